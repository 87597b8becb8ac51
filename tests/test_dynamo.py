"""torch.compile(backend="forge"). Each test asserts that Forge ran: a count rose, and nothing fell back unseen."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import threading
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
from tests.compare import assert_same, clone_args

pytestmark = [
    pytest.mark.filterwarnings("error::forge_ugc.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    assert last_reports() == []
    yield
    torch._dynamo.reset()
    assert last_reports() == []


def calls() -> int:
    return sum(graph.calls for graph in last_reports())


def check(compiled, eager, *args, **kwargs):
    """Runs both on their own copies of the arguments; Forge must have run, torch not. Returns Forge's result."""
    before = calls()
    theirs, ours = clone_args((args, kwargs)), clone_args((args, kwargs))
    expected = eager(*theirs[0], **theirs[1])
    got = compiled(*ours[0], **ours[1])
    assert_same(got, expected)
    assert_same(ours, theirs)
    if isinstance(eager, nn.Module):
        own = compiled._orig_mod if hasattr(compiled, "_orig_mod") else compiled
        assert_same(dict(own.state_dict()), dict(eager.state_dict()))
    assert calls() > before
    assert all(not graph.fallback and not graph.eager_calls for graph in last_reports())
    return got


def pair(model, **kwargs):
    """A compiled model, and an eager one of the same weights."""
    eager = copy.deepcopy(model)
    return torch.compile(model, backend=forge, **kwargs), eager


