"""Each operator that the emitter writes through the public API, on the software NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from forge_ugc.testing import software_npu
from tests import ze_client
from tests.compare import assert_same
from tests.test_npu_emit import BINARY, MOVE, REDUCE, UNARY

GROUPS = {"unary": UNARY, "binary": BINARY, "reduce": REDUCE, "move": MOVE}


@pytest.fixture(autouse=True)
def device() -> Iterator[Any]:
    ze_client.require_software_npu()
    with software_npu() as found:
        yield found


class Rows(torch.nn.Module):
    """All rows of a group, on values that depend on a contraction: placement puts what follows on the NPU."""

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self.functions = [function for function, _ in rows.values()]
        self.weight = torch.nn.Parameter(torch.eye(8))

    def forward(self, anchor: torch.Tensor, *args: tuple[torch.Tensor, ...]) -> Any:
        score = F.linear(anchor, self.weight).sum()
        true = score > -100

        def on_npu(x: torch.Tensor) -> torch.Tensor:
            return x & true if x.dtype == torch.bool else torch.where(true, x, score)

        return tuple(f(*map(on_npu, a)) for f, a in zip(self.functions, args, strict=True))


@pytest.mark.parametrize("types", ["f32", "f16"])
@pytest.mark.parametrize("group", GROUPS)
def test_operators(group: str, types: str) -> None:
    rows = GROUPS[group]
    args = [tuple(t.clone() for t in (a if isinstance(a, tuple) else (a,))) for _, a in rows.values()]
    if types == "f16":
        args = [tuple(t.half().float() if t.is_floating_point() else t for t in a) for a in args]
    model, inputs = Rows(rows).eval(), (torch.ones(8, 8), *args)
    with torch.no_grad():
        forge = forge_ugc.compile(model, inputs, device="npu", npu_options={"types": types, "border": types})
        got, want = forge(*inputs), model(*inputs)
    tolerance = 1e-4 if types == "f32" else 3e-2
    assert_same(want, got, atol=tolerance, rtol=tolerance)
    assert forge.report["transitions"]["after"] == 2
