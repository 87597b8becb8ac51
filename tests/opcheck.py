"""Compiles a function, compares it with eager, and demands that nothing of it fell back: for the operator tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import forge_ugc
from tests.compare import assert_same

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tensor(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, low: float = -3, high: float = 3
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 17 * len(shape) + sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(
            max(int(low * 3), 0 if dtype == torch.uint8 else -9), int(high * 3) + 1, shape, generator=generator
        ).to(dtype)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def check(function: Callable[..., Any], *args: Any, tolerance: float = 2e-6, native: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if native else "ignore", UserWarning)
        compiled = forge_ugc.compile(function, args)
    expected = function(*args)
    for _ in range(2):  # the second call reuses the frame
        assert_same(expected, compiled(*args), atol=tolerance, rtol=tolerance)
    if native:
        assert compiled.report.to_dict()["fallbacks"] == []