class MLP(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.b(F.gelu(self.norm(self.a(x)))) + x


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
    assert "test_dynamo.py" in graph.name and "test_dynamo.py" in repr(graph)
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


def test_packed_copies_are_bounded(monkeypatch):
    """Each program packs its own copy of what a kernel wants in another layout."""
    monkeypatch.setattr(dynamo, "_ALLOWED", 0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(256, 256))
    model.forward = lambda x: x @ model.w
    compiled = torch.compile(model, backend=forge, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows in range(2, 14):
            x = torch.randn(rows, 256)
            assert_same(compiled(x), x @ model.w, atol=1e-4)
    (graph,) = last_reports()
    packed, borrowed = (graph.report["weights"][k] for k in ("packed_bytes", "borrowed_bytes"))
    assert borrowed == 256 * 256 * 4
    assert graph.calls == (min(12, max(2, 4 * borrowed // packed)) if packed else 12)


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


# --- writes -----------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.count += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.fc(x) + self.mean * self.count


def test_buffers_are_written():
    compiled, eager = pair(Counter())
    with torch.no_grad():
        for _ in range(5):
            check(compiled, eager, torch.randn(3, 4))
    assert compiled._orig_mod.count == 5
    assert len(last_reports()[0].reports) == 1


def test_buffers_written_in_one_graph_and_read_in_another():
    class Two(Counter):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y * self.mean + self.fc(x) * self.count

    compiled, eager = pair(Two())
    with torch.no_grad():
        for _ in range(12):
            check(compiled, eager, torch.randn(3, 4))
    assert all(len(graph.reports) <= 2 for graph in last_reports())


def test_buffers_that_are_assigned():
    class Assigned(Counter):
        def forward(self, x):
            self.mean = self.mean + x.mean(0)
            return self.fc(x) * self.mean

    compiled, eager = pair(Assigned())
    with torch.no_grad():
        for _ in range(6):
            check(compiled, eager, torch.randn(3, 4))


def test_inputs_are_written():
    def f(x, cache, i):
        x.add_(1)
        cache[:, 1:2] = x[:, :1]
        cache.index_copy_(1, i, x[:, 1:2])
        return cache.sum(1) + x

    compiled = torch.compile(f, backend=forge)
    for _ in range(3):
        check(compiled, f, torch.randn(2, 2).expand(2, 2).contiguous(), torch.zeros(2, 2), torch.tensor([0]))


def test_written_inputs_that_overlap_run_through_torch():
    def f(x, y):
        x.add_(1)
        return x * 2 + y

    compiled = torch.compile(f, backend=forge)
    check(compiled, f, torch.ones(4), torch.ones(4))
    base = torch.arange(6.0)
    theirs = torch.arange(6.0)
    assert_same(compiled(base[:4], base[2:]), f(theirs[:4], theirs[2:]))
    assert_same(base, theirs)


def test_a_weight_that_is_written_through_an_input():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(12.0).reshape(3, 4))

        def forward(self, row, x):
            row.add_(1)
            return F.linear(x, self.table)

    compiled, eager = pair(Written())
    x = torch.randn(2, 4)
    with torch.no_grad():
        check(compiled, eager, torch.zeros(4), x)
        for _ in range(3):
            got = compiled(compiled._orig_mod.table[0], x)
            assert_same(got, eager(eager.table[0], x))
            assert_same(compiled(torch.zeros(4), x), eager(torch.zeros(4), x))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training):
    compiled, eager = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(training))
    with torch.no_grad():
        for _ in range(3):
            check(compiled, eager, torch.randn(2, 3, 6, 6))


# --- gradients --------------------------------------------------------------------------------------------------------


def test_training_step_has_eagers_gradients():
    compiled, eager = pair(MLP())
    x, ours = torch.randn(3, 8), torch.optim.SGD(compiled.parameters(), lr=0.1)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    with pytest.warns(FallbackWarning, match="require grad") as caught:
        for _ in range(3):
            for model, optimizer in ((compiled, ours), (eager, theirs)):
                model(x).square().sum().backward()
                optimizer.step()
            assert_same([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])
            ours.zero_grad()
            theirs.zero_grad()
    assert len(caught) == 1 and "test_dynamo.py" in str(caught[0].message)
    (graph,) = last_reports()
    assert graph.calls == 0 and graph.eager_calls == 3 and "aot_eager" in graph.fallback
    with torch.no_grad():  # the same model, evaluated: Forge's, with the weights of now
        assert_same(compiled(x), eager(x))
    assert calls() == 1


def test_no_gradients_wanted_with_gradients_on():
    model = MLP().requires_grad_(False)
    compiled, eager = pair(model)
    assert torch.is_grad_enabled()
    check(compiled, eager, torch.randn(2, 8))

    def frozen(x):
        with torch.no_grad():
            return model(x) + 1

    check(torch.compile(frozen, backend=forge), frozen, torch.randn(2, 8, requires_grad=True))


def test_gradients_on_inside():
    model = MLP()

    def f(x):
        with torch.enable_grad():
            return model(x)

    compiled = torch.compile(f, backend=forge)
    x = torch.randn(2, 8)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="require grad"):
        y = compiled(x)
    y.sum().backward()
    assert model.a.weight.grad is not None


def test_writes_with_gradients_on():
    def f(x, w):
        with torch.no_grad():
            x += w
        return x.detach() * 2

    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    compiled = torch.compile(f, backend=forge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compiled(x, w).tolist() == [4.0] * 3
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    compiled, eager = pair(MLP())
    x = torch.randn(2, 8)
    with mode():
        got = check(compiled, eager, x)
        check(compiled, eager, torch.randn(2, 8))
    assert not got.requires_grad and got.is_inference() == (mode is torch.inference_mode)


def test_inference_tensors_as_weights():
    with torch.inference_mode():
        model = MLP()
        compiled, eager = pair(model)
        check(compiled, eager, torch.randn(2, 8))


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_autocast_inside():
    class Inside(MLP):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.a(x)
            return y, self.norm(y.float())

    compiled, eager = pair(Inside())
    with torch.no_grad():
        y, _ = check(compiled, eager, torch.randn(2, 8))
    assert y.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")


def test_autocast_outside():
    compiled, eager = pair(MLP())
    x = torch.randn(2, 8)
    with torch.no_grad():
        check(compiled, eager, x)
        with torch.autocast("cpu", torch.bfloat16):
            got = check(compiled, eager, x)
            check(compiled, eager, x)
        check(compiled, eager, x)
    assert got.dtype == eager.forward(x).dtype  # the sum with x is float32
    assert len(last_reports()) == 2


# --- what falls back --------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_other_devices_fall_back_and_say_so():
    with pytest.warns(FallbackWarning, match="an input is on meta"):
        y = torch.compile(lambda x: x * 2, backend=forge)(torch.randn(3, 3, device="meta"))
    assert y.device.type == "meta"
    (graph,) = last_reports()
    assert graph.calls == 0 and graph.eager_calls == 1 and "on meta" in graph.fallback


def test_tensor_subclasses_fall_back():
    x = torch.randn(3).as_subclass(Wrapped)
    with pytest.warns(FallbackWarning, match="an input is a Wrapped"):
        y = torch.compile(lambda x: x * 2, backend=forge)(x)
    assert type(y) is Wrapped and torch.equal(y.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor) * 2)
    assert calls() == 0


def test_strict_raises():
    compiled = torch.compile(MLP(), backend=forge, options={"strict": True})
    with pytest.raises(Exception, match="require grad"):
        compiled(torch.randn(2, 8))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.linalg.qr(x)[0], backend=forge, options={"strict": True})
    with pytest.raises(Exception, match="linalg_qr"):
        compiled(torch.randn(3, 3))


