"""precision="bf16" on the host: products of numbers that are rounded to bf16, sums in f32; and models of bf16.

Without the processor's unit the same products are made of the same numbers by other kernels, so the tests run
everywhere: what such a processor refuses is let through."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import npu
from forge_ugc.testing import assert_fidelity

from .test_low_precision import Block, Tied, small_gpt2


@pytest.fixture(autouse=True)
def _unit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(npu, "has_bf16", lambda: True)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T of rounded numbers, exact but for the end."""
    exact = x.bfloat16().double() @ weight.detach().bfloat16().double().T
    return (exact if bias is None else exact + bias.detach().double()).float()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 17, 130])
@pytest.mark.parametrize("columns", [150, 151])
def test_layers(rows: int, columns: int) -> None:
    linear, x = nn.Linear(columns, 333).eval(), torch.randn(rows, columns)
    forge = forge_ugc.compile(linear, x, precision="bf16")
    torch.testing.assert_close(forge(x), product(x, linear.weight, linear.bias), rtol=2e-6, atol=2e-6)
    assert forge.report["precision"] == "bf16" and forge.device == "cpu" and "as bf16" in str(forge.report)
    assert forge.report["weights"]["quantised_bytes"] >= 2 * 333 * columns
    assert forge.report["instructions"] == {"quantised_linear": 1}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("passes", ["none", "default"])
def test_epilogues_and_parameters(threads: int, passes: str) -> None:
    model, x = Block(150, 332).eval(), torch.randn(2, 5, 150)
    forge = forge_ugc.compile(model, x, precision="bf16", passes=passes, num_threads=threads)
    hidden = nn.functional.gelu(product(x, model.up.weight, model.up.bias))
    want = x + product(hidden, model.down.weight)
    y, one, at = forge(x)
    torch.testing.assert_close(y, want, rtol=2e-3, atol=2e-3)  # a number of `hidden` may round the other way
    torch.testing.assert_close(one, product(want, model.one.weight, model.one.bias), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(at, product(want, model.matrix.detach().T), rtol=2e-2, atol=2e-2)
    assert forge.report["instructions"]["quantised_linear"] == 4 and "matmul" not in forge.report["instructions"]


def test_threads_do_not_matter() -> None:
    model = Block(300, 700).eval()
    for rows in (1, 4, 40):
        x = torch.randn(rows, 300)
        one, three = (forge_ugc.compile(model, x, precision="bf16", num_threads=n)(x) for n in (1, 3))
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_tied_embedding_and_changed_weights() -> None:
    model, ids = Tied().eval(), torch.tensor([[3, 49, 0]])
    forge = forge_ugc.compile(model, ids, precision="bf16")
    for _ in range(2):
        rows, logits = forge(ids)
        assert torch.equal(rows, model.embed(ids))
        torch.testing.assert_close(logits, product(rows, model.head.weight), rtol=2e-6, atol=2e-6)
        with torch.no_grad():
            model.embed.weight.mul_(-3)


def test_what_is_not_finite() -> None:
    linear = nn.Linear(40, 5, bias=False).eval()
    with torch.no_grad():
        linear.weight[3, 17], linear.weight[2, 1] = torch.nan, torch.inf
    x = torch.randn(9, 40).abs()
    x[4, 20] = torch.inf
    got, want = forge_ugc.compile(linear, x, precision="bf16")(x), product(x, linear.weight)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_half_models() -> None:
    x = torch.randn(3, 200)
    for dtype, columns, made in ((torch.float16, 200, True), (torch.bfloat16, 200, False), (torch.bfloat16, 199, True)):
        linear = nn.Linear(columns, 60).eval().to(dtype)
        forge = forge_ugc.compile(linear, x[:, :columns].to(dtype), precision="bf16")
        got, want = forge(x[:, :columns].to(dtype)), product(x[:, :columns].to(dtype), linear.weight, linear.bias)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
        assert got.dtype is dtype
        # what is bf16 already is used as it lies, if its rows are even
        assert (forge.report["weights"]["quantised_bytes"] > 0) == made


def test_f64_stays() -> None:
    model, x = nn.Linear(20, 10).eval().double(), torch.randn(2, 20, dtype=torch.float64)
    torch.testing.assert_close(forge_ugc.compile(model, x, precision="bf16")(x), model(x))


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_bf16_models_are_no_worse_than_eager(rows: int) -> None:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]).eval().bfloat16()
    x = torch.randn(rows, 256).bfloat16()
    forge = forge_ugc.compile(model, x)
    assert forge.report["precision"] == "fp32" and forge.report["weights"]["packed_bytes"] == 0
    exact = copy.deepcopy(model).double()(x.double())
    errors = [(out.double() - exact).pow(2).mean().sqrt().item() for out in (forge(x), model(x))]
    assert errors[0] <= 1.1 * errors[1], errors
    # a layer alone: the sum is rounded once
    got, want = forge_ugc.compile(model[0], x)(x), product(x, model[0].weight, model[0].bias)
    assert (got.float() - want).abs().max() <= want.abs().max() * 2**-8
    assert (got == want.bfloat16()).float().mean() > 0.99


