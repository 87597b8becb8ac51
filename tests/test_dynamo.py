"""torch.compile(backend="forge"): entry point, options, graphs, shapes, weights. Each test asserts that Forge ran: a
count rose, and nothing fell back unseen."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_ugc
from forge_ugc import FallbackWarning, dynamo, last_reports
from forge_ugc.dynamo import forge
from tests.compare import assert_same
from tests.dynamo_check import (
    MARKS,
    MLP,
    calls,
    check,
    fresh,  # noqa: F401 (fixtures)
    pair,
)

pytestmark = MARKS


# --- the entry point --------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
model = torch.nn.Linear(4, 3).eval()
{before}
compiled = torch.compile(model, backend="forge")
x = torch.randn(2, 4)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
import forge_ugc
(graph,) = forge_ugc.last_reports()
assert graph.calls == 1 and graph.report is not None, graph
assert "forge" in torch._dynamo.list_backends()
"""


@pytest.fixture
def installed(tmp_path):
    """An environment in which the package's entry points are found, whether or not pip has installed it."""
    root = Path(forge_ugc.__file__).parent.parent
    path = [str(root)]
    if "forge" not in entry_points(group="torch_dynamo_backends").names:
        text = (root / "pyproject.toml").read_text()
        groups = re.findall(r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:.+\n)+)', text, re.MULTILINE)
        info = tmp_path / "forge_ugc-0.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-ugc\nVersion: 0.0.0\n")
        lines = [f"[{group}]\n{entries}" for group, entries in groups]
        (info / "entry_points.txt").write_text("".join(lines).replace('"', ""))
        path.append(str(tmp_path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "before", ["", "import forge_ugc", "forge = __import__('forge_ugc').compile(model, torch.zeros(2, 4))"]
)
def test_entry_point_in_a_fresh_process(installed, before, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM.format(before=before)],
        env=installed, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_import_is_light(installed, tmp_path):
    program = "import sys, forge_ugc, forge_ugc.dynamo; assert 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], env=installed, cwd=tmp_path).returncode == 0


# --- options ----------------------------------------------------------------------------------------------------------


def raised(error: BaseException) -> str:
    """All texts of a chain of exceptions: dynamo wraps what a backend raises."""
    texts, seen = [], error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)


def test_options_are_those_of_compile():
    compiled, eager = pair(MLP(), options={"passes": "dce,cse", "alpha": 0.5, "num_threads": 1, "strict": True})
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
    report = last_reports()[0].report.to_dict()
    assert [p["name"] for p in report["passes"]] == ["dce", "cse"] and report["alpha"] == 0.5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pases": "dce"}, "no option 'pases'"),
        ({"dynamic_shapes": None}, "use torch.compile(dynamic=...)"),
        ({"passes": "dce,nonsense"}, "unknown pass 'nonsense'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "npu:plan"}, "only the plan exists"),
        ({"alpha": 2.0}, "alpha must be"),
    ],
)
def test_wrong_options_raise(options, text):
    compiled = torch.compile(MLP(), backend=forge, options=options)
    with torch.no_grad(), pytest.raises(Exception) as caught:
        compiled(torch.randn(2, 8))
    assert text in raised(caught.value)
    assert calls() == 0


def test_a_mode_raises():
    compiled = torch.compile(MLP(), backend=forge, mode="max-autotune")
    with torch.no_grad(), pytest.raises(Exception, match=r"autotune.*True"):
        compiled(torch.randn(2, 8))


