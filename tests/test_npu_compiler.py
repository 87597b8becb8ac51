"""Intel's own NPU compiler takes what is emitted: each operator that the capability table gives to the NPU, and a block
of each family, folded and with its weights inside, for every target.

The compiler is installed by benchmarks/npu_compiler/setup.sh: in CI (or with FORGE_NPU_COMPILER=1) by this file, and a
failing install fails the tests; elsewhere the tests are skipped until you run it."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from benchmarks import npu_compiler
from tests import npu_ir
from tests.models.families import build, input_ids
from tests.npu_decode import WithCache, arguments
from tests.opcheck import tensor
from tests.tables import Builder, array
from tests.test_npu_emit import BINARY, MOVE, REDUCE, UNARY
from tests.test_npu_emit_nn import SwiGLU


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    if npu_compiler.available():
        return
    if not os.environ.get("CI") and os.environ.get("FORGE_NPU_COMPILER") != "1":
        pytest.skip(f"Intel's NPU compiler is not installed: bash {npu_compiler.HERE / 'setup.sh'}")
    npu_compiler.install()


def accepted(jobs: list[tuple[str, Path, str]]) -> dict[str, npu_compiler.Result]:
    """Compiles (name, xml, target) side by side; fails with the compiler's words for all that it refuses."""

    def run(job: tuple[str, Path, str]) -> npu_compiler.Result:
        return npu_compiler.compile_ir(job[1], job[2])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip((f"{name} {target}" for name, _, target in jobs), pool.map(run, jobs), strict=True))
    refused = {name: result.error for name, result in results.items() if not result.ok}
    assert not refused, "\n".join(f"{name}: {error}" for name, error in refused.items())
    return results


# --- operators -------------------------------------------------------------------------------------------------------

X, LINE, IMAGE = tensor(2, 8, 16), tensor(1, 8, 12), tensor(1, 8, 10, 12)
Q, KV, MASK = tensor(1, 4, 16, 16), tensor(1, 2, 16, 16, seed=1), tensor(16, 16, dtype=torch.bool)
COS, SIN = tensor(16, 16, seed=2), tensor(16, 16, seed=3)


def weight(*shape: int, seed: int = 4) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor(*shape, seed=seed), requires_grad=False)


def attend(q: torch.Tensor, kv: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True, **how)


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)


def turned_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.long, self.cut = weight(24, 16), weight(24), weight(8, 2048), weight(24, 16, seed=6)
        self.k1, self.k1g, self.k2, self.k2g = weight(6, 8, 3), weight(8, 1, 3), weight(6, 8, 3, 3), weight(8, 2, 3, 3)
        self.o = weight(6)

    def forward(self, x: torch.Tensor, wide: torch.Tensor, line: torch.Tensor, image: torch.Tensor) -> Any:
        q, k, v = F.linear(x, self.cut, self.b).split(8, dim=-1)
        return (
            F.linear(x, self.w),
            F.gelu(F.linear(x, self.w, self.b)) * 2,
            F.linear(wide, self.long),
            (q + k, v * 2),
            x @ self.w.t(),
            x @ x.transpose(1, 2),
            F.conv1d(line, self.k1, self.o, padding=1),
            F.conv1d(line, self.k1g, padding=2, groups=8),
            F.conv2d(image, self.k2, self.o, stride=2, dilation=2),
            F.conv2d(image, self.k2g, groups=4, padding=1),
        )


