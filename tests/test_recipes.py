"""Calls that repeat are lowered from what the first of them emitted: the table is the same as without."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc.fastcapture import capture_fast
from forge_ugc.lowering import _Lowering, lower
from forge_ugc.pause import collector_paused
from forge_ugc.specialise import Symbols
from tests.compare import assert_same
from tests.models import families


def by_itself(captured: Any) -> Any:
    lowering = _Lowering(captured, Symbols())
    lowering.call = lowering.call_by_itself  # type: ignore[method-assign]
    return lowering.run(False)


def program(table: Any) -> list[Any]:
    """Its nodes with operands, attributes and types spelled out: pools may be shared."""
    a, value, nodes = table.arrays, 0, []
    for row in a["nodes"].tolist():
        named = dict(zip(a["nodes"].dtype.names, row, strict=True))
        types = a["values"][value : value + named["n_results"]]
        value += named["n_results"]
        nodes.append(
            (
                named["op"],
                a["operands"][named["first_operand"] :][: named["n_operands"]].tolist(),
                a["attrs"][named["first_attr"] :][: named["n_attr_words"]].tolist(),
                [(t["dtype"], a["dims"][t["first_dim"] :][: t["rank"]].tolist()) for t in types],
                a["sources"][named["source"]] if named["source"] >= 0 else "",
            )
        )
    return nodes


@pytest.mark.parametrize("family", ["gpt2", "granite", "qwen2", "llama1b", "lfm2"])
@torch.no_grad()
def test_families_have_the_same_table(family: str) -> None:
    model = families.build(family, 3, "meta")
    captured = capture_fast(model, (families.input_ids(model, seq=16).to("meta"),), {}, None)
    with_recipes, without = lower(captured, Symbols()), by_itself(captured)
    assert program(with_recipes.table) == program(without.table)
    assert np.array_equal(with_recipes.table.arrays["outputs"], without.table.arrays["outputs"])
    lowering = _Lowering(captured, Symbols())
    lowering.run(False)
    assert 0 < len(lowering.recipes) < len(captured.nodes) / 2


@torch.no_grad()
def test_what_tells_calls_apart() -> None:
    """Equal to Python and not to torch: 0.0 and -0.0, 1 and True and 1.0; the same operand twice; unused results."""

    def forward(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> tuple[Any, ...]:
        a, b = x.split(2, 1)
        _, d = y.split(2, 1)
        return (
            x * 0.0, x * -0.0, y * 0.0, n + 1, n + 1.0, n + True, x - y, x - x, y - x, a, b, d,
            torch.cat([x, y]), torch.cat([x, x]), torch.cat([y, x]), x.max(1), y.max(1)[0], y.max(1)[1],
            x.reshape(x.shape), y.reshape(x.shape), x.to(torch.float64), y.to(torch.float64), x + n, y + n,
        )  # fmt: skip

    args = torch.randn(3, 4), torch.randn(3, 4), torch.randint(0, 9, (3, 4))
    compiled = forge_ugc.compile(forward, args, device="cpu")
    assert compiled.report["capture"] == "fast"
    got, want = compiled(*args), forward(*args)
    assert_same(want, got)
    assert torch.equal(torch.signbit(got[1]), torch.signbit(want[1]))


def test_collector_goes_on_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused(), collector_paused():
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

    started, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collector_paused():
            started.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    started.wait(10)
    with collector_paused():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_number_known_at_run_time_only(dtype: torch.dtype) -> None:
    """The hash of such a number would guard on its value, which only a call knows."""

    class Item(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
            return x[0].item(), x[1].item()

    args = (torch.tensor([1, 0], dtype=dtype),)
    compiled = forge_ugc.compile(torch.export.export(Item(), args, strict=False), args)
    for values in ([1, 0], [0, 1]):
        x = torch.tensor(values, dtype=dtype)
        assert compiled(x) == (x[0].item(), x[1].item())
