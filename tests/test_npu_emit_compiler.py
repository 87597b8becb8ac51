"""Intel's NPU compiler takes each operator that the emitter writes. Skipped where it is not installed
(`python -m benchmarks.npu_compiler install`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import npu_compiler
from tests import npu_ir
from tests.tables import Builder, array
from tests.test_npu_emit import BINARY, MOVE, REDUCE, UNARY

GROUPS = {"unary": UNARY, "binary": BINARY, "reduce": REDUCE, "move": MOVE}
pytestmark = pytest.mark.skipif(not npu_compiler.available(), reason="Intel's NPU compiler is not installed")
TARGETS = [t if t == "NPU4000" else pytest.param(t, marks=pytest.mark.slow) for t in npu_compiler.TARGETS]


class Rows(torch.nn.Module):
    """All rows of a group as one model; row k's arguments are `args[k]`."""

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self.functions = [function for function, _ in rows.values()]

    def forward(self, *args: tuple[torch.Tensor, ...]) -> Any:
        return tuple(f(*a) for f, a in zip(self.functions, args, strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("group", GROUPS)
def test_intels_compiler_takes_it(group: str, target: str) -> None:
    rows = GROUPS[group]
    # a copy each: equal arguments of two rows would otherwise be one tensor, and its operators shared
    args = tuple(tuple(t.clone() for t in (a if isinstance(a, tuple) else (a,))) for _, a in rows.values())
    emitted = npu_ir.emit(Rows(rows).eval(), args, f32=False)
    result = npu_compiler.compile_ir(emitted.xml, target)
    assert result.ok, result.error


@pytest.mark.parametrize("target", TARGETS)
def test_ends_of_every_kind(target: str) -> None:
    """Inputs that are outputs, views of them, values that are two outputs, constants that are outputs, rank 0."""
    b, shape = Builder(), (4, 6)
    x, s = b.input("f32", shape), b.input("f32", ())
    y, m = b.node("neg", [x], ("f32", shape)), b.node("gt", [x], ("bool", shape), scalar=0.0)
    b.output(x, y, y, m, m, s, s, b.node("neg", [s], ("f32", ())), b.constant(array(3)))
    b.output(b.node("permute", [x], ("f32", (6, 4)), dims=[1, 0]), b.node("sum", [x], ("f32", ()), dims=[0, 1]))
    b.output(b.node("reshape", [b.node("slice", [x], ("f32", (1, 6)), dim=0, end=1, step=1)], ("f32", (6,)), shape=[6]))
    result = npu_compiler.compile_ir(npu_ir.emit_table(b.table(), f32=False).xml, target)
    assert result.ok, result.error