NN: dict[str, tuple[Callable[..., Any], Any]] = {
    "attention": (
        lambda q, kv, m, f: (
            attend(q, kv),
            attend(q, kv, is_causal=True, scale=0.2),
            attend(q, kv, attn_mask=m),
            attend(q, kv, attn_mask=f),
            attend(q, kv, attn_mask=MASK.tril()),
            torch.softmax(q @ kv[:, :1].transpose(2, 3) / 4 + f, -1) @ kv[:, :1],
        ),
        (Q, KV, MASK, tensor(16, 16)),
    ),
    "norms": (
        lambda x, y: (
            F.layer_norm(x, (16,), COS[0], SIN[0]),
            F.layer_norm(x + y, (8, 16)),
            F.rms_norm(x, (16,), COS[1]),
            F.rms_norm(x + y, (16,)) + (x + y),
            F.group_norm(x, 4, COS[0, :8], SIN[0, :8]),
        ),
        (X, tensor(2, 8, 16, seed=5)),
    ),
    "rope": (
        lambda x, cos, sin: (
            x * COS + turned(x) * SIN,
            x * cos + turned(x) * sin,
            x * COS + turned_pairs(x) * SIN,
        ),
        (Q, tensor(16, 16, seed=7), tensor(16, 16, seed=8)),
    ),
    "softmax gelu": (
        lambda x: (
            x.softmax(-1),
            x.softmax(1),
            x.log_softmax(-1),
            x.log_softmax(0),
            F.gelu(x),
            F.gelu(x, approximate="tanh"),
        ),
        X,
    ),
}
GROUPS = {"unary": UNARY, "binary": BINARY, "reduce": REDUCE, "move": MOVE, "nn": NN}


class Rows(torch.nn.Module):
    """All rows of a group as one model; row k's arguments are `args[k]`."""

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self.functions = [function for function, _ in rows.values()]

    def forward(self, *args: tuple[torch.Tensor, ...]) -> Any:
        return tuple(f(*a) for f, a in zip(self.functions, args, strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_each_operator(group: str) -> None:
    rows = GROUPS[group]
    # a copy each: equal arguments of two rows would otherwise be one tensor, and its operators shared
    args = tuple(tuple(t.clone() for t in (a if isinstance(a, tuple) else (a,))) for _, a in rows.values())
    xml = npu_ir.emit(Rows(rows).eval(), args, f32=False).xml
    accepted([(group, xml, target) for target in npu_compiler.TARGETS])


@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "w8a16", "w4a16"])
def test_contractions(precision: str, arguments: bool) -> None:
    args = (X, tensor(2, 2048), LINE, IMAGE)
    xml = npu_ir.emit(Weighted().eval(), args, f32=False, precision=precision, arguments=arguments).xml
    accepted([("contractions", xml, target) for target in npu_compiler.TARGETS])


@pytest.mark.parametrize("forms", [0, 1, 2, 3, 7, 255])
def test_forms(forms: int) -> None:
    """The ways to write attention and norms that are not the default."""

    def both(q: torch.Tensor, kv: torch.Tensor, x: torch.Tensor) -> Any:
        mask = MASK | torch.eye(16, dtype=torch.bool)
        norms = F.layer_norm(x, (16,)), F.rms_norm(x, (16,))
        return attend(q, kv, is_causal=True), attend(q, kv, attn_mask=mask), norms

    xml = npu_ir.emit(both, (Q, KV, X), f32=False, forms=forms).xml
    accepted([(f"forms {forms}", xml, "NPU4000")])


@pytest.mark.parametrize("precision", ["fp16", "w8a16"])
def test_wide_gate_and_up(precision: str) -> None:
    """int8 weights stay int8."""
    inner, width = 8192, 64
    xml = npu_ir.emit(SwiGLU(inner, width), (tensor(1, 16, width),), f32=False, precision=precision).xml
    results = accepted([("gate and up", xml, target) for target in npu_compiler.TARGETS])
    limit = 2 * inner * width * (2 if precision == "fp16" else 1)
    assert all(limit < r.blob_bytes < 1.4 * limit for r in results.values()), results


