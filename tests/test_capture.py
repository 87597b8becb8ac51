"""The flat capture that lowering reads: placeholders, state, regions, mutations, sources."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import _core
from forge_ugc.capture import Captured, Kind, Ref, TensorMeta, capture_export
from forge_ugc.errors import source_of
from forge_ugc.lowering import lower
from forge_ugc.lowering.registry import RULES
from forge_ugc.specialise import Symbols
from tests.compare import assert_same


def calls(captured: Captured) -> list[str]:
    return [str(n.target) for n in captured.nodes if n.kind is Kind.CALL]


def test_composites_stay_whole_and_the_count_is_exports() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    captured = capture_export(model, (x,), {})
    program = torch.export.export(model, (x,), strict=False)
    assert captured.nodes_captured == sum(n.op == "call_function" for n in program.graph.nodes)
    assert "aten.linear.default" in calls(captured) and "aten.layer_norm.default" in calls(captured)


def test_state_is_found_in_the_callers_module() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.tied = self.inner
            self.register_buffer("b", torch.ones(3), persistent=False)
            self.plain = torch.full((3,), 2.0)

        def forward(self, items: list[torch.Tensor]) -> torch.Tensor:
            return self.tied(self.inner(items[0])) + self.b * self.plain + torch.tensor([1.0, 2.0, 3.0])

    model = M()
    captured = capture_export(model.eval(), ([torch.ones(3)],), {})
    slots = {s.name: s for s in captured.slots.values()}
    assert {"inner.weight", "inner.bias", "b", "plain"} <= set(slots)
    assert slots["inner.weight"].tensor() is model.inner.weight
    assert slots["b"].where is model._buffers and slots["plain"].tensor() is model.plain
    assert any(s.constant for s in captured.slots.values())  # torch.tensor(...) in forward


def test_mutations_are_writes_not_outputs() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            x.mul_(2)
            return x + self.n

    captured = capture_export(M().eval(), (torch.ones(2),), {})
    assert len(captured.outputs) == 1 and len(captured.writes) == 2
    written = [captured.nodes[w.writes] for w in captured.writes if w.writes is not None]
    assert [n.kind for n in written] == [Kind.STATE, Kind.INPUT]
    assert not any(t._schema.is_mutable for n in captured.nodes if (t := n.target) and hasattr(t, "_schema"))


def test_regions_are_inlined() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        with torch.enable_grad():
            y = y + 1
        return y

    captured = capture_export(function, (torch.ones(2, 2),), {})
    assert "wrap" not in " ".join(calls(captured))
    product = next(n for n in captured.nodes if str(n.target) == "aten.matmul.default")
    assert product.autocast == ("cpu", torch.bfloat16)


def test_sources_and_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    captured = capture_export(function, (torch.ones(2),), {})
    if hasattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS"):
        assert all(
            "test_capture.py" in n.source and n.source.endswith("in function") for n in captured.nodes if n.source
        )
        assert any(n.source for n in captured.nodes)
    assert "aten.exp.default" in captured.text() and "return %" in captured.text()
    assert (
        source_of(None) == "" and source_of('File "/a/b.py", line 3, in forward\n    x = 1') == "/a/b.py:3 in forward"
    )


def test_dynamic_metas_are_symbolic_and_lower_for_each_size() -> None:
    dim = torch.export.Dim("n", min=2, max=32)
    captured = capture_export(lambda x: x.reshape(-1) * x.shape[0], (torch.ones(4, 3),), {}, {"x": {0: dim}})
    meta = captured.nodes[0].meta
    assert isinstance(meta, TensorMeta) and isinstance(meta.shape[0], torch.SymInt)
    symbol = meta.shape[0].node.expr
    for n in (2, 7):
        lowered = lower(captured, Symbols({symbol: n}))
        assert lowered.plan.values[0].shape == (3 * n,)


def test_table_is_what_core_describes() -> None:
    captured = capture_export(nn.Linear(3, 2).eval(), (torch.ones(4, 3),), {})
    lowered = lower(captured, Symbols())
    arrays = lowered.table.arrays
    ops = {info["id"]: info["name"] for info in _core.ops()}
    assert [ops[row["op"]] for row in arrays["nodes"]].count("linear") == 1
    assert {n: a.dtype.names for n, a in arrays.items() if n in _core.TABLE_DTYPES} == {
        n: tuple(f[0] for f in fields) for n, fields in _core.TABLE_DTYPES.items()
    }
    assert arrays["constants"]["data"][0] == captured.slots[0].tensor().data_ptr()


def test_every_rule_is_an_overload_of_aten() -> None:
    assert len(RULES) > 350
    assert all(isinstance(t, torch._ops.OpOverload) and t.namespace == "aten" for t in RULES)
    assert not any(t._schema.is_mutable and not t._schema.name.endswith(("detach_", "requires_grad_")) for t in RULES)


def test_exported_programs_are_accepted_and_checked() -> None:
    model, x = nn.Linear(3, 2).eval(), torch.ones(4, 3)
    program = torch.export.export(model, (x,), strict=False)
    captured = capture_export(program, (x,), {})
    assert [o.value for o in captured.outputs] == [Ref(len(captured.nodes) - 1)]
    with pytest.raises(TypeError, match="structure"):
        capture_export(program, (x, x), {})
    with pytest.raises(TypeError, match="keyword"):
        capture_export(program, (x,), {"other": x})


def test_what_export_refuses_is_a_compile_error() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.numpy()

    with pytest.raises(forge_ugc.CompileError):
        forge_ugc.compile(function, torch.ones(2))


def test_vmap_leaves_no_levels_behind() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sum() * row)(x)

    x = torch.randn(3, 2)
    forge = forge_ugc.compile(function, x)
    assert not forge.report["fallbacks"]
    torch.testing.assert_close(forge(x), function(x))


def test_assignment_to_data_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(3)
        y.data = x * 2
        return y + 1

    with pytest.raises(forge_ugc.CompileError, match=r"tensor\.data"):
        forge_ugc.compile(function, torch.randn(3))


# --- Python numbers that are known at run time ------------------------------------------------------------------------


def numbers(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x * int(n), x + float(n), torch.zeros(int(n)) + x.sum(), torch.tensor([x[0, 0], x[1, 1], 3])


def lengths(x: torch.Tensor, n: torch.Tensor) -> Any:
    found = (x > n).nonzero()
    return found, len(found), torch.arange(int(n))[None] < n


def loop(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 2)
    for i in range(2):
        out[: int(n), i] = x[: int(n), i] * 2
    return out


class Numbers(nn.Module):
    """Tied weights, buffers and an argument that are written, a plain tensor, arguments and results of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.offset = torch.arange(3.0)

    def forward(self, x: torch.Tensor, n: torch.Tensor, unused: Any = None, k: int = 2, *, pair: Any) -> Any:
        self.total.add_(x[0])
        self.calls.add_(1)
        y = self.second(self.first(x))[: int(n)] * k + self.offset + self.total * self.calls + pair[0] - pair[1]
        x[:, 0] = 1
        return {"y": y, "total": self.total, "none": unused, "k": k}


