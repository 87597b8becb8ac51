"""Mixtures of experts: products over groups of rows whose sizes are known at run time only."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers its operator

import forge_ugc
from tests.architectures import tiny
from tests.compare import assert_same
from tests.opcheck import TOLERANCE, check, tensor

ENDS = [[3, 3, 7, 10], [0, 0, 0, 10], [10, 10, 10, 10], [1, 2, 3, 10]]


def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of every dtype, where torch exports its own for bfloat16 alone."""
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_groups(dtype: torch.dtype) -> None:
    x, w = tensor(10, 48, dtype=dtype), tensor(4, 48, 32, dtype=dtype)
    turned = tensor(4, 32, 48, dtype=dtype).mT
    compiled = [forge_ugc.compile(grouped, (x, weight, torch.tensor(ENDS[0]).int())) for weight in (w, turned)]
    for ends in (torch.tensor(e).int() for e in ENDS):
        for fast, weight in zip(compiled, (w, turned), strict=True):
            assert fast.report["fallbacks"] == []
            # sums of 48 products of numbers up to 3
            assert_same(grouped(x, weight, ends), fast(x, weight, ends), atol=50 * TOLERANCE[dtype], rtol=0.01)


def test_groups_that_end_early_leave_zeros() -> None:
    x, w, ends = tensor(10, 16), tensor(3, 16, 16), torch.tensor([2, 2, 5]).int()
    got = forge_ugc.compile(grouped, (x, w, ends))(x, w, ends)
    assert_same(torch.cat([x[:2] @ w[0], x[2:5] @ w[2], torch.zeros(5, 16)]), got, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bad", [[2, 1, 10], [2, 5, 11], [-1, 5, 10]])
def test_ends_out_of_order(bad: list[int]) -> None:
    x, w = tensor(10, 16), tensor(3, 16, 16)
    fast = forge_ugc.compile(grouped, (x, w, torch.tensor([2, 5, 10]).int()))
    with pytest.raises(IndexError, match="of group"):
        fast(x, w, torch.tensor(bad).int())


def test_histc() -> None:
    x = torch.tensor([0.0, 1, 2, 5, -1, float("nan"), 3.999, 4, 2.5, float("inf")])
    check(lambda x: (torch.histc(x, 4, 0, 4), torch.histc(x.double(), 7, -2, 5), torch.histc(x[:0], 3, 0, 1)), x)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "GptOss"])
def test_models(name: str) -> None:
    """Other tokens take other experts. Only the order of the experts comes from torch: eager's is not specified."""
    model, kwargs = tiny(name)
    fast = forge_ugc.compile(model, (), kwargs)
    assert fast.report["capture"] == "fast"
    assert {f["op"] for f in fast.report["fallbacks"]} == {"aten.sort.default"}
    for seed in range(4):
        ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert_same(model(ids, use_cache=False), fast(input_ids=ids, use_cache=False), atol=1e-5, rtol=1e-5)
