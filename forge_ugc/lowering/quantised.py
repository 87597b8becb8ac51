"""PT2E's operators (`quantized_decomposed`), in the order and the types in which torch computes them.

torchao's go through their own decompositions. The pass `dequantise` then finds products of dequantised weights.
"""

from __future__ import annotations

from typing import Any

import torch

from .emitter import Decline, Emitter, Value
from .registry import lowers


def _input(b: Emitter, x: Value) -> Value:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Decline(f"quantises {x.dtype}")
    return b.cast(x, torch.float32)


def _quantised(b: Emitter, x: Value, inverse: Any, zero: Any, low: int, high: int, dtype: torch.dtype) -> Value:
    steps = b.unary("round", b.binary("mul", x, inverse, torch.float32))
    return b.cast(b.clamp(b.binary("add", steps, zero, torch.float32), low, high), dtype)


def _one(b: Emitter, x: Value, dtype: torch.dtype) -> Value:
    """A tensor of one element, which torch takes as a number."""
    return b.cast(b.reshape(x, ()), dtype)


@lowers("quantized_decomposed::quantize_per_tensor")
def _quantize_per_tensor(b: Emitter, x: Value, scale: float, zero: int, low: int, high: int, dtype: Any) -> Value:
    return _quantised(b, _input(b, x), 1.0 / scale, zero, low, high, dtype)


@lowers("quantized_decomposed::quantize_per_tensor.tensor")
def _quantize_per_tensor_tensor(
    b: Emitter, x: Value, scale: Value, zero: Value, low: int, high: int, dtype: Any
) -> Value:
    inverse = b.cast(b.binary("div", 1.0, _one(b, scale, torch.float64), torch.float64), torch.float32)
    return _quantised(b, _input(b, x), inverse, _one(b, zero, torch.float32), low, high, dtype)


@lowers("quantized_decomposed::quantize_per_channel")
def _quantize_per_channel(
    b: Emitter, x: Value, scales: Value, zeros: Value, axis: int, low: int, high: int, dtype: Any
) -> Value:
    shape = [scales.shape[0] if d == axis % x.rank else 1 for d in range(x.rank)]
    inverse = b.binary("div", 1.0, b.reshape(scales, shape))
    if scales.dtype != torch.float32:
        raise Decline(f"scales of {scales.dtype}")
    return _quantised(b, _input(b, x), inverse, b.cast(b.reshape(zeros, shape), torch.float32), low, high, dtype)


@lowers("quantized_decomposed::dequantize_per_tensor")
def _dequantize_per_tensor(
    b: Emitter, q: Value, scale: float, zero: int, low: int, high: int, dtype: Any, *, out_dtype: Any = None
) -> Value:
    x = b.cast(q, out_dtype or torch.float32)
    return b.binary("mul", b.binary("sub", x, zero, x.dtype), scale, x.dtype)


@lowers("quantized_decomposed::dequantize_per_tensor.tensor")
def _dequantize_per_tensor_tensor(
    b: Emitter, q: Value, scale: Value, zero: Value, low: int, high: int, dtype: Any, *, out_dtype: Any = None
) -> Value:
    if out_dtype not in (None, torch.float32):
        raise Decline(f"dequantises to {out_dtype}")
    x = b.sub(b.cast(q, torch.float32), _one(b, zero, torch.float32))
    return b.mul(x, _one(b, scale, torch.float32))


@lowers("quantized_decomposed::dequantize_per_channel")
def _dequantize_per_channel(
    b: Emitter,
    q: Value,
    scales: Value,
    zeros: Value | None,
    axis: int,
    low: int,
    high: int,
    dtype: Any,
    *,
    out_dtype: Any = None,
) -> Value:
    if scales.dtype != torch.float32 or q.dtype not in (torch.int8, torch.uint8, torch.int16):
        raise Decline(f"{q.dtype} with scales of {scales.dtype}")
    shape = [scales.shape[0] if d == axis % q.rank else 1 for d in range(q.rank)]
    x = b.cast(q, torch.float32)  # exact, as is the difference; torch makes it in int64
    if zeros is not None:
        x = b.sub(x, b.cast(b.reshape(zeros, shape), torch.float32))
    return b.cast(b.mul(x, b.reshape(scales, shape)), out_dtype or torch.float32)


@lowers("quantized_decomposed::choose_qparams.tensor")
def _choose_qparams(b: Emitter, x: Value, low: int, high: int, eps: float, dtype: Any) -> tuple[Value, Value]:
    if x.dtype != torch.float32 or 0 in x.shape:
        raise Decline("half types, or nothing to choose from")
    least = b.binary("minimum", b.reduce("amin", x, None), 0.0)
    most = b.binary("maximum", b.reduce("amax", x, None), 0.0)
    scale = b.binary("maximum", b.binary("div", b.sub(most, least), float(high - low)), eps)
    steps = b.cast(b.unary("round", b.binary("div", least, scale)), torch.int32)
    zero = b.clamp(b.binary("sub", low, steps, torch.int32), low, high)
    return b.reshape(b.cast(scale, torch.float64), [1]), b.reshape(b.cast(zero, torch.int64), [1])
