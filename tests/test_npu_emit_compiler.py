"""Intel's NPU compiler takes each operator that the emitter writes. Skipped where it is not installed
(`python -m benchmarks.npu_compiler install`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import npu_compiler
from tests import npu_ir
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
