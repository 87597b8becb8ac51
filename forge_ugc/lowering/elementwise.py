"""Elementwise operators: arithmetic, comparisons, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, float_type, is_integral, result_type
from .registry import Rule, lowers

# --- one operand ----------------------------------------------------------------------------------------------------


def _unary(op: str, *names: str, to_float: bool = False, keep_integers: bool = False) -> None:
    def rule(b: Emitter, x: Value) -> Value:
        if to_float:
            x = b.cast(x, float_type(x.dtype))
        elif keep_integers and is_integral(x.dtype):
            return x
        elif x.dtype == torch.bool:
            if op == "sign":
                return x
            raise Decline("bool operand")
        return b.unary(op, x)

    lowers(*names)(rule)


for _op, *_names in (
    ("exp", "exp", "special_exp"),
    ("exp2", "exp2", "special_exp2"),
    ("expm1", "expm1", "special_expm1"),
    ("log", "log"),
    ("log2", "log2"),
    ("log10", "log10"),
    ("log1p", "log1p", "special_log1p"),
    ("sqrt", "sqrt"),
    ("rsqrt", "rsqrt"),
    ("reciprocal", "reciprocal"),
    ("sin", "sin"),
    ("cos", "cos"),
    ("tan", "tan"),
    ("asin", "asin", "arcsin"),
    ("acos", "acos", "arccos"),
    ("atan", "atan", "arctan"),
    ("sinh", "sinh"),
    ("cosh", "cosh"),
    ("tanh", "tanh"),
    ("erf", "erf", "special_erf"),
    ("sigmoid", "sigmoid", "special_expit"),
):
    _unary(_op, *_names, to_float=True)
for _op, *_names in (
    ("silu", "silu"),
    ("neg", "neg", "negative"),
    ("abs", "abs", "absolute"),
    ("sign", "sign", "sgn"),
    ("relu", "relu"),
):
    _unary(_op, *_names)
for _op, *_names in (("floor", "floor"), ("ceil", "ceil"), ("round", "round"), ("trunc", "trunc", "fix")):
    _unary(_op, *_names, keep_integers=True)


@lowers("positive", "real", "conj", "_conj", "resolve_conj", "resolve_neg", "conj_physical", "_conj_physical")
def _identity(b: Emitter, x: Value) -> Value:
    return x


@lowers("square")
def _square(b: Emitter, x: Value) -> Value:
    x = b.cast(x, b.out[0].dtype)  # bool gives int64
    return b.mul(x, x)


@lowers("frac")
def _frac(b: Emitter, x: Value) -> Value:
    return b.sub(x, b.unary("trunc", x))


def _inverse_hyperbolic(*names: str) -> Callable[[Rule], Rule]:
    """Float functions in f32 or f64, whatever the operand."""

    def wrap(function: Rule) -> Rule:
        def rule(b: Emitter, x: Value) -> Value:
            dtype = float_type(x.dtype)
            return b.cast(function(b, b.opmath(b.cast(x, dtype))), dtype)

        lowers(*names)(rule)
        return function

    return wrap


def _large(b: Emitter, x: Value, small: Value) -> Value:
    """log(2 x) where x is too large to be squared."""
    return b.where(b.binary("gt", x, 1e15), b.add(b.unary("log", x), math.log(2.0)), small)


@_inverse_hyperbolic("asinh", "arcsinh")
def _asinh(b: Emitter, x: Value) -> Value:
    size = b.unary("abs", x)
    root = b.unary("sqrt", b.add(b.mul(size, size), 1.0))
    inner = b.add(size, b.div(b.mul(size, size), b.add(root, 1.0)))
    positive = _large(b, size, b.unary("log1p", inner))
    return b.where(b.binary("lt", x, 0), b.unary("neg", positive), b.where(b.binary("eq", x, 0), x, positive))


@_inverse_hyperbolic("acosh", "arccosh")
def _acosh(b: Emitter, x: Value) -> Value:
    above = b.sub(x, 1.0)
    root = b.unary("sqrt", b.mul(above, b.add(above, 2.0)))
    inside = b.where(b.binary("lt", x, 1.0), math.nan, b.unary("log1p", b.add(above, root)))
    return _large(b, x, inside)


@_inverse_hyperbolic("atanh", "arctanh")
def _atanh(b: Emitter, x: Value) -> Value:
    return b.mul(b.unary("log1p", b.div(b.mul(x, 2.0), b.sub(1.0, x))), 0.5)


@lowers("deg2rad")
def _deg2rad(b: Emitter, x: Value) -> Value:
    return b.mul(x, math.pi / 180.0)


@lowers("rad2deg")
def _rad2deg(b: Emitter, x: Value) -> Value:
    return b.mul(x, 180.0 / math.pi)


@lowers("logit", "special_logit")
def _logit(b: Emitter, x: Value, eps: float | None = None) -> Value:
    y = b.opmath(b.cast(x, float_type(x.dtype)))
    if eps is not None:
        y = b.clamp(y, eps, 1.0 - eps)
    return b.cast(b.unary("log", b.div(y, b.sub(1.0, y))), float_type(x.dtype))


@lowers("bitwise_not")
def _bitwise_not(b: Emitter, x: Value) -> Value:
    return b.unary("bitwise_not", x)


@lowers("logical_not")
def _logical_not(b: Emitter, x: Value) -> Value:
    return b.op("logical_not", [x], torch.bool, x.shape)


@lowers("isnan")
def _isnan(b: Emitter, x: Value) -> Value:
    return b.full(x.shape, False, torch.bool) if is_integral(x.dtype) else b.op("isnan", [x], torch.bool, x.shape)


@lowers("isinf")
def _isinf(b: Emitter, x: Value) -> Value:
    return b.full(x.shape, False, torch.bool) if is_integral(x.dtype) else b.op("isinf", [x], torch.bool, x.shape)


@lowers("isfinite")
def _isfinite(b: Emitter, x: Value) -> Value:
    if is_integral(x.dtype):
        return b.full(x.shape, True, torch.bool)
    return b.unary("bitwise_not", b.binary("bitwise_or", _isnan(b, x), _isinf(b, x)))


@lowers("isreal")
def _isreal(b: Emitter, x: Value) -> Value:
    return b.full(x.shape, True, torch.bool)


@lowers("copysign.Tensor", "copysign.Scalar")
def _copysign(b: Emitter, x: Value, y: Any) -> Value:
    dtype = float_type(result_type(x, y))
    size = b.unary("abs", b.cast(x, dtype))
    if not isinstance(y, Value):
        return b.unary("neg", size) if math.copysign(1.0, y) < 0 else size
    return b.where(_signbit(b, y), b.unary("neg", size), size, dtype)


@lowers("isclose")
def _isclose(b: Emitter, x: Value, y: Value, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Value:
    same = b.binary("eq", x, y)
    if is_integral(x.dtype) and rtol == 0 and atol == 0:
        return same
    dtype = float_type(x.dtype)
    x, y = b.cast(x, dtype), b.cast(y, dtype)
    if equal_nan:
        both = b.binary("bitwise_and", _isnan(b, x), _isnan(b, y))
        same = b.binary("bitwise_or", same, both)
    bound = b.add(b.unary("abs", b.mul(y, float(rtol))), float(atol))
    gap = b.unary("abs", b.sub(x, y))
    near = b.binary("bitwise_and", _isfinite(b, gap), b.binary("le", gap, bound))
    return b.binary("bitwise_or", same, near)


@lowers("signbit")
def _signbit(b: Emitter, x: Value) -> Value:
    if not is_integral(x.dtype):
        # 1 / -0.0 is -inf; the sign of a NaN is not kept
        below = b.binary("lt", b.unary("reciprocal", x), 0)
        return b.binary("bitwise_or", b.binary("lt", x, 0), below)
    return b.full(x.shape, False, torch.bool) if x.dtype == torch.bool else b.binary("lt", x, 0)


@lowers("nan_to_num")
def _nan_to_num(
    b: Emitter, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if is_integral(x.dtype):
        return x
    info = torch.finfo(x.dtype)
    y = b.where(b.op("isnan", [x], torch.bool, x.shape), 0.0 if nan is None else nan, x, x.dtype)
    y = b.where(b.binary("eq", y, math.inf), info.max if posinf is None else posinf, y, x.dtype)
    return b.where(b.binary("eq", y, -math.inf), info.min if neginf is None else neginf, y, x.dtype)


# --- two operands ---------------------------------------------------------------------------------------------------


_HALVES = (torch.float16, torch.bfloat16)


def _plus(b: Emitter, op: str, x: Any, y: Any, alpha: Any) -> Value:
    """x + alpha * y or x - alpha * y. Half types: `alpha` is rounded to their type, the result once."""
    dtype = b.out[0].dtype
    if alpha == 1:
        return b.binary(op, x, y, dtype)
    if dtype in _HALVES:
        alpha = torch.tensor(alpha, dtype=dtype).item()
        x, y = (
            b.opmath(b.cast(v, dtype)) if isinstance(v, Value) else torch.tensor(v, dtype=dtype).item() for v in (x, y)
        )
    wide = torch.float32 if dtype in _HALVES else dtype
    scaled = b.binary("mul", y, alpha, wide) if isinstance(y, Value) else y * alpha
    return b.cast(b.binary(op, x, scaled, wide), dtype)


@lowers("add.Tensor", "add.Scalar")
def _add(b: Emitter, x: Value, y: Any, alpha: Any = 1) -> Value:
    return _plus(b, "add", x, y, alpha)


@lowers("sub.Tensor", "sub.Scalar", "subtract.Tensor", "subtract.Scalar")
def _sub(b: Emitter, x: Value, y: Any, alpha: Any = 1) -> Value:
    return _plus(b, "sub", x, y, alpha)


@lowers("rsub.Tensor", "rsub.Scalar")
def _rsub(b: Emitter, x: Value, y: Any, alpha: Any = 1) -> Value:
    return _plus(b, "sub", y, x, alpha)


def _scale(b: Emitter, op: str, x: Any, y: Any, dtype: Any) -> Value:
    """Products and quotients. Eager takes a 0-d second operand unrounded into half types, as it does Python numbers."""
    one = isinstance(x, Value) and isinstance(y, Value) and x.shape and not y.shape
    if one and dtype in _HALVES and x.dtype == dtype != y.dtype:
        return b.cast(b.binary(op, x, y, torch.float32), dtype)
    return b.binary(op, x, y, dtype)


def _binary(op: str, *names: str, to_float: bool = False) -> None:
    def rule(b: Emitter, x: Any, y: Any) -> Value:
        dtype = result_type(x, y)
        combine = _scale if op in ("mul", "div", "div_floor") else Emitter.binary
        return combine(b, op, x, y, float_type(dtype) if to_float else dtype)

    lowers(*names)(rule)


for _op, *_names in (
    ("mul", "mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar"),
    ("minimum", "minimum", "min.other"),
    ("maximum", "maximum", "max.other"),
    ("remainder", "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"),
    ("fmod", "fmod.Tensor", "fmod.Scalar"),
    ("pow", "pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"),
    (
        "bitwise_and",
        "bitwise_and.Tensor",
        "bitwise_and.Scalar",
        "bitwise_and.Scalar_Tensor",
        "__and__.Tensor",
        "__and__.Scalar",
    ),
    (
        "bitwise_or",
        "bitwise_or.Tensor",
        "bitwise_or.Scalar",
        "bitwise_or.Scalar_Tensor",
        "__or__.Tensor",
        "__or__.Scalar",
    ),
    (
        "bitwise_xor",
        "bitwise_xor.Tensor",
        "bitwise_xor.Scalar",
        "bitwise_xor.Scalar_Tensor",
        "__xor__.Tensor",
        "__xor__.Scalar",
    ),
    ("eq", "eq.Tensor", "eq.Scalar"),
    ("ne", "ne.Tensor", "ne.Scalar", "not_equal.Tensor", "not_equal.Scalar"),
    ("lt", "lt.Tensor", "lt.Scalar", "less.Tensor", "less.Scalar"),
    ("le", "le.Tensor", "le.Scalar", "less_equal.Tensor", "less_equal.Scalar"),
    ("gt", "gt.Tensor", "gt.Scalar", "greater.Tensor", "greater.Scalar"),
    ("ge", "ge.Tensor", "ge.Scalar", "greater_equal.Tensor", "greater_equal.Scalar"),
    ("logical_and", "logical_and"),
    ("logical_or", "logical_or"),
    ("logical_xor", "logical_xor"),
):
    _binary(_op, *_names)
_binary(
    "div",
    "div.Tensor",
    "div.Scalar",
    "true_divide.Tensor",
    "true_divide.Scalar",
    "divide.Tensor",
    "divide.Scalar",
    to_float=True,
)
_binary("atan2", "atan2", "arctan2", to_float=True)
_binary("div_floor", "floor_divide", "floor_divide.Scalar")


def _shift(op: str, *names: str) -> None:
    def rule(b: Emitter, x: Any, y: Any) -> Value:
        dtype = result_type(x, y)
        if not is_integral(dtype) or dtype == torch.bool:
            raise Decline("shift of floats or bools")
        return b.binary(op, x, y, dtype)

    lowers(*names)(rule)


_shift(
    "shift_left",
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
)
_shift(
    "shift_right",
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
)


@lowers("div.Tensor_mode", "div.Scalar_mode", "divide.Tensor_mode", "divide.Scalar_mode")
def _div_mode(b: Emitter, x: Value, y: Any, rounding_mode: str | None = None) -> Value:
    dtype = result_type(x, y)
    if rounding_mode is None:
        return _scale(b, "div", x, y, float_type(dtype))
    return _scale(b, "div_floor" if rounding_mode == "floor" else "div_trunc", x, y, dtype)


@lowers("fmax", "fmin")
def _fmax(b: Emitter, x: Value, y: Value) -> Value:
    op = "maximum" if b.target_name == "fmax" else "minimum"
    dtype = result_type(x, y)
    x, y = b.cast(x, dtype), b.cast(y, dtype)
    if is_integral(dtype):
        return b.binary(op, x, y)
    best = b.where(b.op("isnan", [y], torch.bool, y.shape), x, b.binary(op, x, y), dtype)
    return b.where(b.op("isnan", [x], torch.bool, x.shape), y, best, dtype)


@lowers("float_power.Tensor_Tensor", "float_power.Tensor_Scalar", "float_power.Scalar")
def _float_power(b: Emitter, x: Any, y: Any) -> Value:
    return b.binary("pow", x, y, torch.float64)


@lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(b: Emitter, condition: Value, x: Any, y: Any) -> Value:
    return b.where(condition, x, y, b.out[0].dtype)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(b: Emitter, x: Value, mask: Value, value: Any) -> Value:
    return b.where(mask, value, x, x.dtype)


@lowers("clamp", "clip", "clamp.Tensor", "clip.Tensor")
def _clamp(b: Emitter, x: Value, min: Any = None, max: Any = None) -> Value:
    dtype = b.out[0].dtype
    x = b.cast(x, dtype)
    if not isinstance(min, Value) and not isinstance(max, Value):
        return b.clamp(x, min, max)
    if min is not None:
        x = b.binary("maximum", x, min, dtype)
    return x if max is None else b.binary("minimum", x, max, dtype)


@lowers("clamp_min", "clamp_min.Tensor")
def _clamp_min(b: Emitter, x: Value, min: Any) -> Value:
    return _clamp(b, x, min, None)


@lowers("clamp_max", "clamp_max.Tensor")
def _clamp_max(b: Emitter, x: Value, max: Any) -> Value:
    return _clamp(b, x, None, max)


@lowers("lerp.Scalar", "lerp.Tensor")
def _lerp(b: Emitter, x: Value, end: Value, weight: Any) -> Value:
    dtype = x.dtype
    x, end = b.opmath(x), b.opmath(end)
    if isinstance(weight, Value):
        weight = b.opmath(weight)
        near = b.binary("lt", b.unary("abs", weight), 0.5)
        delta = b.sub(end, x)
        low = b.add(x, b.mul(weight, delta))
        high = b.sub(end, b.mul(delta, b.sub(1.0, weight)))
        return b.cast(b.where(near, low, high), dtype)
    delta = b.sub(end, x)
    if abs(weight) < 0.5:
        return b.cast(b.add(x, b.mul(delta, weight)), dtype)
    return b.cast(b.sub(end, b.mul(delta, 1.0 - weight)), dtype)


@lowers("addcmul", "addcdiv")
def _addcmul(b: Emitter, x: Value, y: Value, z: Value, value: Any = 1) -> Value:
    dtype = b.out[0].dtype
    x, y, z = (b.opmath(b.cast(v, dtype)) for v in (x, y, z))
    product = b.div(y, z) if b.target_name == "addcdiv" else b.mul(y, z)
    return b.cast(b.add(x, product if value == 1 else b.mul(product, value)), dtype)


# --- activations ------------------------------------------------------------------------------------------------------


def _composed(*names: str) -> Callable[[Rule], Rule]:
    """A function of floats that torch computes in opmath: half types go through f32."""

    def wrap(function: Rule) -> Rule:
        def rule(b: Emitter, x: Value, *args: Any, **kwargs: Any) -> Value:
            if is_integral(x.dtype):
                raise Decline("integer operand")
            return b.cast(function(b, b.opmath(x), *args, **kwargs), x.dtype)

        lowers(*names)(rule)
        return function

    return wrap


@lowers("gelu")
def _gelu(b: Emitter, x: Value, approximate: str = "none") -> Value:
    return b.unary("gelu", x, approximate=approximate == "tanh")


@lowers("relu6")
def _relu6(b: Emitter, x: Value) -> Value:
    return b.clamp(x, 0, 6)


@lowers("hardtanh")
def _hardtanh(b: Emitter, x: Value, min_val: Any = -1, max_val: Any = 1) -> Value:
    return b.clamp(x, min_val, max_val)


@_composed("leaky_relu")
def _leaky_relu(b: Emitter, x: Value, negative_slope: float = 0.01) -> Value:
    return b.where(b.binary("gt", x, 0), x, b.mul(x, float(negative_slope)))


@_composed("elu")
def _elu(b: Emitter, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    negative = b.mul(b.unary("expm1", b.mul(x, float(input_scale))), float(alpha) * float(scale))
    return b.where(b.binary("le", x, 0), negative, b.mul(x, float(scale)))


@_composed("celu")
def _celu(b: Emitter, x: Value, alpha: float = 1.0) -> Value:
    return _elu(b, x, alpha, 1.0, 1.0 / alpha)


@_composed("selu")
def _selu(b: Emitter, x: Value) -> Value:
    return _elu(b, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1)


@_composed("hardswish")
def _hardswish(b: Emitter, x: Value) -> Value:
    return b.div(b.mul(x, b.clamp(b.add(x, 3.0), 0, 6)), 6.0)


@_composed("hardsigmoid")
def _hardsigmoid(b: Emitter, x: Value) -> Value:
    return b.div(b.clamp(b.add(x, 3.0), 0, 6), 6.0)


@_composed("softplus")
def _softplus(b: Emitter, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    if beta == 1 and threshold == 20:
        return b.unary("softplus", x)
    scaled = b.mul(x, float(beta))
    soft = b.div(b.unary("log1p", b.unary("exp", scaled)), float(beta))
    return b.where(b.binary("gt", scaled, float(threshold)), x, soft)


@_composed("mish")
def _mish(b: Emitter, x: Value) -> Value:
    return b.mul(x, b.unary("tanh", b.unary("softplus", x)))


@_composed("log_sigmoid")
def _log_sigmoid(b: Emitter, x: Value) -> Value:
    small = b.unary("log1p", b.unary("exp", b.unary("neg", b.unary("abs", x))))
    return b.sub(b.binary("minimum", x, 0.0), small)


@_composed("softsign")
def _softsign(b: Emitter, x: Value) -> Value:
    return b.div(x, b.add(b.unary("abs", x), 1.0))


@_composed("tanhshrink")
def _tanhshrink(b: Emitter, x: Value) -> Value:
    return b.sub(x, b.unary("tanh", x))


@_composed("hardshrink")
def _hardshrink(b: Emitter, x: Value, lambd: float = 0.5) -> Value:
    inside = b.binary("le", b.unary("abs", x), float(lambd))
    return b.where(inside, 0.0, x)


@_composed("softshrink")
def _softshrink(b: Emitter, x: Value, lambd: float = 0.5) -> Value:
    lambd = float(lambd)
    low = b.where(b.binary("lt", x, -lambd), b.add(x, lambd), b.mul(x, 0.0))
    return b.where(b.binary("gt", x, lambd), b.sub(x, lambd), low)


@lowers("threshold")
def _threshold(b: Emitter, x: Value, threshold: Any, value: Any) -> Value:
    return b.where(b.binary("le", x, threshold, x.dtype), value, x, x.dtype)


@lowers("glu")
def _glu(b: Emitter, x: Value, dim: int = -1) -> Value:
    dim %= x.rank
    half = x.shape[dim] // 2
    left, right = b.opmath(b.slice(x, dim, 0, half)), b.opmath(b.slice(x, dim, half, 2 * half))
    return b.cast(b.mul(left, b.unary("sigmoid", right)), x.dtype)


@lowers("prelu")
def _prelu(b: Emitter, x: Value, weight: Value) -> Value:
    if weight.rank and weight.shape != (1,):
        weight = b.reshape(weight, [weight.shape[0] if d == 1 else 1 for d in range(x.rank)])
    elif x.rank == 0:
        weight = b.reshape(weight, ())
    return b.where(b.binary("gt", x, 0), x, b.mul(x, weight))


@lowers("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(b: Emitter, x: Value, p: float, train: bool) -> Value:
    if train and p > 0:
        raise Decline("random")
    return x


@lowers("native_dropout")
def _native_dropout(b: Emitter, x: Value, p: float, train: bool | None) -> Any:
    if train is None or (train and p > 0):
        raise Decline("random")
    return x, b.full(x.shape, True, torch.bool)


@lowers("copy")
def _copy(b: Emitter, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return b.expand(b.cast(source, x.dtype), x.shape)


@lowers("fill.Scalar", "fill.Tensor")
def _fill(b: Emitter, x: Value, value: Any) -> Value:
    if isinstance(value, Value):
        return b.expand(b.cast(value, x.dtype), x.shape)
    return b.full(x.shape, value, x.dtype)
