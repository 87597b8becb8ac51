"""Pooling: a window is a handful of strided slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, is_integral
from .registry import lowers

_MOST_SLICES = 64


def _spread(value: Any, count: int, default: Any = None) -> list[int]:
    items = [value] if isinstance(value, int) else list(value)
    items = items or list(default)
    return items * count if len(items) == 1 else items


def _padded(b: Emitter, x: Value, before: Sequence[int], after: Sequence[int], value: float) -> Value:
    if not any(before) and not any(after):
        return x
    lead = x.rank - len(before)
    amounts = [0, 0] * lead + [n for pair in zip(before, after, strict=True) for n in pair]
    shape = [s + amounts[2 * d] + amounts[2 * d + 1] for d, s in enumerate(x.shape)]
    return b.op("pad", [x], x.dtype, shape, padding=amounts, value=value)


def _windows(
    b: Emitter,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    out: Sequence[int],
    join: Callable[[Value, Value], Value],
) -> Value:
    """Joins the elements of each window, one dimension after the other."""
    if sum(size) > _MOST_SLICES:
        raise Decline("large window")
    lead = x.rank - len(size)
    for k, (n, s, step, count) in enumerate(zip(size, stride, dilation, out, strict=True)):
        dim = lead + k
        parts = [b.slice(x, dim, i * step, i * step + (count - 1) * s + 1, s) for i in range(n)]
        x = parts[0]
        for part in parts[1:]:
            x = join(x, part)
    return x


@lowers(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool1d_with_indices",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)
def _max_pool(
    b: Emitter, x: Value, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    indexed = b.target_name.endswith("indices")
    if indexed and (b.used is None or 1 in b.used):
        raise Decline("indices are used")
    if is_integral(x.dtype) or 0 in x.shape:
        raise Decline("integers, or nothing")
    n = int(b.target_name[8])
    size, padding, dilation = _spread(size, n), _spread(padding, n), _spread(dilation, n)
    stride = _spread(stride, n, size)
    out = list(b.out[0].shape[-n:])
    if x.rank not in (n + 1, n + 2):
        raise Decline("rank")
    after = [
        max(0, (o - 1) * s + d * (k - 1) + 1 - p - full)
        for o, s, d, k, p, full in zip(out, stride, dilation, size, padding, x.shape[-n:], strict=True)
    ]
    y = _padded(b, x, padding, after, -math.inf)
    y = _windows(b, y, size, stride, dilation, out, lambda p, q: b.binary("maximum", p, q))
    return (y, None) if indexed else y


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    b: Emitter, x: Value, size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:  # fmt: skip
    if is_integral(x.dtype) or 0 in x.shape:
        raise Decline("integers, or nothing")
    n = int(b.target_name[8])
    size, padding = _spread(size, n), _spread(padding, n)
    stride = _spread(stride, n, size)
    out = list(b.out[0].shape[-n:])
    if x.rank not in (n + 1, n + 2):
        raise Decline("rank")
    full = x.shape[-n:]
    after = [max(0, (o - 1) * s + k - p - f) for o, s, k, p, f in zip(out, stride, size, padding, full, strict=True)]
    dtype = x.dtype
    y = _padded(b, b.opmath(x), padding, after, 0.0)
    y = _windows(b, y, size, stride, [1] * n, out, b.add)
    if divisor_override:
        return b.cast(b.div(y, float(divisor_override)), dtype)
    # how many elements count, a dimension at a time
    for k in range(n):
        counts = []
        for o in range(out[k]):
            start = o * stride[k] - padding[k]
            end = min(start + size[k], full[k] + padding[k])
            counts.append(end - start if count_include_pad else min(end, full[k]) - max(start, 0))
        if len(set(counts)) == 1:
            y = b.div(y, float(counts[0]))
        else:
            divisor = b.literal(torch.tensor(counts, dtype=y.dtype))
            y = b.div(y, b.reshape(divisor, [len(counts), *([1] * (n - 1 - k))]))
    return b.cast(y, dtype)


@lowers(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def _adaptive_avg_pool(b: Emitter, x: Value, size: Sequence[Any]) -> Value:
    n = len(size)
    full, out = x.shape[-n:], b.out[0].shape[-n:]
    if math.prod(x.shape) == 0 or any(f % o for f, o in zip(full, out, strict=True)):
        raise Decline("windows of several sizes")
    lead = x.rank - n
    shape = [*x.shape[:lead], *(m for f, o in zip(full, out, strict=True) for m in (o, f // o))]
    if len(shape) > 8:
        raise Decline("rank")
    return b.reduce("mean", b.reshape(x, shape), [lead + 2 * k + 1 for k in range(n)])
