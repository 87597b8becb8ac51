"""Random graphs through the emitter and openvino: always what the host kernels give."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.npu_ir import Refused, emit, emit_table
from tests.npu_ir import check as check_function
from tests.tables import Builder
from tests.test_random_graphs import COLUMNS, ROWS, Random
from tests.test_random_graphs import STEPS as MODULE_STEPS

pytest.importorskip("openvino")

UNARY = ["neg", "abs", "tanh", "sigmoid", "sin", "cos", "erf", "relu", "silu", "softplus", "atan", "floor", "expm1"]
BINARY = ["add", "sub", "mul", "minimum", "maximum"]
TESTS = ["lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ne", "lt", "logical_or", "add", "mul"]
REDUCE = ["sum", "mean", "amax", "amin", "var"]
MOST = 400  # elements


class Graph:
    """Draws a graph; `values`: (value, dtype, shape)."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.b = draw, Builder()
        self.rng = np.random.default_rng(draw(st.integers(0, 999)))
        self.inputs: list[np.ndarray] = []
        self.values: list[tuple[int, str, tuple[int, ...]]] = []
        for _ in range(2):
            a = self.array()
            self.inputs.append(a)
            self.add(self.b.input("f32", a.shape), "f32", a.shape)
        a = self.array()
        order = draw(st.permutations(range(a.ndim)))
        self.add(self.b.constant(a.transpose(order)), "f32", a.transpose(order).shape)

    def array(self) -> np.ndarray:
        shape = self.draw(st.lists(st.integers(1, 3), max_size=4))
        return np.asarray(self.rng.standard_normal(shape) * 2, np.float32)

    def add(self, value: int, dtype: str, shape: Any) -> None:
        self.values.append((value, dtype, tuple(shape)))

    def pick(self, dtype: str | None = None) -> tuple[int, str, tuple[int, ...]]:
        return self.draw(st.sampled_from([v for v in self.values if dtype in (None, v[1])]))

    def node(self, op: str, operands: Any, dtype: str, size: Any, **attrs: Any) -> None:
        self.add(self.b.node(op, operands, (dtype, tuple(size)), **attrs), dtype, size)

    def number(self) -> Any:
        return self.draw(st.sampled_from([-1, 0, 2, 0.37, -1.7]))

    # --- steps ----------------------------------------------------------------------------------------------------

    def unary(self) -> None:
        v, _, shape = self.pick("f32")
        self.node(self.draw(st.sampled_from(UNARY)), [v], "f32", shape)

    def binary(self) -> None:
        v, dtype, shape = self.pick()
        if dtype == "bool":
            ops, result = BITS, "bool"
        else:
            ops, result = self.draw(st.sampled_from([(BINARY, "f32"), (BINARY, "f32"), (TESTS, "bool")]))
        op = self.draw(st.sampled_from(ops))
        if self.draw(st.booleans()) and dtype == "f32":
            self.node(op, [v], result, shape, scalar=self.number(), reverse=self.draw(st.booleans()))
            return
        other, both = v, shape
        for candidate, kind, size in self.draw(st.permutations(self.values)):
            try:
                both = np.broadcast_shapes(shape, size)
            except ValueError:
                continue
            if kind == dtype and math.prod(both) <= MOST:
                other = candidate
                break
        else:
            both = shape
        self.node(op, [v, other], result, both)

    def where(self) -> None:
        v, dtype, shape = self.pick()
        if dtype == "f32":
            test = self.b.node("gt", [v], ("bool", shape), scalar=0.1)
            half = self.b.node("mul", [v], ("f32", shape), scalar=0.5)
            self.node("where", [test, half, v], "f32", shape)
        else:
            self.node("cast", [v], "f32", shape)

    def reduce(self) -> None:
        v, dtype, shape = self.pick()
        dims = sorted(self.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))) if shape else []
        keep = self.draw(st.booleans())
        kept = [1 if d in dims else n for d, n in enumerate(shape) if keep or d not in dims]
        if dtype == "bool" or self.draw(st.integers(0, 4)) == 0:
            self.node(self.draw(st.sampled_from(["any", "all"])), [v], "bool", kept, dims=dims, keepdim=keep)
        else:
            op = self.draw(st.sampled_from(REDUCE))
            more = {"correction": 0.0} if op == "var" else {}
            self.node(op, [v], "f32", kept, dims=dims, keepdim=keep, **more)

    def view(self) -> None:
        v, dtype, shape = self.pick()
        kind = self.draw(st.sampled_from(["permute", "flatten", "unsqueeze", "expand", "slice", "contiguous"]))
        rank = len(shape)
        if kind == "permute" and rank:
            dims = self.draw(st.permutations(range(rank)))
            self.node("permute", [v], dtype, [shape[d] for d in dims], dims=dims)
        elif kind == "slice" and rank:
            d = self.draw(st.integers(0, rank - 1))
            start, step = self.draw(st.integers(0, shape[d] - 1)), self.draw(st.integers(1, 2))
            size = [*shape[:d], (shape[d] - start + step - 1) // step, *shape[d + 1 :]]
            self.node("slice", [v], dtype, size, dim=d, start=start, end=shape[d], step=step)
        elif kind == "expand" and rank < 5 and math.prod(shape) * 8 <= MOST:
            size = [2, *(2 if n == 1 else n for n in shape)]
            self.node("expand", [v], dtype, size, shape=size)
        elif kind == "unsqueeze" and rank < 5:
            d = self.draw(st.integers(0, rank))
            size = [*shape[:d], 1, *shape[d:]]
            self.node("reshape", [v], dtype, size, shape=size)
        elif kind == "flatten" and rank > 1:
            d = self.draw(st.integers(0, rank - 2))
            size = [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]]
            self.node("reshape", [v], dtype, size, shape=size)
        else:
            self.node("contiguous", [v], dtype, shape)

    def move(self) -> None:
        v, dtype, shape = self.pick()
        kind, rank = self.draw(st.sampled_from(["cat", "pad", "flip", "tril", "triu"])), len(shape)
        if not rank or math.prod(shape) * 3 > MOST:
            return
        d = self.draw(st.integers(0, rank - 1))
        if kind == "cat":
            count = self.draw(st.integers(1, 3))
            self.node("cat", [v] * count, dtype, [*shape[:d], shape[d] * count, *shape[d + 1 :]], dim=d)
        elif kind == "pad":
            padding = [0] * (2 * rank)
            padding[2 * d], padding[2 * d + 1] = self.draw(st.integers(0, 1)), self.draw(st.integers(0, 1))
            size = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(shape)]
            self.node("pad", [v], dtype, size, padding=padding, value=1 if dtype == "bool" else self.number())
        elif kind == "flip":
            self.node("flip", [v], dtype, shape, dims=[d])
        elif rank >= 2:
            self.node(kind, [v], dtype, shape, diagonal=self.draw(st.integers(-2, 2)))


