"""The emitter: each operator that the NPU takes as OpenVINO IR, run by openvino on the CPU, against eager.

In f32 within 1e-4. In f16 (weights, arithmetic and ports) within a tolerance a row, which is that of a few roundings of
the largest numbers that the row makes."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from tests import npu_ir
from tests.npu_ir import Refused, check, emit_table
from tests.opcheck import tensor
from tests.tables import NUMPY, Builder, array

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
    "clamp": (lambda x: (x.clamp(-1e9, 1e30), x.clamp(-1, 2), x.clamp(min=0.5), x.clamp(max=-1), x.clamp(2, -1)), X),
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
    "products of vectors": (lambda x, y: (x @ y, (x @ y).exp(), torch.vdot(x + y, x) + x.sum()), (ROW, ROW.flip(0))),
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
    "pixel shuffle": (lambda x: F.pixel_shuffle(x * 2, 2), tensor(1, 8, 3, 2)),
    "rank 6 and 7": (
        lambda x: (
            (x * 2).view(2, 3, 2, 1, 3, 2).permute(5, 3, 1, 0, 2, 4).contiguous(),
            x.view(2, 3, 2, 1, 3, 2, 1).permute(5, 3, 1, 6, 0, 2, 4).reshape(2, 36) + 1,
        ),
        tensor(6, 12),
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
    check(function, *rounded, f32=False, tolerance=F16_TOLERANCE.get(name, 1e-2), passes="none")


ELSEWHERE = {
    "linear", "matmul", "conv", "attention", "layer_norm", "rms_norm", "group_norm", "rope", "softmax", "log_softmax",
    "gelu", "elementwise", "arange", "input", "constant", "reshape", "permute", "expand", "slice",
}  # fmt: skip


def test_each_operator_has_a_reason_or_a_row() -> None:
    """What the emitter takes is written by some row above, or is listed as tested elsewhere."""
    taken = {op for op, reason in npu_ir.reasons().items() if not reason}
    assert taken >= ELSEWHERE
    seen = set(ELSEWHERE)
    for function, args in ROWS.values():
        model = npu_ir.emit(function, _args(args), passes="none").model
        seen |= {line[3] for line in model.ports if line[0] == "op"}
    assert taken - seen == set()


# --- graphs made by hand ---------------------------------------------------------------------------------------------


def check_graph(b: Builder, *inputs: np.ndarray, **how: Any) -> npu_ir.Model:
    """The IR gives what the host kernels give."""
    expected = b.compile()(*inputs)
    model = emit_table(b.table(), **how)
    for want, have in zip(expected, model.run(inputs), strict=True):
        assert want.shape == have.shape
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    return model


def test_ranks_and_sizes_of_one() -> None:
    for shape in ((), (1,), (1, 1), (1, 1, 1, 1, 1), (2, 1, 3, 1, 2)):
        b, x = Builder(), array(*shape)
        v = b.input("f32", shape)
        total = b.node("sum", [v], ("f32", ()), dims=list(range(len(shape))))
        b.output(b.node("exp", [v], ("f32", shape)), b.node("add", [v, total], ("f32", shape)), total)
        check_graph(b, x)
        check_graph(b, x, passes="none")


def test_ends_that_are_inputs_views_and_the_same() -> None:
    b, x = Builder(), array(4, 6)
    v = b.input("f32", (4, 6))
    t = b.node("permute", [v], ("f32", (6, 4)), dims=[1, 0])
    y = b.node("neg", [v], ("f32", (4, 6)))
    part = b.node("slice", [y], ("f32", (2, 6)), dim=0, start=1, end=4, step=2)
    b.output(v, t, y, y, part, v)
    check_graph(b, x)
    b = Builder()
    b.output(b.input("f32", (4, 6)))
    check_graph(b, x)
    b = Builder()
    v = b.input("f32", ())
    w = b.node("neg", [v], ("f32", ()))
    one = b.node("exp", [b.input("f32", (1, 1))], ("f32", (1, 1)))
    b.output(v, w, w, b.node("reshape", [one], ("f32", ()), shape=[]))
    check_graph(b, np.array(1.5, np.float32), np.ones((1, 1), np.float32))


def test_only_constants() -> None:
    b, w = Builder(), array(3, 4)
    c = b.constant(w)
    t = b.node("permute", [c], ("f32", (4, 3)), dims=[1, 0])
    b.output(b.node("add", [c, b.constant(array(4), literal=True)], ("f32", (3, 4))))
    b.output(t, c, b.node("full", [], ("f32", (2, 2)), value=1.5), b.node("full", [], ("bool", (3,)), value=1))
    b.output(b.node("arange", [], ("f32", (5,)), first=-1.5, delta=0.25))
    for passes in ("none", "default"):
        check_graph(b, passes=passes)
        check_graph(b, passes=passes, arguments=True)


def test_views_of_constants_are_no_operators() -> None:
    b = Builder()
    x, w = b.input("f32", (2, 4)), b.constant(np.ascontiguousarray(array(8, 4).T).T[:, ::-1].copy())
    shapes = {"permute": ((4, 8), {"dims": [1, 0]}), "slice": ((3, 4), {"dim": 0, "start": 1, "end": 7, "step": 2})}
    p = b.node("permute", [w], ("f32", shapes["permute"][0]), **shapes["permute"][1])
    s = b.node("slice", [w], ("f32", shapes["slice"][0]), **shapes["slice"][1])
    r = b.node("reshape", [w], ("f32", (4, 2, 4)), shape=[4, 2, 4])
    b.output(b.node("matmul", [x, p], ("f32", (2, 8))), b.node("linear", [x, s], ("f32", (2, 3))))
    b.output(b.node("add", [r, x], ("f32", (4, 2, 4))))
    for arguments in (False, True):
        xml = check_graph(b, array(2, 4), arguments=arguments).xml.read_text()
        assert not any(f'type="{t}"' in xml for t in ("Transpose", "StridedSlice", "Reshape"))


def test_constants_that_are_expanded_stay_small() -> None:
    b = Builder()
    x, w = b.input("f32", (64, 33)), b.constant(array(1, 33))
    e = b.node("expand", [w], ("f32", (64, 33)), shape=[64, 33])
    r = b.node("reshape", [e], ("f32", (64 * 33,)), shape=[64 * 33])
    b.output(b.node("add", [x, e], ("f32", (64, 33))), b.node("neg", [r], ("f32", (64 * 33,))))
    model = check_graph(b, array(64, 33), passes="none")
    assert (model.folder / "model.bin").stat().st_size < 1000


def test_all_operands_expanded() -> None:
    b = Builder()
    x, y = b.input("f32", (4, 1)), b.input("f32", (4, 1))
    ex, ey = (b.node("expand", [v], ("f32", (3, 4, 5)), shape=[3, 4, 5]) for v in (x, y))
    b.output(b.node("add", [ex, ey], ("f32", (3, 4, 5))), b.node("exp", [ex], ("f32", (3, 4, 5))))
    b.output(b.node("lt", [ex], ("bool", (3, 4, 5)), scalar=0.5, reverse=True))
    check_graph(b, array(4, 1), array(4, 1), passes="none")
    check_graph(b, array(4, 1), array(4, 1))


def test_ports_have_at_most_rank_five() -> None:
    b, shape = Builder(), (2, 1, 3, 2, 1, 2, 2)
    v = b.input("f32", shape)
    b.output(b.node("neg", [b.node("reshape", [v], ("f32", (6, 8)), shape=[6, 8])], ("f32", (6, 8))))
    assert check_graph(b, array(*shape)).ports[1] == ["in", "0", "f32", "6", "2", "1", "2", "2"]


def test_inputs_that_nothing_reads() -> None:
    b = Builder()
    b.input("f32", (3, 3))
    y = b.input("f32", (2,))
    b.input("i64", (2,))
    b.output(b.node("neg", [y], ("f32", (2,))))
    expected = b.compile()(array(3, 3), array(2) * 0 + 1, np.zeros(2, np.int64))
    assert (expected[0] == -1).all()


def test_weights_of_eight_bits() -> None:
    for dtype in ("i8", "u8"):
        b, x = Builder(), array(3, 5)
        w = np.arange(-7 if dtype == "i8" else 250, 13 if dtype == "i8" else 270).astype(NUMPY[dtype]).reshape(4, 5)
        v, c = b.input("f32", (3, 5)), b.constant(w)
        b.output(b.node("linear", [v, b.node("cast", [c], ("f32", (4, 5)))], ("f32", (3, 4))))
        b.output(b.node("cast", [c], ("bool", (4, 5))))
        model = check_graph(b, x, passes="none")
        assert f'element_type="{dtype}"' in model.xml.read_text()


BAD = [
    ("cumsum", ["f32"], (2, 3), "f32", {"dim": 1}, "scan"),
    ("sort", ["f32"], (2, 3), ("f32", "i64"), {"dim": 1}, "sorting"),
    ("argmax", ["f32"], (2, 3), None, {"dim": 1, "keepdim": True}, "index result"),
    ("remainder", ["f32", "f32"], (2, 3), "f32", {}, "quotient"),
    ("div_floor", ["f32", "f32"], (2, 3), "f32", {}, "quotient"),
    ("atan2", ["f32", "f32"], (2, 3), "f32", {}, "does not have"),
    ("neg", ["f64"], (2, 3), "f64", {}, "f64"),
    ("neg", ["i64"], (2, 3), "i64", {}, "integer"),
    ("neg", ["i8"], (2, 3), "i8", {}, "integer"),
    ("cast", ["i64"], (2, 3), "f32", {}, "integer"),
    ("cast", ["f32"], (2, 3), "i8", {}, "integer"),
    ("cast", ["bf16"], (2, 3), "f64", {}, "f64"),
    ("bitwise_and", ["i32", "i32"], (2, 3), "i32", {}, "bit arithmetic"),
    ("neg", ["f32"], (1, 2, 1, 2, 1, 2), "f32", {}, "rank above 5"),
    ("neg", ["f32"], (2, 0), "f32", {}, "empty"),
    ("slice_scatter", ["f32", "f32"], (2, 3), "f32", {"dim": 1, "start": 0, "end": 1, "step": 2}, "scattered"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda c: f"{c[0]}-{c[1][0]}-{len(c[2])}")
def test_refusals_have_reasons(case: Any) -> None:
    op, operands, shape, results, attrs, reason = case
    b = Builder()
    values = [b.input(dtype, shape) for dtype in operands]
    if op == "slice_scatter":
        values[1] = b.node("slice", [values[1]], ("f32", (2, 1)), dim=1, start=0, end=1, step=1)
    types = results if isinstance(results, tuple) else (results,)
    shapes = [("i64", (2, 1)) if t is None else (t, shape) for t in types]
    made = b.node(op, values, *shapes, **attrs)
    b.output(*(made if isinstance(made, list) else [made]))
    with pytest.raises(Refused, match=reason):
        emit_table(b.table())


def test_refusals_inside_of_programs() -> None:
    """Fused or not, the NPU does not take it."""
    with pytest.raises(Refused, match="quotient"):
        npu_ir.emit(lambda x, y: ((x + 1) % y) * 2, (X, Y))
    with pytest.raises(Refused, match="integer"):
        npu_ir.emit(lambda x: (x + 1).long().float() * 2, (X,))


def test_masks_stay_finite() -> None:
    """Numbers beyond f16 leave room for scores that are added; as limits they are its largest ones; infinity stays."""
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min, 1e30, -math.inf, math.inf, 65504, -65519])

    def function(x: torch.Tensor) -> Any:
        return x + mask, x + 0 - 3e38, (x + 6e4).clamp(-1e30, 1e30), (x + 6e4).clamp(max=1e5)

    x = torch.zeros(7)
    first, second, *limits = npu_ir.emit(function, (x,), f32=False).run((x,), "f16")
    assert first.tolist() == [0.0, -57344.0, 57344.0, -math.inf, math.inf, 65504, -65504]
    assert second.tolist() == [-57344.0] * 7
    assert all(kept.tolist() == [6e4] * 7 for kept in limits)


def test_guards_of_divisions_stay_above_zero() -> None:
    """What f16 rounds to zero would make NaN of rows of zeros. Comparisons tell zero from small numbers still."""

    def function(x: torch.Tensor) -> Any:
        total = x.sum(-1, keepdim=True)
        return (
            F.normalize(x, dim=-1), x / total.clamp(min=1e-9), x / (total + 1e-9), x * torch.rsqrt(total + 1e-12),
            F.rms_norm(x, (6,), eps=1e-12), x / (x.std(-1, keepdim=True) + 1e-10),
            x >= 1e-9, x < 1e-9, x > -1e-9, x * 1e-9, torch.maximum(x, torch.full((6,), 1e-9)) - x,
        )  # fmt: skip

    x = torch.cat([torch.zeros(2, 6), X[0].abs() + 0.5])
    check(function, x, f32=False, tolerance=5e-3)
    got = forge_ugc.compile(function, x, device="npu:emulate")(x)
    for want, have in zip(function(x), got, strict=True):
        torch.testing.assert_close(have.double(), want.double(), atol=5e-3, rtol=5e-3)


def test_names_tell_the_line() -> None:
    emitted = npu_ir.emit(lambda x: x.tanh() + x.exp(), (X,))
    xml = emitted.xml.read_text()
    assert " test_npu_emit.py:" in xml and str(Path(__file__).parent) not in xml


def test_a_model_is_the_same_in_every_folder(tmp_path: Path) -> None:
    """So that its compiled graphs are found again."""
    made = []
    for folder in (tmp_path / "one", tmp_path / "two" / "three"):
        folder.mkdir(parents=True)
        (folder / "model.py").write_text("def function(x):\n    return x.tanh() + 1\n")
        function = runpy.run_path(str(folder / "model.py"))["function"]
        made.append(npu_ir.emit(function, (X,)).xml.read_bytes())
    assert made[0] == made[1] and b"model.py:2 in function" in made[0]