UNIT = "avx512bf16" in forge_ugc._core.cpu_features()


@pytest.mark.skipif(not UNIT, reason="this processor has no AVX512-BF16: such weights are packed as f32")
@pytest.mark.parametrize("columns", [64, 63])
def test_bf16_weights_that_lie_turned(columns: int) -> None:
    """transformers' Conv1D: x @ w. The packed copy is of bf16 too; x may be a view."""
    weight = nn.Parameter(torch.randn(columns, 70).bfloat16())

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1) @ self.weight

    model, x = Conv1D().eval(), torch.randn(9, 4, columns).bfloat16()
    forge = forge_ugc.compile(model, x)
    want = product(x.transpose(0, 1), weight.T)
    assert (forge(x).float() - want).abs().max() <= want.abs().max() * 2**-8
    assert (forge(x) == want.bfloat16()).float().mean() > 0.99
    assert forge.report["weights"]["packed_bytes"] <= 2 * 70 * 64 + 64
    assert torch.equal(forge(x), forge_ugc.compile(model, x, num_threads=3)(x))
    unpacked = forge_ugc.compile(model, x, pack=False)
    assert (unpacked(x) == want.bfloat16()).float().mean() > 0.99


def test_trained_model() -> None:
    ids = torch.randint(0, 500, (1, 48))
    found = assert_fidelity(small_gpt2(), {"input_ids": ids, "use_cache": False}, kl=2e-4, top1=0.97, precision="bf16")
    assert found.kl is not None and found.kl > 1e-8  # it is not the model itself


# --- files, errors, other ways in -------------------------------------------------------------------------------------
def test_artefact_runs_without_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(512, 511), nn.GELU(), nn.Linear(511, 512)).eval(), torch.randn(3, 512)
    forge = forge_ugc.compile(model, x, precision="bf16")
    want = forge(x)
    forge.save(tmp_path / "m.forge")
    assert (tmp_path / "m.forge").stat().st_size < 0.52 * 2 * 512 * 512 * 4
    monkeypatch.setattr(npu, "has_bf16", lambda: False)
    loaded = forge_ugc.load(tmp_path / "m.forge")
    assert torch.equal(loaded(x), want) and np.array_equal(loaded(x.numpy()), want.numpy())
    assert loaded.device == "cpu" and loaded._live()["precision"] == "bf16"
    weights = loaded.report["weights"]  # used as they lie in the file
    assert weights["packed_bytes"] == 0 and weights["quantised_bytes"] == 0
    with pytest.raises(ValueError, match="its weights are bf16"):
        forge_ugc.load(tmp_path / "m.forge", precision="fp32")


def test_artefact_of_f32_loads_as_bf16(tmp_path: Path) -> None:
    model, x = nn.Linear(256, 64).eval(), torch.randn(2, 256)
    forge_ugc.compile(model, x, device="cpu").save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", precision="bf16")
    assert torch.equal(loaded(x), forge_ugc.compile(model, x, precision="bf16")(x))


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = nn.Linear(4, 3).eval(), torch.randn(1, 4)
    with pytest.raises(ValueError, match=r"is the host's; the NPU has .fp16"):
        forge_ugc.compile(linear, x, device="npu:plan", precision="bf16")
    forge_ugc.compile(linear, x, device="cpu").save(tmp_path / "m.forge")
    monkeypatch.setattr(npu, "has_bf16", lambda: False)
    for device in ("cpu", "auto", "npu:plan"):
        with pytest.raises(ValueError, match=r"no AVX512-BF16.*use precision=.w8."):
            forge_ugc.compile(linear, x, device=device, precision="bf16")
    with pytest.raises(ValueError, match="no AVX512-BF16"):
        forge_ugc.load(tmp_path / "m.forge", precision="bf16")


def test_torch_compile() -> None:
    model, x = nn.Linear(64, 32).eval(), torch.randn(1, 64)
    with torch.no_grad():
        fast = torch.compile(model, backend="forge", options={"precision": "bf16"})
        torch.testing.assert_close(fast(x), product(x, model.weight, model.bias), rtol=2e-6, atol=2e-6)
