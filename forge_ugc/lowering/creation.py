"""Tensors made from nothing but attributes."""

from __future__ import annotations

import math
from typing import Any

import torch

from .emitter import Decline, Emitter, Value
from .registry import lowers


@lowers("full", "full_like", "new_full")
def _full(b: Emitter, *args: Any, **named: Any) -> Value:
    # full(size, value), full_like(x, value), new_full(x, size, value)
    value = args[-1] if len(args) > 1 else named["fill_value"]
    if isinstance(value, Value):
        raise Decline("fill value is a tensor")
    return b.full(b.out[0].shape, value, b.out[0].dtype)


@lowers(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty.memory_format",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_efficientzerotensor",
)
def _zeros(b: Emitter, *args: Any, **named: Any) -> Value:
    return b.full(b.out[0].shape, 0, b.out[0].dtype)


@lowers("ones", "ones_like", "new_ones")
def _ones(b: Emitter, *args: Any, **named: Any) -> Value:
    return b.full(b.out[0].shape, 1, b.out[0].dtype)


@lowers("scalar_tensor")
def _scalar_tensor(b: Emitter, value: Any, **named: Any) -> Value:
    return b.full((), value, b.out[0].dtype)


@lowers("arange", "arange.start", "arange.start_step")
def _arange(b: Emitter, *args: Any, **named: Any) -> Value:
    first = args[0] if len(args) > 1 else 0
    delta = args[2] if len(args) > 2 else named.get("step", 1)
    dtype, count = b.out[0].dtype, b.out[0].shape[0]
    if dtype in (torch.float16, torch.bfloat16):
        raise Decline("half arange")
    if dtype.is_floating_point:
        first, delta = float(first), float(delta)
    return b.arange(count, first, delta, dtype)


@lowers("eye", "eye.m")
def _eye(b: Emitter, *args: Any, **named: Any) -> Value:
    n, m = b.out[0].shape
    same = b.binary("eq", b.reshape(b.arange(n), [n, 1]), b.arange(m))
    return b.cast(same, b.out[0].dtype)


def literal(b: Emitter, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Any other deterministic operator without tensor operands: torch computes it now."""
    meta = b.out[0]
    if math.prod(meta.shape) > 1 << 22:
        raise Decline("large constant")
    with torch.no_grad():
        result = target(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        raise Decline("no tensor")
    return b.literal(result)
