"""The emitter: each operator that the NPU takes as OpenVINO IR, run by openvino on the CPU, against eager.

In f32 within 1e-4. In f16 (weights, arithmetic and ports) within a tolerance a row, which is that of a few roundings of
the largest numbers that the row makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.npu_ir import check
from tests.opcheck import tensor

pytest.importorskip("openvino")

X, Y, ROW = tensor(3, 4, 6), tensor(3, 4, 6, seed=1), tensor(6, seed=2)
POSITIVE = tensor(3, 4, 6, low=0.05, high=3)
UNIT = tensor(3, 4, 6, low=-0.97, high=0.97)
MASK, OTHER = tensor(3, 4, 6, dtype=torch.bool), tensor(3, 4, 6, dtype=torch.bool, seed=5)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-3, -1e-3, math.inf, -math.inf])
WITH_NAN = torch.cat([SPECIAL, torch.tensor([math.nan])])

# name -> (function, arguments). Several results in one model, to build few models.
UNARY: dict[str, tuple[Callable[..., Any], Any]] = {
    "neg abs sign": (lambda x: (-x, x.abs(), x.sign()), X),
    "floor ceil round trunc": (
        lambda x: (x.floor(), x.ceil(), x.round(), x.trunc()),
        torch.cat([X.flatten(), SPECIAL]),
    ),
    "exp exp2 expm1": (lambda x: (x.exp(), x.exp2(), x.expm1()), X),
    "log log2 log10 log1p": (lambda x: (x.log(), x.log2(), x.log10(), x.log1p()), POSITIVE),
    "small": (lambda x: (x.expm1() * 100, x.log1p() * 100), UNIT * 0.02),
    "sqrt rsqrt reciprocal": (lambda x: (x.sqrt(), x.rsqrt(), x.reciprocal()), POSITIVE),
    "sin cos tan": (lambda x: (x.sin(), x.cos(), x.tan()), UNIT),
    "asin acos atan": (lambda x: (x.asin(), x.acos(), x.atan()), UNIT),
    "sinh cosh tanh": (lambda x: (x.sinh(), x.cosh(), x.tanh()), X),
    "erf sigmoid": (lambda x: (x.erf(), x.sigmoid()), X),
    "silu relu softplus": (lambda x: (F.silu(x), x.relu(), F.softplus(x)), X * 8),
    "gelu": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")), X),
    "clamp": (lambda x: (x.clamp(-1, 2), x.clamp(min=0.5), x.clamp(max=-1), x.clamp(2, -1)), X),
    "bitwise_not logical_not": (lambda x, m: (~m, x.logical_not(), m.logical_not()), (X.round(), MASK)),
    "isnan isinf": (lambda x: (x.isnan(), x.isinf(), ~x.isfinite()), WITH_NAN),
    "special exp": (lambda x: (x.exp(), x.expm1(), x.tanh(), x.sigmoid(), x.relu(), x.abs()), SPECIAL),
    "special log": (lambda x: (x.log(), x.sqrt(), x.rsqrt(), x.reciprocal(), x.log1p()), SPECIAL.abs()),
    "cast": (lambda x, m: (m.to(x.dtype) + x, ~x.bool(), (x > 0).to(x.dtype)), (X, MASK)),
    "truth of specials": (lambda x: (~x.bool(), x.logical_not(), x.logical_and(x)), WITH_NAN),
}
BINARY: dict[str, tuple[Callable[..., Any], Any]] = {
    "add sub mul div": (lambda x, y: (x + y, x - y, x * y, x / y), (X, POSITIVE)),
    "broadcast": (lambda x, y: (x + y, x[:, :1] * y, x[0, :, :1] - y), (X, ROW)),
    "numbers": (lambda x: (x + 1, 1 - x, x - 2.5, x * 3, 2 / x, x / 3, 1.5 + x), POSITIVE),
    "pow": (lambda x, y: (x.pow(y), x.pow(2.3), 1.7**y), (POSITIVE, UNIT)),
    "pow of numbers": (lambda x: (x**2, x**3, x.pow(1), x.pow(-1), x.pow(-2), x**4), X.sign() * (X.abs() + 0.3)),
    "pow of roots": (lambda x: (x**0.5, x**-0.5, x**0.25, x**1.5, x**0), POSITIVE),
    "minimum maximum": (lambda x, y: (torch.minimum(x, y), torch.maximum(x, y)), (X, Y)),
    "compare": (lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), (X.round(), Y.round())),
    "compare numbers": (lambda x: (x == 1, x != 1, x < 0.5, 1 <= x, x > 1e9, x >= -1e9, x == 1e9), X.round()),
    "compare specials": (lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), (WITH_NAN, WITH_NAN.flip(0))),
    "logical": (
        lambda x, y: (x.logical_and(y), x.logical_or(y), x.logical_xor(y)),
        (X.round().clamp(-1, 1), Y.round().clamp(-1, 1)),
    ),
    "bools": (lambda a, b: (a & b, a | b, a ^ b, a == b, a != b, a < b, a <= b, a > b, a >= b), (MASK, OTHER)),
    "bool arithmetic": (lambda a, b: (a + b, a * b, torch.maximum(a, b), torch.minimum(a, b)), (MASK, OTHER)),
    "bool numbers": (lambda a: (a & True, a | False, a ^ True, a.logical_and(torch.tensor(True))), MASK),
    "where": (
        lambda m, x, y: (torch.where(m, x, y), torch.where(m, x, 0.0), x.masked_fill(m, -1e4), torch.where(m, y[0], x)),
        (MASK, X, Y),
    ),
    "program": (lambda x, y, m: torch.where(m, (x * 2 + y).tanh(), x.sigmoid() * y - 1).clamp(-0.5, 0.9), (X, Y, MASK)),
}
REDUCE: dict[str, tuple[Callable[..., Any], Any]] = {
    "sum mean": (lambda x: (x.sum(), x.sum(1), x.mean((0, 2), keepdim=True), x.mean(-1)), X),
    "amax amin": (lambda x: (x.amax(), x.amin(1), x.amax((0, 2), keepdim=True), x.amin(-1)), X),
    "prod": (lambda x: (x.prod(), x.prod(1), x.prod(-1, keepdim=True)), UNIT),
    "any all": (lambda x, m: (m.any(), m.all(1), x.any(-1), x.all(0, keepdim=True)), (X.round(), MASK)),
    "bool amax amin": (lambda m: (m.amax(1), m.amin(-1, keepdim=True)), MASK),
    "var std": (lambda x: (x.var(), x.var(1, correction=0), x.std(-1, keepdim=True), x.var((0, 1), correction=2)), X),
    "var of one": (lambda x: (x.var(0), x.var(1, correction=9)), X[:1, :3, 0]),
    "large variance": (lambda x: x.var(-1) / 100, X * 80),
    "logsumexp norm": (lambda x: (x.logsumexp(1), x.norm(dim=-1)), X),
    "rank 0": (
        lambda x: (x.sum(), x.mean(), x.amax(), x.sum(0), x.var(correction=0), x.any(), x.prod()),
        torch.tensor(1.5),
    ),
}
MOVE: dict[str, tuple[Callable[..., Any], Any]] = {
    "cat": (lambda x, y, m: (torch.cat([x, y, x], 1), torch.stack([x, y], -1), torch.cat([m, ~m], -1)), (X, Y, MASK)),
    "pad": (
        lambda x, m: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=-1.5), F.pad(m, (1, 1), value=True)),
        (X, MASK),
    ),
    "flip": (lambda x, m: (x.flip(0), x.flip(1, 2), m.flip(-1)), (X, MASK)),
    "tril triu": (
        lambda x, m: (x.tril(), x.triu(1), x.tril(-2), m.triu(), x.tril(9), x.triu(-9), x.triu(9)),
        (torch.cat([X, torch.full((3, 4, 1), math.inf)], -1), MASK),
    ),
    "full arange": (
        lambda x: (x + torch.full((4, 1), 2.5), x * torch.arange(6, dtype=torch.float32), torch.ones(3, 4, 6) - x),
        X,
    ),
    "slice_scatter": (
        lambda x, y: (x.slice_scatter(y[:, 1:3], 1, 0, 2), x.slice_scatter(y[..., :3], 2, 3, 6), x.slice_scatter(y)),
        (X, Y),
    ),
    "views": (
        lambda x: (
            x.view(12, 6) + 1,
            x.transpose(0, 1).reshape(4, 18) * 2,
            x[:, 1:4:2].neg(),
            x[1].unsqueeze(0).expand(5, 4, 6) + 1,
            x.permute(2, 0, 1).contiguous() - 1,
            x.select(1, 2).abs(),
        ),
        X,
    ),
    "views as results": (
        lambda x: ((x + 1).t(), (x * 2)[1:, ::2], (x - 1).unsqueeze(1).expand(3, 2, 4), (x / 2).reshape(4, 3).t()),
        X[..., 0],
    ),
    "rank 5 by rank 6": (
        lambda x: x.view(2, 3, 2, 2, 3).permute(0, 3, 1, 4, 2).reshape(2, 2, 18) + 1,
        tensor(2, 3, 2, 6),
    ),
    "clone": (lambda x: (x.clone() + 1, x.t().contiguous() * 2), X[0]),
}
ROWS = {**UNARY, **BINARY, **REDUCE, **MOVE}
# Largest numbers: results of exp, powers and products are up to that size.
F16_TOLERANCE = {"small": 3e-2}


def _args(args: Any) -> tuple[Any, ...]:
    return args if isinstance(args, tuple) else (args,)


@pytest.mark.parametrize("name", ROWS)
def test_f32(name: str) -> None:
    function, args = ROWS[name]
    check(function, *_args(args))


@pytest.mark.parametrize("name", ROWS)
def test_f16(name: str) -> None:
    """f16 arguments, so that eager starts from the same numbers; it computes in f32."""
    function, args = ROWS[name]
    rounded = [a.half().float() if a.is_floating_point() else a for a in _args(args)]
    check(function, *rounded, f32=False, tolerance=F16_TOLERANCE.get(name, 1e-2))
