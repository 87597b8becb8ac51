"""Building blocks that rules are written with: each emits a node or none, and knows its result's type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..table import OBJECT, TableBuilder, Value
from .promote import float_type, is_integral, result_type
from .registry import Decline, Refused

Number = Any  # bool, int or float
_LIMITS = {
    d: (torch.iinfo(d).min, torch.iinfo(d).max)
    for d in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
_LIMITS[torch.bool] = (0, 1)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; Decline if there is none."""
    rank = max(map(len, shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for d, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if out[d] not in (1, size):
                    raise Decline(f"shapes {shapes} do not broadcast")
                out[d] = size
    return tuple(out)


def wrap_dim(dim: int, rank: int) -> int:
    """A dimension in [0, rank); a 0-d tensor counts as 1-d."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise Decline(f"dim {dim} is outside rank {rank}")
    return dim % rank


class Emitter(TableBuilder):
    """A TableBuilder with operators as methods."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[Any] = []  # expected TensorMeta of each result of the node being lowered
        self.used: set[int] | None = None  # which results are used; None: all
        self.depth = 0  # of decompositions within decompositions
        self.target_name = ""  # name of the ATen operator, for rules that serve several

    # --- types ----------------------------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        return x if x.dtype == dtype else self.op("cast", [x], dtype, x.shape)

    def opmath(self, x: Value) -> Value:
        """Half types in f32: what torch computes a composed function in."""
        return self.cast(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x

    def full(self, shape: Sequence[int], value: Number, dtype: torch.dtype) -> Value:
        return self.op("full", [], dtype, shape, value=self.scalar(value, dtype))

    def literal(self, tensor: torch.Tensor) -> Value:
        """A constant known at compile time."""
        return self.constant(tensor.contiguous())

    @staticmethod
    def scalar(value: Number, dtype: torch.dtype) -> Number:
        """A Python number as an attribute for operands of `dtype`; Decline if it does not fit."""
        if isinstance(value, complex):
            raise Decline("complex scalar")
        if dtype in _LIMITS:
            if isinstance(value, float):
                if not math.isfinite(value) or value != int(value):
                    raise Decline(f"scalar {value} does not fit {dtype}")
                value = int(value)
            low, high = _LIMITS[dtype]
            if not low <= value <= high:
                raise Decline(f"scalar {value} does not fit {dtype}")
            return int(value)
        value = float(value) if isinstance(value, bool) else value
        return value if isinstance(value, float) or -(2**63) <= value < 2**63 else float(value)

    # --- views ----------------------------------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if shape == x.shape else self.op("reshape", [x], x.dtype, shape, shape=shape)

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        if list(dims) == list(range(x.rank)):
            return x
        return self.op("permute", [x], x.dtype, [x.shape[d] for d in dims], dims=dims)

    def transpose(self, x: Value, a: int, b: int) -> Value:
        dims = list(range(x.rank))
        if dims:
            a, b = wrap_dim(a, x.rank), wrap_dim(b, x.rank)
            dims[a], dims[b] = dims[b], dims[a]
        return self.permute(x, dims)

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        if broadcast(x.shape, shape) != shape:
            raise Decline(f"cannot expand {x.shape} to {shape}")
        return x if shape == x.shape else self.op("expand", [x], x.dtype, shape, shape=shape)

    def slice(self, x: Value, dim: int, start: int | None, end: int | None, step: int = 1) -> Value:
        """x[start:end:step] in one dimension, with Python's clamping."""
        if not x.shape:
            raise Decline("slice of a 0-d tensor")
        dim = wrap_dim(dim, x.rank)
        size = x.shape[dim]
        start, end, _ = slice(start, end).indices(size)
        end = max(start, end)
        if start == 0 and end == size and step == 1:
            return x
        shape = list(x.shape)
        shape[dim] = -(-(end - start) // step)
        return self.op("slice", [x], x.dtype, shape, dim=dim, start=start, end=end, step=step)

    def select(self, x: Value, dim: int, index: int) -> Value:
        dim = wrap_dim(dim, x.rank)
        if not x.shape or not -x.shape[dim] <= index < x.shape[dim]:
            raise Decline(f"index {index} is out of range")
        index %= x.shape[dim]
        piece = self.slice(x, dim, index, index + 1)
        return self.reshape(piece, [s for d, s in enumerate(x.shape) if d != dim])

    def unsqueeze(self, x: Value, dim: int) -> Value:
        dim = wrap_dim(dim, x.rank + 1)
        return self.reshape(x, [*x.shape[:dim], 1, *x.shape[dim:]])

    # --- elementwise ------------------------------------------------------------------------------------------------

    def unary(self, op: str, x: Value, **attrs: Any) -> Value:
        return self.op(op, [x], x.dtype, x.shape, **attrs)

    def binary(self, op: str, a: Value | Number, b: Value | Number, dtype: torch.dtype | None = None) -> Value:
        """`op` on operands cast to `dtype` (default: their promoted type). One of them may be a number."""
        dtype = result_type(a, b) if dtype is None else dtype
        result = torch.bool if op in _TESTS else dtype
        if isinstance(a, Value) and isinstance(b, Value):
            a, b = self.cast(a, dtype), self.cast(b, dtype)
            return self.op(op, [a, b], result, broadcast(a.shape, b.shape))
        reverse = not isinstance(a, Value)
        x, number = (b, a) if reverse else (a, b)
        if not isinstance(x, Value):
            raise Decline("no tensor operand")
        x = self.cast(x, dtype)
        return self.op(op, [x], result, x.shape, scalar=self.scalar(number, dtype), reverse=reverse)

    def add(self, a: Any, b: Any) -> Value:
        return self.binary("add", a, b)

    def sub(self, a: Any, b: Any) -> Value:
        return self.binary("sub", a, b)

    def mul(self, a: Any, b: Any) -> Value:
        return self.binary("mul", a, b)

    def div(self, a: Any, b: Any) -> Value:
        return self.binary("div", a, b, float_type(result_type(a, b)))

    def where(self, condition: Value, a: Value | Number, b: Value | Number, dtype: torch.dtype | None = None) -> Value:
        dtype = result_type(a, b) if dtype is None else dtype
        condition = self.truth(condition)
        x = self.cast(a, dtype) if isinstance(a, Value) else self.full((), a, dtype)
        y = self.cast(b, dtype) if isinstance(b, Value) else self.full((), b, dtype)
        return self.op("where", [condition, x, y], dtype, broadcast(condition.shape, x.shape, y.shape))

    def truth(self, x: Value) -> Value:
        """x != 0 as bool."""
        return self.cast(x, torch.bool)

    def clamp(self, x: Value, low: Number | None, high: Number | None) -> Value:
        low = None if low is None else self.scalar(low, x.dtype)
        high = None if high is None else self.scalar(high, x.dtype)
        return self.op("clamp", [x], x.dtype, x.shape, low=low, high=high)

    # --- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Value, dims: Sequence[int] | int | None, keepdim: bool = False, **attrs: Any) -> Value:
        """A reduction over `dims` (None or empty: all)."""
        if not x.shape:
            x = self.reshape(x, [1])
            return self.op(op, [x], _reduced_type(op, x), (), dims=[0], keepdim=False, **attrs)
        dims = [dims] if isinstance(dims, int) else dims
        wrapped = sorted({wrap_dim(d, x.rank) for d in dims}) if dims else list(range(x.rank))
        if dims and len(wrapped) != len(dims):
            raise Decline("a dimension appears twice")
        if op in ("amax", "amin") and any(x.shape[d] == 0 for d in wrapped):
            raise Decline("reduction over nothing")
        shape = tuple(1 if d in wrapped else s for d, s in enumerate(x.shape) if keepdim or d not in wrapped)
        return self.op(op, [x], _reduced_type(op, x), shape, dims=wrapped, keepdim=keepdim, **attrs)

    def arg_reduce(self, op: str, x: Value, dim: int | None, keepdim: bool = False) -> Value:
        rank, shape = x.rank, x.shape
        if dim is None:
            x = self.reshape(x, [math.prod(shape)])
            dim, keep = 0, [1] * rank if keepdim else []
        else:
            dim = wrap_dim(dim, rank)
            if not rank:
                x, keep = self.reshape(x, [1]), []
            else:
                keep = [1 if d == dim else s for d, s in enumerate(shape) if keepdim or d != dim]
        if x.shape[dim] == 0:
            raise Decline("reduction over nothing")
        out = [s for d, s in enumerate(x.shape) if d != dim]
        return self.reshape(self.op(op, [x], torch.int64, out, dim=dim, keepdim=False), keep)

    def along(self, op: str, x: Value, dim: int, **attrs: Any) -> Value:
        """cumsum, softmax and the like: the shape stays."""
        shape = x.shape
        if not shape:
            x = self.reshape(x, [1])
        return self.reshape(self.op(op, [x], x.dtype, x.shape, dim=wrap_dim(dim, x.rank), **attrs), shape)

    # --- others -----------------------------------------------------------------------------------------------------

    def cat(self, parts: Sequence[Value], dim: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        dim = wrap_dim(dim, parts[0].rank)
        shape = list(parts[0].shape)
        for part in parts[1:]:
            if part.rank != len(shape) or any(
                s != t for d, (s, t) in enumerate(zip(part.shape, shape, strict=True)) if d != dim
            ):
                raise Decline("shapes differ")
        shape[dim] = sum(p.shape[dim] for p in parts)
        return self.op("cat", parts, parts[0].dtype, shape, dim=dim)

    def matmul(self, a: Value, b: Value) -> Value:
        """Product of matrices; batch dimensions broadcast, ranks >= 2."""
        if a.shape[-1] != b.shape[-2]:
            raise Decline("inner sizes differ")
        rank = max(a.rank, b.rank)
        a = self.reshape(a, (1,) * (rank - a.rank) + a.shape)
        b = self.reshape(b, (1,) * (rank - b.rank) + b.shape)
        batch = broadcast(a.shape[:-2], b.shape[:-2])
        return self.op("matmul", [a, b], a.dtype, (*batch, a.shape[-2], b.shape[-1]))

    def arange(self, count: int, first: Number = 0, delta: Number = 1, dtype: torch.dtype = torch.int64) -> Value:
        return self.op("arange", [], dtype, (count,), first=self.scalar(first, dtype), delta=self.scalar(delta, dtype))


_TESTS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"})


def _reduced_type(op: str, x: Value) -> Any:
    return torch.bool if op in ("any", "all") else x.dtype


def one_type(*values: Value | None) -> torch.dtype:
    """The dtype of all of them. Refused if they have several."""
    dtypes = list(dict.fromkeys(v.dtype for v in values if v is not None))
    if len(dtypes) != 1:
        raise Refused("operands of " + " and ".join(str(d).removeprefix("torch.") for d in dtypes))
    return dtypes[0]


def need_float(*values: Value | None) -> None:
    """Decline unless all are floats of one dtype."""
    dtypes = {v.dtype for v in values if v is not None}
    if len(dtypes) != 1 or dtypes & {OBJECT} or not next(iter(dtypes)).is_floating_point:
        raise Decline(f"dtypes {dtypes}")


def is_tensor(x: Any) -> bool:
    return isinstance(x, Value)


__all__ = [
    "Decline",
    "Emitter",
    "Number",
    "Value",
    "broadcast",
    "float_type",
    "is_integral",
    "is_tensor",
    "need_float",
    "result_type",
    "wrap_dim",
]