@pytest.mark.parametrize("function", [numbers, lengths, loop])
def test_numbers_known_at_run_time(function: Any) -> None:
    forge = forge_ugc.compile(function, (torch.randn(4, 3), torch.tensor(2)))
    for n in (1, 3, 2):
        x = torch.randn(4, 3)
        assert_same(function(x, torch.tensor(n)), forge(x, torch.tensor(n)))


def test_numbers_known_at_run_time_in_a_module() -> None:
    eager = Numbers().eval()
    model = copy.deepcopy(eager)
    pair = (torch.randn(1, 3), torch.randn(1, 3))
    forge = forge_ugc.compile(model, (torch.randn(4, 3), torch.tensor(2)), {"pair": pair, "k": 3})
    for n in (2, 3):
        x = torch.randn(4, 3)
        y = x.clone()
        with torch.no_grad():
            assert_same(eager(x, torch.tensor(n), k=3, pair=pair), forge(y, torch.tensor(n), k=3, pair=pair))
        assert_same(x, y)
        assert_same([eager.total, eager.calls], [model.total, model.calls])
    with torch.no_grad():
        for weights in (eager.first.weight, model.first.weight):
            weights.mul_(2)
        assert_same(eager(x, torch.tensor(1), k=3, pair=pair), forge(y, torch.tensor(1), k=3, pair=pair))


class Kept(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x[: int(n)]


WITHOUT_GRAPH = [
    Kept(),
    lambda x, n: x * 2 if int(n) > 1 else x,
    lambda x, n: x[: int(n)].numpy(),
    lambda x, n: x * 2 if 2 in [n.item(), 1] else x,
    lambda x, n: (x * int(n), x * 2 if 2 in n[None].tolist() else x),
]


@pytest.mark.parametrize("model", WITHOUT_GRAPH)
def test_numbers_known_at_run_time_and_what_no_graph_can_do(model: Any) -> None:
    with pytest.raises(forge_ugc.CompileError, match=r"test_capture\.py:\d+"):
        forge_ugc.compile(model, (torch.randn(3), torch.tensor(2)))