STEPS = [Graph.unary, Graph.binary, Graph.binary, Graph.where, Graph.reduce, Graph.view, Graph.view, Graph.move]


@st.composite
def graphs(draw: Any) -> tuple[Graph, dict[str, Any]]:
    g = Graph(draw)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=12)):
        step(g)
    made = g.values[3:] or g.values
    g.b.output(made[-1][0], *(v for v, _, _ in draw(st.lists(st.sampled_from(g.values), max_size=3))))
    passes = draw(st.sampled_from(["none", "default", "fold,operator_fusion,layout"]))
    return g, {"passes": passes, "arguments": draw(st.booleans())}


def check(g: Graph, how: dict[str, Any]) -> None:
    expected = g.b.compile()(*g.inputs)
    model = emit_table(g.b.table(), **how)
    for want, have in zip(expected, model.run(g.inputs), strict=True):
        assert want.shape == have.shape and want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=80, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(graphs())
def test_random_graphs(example: tuple[Graph, dict[str, Any]]) -> None:
    check(*example)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=QUIET)
@given(graphs())
def test_random_graphs_long(example: tuple[Graph, dict[str, Any]]) -> None:
    check(*example)


# --- networks: linear, norms, attention and what is around them ------------------------------------------------------


@functools.cache
def kinds() -> list[int]:
    """The steps of tests/test_random_graphs.py that the NPU takes."""
    x, found = torch.ones(ROWS, COLUMNS), []
    for kind in range(len(MODULE_STEPS)):
        try:
            for passes in ("none", "default"):
                emit(Random([(kind, 0, 1, 0)], 1).eval(), (x, x), passes=passes)
        except Refused:
            continue
        found.append(kind)
    return found


def check_network(example: tuple[list[tuple[int, int, int, int]], int, int, bool, str]) -> None:
    steps, outputs, seed, arguments, passes = example
    model = Random([(kinds()[k % len(kinds())], *rest) for k, *rest in steps], outputs).eval()
    generator = torch.Generator().manual_seed(seed)
    args = tuple(torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
    with torch.no_grad():
        check_function(model, *args, arguments=arguments, passes=passes)


step = st.tuples(*[st.integers(0, 99)] * 4)
NETWORKS = st.tuples(
    st.lists(step, min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 999), st.booleans(),
    st.sampled_from(["default", "none", "operator_fusion", "attention_fusion,dce,layout"]),
)  # fmt: skip


def test_the_npu_takes_most_steps() -> None:
    assert len(kinds()) >= len(MODULE_STEPS) - 5


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(NETWORKS)
def test_random_networks(example: Any) -> None:
    check_network(example)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=QUIET)
@given(NETWORKS)
def test_random_networks_long(example: Any) -> None:
    check_network(example)
