"""Shapes, views and moving data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, result_type, wrap_dim
from .registry import lowers


@lowers(
    "clone",
    "contiguous",
    "detach",
    "detach_",
    "alias",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "pin_memory",
    "requires_grad_",
    "resolve_conj",
)
def _same(b: Emitter, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


@lowers(
    "view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "squeeze", "squeeze.dim",
    "squeeze.dims", "unsqueeze", "view_as", "reshape_as", "ravel", "atleast_1d", "atleast_2d", "_reshape_alias",
    "view_copy", "squeeze_copy", "unsqueeze_copy", "squeeze_copy.dim", "squeeze_copy.dims", "_reshape_copy",
)  # fmt: skip
def _reshape(b: Emitter, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.reshape(x, b.out[0].shape)


@lowers(
    "to.dtype",
    "to.dtype_layout",
    "to.device",
    "to.other",
    "_to_copy",
    "type_as",
    "to.prim_dtype",
    "_autocast_to_full_precision",
    "_autocast_to_reduced_precision",
)
def _to(b: Emitter, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.cast(x, b.out[0].dtype)


@lowers("expand", "expand_as", "broadcast_to", "expand_copy")
def _expand(b: Emitter, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.expand(x, b.out[0].shape)


@lowers("permute", "permute_copy")
def _permute(b: Emitter, x: Value, dims: Sequence[int]) -> Value:
    return b.permute(x, [wrap_dim(d, x.rank) for d in dims] if x.rank else [])


@lowers("transpose.int", "swapaxes", "swapdims", "transpose_copy.int")
def _transpose(b: Emitter, x: Value, a: int, c: int) -> Value:
    return b.transpose(x, a, c)


@lowers("t", "t_copy")
def _t(b: Emitter, x: Value) -> Value:
    return b.transpose(x, 0, 1) if x.rank == 2 else x


@lowers("numpy_T", "matrix_H")
def _numpy_t(b: Emitter, x: Value) -> Value:
    return b.permute(x, list(range(x.rank))[::-1])


@lowers("mT", "mH", "adjoint")
def _mt(b: Emitter, x: Value) -> Value:
    return b.transpose(x, -1, -2)


@lowers("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def _movedim(b: Emitter, x: Value, source: Any, destination: Any) -> Value:
    if not x.rank:
        return x
    src = [wrap_dim(d, x.rank) for d in ([source] if isinstance(source, int) else source)]
    dst = [wrap_dim(d, x.rank) for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter(d for d in range(x.rank) if d not in src)
    where = dict(zip(dst, src, strict=True))
    return b.permute(x, [where[d] if d in where else next(rest) for d in range(x.rank)])


@lowers("select.int", "select_copy.int")
def _select(b: Emitter, x: Value, dim: int, index: int) -> Value:
    return b.select(x, dim, index)


@lowers("slice.Tensor", "slice_copy.Tensor")
def _slice(
    b: Emitter, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    return b.slice(x, dim, start, end, step)


@lowers("narrow", "narrow_copy")
def _narrow(b: Emitter, x: Value, dim: int, start: int, length: int) -> Value:
    size = x.shape[wrap_dim(dim, x.rank)]
    start = start + size if start < 0 else start
    return b.slice(x, dim, start, start + length)


def _pieces(b: Emitter, x: Value, dim: int) -> tuple[Value, ...]:
    """Consecutive pieces with the sizes that the results have."""
    dim = wrap_dim(dim, x.rank)
    out, start = [], 0
    for k, meta in enumerate(b.out):
        size = meta.shape[dim]
        out.append(b.slice(x, dim, start, start + size) if b.used is None or k in b.used else x)
        start += size
    if start != x.shape[dim]:
        raise Decline("pieces do not cover the dimension")
    return tuple(out)


@lowers(
    "split.Tensor",
    "split.sizes",
    "split_with_sizes",
    "chunk",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes",
    "unsafe_chunk",
)
def _split(b: Emitter, x: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    return _pieces(b, x, dim)


@lowers("tensor_split.sections", "tensor_split.indices")
def _tensor_split(b: Emitter, x: Value, where: Any, dim: int = 0) -> tuple[Value, ...]:
    return _pieces(b, x, dim)


@lowers("hsplit.int", "hsplit.array")
def _hsplit(b: Emitter, x: Value, where: Any) -> tuple[Value, ...]:
    return _pieces(b, x, 0 if x.rank == 1 else 1)


@lowers("vsplit.int", "vsplit.array")
def _vsplit(b: Emitter, x: Value, where: Any) -> tuple[Value, ...]:
    return _pieces(b, x, 0)


@lowers("dsplit.int", "dsplit.array")
def _dsplit(b: Emitter, x: Value, where: Any) -> tuple[Value, ...]:
    return _pieces(b, x, 2)


@lowers("unbind.int", "unbind_copy.int")
def _unbind(b: Emitter, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(b.select(x, dim, k) if b.used is None or k in b.used else x for k in range(len(b.out)))


@lowers("unfold")
def _unfold(b: Emitter, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.rank:
        raise Decline("0-d")
    dim = wrap_dim(dim, x.rank)
    count = b.out[0].shape[dim]
    index = (torch.arange(count)[:, None] * step + torch.arange(size)).reshape(-1)
    picked = b.op(
        "index_select", [x, b.literal(index)], x.dtype, [*x.shape[:dim], count * size, *x.shape[dim + 1 :]], dim=dim
    )
    split = b.reshape(picked, [*x.shape[:dim], count, size, *x.shape[dim + 1 :]])
    dims = [d for d in range(split.rank) if d != dim + 1]
    return b.permute(split, [*dims, dim + 1])


@lowers("diagonal", "linalg_diagonal", "diagonal_copy")
def _diagonal(b: Emitter, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1, **named: Any) -> Value:
    if b.target_name == "linalg_diagonal":
        dim1, dim2 = named.get("dim1", -2), named.get("dim2", -1)
    dim1, dim2 = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    rest = [d for d in range(x.rank) if d not in (dim1, dim2)]
    y = b.permute(x, [*rest, dim1, dim2])
    n, m = y.shape[-2:]
    flat = b.reshape(y, [*y.shape[:-2], n * m])
    count = b.out[0].shape[-1]
    start = offset if offset >= 0 else -offset * m
    if count == 0:
        return b.slice(flat, -1, 0, 0)
    return b.slice(flat, -1, start, start + (count - 1) * (m + 1) + 1, m + 1)


# --- joining ----------------------------------------------------------------------------------------------------------


@lowers("cat", "concat", "concatenate")
def _cat(b: Emitter, parts: Sequence[Value], dim: int = 0) -> Value:
    dtype = b.out[0].dtype
    kept = [p for p in parts if p.shape != (0,)] or parts[:1]  # legacy: 1-d empty tensors fit anything
    if len({p.rank for p in kept}) != 1:
        raise Decline("ranks differ")
    return b.cat([b.cast(p, dtype) for p in kept], dim)


@lowers("stack")
def _stack(b: Emitter, parts: Sequence[Value], dim: int = 0) -> Value:
    dtype = b.out[0].dtype
    dim = wrap_dim(dim, parts[0].rank + 1)
    return b.cat([b.unsqueeze(b.cast(p, dtype), dim) for p in parts], dim)


@lowers("hstack", "vstack", "dstack", "column_stack", "row_stack")
def _hstack(b: Emitter, parts: Sequence[Value]) -> Value:
    dtype, name = b.out[0].dtype, b.target_name
    parts = [b.cast(p, dtype) for p in parts]
    if name == "hstack":
        parts = [b.reshape(p, p.shape or (1,)) for p in parts]
        return b.cat(parts, 0 if parts[0].rank == 1 else 1)
    if name == "column_stack":
        return b.cat([b.reshape(p, (p.shape[0] if p.rank else 1, 1)) if p.rank < 2 else p for p in parts], 1)
    if name == "dstack":
        shapes = [((1, 1, 1), (1, *p.shape, 1), (*p.shape, 1))[p.rank] if p.rank < 3 else p.shape for p in parts]
        return b.cat([b.reshape(p, s) for p, s in zip(parts, shapes, strict=True)], 2)
    return b.cat([b.reshape(p, (1, *(p.shape or (1,)))) if p.rank < 2 else p for p in parts], 0)


@lowers("repeat", "tile")
def _repeat(b: Emitter, x: Value, repeats: Sequence[int]) -> Value:
    rank = max(len(repeats), x.rank)
    repeats = [1] * (rank - len(repeats)) + list(repeats)
    shape = (1,) * (rank - x.rank) + x.shape
    if 2 * rank - sum(r == 1 for r in repeats) > 8:
        raise Decline("rank")
    before: list[int] = []
    after: list[int] = []
    for size, times in zip(shape, repeats, strict=True):
        if times != 1:
            before.append(1)
            after.append(times)
        before.append(size)
        after.append(size)
    return b.reshape(b.expand(b.reshape(x, before), after), [s * r for s, r in zip(shape, repeats, strict=True)])


@lowers("repeat_interleave.self_int")
def _repeat_interleave(
    b: Emitter, x: Value, repeats: int, dim: int | None = None, output_size: int | None = None
) -> Value:
    if dim is None:
        x, dim = b.reshape(x, [math.prod(x.shape)]), 0
    elif not x.rank:
        x = b.reshape(x, [1])
    dim = wrap_dim(dim, x.rank)
    shape = [*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]]
    wide = b.expand(b.reshape(x, [*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]]), shape)
    return b.reshape(wide, b.out[0].shape)


@lowers("meshgrid", "meshgrid.indexing", "broadcast_tensors")
def _meshgrid(b: Emitter, parts: Sequence[Value], indexing: str = "ij") -> tuple[Value, ...]:
    if b.target_name == "broadcast_tensors":
        return tuple(b.expand(p, meta.shape) for p, meta in zip(parts, b.out, strict=True))
    axes = list(range(len(parts)))
    if indexing == "xy" and len(parts) >= 2:
        axes[:2] = [1, 0]
    out = []
    for part, axis, meta in zip(parts, axes, b.out, strict=True):
        size = part.shape[0] if part.rank else 1
        out.append(b.expand(b.reshape(part, [size if d == axis else 1 for d in range(len(parts))]), meta.shape))
    return tuple(out)


@lowers("flip", "fliplr", "flipud")
def _flip(b: Emitter, x: Value, dims: Sequence[int] | None = None) -> Value:
    dims = [1] if b.target_name == "fliplr" else [0] if b.target_name == "flipud" else dims
    wrapped = sorted({wrap_dim(d, x.rank) for d in dims or ()})
    return b.op("flip", [x], x.dtype, x.shape, dims=wrapped) if wrapped and x.rank else x


@lowers("roll")
def _roll(b: Emitter, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not x.rank:
        return x
    shape = x.shape
    if not dims:
        x, dims = b.reshape(x, [math.prod(shape)]), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        dim = wrap_dim(dim, x.rank)
        size = x.shape[dim]
        cut = (size - shift) % size if size else 0
        if cut:
            x = b.cat([b.slice(x, dim, cut, size), b.slice(x, dim, 0, cut)], dim)
    return b.reshape(x, shape)


@lowers("constant_pad_nd", "pad")
def _pad(b: Emitter, x: Value, pad: Sequence[int], mode: Any = None, value: Any = None) -> Value:
    if b.target_name == "constant_pad_nd":
        mode, value = "constant", mode
    if len(pad) % 2 or len(pad) > 2 * x.rank:
        raise Decline("padding of odd length")
    amounts = [(0, 0)] * (x.rank - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    if mode != "constant":
        return _pad_index(b, x, amounts, mode)
    for d, (before, after) in enumerate(amounts):
        if before < 0 or after < 0:
            x = b.slice(x, d, max(0, -before), x.shape[d] - max(0, -after))
    amounts = [(max(0, p), max(0, q)) for p, q in amounts]
    if not any(map(any, amounts)):
        return x
    shape = [s + p + q for s, (p, q) in zip(x.shape, amounts, strict=True)]
    flat = [n for pair in amounts for n in pair]
    return b.op("pad", [x], x.dtype, shape, padding=flat, value=b.scalar(value or 0, x.dtype))


@lowers(
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)
def _pad_by_name(b: Emitter, x: Value, pad: Sequence[int]) -> Value:
    amounts = [(0, 0)] * (x.rank - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    return _pad_index(b, x, amounts, "reflect" if b.target_name.startswith("reflection") else "replicate")


def _pad_index(b: Emitter, x: Value, amounts: Sequence[tuple[int, int]], mode: str) -> Value:
    """Padding that repeats elements: one index_select a dimension."""
    for d, (before, after) in enumerate(amounts):
        if not before and not after:
            continue
        size = x.shape[d]
        at = torch.arange(-before, size + after)
        if mode == "replicate":
            at = at.clamp(0, size - 1)
        elif mode == "circular":  # what is cut off first is not wrapped around
            first, stop = max(0, -before), size - max(0, -after)
            if max(before, after) > stop - first:
                raise Decline("padding wider than the input")
            at = (at - first) % (stop - first) + first
        elif mode == "reflect":
            at = at.abs()
            at = (size - 1) - (at - (size - 1)).abs()
        else:
            raise Decline(f"padding mode {mode}")
        if size == 0 or int(at.min()) < 0 or int(at.max()) >= size:
            raise Decline("padding wider than the input")
        x = b.op("index_select", [x, b.literal(at)], x.dtype, [*x.shape[:d], len(at), *x.shape[d + 1 :]], dim=d)
    return x


@lowers("pixel_shuffle")
def _pixel_shuffle(b: Emitter, x: Value, factor: int) -> Value:
    *batch, c, h, w = x.shape
    n = len(batch)
    y = b.reshape(x, [*batch, c // factor**2, factor, factor, h, w])
    y = b.permute(y, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return b.reshape(y, b.out[0].shape)


@lowers("pixel_unshuffle")
def _pixel_unshuffle(b: Emitter, x: Value, factor: int) -> Value:
    *batch, c, h, w = x.shape
    n = len(batch)
    y = b.reshape(x, [*batch, c, h // factor, factor, w // factor, factor])
    y = b.permute(y, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return b.reshape(y, b.out[0].shape)


@lowers("channel_shuffle")
def _channel_shuffle(b: Emitter, x: Value, groups: int) -> Value:
    shape = x.shape
    y = b.reshape(x, [shape[0], groups, shape[1] // groups, math.prod(shape[2:])])
    return b.reshape(b.permute(y, [0, 2, 1, 3]), shape)


@lowers("tril", "triu")
def _tril(b: Emitter, x: Value, diagonal: int = 0) -> Value:
    return b.op(b.target_name, [x], x.dtype, x.shape, diagonal=diagonal)


@lowers("diff")
def _diff(
    b: Emitter, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Value:
    parts = [p for p in (prepend, x, append) if p is not None]
    dtype = b.out[0].dtype
    if len(parts) > 1:
        x = b.cat([b.cast(p, dtype) for p in parts], dim)
    for _ in range(min(n, x.shape[wrap_dim(dim, x.rank)])):
        size = x.shape[wrap_dim(dim, x.rank)]
        high, low = b.slice(x, dim, 1, size), b.slice(x, dim, 0, max(size - 1, 0))
        x = b.binary("ne", high, low) if dtype == torch.bool else b.sub(high, low)
    return x


@lowers("outer", "ger")
def _outer(b: Emitter, x: Value, y: Value) -> Value:
    dtype = result_type(x, y)
    return b.binary("mul", b.reshape(x, [*x.shape, 1]), y, dtype)
