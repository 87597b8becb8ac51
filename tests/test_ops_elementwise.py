"""Elementwise operators against torch: dtypes, broadcasting, special values, promotion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from tests.opcheck import FLOATS, INTS, TOLERANCE, check, tensor

UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "clamp": lambda x: x.clamp(-1, 1.5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "reciprocal": torch.reciprocal,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "atan": torch.atan,
    "add_scalar": lambda x: x + 1.5,
    "rsub": lambda x: 2.5 - x,
    "mul_scalar": lambda x: x * 0.1,
    "div_scalar": lambda x: x / 3,
    "pow_scalar": lambda x: x.abs() ** 1.7,
    "scalar_pow": lambda x: 2.0**x,
    "log": lambda x: x.abs().log(),
    "log2": lambda x: x.abs().log2(),
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "nan_to_num": torch.nan_to_num,
    "logical_not": torch.logical_not,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype) -> None:
    for x in (
        tensor(3, 5, 7, dtype=dtype),
        tensor(dtype=dtype),
        tensor(0, 4, dtype=dtype),
        tensor(33, 65, dtype=dtype).t(),
    ):
        check(UNARY[name], x, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("name", [n for n in UNARY if n not in ("nan_to_num",)])
def test_unary_special_values(name: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-42, 88.8, -88.8, 104.0, -104.0, 1e30, -1e30, 3.4e38, 1e-30, 0.5, 2.5]
    )
    if name == "gelu":  # torch's AVX-512 form gives NaN for infinity and infinity for 3.4e38
        eager, wide = UNARY[name](x), UNARY[name](x.double()).float()
        x = x[(eager.isnan() == wide.isnan()) & (eager.isinf() == wide.isinf())]
    check(UNARY[name], x)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_as_exact_as_eager(approximate: str) -> None:
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=approximate)

    bits = torch.arange(0x30000000, 0x41800000, 1009, dtype=torch.int32)  # 2^-31 to 16
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    wide = x.double()
    if approximate == "none":
        exact = 0.5 * wide * torch.special.erfc(-wide * 0.5**0.5)
    else:
        exact = wide * torch.sigmoid((8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    got = forge_ugc.compile(gelu, (x,))(x)
    error, eager = (got - exact).abs() / x.abs(), (gelu(x) - exact).abs() / x.abs()
    assert error.max() <= max(1.5 * 2**-23, float(eager.max()))
    near = x > -1
    assert (error[near] * x[near].abs() <= 4 * 2**-23 * exact[near].abs()).all()
    tail = (x < -1) & (x > -5)  # eager cancels there
    assert (error[tail] * x[tail].abs() <= 1e-4 * exact[tail].abs()).all()


@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, torch.tanh])
def test_logistic_functions_are_exact_to_their_ends(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    bits = torch.arange(0x30000000, 0x42B10000, 1009, dtype=torch.int32)  # 2^-31 to 88.5
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    exact, got = function(x.double()), forge_ugc.compile(function, (x,))(x)
    assert ((got - exact).abs() <= 2 * 2**-23 * exact.abs() + 2**-149).all()


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_unary_integers(dtype: torch.dtype) -> None:
    x = tensor(4, 9, dtype=dtype)
    check(lambda x: (-x, x.abs(), x.sign(), ~x, x.relu() if x.dtype != torch.bool else x, x.clamp(1, 5), x**2), x)
    check(
        lambda x: (x.float(), x.to(torch.bool), x.to(torch.int16), x.double(), x.exp(), x.sqrt(), x / 3, x.sigmoid()), x
    )


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "alpha": lambda a, b: torch.add(a, b, alpha=2),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS), ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype) -> None:
    def nonzero(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 0, torch.ones_like(x), x)

    for a, b in (((3, 5, 7), (3, 5, 7)), ((3, 1, 7), (5, 1)), ((), (4, 2)), ((0, 3), (1, 3))):
        check(
            BINARY[name],
            tensor(*a, dtype=dtype),
            nonzero(tensor(*b, dtype=dtype, seed=5)),
            tolerance=TOLERANCE.get(dtype, 0.0),
        )


def test_promotion() -> None:
    i, f, h, b, u = (
        tensor(4, dtype=d, low=0) for d in (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
    )
    check(
        lambda i, f, h, b, u: (i + f, h * f, b + i, u + i, b * f, i / i.abs().clamp(min=1), u * 2.5, b + 1, i + True),
        i,
        f,
        h,
        b,
        u,
    )
    check(
        lambda h, s, d: (h * s, s * d, d + h, torch.where(h > 0, h, 0.0), torch.where(h > 0, 1, 0)),
        h,
        torch.tensor(0.3),
        torch.tensor(2),
    )
    check(lambda i, j: (i & j, i | j, i ^ j, i << 1, i >> 1), i, i + 1)
    check(lambda b, c: (b & c, b | c, b ^ c, ~b, b == c, b + c, b * c), b, ~b)


def test_pow_forms() -> None:
    x, y = tensor(4, 4, low=0.1), tensor(4, 4, seed=3)
    check(lambda x, y: (x**y, x**0.5, x**-1, x**-0.5, x**3, y**2, y**4, torch.pow(2, y)), x, y)
    check(lambda i, j: (i**2, i**j, 2**j), tensor(5, dtype=torch.int64), tensor(5, dtype=torch.int64).abs())
