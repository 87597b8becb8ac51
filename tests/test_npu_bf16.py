"""Models in bfloat16 on the NPU, which computes them in f16.

The yardstick is the model's own weights in float32: bf16 has 8 digits, f16 has 11, so the NPU must be at least as near
to it as eager bf16 is. Emulation rounds to bf16 between operators, as eager does, and may be as far as that."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forge_ugc
from forge_ugc.testing import software_npu
from tests import npu_ir, ze_client
from tests.models.families import build, input_ids, spread
from tests.opcheck import tensor
from tests.test_npu_emit import BINARY, MOVE, REDUCE, UNARY

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4},
    "qwen2": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama1b": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}
PRECISIONS = ("fp16", "w8a16", "w4a16")


def small(name: str, layers: int = 2, **settings: Any) -> nn.Module:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 500}
    return spread(build(name, layers, **tokens, **SMALL[name], **settings)).bfloat16()


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean squared difference, in parts of the result's own."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


# --- operators --------------------------------------------------------------------------------------------------------

FLOAT_ROWS = [
    name for name in (*UNARY, *BINARY, *REDUCE, *MOVE) if name not in ("clamp", "full arange", "large variance")
]
ROWS = {**UNARY, **BINARY, **REDUCE, **MOVE}
# 8 digits of the largest number that the row makes: results that leave are bf16, and eager rounds between operators.
TOLERANCE = {"small": 5e-2}


@pytest.mark.parametrize("name", FLOAT_ROWS)
def test_operators(name: str) -> None:
    """bf16 values are f16 inside; eager's bf16 is as near as 8 digits are."""
    pytest.importorskip("openvino")
    function, args = ROWS[name]
    args = args if isinstance(args, tuple) else (args,)
    given = [a.bfloat16() if a.is_floating_point() else a for a in args]
    emitted = npu_ir.check(function, *given, f32=False, passes="none", tolerance=TOLERANCE.get(name, 3e-2))
    xml = emitted.xml.read_text()
    assert "bf16" not in xml


def test_casts_weights_and_programs() -> None:
    pytest.importorskip("openvino")
    w, b, gain = tensor(24, 16, seed=1).bfloat16(), tensor(24, seed=2).bfloat16(), tensor(24, seed=3)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = F.gelu(F.linear(x, w, b)).float() * gain
        return z, z.to(torch.bfloat16) + 1, (x.float() * y).bfloat16(), y.bfloat16() @ w.mT[:, :8], x.half() > y

    for passes in ("none", "default"):
        args = tensor(5, 16).bfloat16(), tensor(5, 16, seed=5)
        emitted = npu_ir.check(function, *args, f32=False, passes=passes, tolerance=3e-2)
        assert 'destination_type="bf16"' not in emitted.xml.read_text()


@pytest.mark.parametrize("precision", ["w8a16", "w4a16"])
def test_quantised_weights_are_those_of_float32(precision: str) -> None:
    """A bf16 weight is quantised from its exact values."""
    pytest.importorskip("openvino")
    w, x = tensor(24, 16, seed=1).bfloat16(), tensor(5, 16).bfloat16()

    def emit(w: torch.Tensor, x: torch.Tensor) -> npu_ir.Emitted:
        return npu_ir.emit(lambda x: F.linear(x, w), (x,), f32=False, precision=precision)

    short, whole = emit(w, x), emit(w.float(), x.float())
    assert torch.equal(short.run((x.float(),))[0], whole.run((x.float(),))[0])
    assert short.folder.joinpath("model.bin").read_bytes() == whole.folder.joinpath("model.bin").read_bytes()


# --- models -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_families(name: str) -> None:
    """Folded or not, and quantised: nearer to float32 than eager bf16 is."""
    ze_client.require_software_npu()
    model = small(name)
    ids = input_ids(model, seq=24)
    exact, eager = copy.deepcopy(model).float()(ids), model(ids)
    own = relative(eager, exact)
    assert own < 2e-2
    with software_npu():
        for fold in (True, False):
            forge = forge_ugc.compile(model, (ids,), device="npu", fold=fold)
            got = forge(ids)
            assert got.dtype == torch.bfloat16 and relative(got, exact) <= own
            assert relative(got, eager) <= 2 * own
            assert forge.report["npu"]["segments"] == 1 and forge.report["placement"]["cpu"] <= 2
    gaps = []
    for precision in PRECISIONS:
        forge = forge_ugc.compile(model, (ids,), device="npu:emulate", precision=precision)
        got = forge(ids)
        assert got.dtype == torch.bfloat16
        gaps.append(relative(got, exact))
    assert gaps[0] <= 1.25 * own and gaps[0] <= gaps[1] <= gaps[2] / 2


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_all_of_a_family_is_planned_for_the_npu(name: str, tmp_path: Path) -> None:
    model = small(name)
    ids = input_ids(model, seq=24)
    plans = [forge_ugc.compile(m, (ids,), device="npu:plan") for m in (model, copy.deepcopy(model).float())]
    short, whole = (plan.report for plan in plans)
    assert short["transitions"]["after"] == whole["transitions"]["after"] == 2
    assert short["npu"]["flops"]["npu"] >= 0.99 * sum(short["npu"]["flops"].values())
    manifest = plans[0].save_openvino_ir(tmp_path)
    assert "bf16" not in (tmp_path / manifest["blocks"][0]["xml"]).read_text()


class Mixed(nn.Module):
    """A bf16 body, its norm in float32, an operator between that stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128).bfloat16(), nn.Linear(128, 64).bfloat16()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x.float()).to(x.dtype)
        z = F.silu(self.up(y)).cumsum(0) * 0.25
        return self.down(z) + x, z.t(), (z > 0)


@torch.no_grad()
def test_borders_between_host_and_npu() -> None:
    """Inputs and results with strides, f16 and f32 ports, weights that change."""
    ze_client.require_software_npu()
    torch.manual_seed(0)
    model = Mixed().eval()
    x = torch.randn(64, 8).bfloat16().t()
    with software_npu():
        for options in ({}, {"border": "f32"}, {"types": "f32", "border": "f32"}):
            forge = forge_ugc.compile(model, (x,), device="npu", npu_options=options)
            for _ in range(2):
                exact = copy.deepcopy(model).float()(x.float())
                for want, got, near in zip(model(x), forge(x), exact, strict=True):
                    assert want.dtype == got.dtype and want.shape == got.shape
                    if want.dtype != torch.bool:
                        assert relative(got, near) <= max(relative(want, near), 2**-8)
                model.up.weight.mul_(1.5)
            model.up.weight.div_(1.5 * 1.5)
            assert forge.report["placement"]["npu"] >= 3


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = small("qwen2", 1)
    ids = input_ids(model, seq=12)
    forge = forge_ugc.compile(model, (ids,), device="npu:emulate")
    forge.save(tmp_path / "model.forge")
    loaded = forge_ugc.load(tmp_path / "model.forge", device="npu:emulate")
    assert torch.equal(loaded(ids), forge(ids))


@torch.no_grad()
def test_emulation_has_the_range_of_f16() -> None:
    w = torch.eye(64).bfloat16()

    def function(x: torch.Tensor) -> Any:
        y = x @ w
        return y, y * 1000, y * 1e-10

    x = torch.full((64, 64), 300.0).bfloat16()
    x[0] = 1e9
    first, large, little = forge_ugc.compile(function, (x,), device="npu:emulate")(x)
    assert first.dtype == torch.bfloat16 and (first[0] == 57344).all() and (first[1:] == 300).all()
    assert large.isinf().all() and (little[1:] == 0).all()
