"""Reductions, scans, softmax, sorting."""

from __future__ import annotations

import math
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, float_type, is_integral, wrap_dim
from .registry import lowers


def _sum_type(x: Value, dtype: Any) -> Any:
    return dtype if dtype is not None else torch.int64 if is_integral(x.dtype) else x.dtype


@lowers("sum", "sum.dim_IntList")
def _sum(b: Emitter, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return b.reduce("sum", b.cast(x, _sum_type(x, dtype)), dim, keepdim)


@lowers("nansum")
def _nansum(b: Emitter, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if not is_integral(x.dtype):
        x = b.where(b.op("isnan", [x], torch.bool, x.shape), 0.0, x, x.dtype)
    return b.reduce("sum", b.cast(x, _sum_type(x, dtype)), dim, keepdim)


@lowers("mean", "mean.dim")
def _mean(b: Emitter, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return b.reduce("mean", b.cast(x, dtype or x.dtype), dim, keepdim)


@lowers("prod", "prod.dim_int")
def _prod(b: Emitter, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return b.reduce("prod", b.cast(x, _sum_type(x, dtype)), dim, keepdim)


@lowers("amax", "amin")
def _amax(b: Emitter, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return b.reduce(b.target_name, x, dim, keepdim)


@lowers("max", "min")
def _max(b: Emitter, x: Value) -> Value:
    return b.reduce("a" + b.target_name, x, None)


@lowers("max.dim", "min.dim")
def _max_dim(b: Emitter, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    name = b.target_name
    indices = b.arg_reduce("arg" + name, x, dim, keepdim)
    return b.reduce("a" + name, x, [dim], keepdim), indices


@lowers("aminmax")
def _aminmax(b: Emitter, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = None if dim is None else [dim]
    low, high = b.reduce("amin", x, dims, keepdim), b.reduce("amax", x, dims, keepdim)
    return b.reshape(low, b.out[0].shape), b.reshape(high, b.out[1].shape)


@lowers("argmax", "argmin")
def _argmax(b: Emitter, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return b.arg_reduce(b.target_name, x, dim, keepdim)


@lowers("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def _any(b: Emitter, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    if isinstance(dim, (list, tuple)) and not dim:
        raise Decline("no dims")
    return b.cast(b.reduce(b.target_name, x, dim, keepdim), b.out[0].dtype)  # uint8 gives uint8


@lowers("count_nonzero", "count_nonzero.dim_IntList")
def _count_nonzero(b: Emitter, x: Value, dim: Any = None) -> Value:
    dims = None if dim is None else [dim] if isinstance(dim, int) else dim
    return b.reduce("sum", b.cast(b.truth(x), torch.int64), dims)


def _variance(b: Emitter, x: Value, dim: Any, keepdim: bool, correction: float) -> Value:
    if is_integral(x.dtype):
        raise Decline("integer operand")
    dims = [dim] if isinstance(dim, int) else dim
    return b.reduce("var", x, dims, keepdim, correction=float(correction))


def _var_args(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, bool, float]:
    """The forms (unbiased), (dim, unbiased, keepdim) and (dim, *, correction, keepdim)."""
    if len(args) == 1 and isinstance(args[0], bool):
        return None, False, float(args[0])
    dim = args[0] if args else named.get("dim")
    if len(args) > 1 or "unbiased" in named:
        unbiased = args[1] if len(args) > 1 else named["unbiased"]
        return dim, bool(args[2] if len(args) > 2 else named.get("keepdim", False)), float(unbiased)
    correction = named.get("correction")
    return dim, bool(named.get("keepdim", False)), 1.0 if correction is None else float(correction)


_FORMS = ("", ".dim", ".correction")


@lowers(*(f"{n}{f}" for n in ("var", "std") for f in _FORMS))
def _var(b: Emitter, x: Value, *args: Any, **named: Any) -> Value:
    var = _variance(b, b.opmath(x), *_var_args(args, named))
    return b.cast(b.unary("sqrt", var) if b.target_name == "std" else var, x.dtype)


@lowers(*(f"{n}{f}" for n in ("var_mean", "std_mean") for f in _FORMS))
def _var_mean(b: Emitter, x: Value, *args: Any, **named: Any) -> tuple[Value, Value]:
    dim, keepdim, correction = _var_args(args, named)
    var = _variance(b, b.opmath(x), dim, keepdim, correction)
    dims = [dim] if isinstance(dim, int) else dim
    first = b.cast(b.unary("sqrt", var) if b.target_name == "std_mean" else var, x.dtype)
    return first, b.reduce("mean", x, dims, keepdim)


@lowers("logsumexp", "special_logsumexp")
def _logsumexp(b: Emitter, x: Value, dim: Any, keepdim: bool = False) -> Value:
    dims = [dim] if isinstance(dim, int) else dim
    y = b.opmath(b.cast(x, float_type(x.dtype)))
    top = b.reduce("amax", y, dims, True)
    finite = b.binary("ne", b.unary("abs", top), math.inf)
    top = b.where(finite, top, 0.0, y.dtype)
    if not x.shape:
        return b.cast(b.add(b.unary("log", b.unary("exp", b.sub(y, top))), top), float_type(x.dtype))
    total = b.unary("log", b.reduce("sum", b.unary("exp", b.sub(y, top)), dims, True))
    return b.cast(b.reshape(b.add(total, top), b.out[0].shape), float_type(x.dtype))


@lowers("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
def _norm(b: Emitter, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    order = 2 if order is None else order
    if is_integral(x.dtype):
        raise Decline("integer norm")
    y = b.opmath(b.cast(x, dtype or x.dtype))
    magnitude = b.unary("abs", y)
    if order == 2:
        result = b.unary("sqrt", b.reduce("sum", b.mul(y, y), dim, keepdim))
    elif order == 1:
        result = b.reduce("sum", magnitude, dim, keepdim)
    elif order in (math.inf, -math.inf):
        result = b.reduce("amax" if order > 0 else "amin", magnitude, dim, keepdim)
    elif order == 0:
        result = b.reduce("sum", b.cast(b.truth(y), y.dtype), dim, keepdim)
    else:
        total = b.reduce("sum", b.binary("pow", magnitude, float(order)), dim, keepdim)
        result = b.binary("pow", total, 1.0 / order)
    return b.cast(result, b.out[0].dtype)


# --- scans ------------------------------------------------------------------------------------------------------------


@lowers("cumsum", "cumprod")
def _cumsum(b: Emitter, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return b.along(b.target_name, b.cast(x, _sum_type(x, dtype)), dim)


@lowers("softmax.int", "log_softmax.int", "special_softmax", "special_log_softmax")
def _softmax(b: Emitter, x: Value, dim: int, dtype: Any = None) -> Value:
    return b.along(b.target_name.removeprefix("special_"), b.cast(x, dtype or float_type(x.dtype)), dim)


@lowers("_softmax", "_log_softmax", "_safe_softmax")
def _softmax_core(b: Emitter, x: Value, dim: int, half_to_float: Any = False) -> Value:
    if b.target_name == "_safe_softmax":
        raise Decline("rows of -inf give zeros")
    return b.along(b.target_name[1:], b.cast(x, b.out[0].dtype), dim)


@lowers("softmin")
def _softmin(b: Emitter, x: Value, dim: int, dtype: Any = None) -> Value:
    return b.along("softmax", b.unary("neg", b.cast(x, dtype or x.dtype)), dim)


# --- sorting ----------------------------------------------------------------------------------------------------------


def _pair(b: Emitter, op: str, x: Value, dim: int, size: int, **attrs: Any) -> tuple[Value, Value]:
    shape = x.shape
    if not shape:
        x = b.reshape(x, [1])
    dim = wrap_dim(dim, x.rank)
    out = [size if d == dim else s for d, s in enumerate(x.shape)]
    values, indices = b.emit(op, [x], [(x.dtype, out), (torch.int64, out)], dim=dim, **attrs)
    return b.reshape(values, out if shape else ()), b.reshape(indices, out if shape else ())


def _ties(b: Emitter, x: Value, stable: Any) -> None:
    """Integers have ties, and where eager's unstable sort puts them is its own affair."""
    if is_integral(x.dtype) and not stable and (b.used is None or 1 in b.used or b.target_name == "argsort"):
        raise Decline("order of equal elements")


@lowers("topk")
def _topk(
    b: Emitter, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    _ties(b, x, False)
    if not x.shape and k != 1:
        raise Decline("0-d")
    return _pair(b, "topk", x, dim, k, k=k, largest=largest, sorted=sorted)


@lowers("sort", "sort.stable")
def _sort(b: Emitter, x: Value, dim: int = -1, descending: bool = False, *, stable: Any = None) -> tuple[Value, Value]:
    _ties(b, x, stable)
    return _pair(b, "sort", x, dim, x.shape[wrap_dim(dim, x.rank)] if x.rank else 1, descending=descending)


@lowers("argsort", "argsort.stable")
def _argsort(b: Emitter, x: Value, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Value:
    return _sort(b, x, dim, descending, stable=stable)[1]


@lowers("msort")
def _msort(b: Emitter, x: Value) -> Value:
    return _sort(b, x, 0)[0]
