"""precision="w8" and "w4" on the host: the same numbers as eager has with the weights rounded as the precision says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc.testing import assert_fidelity

ROWS = {"w8": (8, None), "w4": (4, 128), "w4g64": (4, 64), "w4g32": (4, 32)}


def rounded(w: torch.Tensor, precision: str) -> torch.Tensor:
    """Weight [N, K] as the precision holds it."""
    bits, group = ROWS[precision]
    wide = w.float()
    parts = [wide] if group is None else list(wide.split(group, 1))
    done = []
    for part in parts:
        most = part.abs().amax(1, keepdim=True)
        scale = most / (127.0 if bits == 8 else 7.5)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        low, high = (-127, 127) if bits == 8 else (-8, 7)
        done.append((part / scale).round().clamp(low, high) * scale)
    return torch.cat(done, 1)


def with_rounded_weights(model: nn.Module, precision: str) -> nn.Module:
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight.detach(), precision).to(module.weight.dtype))
        elif type(module).__name__ == "Conv1D":
            module.weight = nn.Parameter(rounded(module.weight.detach().T, precision).T)  # type: ignore[operator]
    return other


class Block(nn.Module):
    """Linear layers with bias and epilogue, of sizes that are no multiple of a group; a product with a parameter."""

    def __init__(self, width: int = 150, hidden: int = 333) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.one = nn.Linear(width, 1)
        self.matrix = nn.Parameter(torch.randn(width, 40))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return y, self.one(y), y @ self.matrix


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", ROWS)
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 130])
def test_layers(precision: str, rows: int) -> None:
    model, x = Block().eval(), torch.randn(rows, 150)
    forge = forge_ugc.compile(model, x, precision=precision)
    reference = with_rounded_weights(model, precision)
    reference.matrix = nn.Parameter(rounded(model.matrix.detach().T, precision).T)
    for got, want in zip(forge(x), reference(x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert forge.report["precision"] == precision and forge.device == "cpu"
    assert forge.report["weights"]["quantised_bytes"] > 0 and precision in str(forge.report)
    assert forge.report["instructions"]["quantised_linear"] == 4 and "linear" not in forge.report["instructions"]
    assert "quantised_linear" in forge.ir("npuir") and "after:quantise" and forge.ir("after:quantise")


@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("threads", [1, 2])
def test_whatever_the_passes(passes: str, threads: int) -> None:
    model, x = Block().eval(), torch.randn(2, 5, 150)
    forge = forge_ugc.compile(model, x, precision="w8", passes=passes, num_threads=threads)
    reference = with_rounded_weights(model, "w8")
    reference.matrix = nn.Parameter(rounded(model.matrix.detach().T, "w8").T)
    for got, want in zip(forge(x), reference(x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models(dtype: torch.dtype) -> None:
    model, x = nn.Linear(200, 60).eval().to(dtype), torch.randn(2, 200, dtype=dtype)
    forge = forge_ugc.compile(model, x, precision="w4g32")
    want = x.float() @ rounded(model.weight.detach(), "w4g32").T + model.bias.float()
    torch.testing.assert_close(forge(x).float(), want, rtol=1e-2, atol=1e-2)
    assert forge(x).dtype is dtype


def test_f64_stays() -> None:
    model, x = nn.Linear(20, 10).eval().double(), torch.randn(2, 20, dtype=torch.float64)
    forge = forge_ugc.compile(model, x, precision="w8")
    torch.testing.assert_close(forge(x), model(x))
    assert forge.report["weights"]["quantised_bytes"] == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        return x, self.head(x)


def test_tied_embedding_keeps_its_table() -> None:
    model, ids = Tied().eval(), torch.tensor([[3, 49, 0]])
    forge = forge_ugc.compile(model, ids, precision="w8")
    rows, logits = forge(ids)
    assert torch.equal(rows, model.embed(ids))
    torch.testing.assert_close(logits, rows @ rounded(model.head.weight.detach(), "w8").T, rtol=1e-5, atol=1e-5)


def test_a_changed_weight_is_quantised_again() -> None:
    model, x = nn.Linear(64, 32).eval(), torch.randn(1, 64)
    forge = forge_ugc.compile(model, x, precision="w8")
    before = forge(x)
    with torch.no_grad():
        model.weight.mul_(-3)
    want = x @ rounded(model.weight.detach(), "w8").T + model.bias
    torch.testing.assert_close(forge(x), want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(forge(x), before)


def test_threads_do_not_matter() -> None:
    model = Block(300, 700).eval()
    for rows in (1, 4, 40):
        x = torch.randn(rows, 300)
        one, three = (forge_ugc.compile(model, x, precision="w4", num_threads=n)(x) for n in (1, 3))
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


# --- models -----------------------------------------------------------------------------------------------------------


def small_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    folder = Path(__file__).parent.parent / "examples" / "small_gpt2"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(("precision", "kl", "top1"), [("w8", 1e-3, 0.97), ("w4", 0.12, 0.75), ("w4g32", 0.06, 0.8)])
def test_trained_model(precision: str, kl: float, top1: float) -> None:
    model = small_gpt2()
    ids = torch.randint(0, 500, (1, 48))
    found = assert_fidelity(model, {"input_ids": ids, "use_cache": False}, kl=kl, top1=top1, precision=precision)
    assert found.kl is not None and found.kl > 1e-8  # it is not the model itself
    with torch.no_grad():
        want = with_rounded_weights(model, precision)
        want.lm_head.weight = nn.Parameter(rounded(model.lm_head.weight.detach(), precision))
        want.transformer.wte.weight = nn.Parameter(model.transformer.wte.weight.detach())
        logits = want(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found(input_ids=ids, use_cache=False).logits, logits, rtol=2e-3, atol=2e-3)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "share"), [("w8", 0.3), ("w4", 0.17)])
def test_artefact_keeps_the_quantised_weights(precision: str, share: float, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).eval(), torch.randn(3, 512)
    forge = forge_ugc.compile(model, x, precision=precision)
    want = forge(x)
    forge.save(tmp_path / "m.forge")
    assert (tmp_path / "m.forge").stat().st_size < share * 2 * 512 * 512 * 4
    loaded = forge_ugc.load(tmp_path / "m.forge")
    assert torch.equal(loaded(x), want) and np.array_equal(loaded(x.numpy()), want.numpy())
    assert loaded.device == "cpu" and loaded._live()["precision"] == precision
    weights = loaded.report["weights"]  # used as they lie in the file
    assert weights["packed_bytes"] == 0 and weights["quantised_bytes"] == 0
    with pytest.raises(ValueError, match="its weights are"):
        forge_ugc.load(tmp_path / "m.forge", precision="fp32")
    with pytest.raises(ValueError, match="is the host's"):
        forge_ugc.load(tmp_path / "m.forge", device="npu:plan")


def test_artefact_of_f32_loads_as_w8(tmp_path: Path) -> None:
    model, x = nn.Linear(256, 64).eval(), torch.randn(2, 256)
    forge_ugc.compile(model, x, device="cpu").save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", precision="w8")
    assert torch.equal(loaded(x), forge_ugc.compile(model, x, precision="w8")(x))


# --- errors and other ways in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "npu:plan", "precision": "w8"}, 'the NPU has "w8a16"'),
        ({"device": "npu:emulate", "precision": "w4g32"}, 'the NPU has "w4a16"'),
        ({"device": "cpu", "precision": "w8a16"}, 'or in "w8"'),
        ({"precision": "w3"}, "unknown precision"),
    ],
)
def test_errors(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        forge_ugc.compile(nn.Linear(3, 3), torch.randn(1, 3), **options)


def test_weights_that_are_not_finite() -> None:
    model = nn.Linear(40, 5).eval()
    with torch.no_grad():
        model.weight[3, 17] = torch.nan
    with pytest.raises(ValueError, match=r"'weight' has infinite values or NaN.*fp32"):
        forge_ugc.compile(model, torch.randn(1, 40), precision="w8")


@pytest.mark.parametrize("precision", ["w8", "w4"])
def test_zeros_and_extremes(precision: str) -> None:
    model, x = nn.Linear(64, 6, bias=False).eval(), torch.randn(2, 64)
    with torch.no_grad():
        model.weight[0] = 0
        model.weight[1] = 1e-42  # subnormal
        model.weight[2] *= 1e37
        model.weight[3, :63] = 0
    forge = forge_ugc.compile(model, x, precision=precision)
    want = x.double() @ rounded(model.weight.detach(), precision).double().T
    torch.testing.assert_close(forge(x)[:, [0, 2, 3, 4, 5]].double(), want[:, [0, 2, 3, 4, 5]], rtol=1e-4, atol=1e-4)
    assert forge(x).isfinite().all() and forge(x)[:, 1].abs().max() < 1e-39


def test_torch_compile() -> None:
    model, x = nn.Linear(64, 32).eval(), torch.randn(1, 64)
    with torch.no_grad():
        fast = torch.compile(model, backend="forge", options={"precision": "w8"})
        want = x @ rounded(model.weight.detach(), "w8").T + model.bias
        torch.testing.assert_close(fast(x), want, rtol=1e-5, atol=1e-5)
