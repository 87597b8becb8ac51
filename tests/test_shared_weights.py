"""What is made of weights (packed, quantised) is made once for all shapes of a model, and follows their changes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import forge_ugc

K, N = 96, 160


class Mixes(torch.nn.Module):
    """Weights that lie as transformers' Conv1D has them: products of few rows read them packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Parameter(torch.randn(s) / 10) for s in ((K, N), (N, K)))
        self.last = torch.nn.Linear(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(x @ self.first) @ self.second)


def batches(model: torch.nn.Module, **options: Any) -> Any:
    batch = torch.export.Dim("batch", min=1, max=64)
    return forge_ugc.compile(model, torch.randn(3, K), dynamic_shapes=({0: batch},), device="cpu", **options)


def made(compiled: Any) -> list[int]:
    """Bytes that each program has made for itself."""
    reports = [plan.program.report() for plan in compiled._plans.values()]
    return [r["packed_bytes"] + r["quantised_bytes"] for r in reports]


@pytest.mark.parametrize("precision", ["fp32", "w8", "w4"])
@torch.no_grad()
def test_a_second_shape_adds_nothing(precision: str) -> None:
    model = Mixes().eval()
    compiled = batches(model, precision=precision)
    inputs = [torch.randn(rows, K) for rows in (1, 2, 7, 40)]
    for change in range(3):  # the weights change twice: all programs follow
        if change:
            model.first.mul_(1.5)
            model.last.weight.neg_()
        alone = [forge_ugc.compile(model, x, device="cpu", precision=precision) for x in inputs]
        for x, other in zip(inputs, alone, strict=True):
            assert torch.equal(compiled(x), other(x))
        sizes = made(compiled)
        least = {"fp32": 8 * K * N, "w8": 2 * K * N, "w4": K * N}[precision]
        assert len(sizes) >= 4 and sizes[0] >= least and not any(sizes[1:])


@torch.no_grad()
def test_the_first_program_may_go() -> None:
    model = Mixes().eval()
    compiled = batches(model)
    x = torch.randn(5, K)
    expected = compiled(x)
    compiled._plans.popitem(last=False)  # the one that has packed
    gc.collect()
    noise = [torch.full((K, N), 7.0) for _ in range(20)]  # over memory that is free now
    assert torch.equal(compiled(x), expected)
    y = torch.randn(6, K)
    assert torch.equal(compiled(y), forge_ugc.compile(model, y, device="cpu")(y))
    assert made(compiled) == [0, 0]
    compiled._plans.clear()
    assert torch.equal(compiled(x), expected) and made(compiled)[0] > 0
    del noise


@torch.no_grad()
def test_refresh() -> None:
    """A change that torch does not count, through memory that numpy has."""
    model = Mixes().eval()
    compiled = batches(model)
    x, y = torch.randn(5, K), torch.randn(6, K)
    compiled(x)
    model.first.numpy()[:] = 0.5
    compiled.refresh()
    for z in (x, y):
        torch.testing.assert_close(compiled(z), model(z), atol=1e-4, rtol=1e-4)
    assert made(compiled)[0] > 0 and made(compiled)[1:] == [0]


@pytest.mark.parametrize("precision", ["w8", "w4", "bf16"])
@torch.no_grad()
def test_artefacts_of_other_precisions(precision: str, tmp_path: Path) -> None:
    """One copy of the weights in the file, however many shapes there are; the same results."""
    try:
        compiled = batches(Mixes().eval(), precision=precision)
    except (ValueError, RuntimeError) as error:
        pytest.skip(str(error))
    inputs = [torch.randn(rows, K) for rows in (3, 1, 40)]
    compiled.save(tmp_path / "one.forge")
    expected = [compiled(x) for x in inputs]
    compiled.save(tmp_path / "m.forge")
    one, all_shapes = ((tmp_path / name).stat().st_size for name in ("one.forge", "m.forge"))
    assert all_shapes < one + 30_000  # graphs, no weights
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    assert len(loaded._programs) == 3
    for x, y in zip(inputs, expected, strict=True):
        assert torch.equal(loaded(x), y)
    compiled._model.first.mul_(2.0)  # saved as they are now, without a call in between
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    results = [loaded(x) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        assert torch.equal(compiled(x), y)
    assert not torch.equal(results[0], expected[0])


@pytest.mark.parametrize("precision", ["fp32", "w8"])
@torch.no_grad()
def test_artefacts(precision: str, tmp_path: Path) -> None:
    model = Mixes().eval()
    compiled = batches(model)
    inputs = [torch.randn(rows, K) for rows in (3, 5, 9)]
    expected = [compiled(x) for x in inputs]
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu", precision=precision)
    reports = [p.program.report() for p in loaded._programs]
    assert len(reports) == 3 and not any(r["packed_bytes"] + r["quantised_bytes"] for r in reports[1:])
    assert reports[0]["quantised_bytes"] > 0 or precision == "fp32"
    for x, y in zip(inputs, expected, strict=True):
        tolerance = 2e-5 if precision == "fp32" else 5e-2
        torch.testing.assert_close(loaded(x), y, atol=tolerance, rtol=tolerance)