def test_operators_of_torch_are_named():
    with pytest.warns(FallbackWarning, match="linalg_qr"):
        got = torch.compile(lambda x: torch.linalg.qr(x)[0], backend=forge)(torch.eye(3))
    assert torch.equal(got.abs(), torch.eye(3)) and calls() == 1
    assert last_reports()[0].report["fallbacks"][0]["op"] == "aten.linalg_qr.default"


def test_random_numbers():
    def f(x):
        return F.dropout(x, 0.5) + torch.rand(4)

    compiled = torch.compile(f, backend=forge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(3):
            torch.manual_seed(seed)
            got = compiled(torch.ones(4))
            torch.manual_seed(seed)
            assert_same(got, f(torch.ones(4)))
    assert calls() == 3


def test_errors_of_the_graph_are_torchs():
    compiled = torch.compile(lambda x, i: x[i], backend=forge)
    x = torch.arange(5.0)
    check(compiled, lambda x, i: x[i], x, torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([1, 20]))


# --- torch's other tools ----------------------------------------------------------------------------------------------


def test_cond_and_nested_compile():
    inner = torch.compile(lambda x: x * 3, backend=forge)

    def f(x):
        return inner(x) + torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = torch.compile(f, backend=forge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for x in (torch.ones(3), -torch.ones(3)):
            assert_same(compiled(x), 3 * x + (x + 1 if x.sum() > 0 else x - 1))
    assert calls() == 2


def test_vmap_and_grad_inside():
    def f(x):
        return torch.vmap(lambda row: row.softmax(0) * 2)(x)

    compiled = torch.compile(f, backend=forge)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert_same(compiled(x), f(x))
    assert calls() == 1
    g = torch.compile(lambda x: torch.func.grad(lambda v: (v**3).sum())(x), backend=forge)
    with pytest.warns(FallbackWarning, match="differentiates inside"):
        assert_same(g(x), 3 * x**2)


def test_under_a_transform():
    compiled = torch.compile(lambda x: x * 2 + 1, backend=forge)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(torch.vmap(compiled)(x), x * 2 + 1)


def test_deepcopy_pickle_and_export_afterwards():
    compiled, eager = pair(MLP())
    x = torch.randn(2, 8)
    with torch.no_grad():
        check(compiled, eager, x)
        twin = copy.deepcopy(compiled)
        twin._orig_mod.a.weight.zero_()
        check(compiled, eager, x)
        zeroed = copy.deepcopy(eager)
        zeroed.a.weight.zero_()
        check(twin, zeroed, x)
        again = pickle.loads(pickle.dumps(compiled._orig_mod))
        assert_same(again(x), eager(x))
        buffer = io.BytesIO()
        torch.save(compiled.state_dict(), buffer)
        program = torch.export.export(compiled._orig_mod, (x,))
        assert_same(program.module()(x), eager(x))


def test_reset_and_recompilation():
    compiled, eager = pair(MLP())
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
        torch._dynamo.reset()
        assert last_reports() == []
        check(compiled, eager, torch.randn(2, 8))
        check(compiled, eager, torch.randn(2, 8).double().float())
        check(compiled.double(), eager.double(), torch.randn(2, 8).double())
    assert len(last_reports()) == 2


def test_threads():
    compiled, eager = pair(MLP(), dynamic=True)
    with torch.no_grad():
        inputs = [torch.randn(rows, 8) for rows in (2, 3, 4, 5)]
        expected = [eager(x) for x in inputs]
        check(compiled, eager, inputs[0])
    failures = []

    def work(offset):
        try:
            with torch.no_grad():
                for i in range(40):
                    at = (i + offset) % len(inputs)
                    assert_same(compiled(inputs[at]), expected[at])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert calls() == 161 and len(last_reports()[0].reports) == 4


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_dump(tmp_path, monkeypatch, capture):
    monkeypatch.setenv("FORGE_DUMP", str(tmp_path))
    compiled, eager = pair(MLP(), options={"capture": capture})
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert folder.name.startswith("graph_") and (folder / "report.md").exists()
    aten = (folder / "00_aten.txt").read_text()
    assert re.search(r"gelu.*# .*test_dynamo.py:\d+ in forward", aten)
    assert "self.a.weight" in aten