def test_capture_export():
    compiled, eager = pair(MLP(), options={"capture": "export"})
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
    assert last_reports()[0].report["capture"] == "export"


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_one_graph_with_its_source_line():
    compiled, eager = pair(MLP(), fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            check(compiled, eager, torch.randn(4, 8))
    (graph,) = last_reports()
    assert graph.calls == 3 and len(graph.reports) == 1
    assert "dynamo_check.py" in graph.name and "dynamo_check.py" in repr(graph)
    assert graph.report["capture"] == "fast"
    assert graph.report["weights"]["borrowed_bytes"] == sum(p.numel() * 4 for p in eager.parameters())


def test_graph_breaks():
    class Broken(MLP):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            z = self.a(y)
            if z.sum() > 0:
                return z + 1
            return self.norm(z)

    compiled, eager = pair(Broken())
    with torch.no_grad():
        for seed in range(6):
            torch.manual_seed(seed)
            check(compiled, eager, torch.randn(2, 8))
    assert len(last_reports()) >= 3


def test_fullgraph_raises_at_a_break():
    @torch.compile(backend=forge, fullgraph=True)
    def f(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        f(torch.ones(2))


def test_functions_and_outputs_of_all_kinds():
    def f(x, scale, flag=True, *, extra=None):
        y = x * scale
        return {
            "y": y,
            "pair": (y + 1, [y.sum(), None]),
            "x": x,
            "text": "t",
            "n": 3,
            "flag": flag,
            "view": y.t(),
            "extra": extra,
        }

    compiled = torch.compile(f, backend=forge)
    with torch.no_grad():
        got = check(compiled, f, torch.randn(2, 3), 2)
        check(compiled, f, torch.randn(2, 3), 2, False, extra=torch.ones(1))
    assert got["y"].shape == (2, 3)
    x = torch.randn(2, 3)
    assert compiled(x, 2)["x"] is x


def test_views_alias_as_in_eager():
    def f(x):
        y = x + 1
        return y, y.view(-1), x.view(-1), x.t()

    compiled = torch.compile(f, backend=forge)
    x = torch.zeros(2, 3)
    y, flat, same, turned = check(compiled, f, x), None, None, None
    y, flat, same, turned = compiled(x)
    flat[0] = 7
    assert y[0, 0] == 7
    same[1] = 5
    assert x[0, 1] == 5 and turned[1, 0] == 5


def test_constants_and_tensors_made_inside():
    table = torch.arange(6.0)

    def f(x):
        return x + torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + table[:3] * torch.ones(3), torch.zeros(2)

    check(torch.compile(f, backend=forge), f, torch.randn(2, 3))


def test_global_tensors_are_read_again():
    compiled = torch.compile(lambda x: x * SCALE, backend=forge)
    x = torch.ones(3)
    assert compiled(x).tolist() == [2.0] * 3
    SCALE.fill_(4)
    assert compiled(x).tolist() == [4.0] * 3
    SCALE.fill_(2)
    assert compiled(x).tolist() == [2.0] * 3
    assert calls() == 3


SCALE = torch.full((3,), 2.0)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_shapes(dynamic):
    compiled, eager = pair(MLP(), dynamic=dynamic)
    with torch.no_grad():
        for rows in (2, 3, 5, 2, 7, 3):
            check(compiled, eager, torch.randn(rows, 8))
    graphs = last_reports()
    if dynamic is False:
        assert len(graphs) == 4
    else:  # no more traces of dynamo's than these
        assert len(graphs) == (2 if dynamic is None else 1)
        assert len(graphs[-1].reports) == 4


def test_sizes_in_the_graph():
    def f(x, n):
        rows, columns = x.shape
        y = x.reshape(columns, rows) * rows + n
        return y[: rows - 1], torch.arange(rows) + n, rows * columns, n + 1

    compiled = torch.compile(f, backend=forge, dynamic=True)
    for rows, columns, n in [(3, 4, 5), (5, 2, 6), (3, 4, 6), (6, 6, 7), (3, 4, 5)]:
        check(compiled, f, torch.randn(rows, columns), n)
    assert len(last_reports()) <= 3  # dynamo takes 1 and equal sizes for special


def test_numbers_that_are_only_counted_on():
    class State:
        at, steps = 3, 5

    def f(x, state):
        state.at += x.shape[0]
        state.steps = 2 * state.steps - state.at
        return x * 2, state.at, x.relu()

    compiled, ours, theirs = torch.compile(f, backend=forge), State(), State()
    for _ in range(20):
        x = torch.randn(2, 3)
        assert_same(compiled(x, ours), f(x, theirs))
        assert (ours.at, ours.steps) == (theirs.at, theirs.steps)
    assert calls() == 20 and not any(graph.fallback or graph.eager_calls for graph in last_reports())
    assert sum(len(graph.reports) for graph in last_reports()) <= 3  # not one for each number


def test_numbers_that_change():
    def f(x, factor, power):
        return x * factor + power

    compiled = torch.compile(f, backend=forge)
    for factor in (0.5, 0.25, 3.0, 0.0, -0.0, float("inf")):
        check(compiled, f, torch.tensor([1.0, -2.0]), factor, 2)
    assert str(compiled(torch.tensor([1.0]), 0.0, -0.0)) == str(f(torch.tensor([1.0]), 0.0, -0.0))
    for power in range(4):
        check(compiled, f, torch.randn(3), 1.5, power)
    negative = torch.compile(lambda x, s: x * s, backend=forge)
    for s in (0.5, 0.25, 0.0, -0.0, 0.0):
        assert torch.copysign(torch.ones(1), negative(torch.ones(1), s)).item() == (-1 if str(s) == "-0.0" else 1)


def test_sizes_are_bounded_and_say_so(monkeypatch):
    compiled, eager = pair(MLP(), dynamic=True)
    with torch.no_grad():
        for rows in range(2, 18):
            check(compiled, eager, torch.randn(rows, 8))
        (graph,) = last_reports()
        assert len(graph.reports) == 16
        with pytest.warns(FallbackWarning, match="has had 16 sets of sizes"):
            x = torch.randn(40, 8)
            assert_same(compiled(x), eager(x))
        assert graph.eager_calls == 1
        before = graph.calls
        assert_same(compiled(x), eager(x))  # it came again
        assert graph.calls == before + 1
        for rows in (41, 42, 40, 3):
            x = torch.randn(rows, 8)
            assert_same(compiled(x), eager(x))
        assert graph.eager_calls == 3
        made = []
        monkeypatch.setattr(
            dynamo, "compile", lambda *args, **kwargs: made.append(1) or forge_ugc.compile(*args, **kwargs)
        )
        for rows in list(range(50, 70)) * 20:  # more sizes in turn than are kept: compiling must not take over
            compiled(torch.ones(rows, 8))
        assert 0 < len(made) < 40


def test_packed_weights_are_shared():
    """All sizes use one copy of what a kernel wants in another layout, also after the weights have changed."""
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(256, 256))
    model.forward = lambda x: x @ model.w
    compiled = torch.compile(model, backend=forge, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for change in range(2):
            model.w.add_(change)
            for rows in range(2, 14):
                x = torch.randn(rows, 256)
                assert_same(compiled(x), x @ model.w, atol=1e-4)
    (graph,) = last_reports()
    assert graph.calls == 24
    packed = [report["weights"]["packed_bytes"] for report in graph._reports]
    assert packed[0] >= 256 * 256 * 4 and not any(packed[1:])


def test_mark_dynamic():
    compiled, eager = pair(MLP())
    with torch.no_grad():
        for rows in (4, 6, 9):
            x = torch.randn(rows, 8)
            torch._dynamo.mark_dynamic(x, 0)
            before = calls()
            assert_same(compiled(x), eager(x))
            assert calls() == before + 1
    assert len(last_reports()) == 1


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_that_change_are_followed():
    compiled, eager = pair(MLP())
    x = torch.randn(3, 8)
    models = (compiled._orig_mod, eager)
    other = MLP()
    for p in other.parameters():
        nn.init.uniform_(p)
    state = {k: v.clone() for k, v in other.state_dict().items()}
    changes = [
        lambda m: m.a.weight.mul_(2),
        lambda m: m.load_state_dict(state),
        lambda m: setattr(m.a.weight, "data", torch.full((16, 8), 0.1)),
        lambda m: setattr(m.b, "bias", nn.Parameter(torch.ones(8))),
        lambda m: m.load_state_dict({k: v + 1 for k, v in state.items()}, assign=True),
        lambda m: nn.utils.vector_to_parameters(torch.linspace(-1, 1, 304 + 32), m.parameters()) if False else None,
        lambda m: m.a.bias.data.fill_(3),
    ]
    with torch.no_grad():
        check(compiled, eager, x)
        for change in changes:
            for model in models:
                change(model)
            check(compiled, eager, x)
            check(compiled, eager, x)
    assert sum(len(g.reports) for g in last_reports()) <= len(changes) + 1


def test_optimizer_steps_between_calls():
    compiled, eager = pair(MLP())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (compiled._orig_mod, eager)]
    x = torch.randn(4, 8)
    for _ in range(8):
        for model, optimizer in zip((compiled._orig_mod, eager), optimizers, strict=True):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            check(compiled, eager, x)
    # what changes all the time is packed no more
    assert len(last_reports()[0].reports) <= 2


def test_weights_are_borrowed_and_released():
    model = MLP(64)
    address = model.a.weight.data_ptr()
    compiled = torch.compile(model, backend=forge)
    with torch.no_grad():
        compiled(torch.randn(2, 64))
    assert model.a.weight.data_ptr() == address
    weight = weakref.ref(model.a.weight)
    del model, compiled
    gc.collect()
    assert weight() is None
    assert calls() == 1


def test_one_graph_for_layers_that_are_alike():
    layers = nn.ModuleList(MLP() for _ in range(5))
    for i, layer in enumerate(layers):
        nn.init.constant_(layer.b.bias, float(i))
    eager = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(backend=forge)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(3):
            for layer, theirs in zip(layers, eager, strict=True):
                check(layer, theirs, x)
    (graph,) = last_reports()
    assert graph.calls == 15 and len(graph.reports) == 5  # each compiled once


def test_weights_given_as_arguments():
    def f(x, w, b):
        return F.linear(x, w, b)

    compiled = torch.compile(f, backend=forge)
    with torch.no_grad():
        for _ in range(4):
            check(compiled, f, torch.randn(2, 3), nn.Parameter(torch.randn(4, 3)), torch.randn(4))


def test_new_parameters_for_each_call():
    compiled, eager = pair(MLP())
    with torch.no_grad():
        for i in range(40):
            for model in (compiled._orig_mod, eager):
                model.a.bias = nn.Parameter(torch.full((16,), float(i)))
            check(compiled, eager, torch.randn(2, 8))
    assert len(last_reports()) == 1
    assert last_reports()[0].report["weights"]["borrowed_bytes"] == 0  # compiled no more: they are inputs by now


def test_functional_call():
    model = MLP()
    compiled = torch.compile(lambda p, x: torch.func.functional_call(model, p, (x,)), backend=forge)
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0):
            weights = {k: v * scale for k, v in model.state_dict().items()}
            x = torch.randn(2, 8)
            before = calls()
            assert_same(compiled(weights, x), torch.func.functional_call(model, weights, (x,)))
            assert calls() == before + 1


def test_outputs_that_are_weights():
    class Handed(MLP):
        def forward(self, x):
            return self.a(x), self.a.weight.t(), self.b.weight[:2], self.norm.weight

    compiled, eager = pair(Handed())
    with torch.no_grad():
        turned = check(compiled, eager, torch.randn(2, 8))[1]
        turned.zero_()
        assert (compiled._orig_mod.a.weight == 0).all()
        assert compiled(torch.randn(2, 8))[3] is compiled._orig_mod.norm.weight


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    compiled, eager = pair(Tied())
    with torch.no_grad():
        check(compiled, eager, torch.arange(5))
        assert last_reports()[0].report["weights"]["borrowed_bytes"] == 10 * 8 * 4
        for m in (compiled._orig_mod, eager):
            m.head.weight = nn.Parameter(m.head.weight + 1)
        check(compiled, eager, torch.arange(5))
