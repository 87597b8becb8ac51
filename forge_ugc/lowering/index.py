"""Gather, scatter and their relatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, broadcast, wrap_dim
from .registry import lowers

_INDEX = (torch.int64, torch.int32)


def _index(b: Emitter, index: Value) -> Value:
    if index.dtype not in _INDEX:
        raise Decline(f"index of {index.dtype}")
    return b.cast(index, torch.int64)


@lowers("embedding")
def _embedding(b: Emitter, weight: Value, ids: Value, *rest: Any, **named: Any) -> Value:
    if ids.dtype not in _INDEX or weight.rank != 2:
        raise Decline("index dtype")
    return b.op("embedding", [weight, ids], weight.dtype, [*ids.shape, weight.shape[1]])


@lowers("one_hot")
def _one_hot(b: Emitter, x: Value, classes: int = -1) -> Value:
    if classes < 0:
        raise Decline("number of classes depends on the data")
    return b.cast(b.binary("eq", b.reshape(x, [*x.shape, 1]), b.arange(classes)), torch.int64)


@lowers("gather")
def _gather(b: Emitter, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    index, shape = _index(b, index), index.shape
    if not x.rank:
        x = b.reshape(x, [1])
    if not index.rank:
        index = b.reshape(index, [1])
    if index.rank != x.rank:
        raise Decline("ranks differ")
    y = b.op("gather", [x, index], x.dtype, index.shape, dim=wrap_dim(dim, x.rank))
    return b.reshape(y, shape)


@lowers("take_along_dim")
def _take_along_dim(b: Emitter, x: Value, index: Value, dim: int | None = None) -> Value:
    index = _index(b, index)
    if dim is None:
        flat, at = b.reshape(x, [math.prod(x.shape)]), b.reshape(index, [math.prod(index.shape)])
        return b.op("gather", [flat, at], x.dtype, at.shape, dim=0)
    dim = wrap_dim(dim, x.rank)
    batch = broadcast(*([*t.shape[:dim], 1, *t.shape[dim + 1 :]] for t in (x, index)))
    x = b.expand(x, [*batch[:dim], x.shape[dim], *batch[dim + 1 :]])
    index = b.expand(index, [*batch[:dim], index.shape[dim], *batch[dim + 1 :]])
    return b.op("gather", [x, index], x.dtype, index.shape, dim=dim)


@lowers("take")
def _take(b: Emitter, x: Value, index: Value) -> Value:
    flat, at = b.reshape(x, [math.prod(x.shape)]), b.reshape(_index(b, index), [math.prod(index.shape)])
    return b.reshape(b.op("index", [flat, at], x.dtype, at.shape, mask=[1]), index.shape)


@lowers("index_select")
def _index_select(b: Emitter, x: Value, dim: int, index: Value) -> Value:
    if index.dtype not in _INDEX:
        raise Decline("index dtype")
    shape = x.shape
    if not shape:
        x = b.reshape(x, [1])
    dim = wrap_dim(dim, x.rank)
    count = index.shape[0] if index.rank else 1
    y = b.op("index_select", [x, index], x.dtype, [*x.shape[:dim], count, *x.shape[dim + 1 :]], dim=dim)
    return b.reshape(y, b.out[0].shape)


def _indices(b: Emitter, indices: Sequence[Value | None]) -> tuple[list[int], list[Value]]:
    given = [None if i is None else _index(b, i) for i in indices]
    return [int(i is not None) for i in given], [i for i in given if i is not None]


@lowers("index.Tensor", "_unsafe_index.Tensor")
def _index_tensor(b: Emitter, x: Value, indices: Sequence[Value | None]) -> Value:
    mask, given = _indices(b, indices)
    if not given:
        return x
    return b.op("index", [x, *given], x.dtype, b.out[0].shape, mask=mask)


@lowers("index_put", "_unsafe_index_put")
def _index_put(b: Emitter, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    values = b.cast(values, x.dtype)
    first = indices[0] if len(indices) == 1 else None
    if first is not None and first.dtype == torch.bool and not accumulate and math.prod(values.shape) == 1:
        keep = b.reshape(first, [*first.shape, *([1] * (x.rank - first.rank))])
        return b.where(keep, b.reshape(values, ()), x, x.dtype)
    mask, given = _indices(b, indices)
    if not given:
        raise Decline("no index")
    return b.op("index_put", [x, values, *given], x.dtype, x.shape, mask=mask, accumulate=accumulate)


def _along(b: Emitter, op: str, x: Value, dim: int, index: Value, source: Value, **attrs: Any) -> Value:
    """Operators of the form op(x, dim, index, source), 0-d operands as 1-d ones."""
    shape = x.shape
    if not x.rank:
        x = b.reshape(x, [1])
    dim = wrap_dim(dim, x.rank)
    if not source.rank:
        source = b.reshape(source, [1])
    if not index.rank:
        index = b.reshape(index, [1])
    if source.rank != x.rank:
        raise Decline("ranks differ")
    return b.reshape(
        b.op(op, [x, _index(b, index), b.cast(source, x.dtype)], x.dtype, x.shape, dim=dim, **attrs), shape
    )


@lowers("index_copy")
def _index_copy(b: Emitter, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _along(b, "index_copy", x, dim, index, source)


@lowers("index_add")
def _index_add(b: Emitter, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    return _along(b, "index_add", x, dim, index, source if alpha == 1 else b.binary("mul", source, alpha, x.dtype))


@lowers("histc")
def _histc(b: Emitter, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    if x.dtype not in (torch.float32, torch.float64) or not min < max:
        raise Decline("a range that depends on data" if min == max else "histc of other types or ranges")
    x = b.reshape(x, [math.prod(x.shape)])
    inside = b.binary("logical_and", b.binary("ge", x, min), b.binary("le", x, max), torch.bool)
    place = b.binary("div", b.binary("mul", b.binary("sub", x, min), bins), max - min)
    place = b.binary("minimum", b.cast(b.where(inside, place, 0.0, x.dtype), torch.int64), bins - 1)
    return _along(b, "index_add", b.full((bins,), 0.0, x.dtype), 0, place, inside)


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(b: Emitter, x: Value, dim: int, index: Value, value: Any) -> Value:
    wide = b.reshape(x, x.shape or (1,))
    dim = wrap_dim(dim, wide.rank)
    count = index.shape[0] if index.rank else 1
    shape = [count if d == dim else s for d, s in enumerate(wide.shape)]
    source = b.full((), value, x.dtype) if not isinstance(value, Value) else b.cast(value, x.dtype)
    return _along(b, "index_copy", x, dim, index, b.expand(source, shape))


@lowers("scatter.src", "scatter.value", "scatter_add", "scatter.reduce", "scatter.value_reduce")
def _scatter(b: Emitter, x: Value, dim: int, index: Value, source: Any, *, reduce: str = "") -> Value:
    if reduce not in ("", "add"):
        raise Decline(f"reduce={reduce}")
    if not isinstance(source, Value):
        source = b.expand(b.full((), source, x.dtype), index.shape)
    adds = b.target_name == "scatter_add" or reduce == "add"
    if index.rank and math.prod(index.shape) == 0:
        return x
    return _along(b, "scatter", x, dim, index, source, reduce=int(adds))


@lowers("slice_scatter")
def _slice_scatter(
    b: Emitter, x: Value, source: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:  # fmt: skip
    dim = wrap_dim(dim, x.rank)
    start, end, _ = slice(start, end).indices(x.shape[dim])
    end = max(start, end)
    length = -(-(end - start) // step)
    source = b.expand(b.cast(source, x.dtype), [length if d == dim else s for d, s in enumerate(x.shape)])
    return b.op("slice_scatter", [x, source], x.dtype, x.shape, dim=dim, start=start, end=end, step=step)


@lowers("select_scatter")
def _select_scatter(b: Emitter, x: Value, source: Value, dim: int, index: int) -> Value:
    dim = wrap_dim(dim, x.rank)
    index %= x.shape[dim]
    source = b.expand(b.cast(source, x.dtype), [s for d, s in enumerate(x.shape) if d != dim])
    return _slice_scatter(b, x, b.unsqueeze(source, dim), dim, index, index + 1)


@lowers("diagonal_scatter")
def _diagonal_scatter(b: Emitter, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    rest = [d for d in range(x.rank) if d not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    y = b.permute(x, order)
    n, m = y.shape[-2:]
    flat = b.reshape(y, [*y.shape[:-2], n * m])
    count = source.shape[-1]
    start = offset if offset >= 0 else -offset * m
    if count:
        flat = _slice_scatter(b, flat, source, flat.rank - 1, start, start + (count - 1) * (m + 1) + 1, m + 1)
    return b.permute(b.reshape(flat, y.shape), [order.index(d) for d in range(x.rank)])
