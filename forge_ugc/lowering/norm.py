"""Normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, is_integral, one_type
from .registry import lowers


def _common(b: Emitter, x: Value, *weights: Value | None, promotes: bool = False) -> tuple[Value, list[Value | None]]:
    """Operands in one dtype: mixed ones (bf16 data, f32 weights) in f32. `promotes`: eager takes any mixture."""
    if is_integral(x.dtype):
        raise Decline("integer operand")
    if not promotes and x.dtype not in (torch.float16, torch.bfloat16):
        one_type(x, *weights)
    dtypes = {x.dtype, *(w.dtype for w in weights if w is not None)}
    dtype = x.dtype if len(dtypes) == 1 else torch.float64 if torch.float64 in dtypes else torch.float32
    return b.cast(x, dtype), [None if w is None else b.cast(w, dtype) for w in weights]


@lowers("layer_norm")
def _layer_norm(
    b: Emitter, x: Value, shape: Sequence[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, cudnn: bool = True,
) -> Value:  # fmt: skip
    dtype = x.dtype
    if 0 in x.shape:
        raise Decline("empty")
    x, (weight, bias) = _common(b, x, weight, bias)
    y, _ = b.emit("layer_norm", [x, weight, bias, None], [(x.dtype, x.shape)] * 2, axes=len(shape), eps=float(eps))
    return b.cast(y, dtype)


@lowers("native_layer_norm")
def _native_layer_norm(
    b: Emitter, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> Any:
    if b.used is None or b.used - {0}:
        raise Decline("statistics are used")
    return _layer_norm(b, x, shape, weight, bias, eps), None, None


@lowers("rms_norm")
def _rms_norm(
    b: Emitter, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    if 0 in x.shape:
        raise Decline("empty")
    dtype = x.dtype
    if eps is None:  # half types are computed in float32, whose epsilon counts
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    x, (weight,) = _common(b, x, weight, promotes=True)
    y, _ = b.emit("rms_norm", [x, weight, None], [(x.dtype, x.shape)] * 2, axes=len(shape), eps=float(eps))
    return b.cast(y, dtype)


@lowers("group_norm")
def _group_norm(
    b: Emitter,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Value:
    if 0 in x.shape or x.rank < 2:
        raise Decline("empty")
    dtype = x.dtype
    x, (weight, bias) = _common(b, x, weight, bias)
    operands = [x, weight, bias]
    return b.cast(b.op("group_norm", operands, x.dtype, x.shape, groups=groups, eps=float(eps)), dtype)


@lowers("instance_norm")
def _instance_norm(
    b: Emitter, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None,
    use_input_stats: bool, momentum: float, eps: float, cudnn: bool,
) -> Value:  # fmt: skip
    if not use_input_stats or mean is not None:
        raise Decline("running statistics")
    return _group_norm(b, x, x.shape[1], weight, bias, eps)


@lowers("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(
    b: Emitter, x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None, *rest: Any
) -> Any:  # fmt: skip
    core = b.target_name == "_native_batch_norm_legit_no_training"
    training, eps = (False, rest[1]) if core else (rest[0], rest[2])
    if training or mean is None or var is None or x.rank < 2:
        raise Decline("batch statistics")
    if core and (b.used is None or b.used - {0}):
        raise Decline("statistics are used")
    dtype = x.dtype
    x, (weight, bias, mean, var) = _common(b, x, weight, bias, mean, var)
    assert mean is not None and var is not None
    x, mean, var = b.opmath(x), b.opmath(mean), b.opmath(var)
    alpha = b.unary("rsqrt", b.add(var, float(eps)))
    if weight is not None:
        alpha = b.mul(alpha, b.opmath(weight))
    shift = b.unary("neg", b.mul(mean, alpha))
    if bias is not None:
        shift = b.add(b.opmath(bias), shift)
    per_channel = [x.shape[1] if d == 1 else 1 for d in range(x.rank)]
    y = b.cast(b.add(b.mul(x, b.reshape(alpha, per_channel)), b.reshape(shift, per_channel)), dtype)
    return (y, None, None) if core else y