def test_f32_ports_and_constants() -> None:
    """What the software NPU is given, and a border in f32."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True).eval()
    for f32 in (False, True):
        xml = npu_ir.emit(layer, (tensor(1, 16, 64),), f32=f32, border=True).xml
        accepted([("f32", xml, target) for target in npu_compiler.TARGETS])


def test_ends_of_every_kind() -> None:
    """Inputs that are outputs, views of them, values that are two outputs, constants that are outputs, rank 0."""
    b, shape = Builder(), (4, 6)
    x, s = b.input("f32", shape), b.input("f32", ())
    y, m = b.node("neg", [x], ("f32", shape)), b.node("gt", [x], ("bool", shape), scalar=0.0)
    b.output(x, y, y, m, m, s, s, b.node("neg", [s], ("f32", ())), b.constant(array(3)))
    b.output(b.node("permute", [x], ("f32", (6, 4)), dims=[1, 0]), b.node("sum", [x], ("f32", ()), dims=[0, 1]))
    b.output(b.node("reshape", [b.node("slice", [x], ("f32", (1, 6)), dim=0, end=1, step=1)], ("f32", (6,)), shape=[6]))
    xml = npu_ir.emit_table(b.table(), f32=False).xml
    accepted([("ends", xml, target) for target in npu_compiler.TARGETS])


# --- families --------------------------------------------------------------------------------------------------------

LAYERS = 4  # so that the middle ones are equal and fold
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {},  # its own width
    "granite": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, intermediate_size=512),
    "qwen2": dict(intermediate_size=1216),  # its own 14 heads on 2: how that is written decides whether it is taken
    "llama1b": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024),
    "lfm2": dict(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=768,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "llama8b": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=1, intermediate_size=1792),
}


def models(name: str, precision: str, fold: bool, target: str, folder: Path) -> list[Path]:
    """The distinct graphs; folded: checks that the layers are calls of one."""
    settings = {**SMALL[name], "vocab_size": 512}
    if not fold:  # two layers have the types that build() gives them
        settings.pop("layer_types", None)
    model = build(name, LAYERS if fold else 2, **settings)
    ids = input_ids(model, seq=128)
    compiled = forge_ugc.compile(model, (ids,), device=f"npu:plan:{target.lower()}", precision=precision)
    manifest = compiled.save_openvino_ir(folder, fold=fold)
    calls = Counter(call["block"] for call in manifest["calls"])
    assert max(calls.values()) >= 2 or not fold, "the layers do not fold"
    return [folder / block["xml"] for block in manifest["blocks"]]


@pytest.mark.parametrize("name", SMALL)
def test_family(name: str, tmp_path: Path) -> None:
    jobs = []
    for target in npu_compiler.TARGETS:
        for precision, fold in itertools.product(("fp16", "w8a16"), (True, False)):
            if target != "NPU4000" and (precision, fold) not in (("fp16", True), ("w8a16", False)):
                continue
            what = f"{precision} {'folded' if fold else 'constant'}"
            folder = tmp_path / f"{what} {target}"
            jobs += [(f"{what} {xml.name}", xml, target) for xml in models(name, precision, fold, target, folder)]
    accepted(jobs)


def test_family_in_bfloat16(tmp_path: Path) -> None:
    """All floats of the graphs are f16."""
    model = build("qwen2", 2, **SMALL["qwen2"], vocab_size=512).bfloat16()
    ids = input_ids(model, seq=128)
    jobs = []
    for precision in ("fp16", "w8a16"):
        compiled = forge_ugc.compile(model, (ids,), device="npu:plan:npu4000", precision=precision)
        manifest = compiled.save_openvino_ir(tmp_path / precision)
        paths = [tmp_path / precision / block["xml"] for block in manifest["blocks"]]
        assert not any('"bf16"' in path.read_text() for path in paths)
        jobs += [(f"{precision} {path.name}", path, "NPU4000") for path in paths]
    accepted(jobs)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "qwen2", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite", "llama1b"))],
)
def test_family_with_a_cache(name: str, tmp_path: Path) -> None:
    """The graphs of a prompt and of a step, with a cache as input; no scattered write is among them."""
    settings = {**SMALL[name], "vocab_size": 512}
    model = build(name, LAYERS, **settings).m
    jobs, size = [], 256
    for what, first, count in (("prompt", 0, 64), ("step", 64, 1)):
        function = WithCache(model, 1, size, started=first > 0)
        args = arguments(torch.arange(count)[None] + 3, first, size)
        for target in npu_compiler.TARGETS:
            folder = tmp_path / f"{what} {target}"
            device = f"npu:plan:{target.lower()}"
            compiled = forge_ugc.compile(function, (*args, *function.state()), device=device, precision="fp16")
            assert compiled.report["transitions"]["after"] == 2
            blocks = compiled.save_openvino_ir(folder)["blocks"]
            paths = [folder / block["xml"] for block in blocks]
            assert not any("Scatter" in path.read_text() for path in paths)
            jobs += [(f"{what} {path.name}", path, target) for path in paths]
    accepted(jobs)
