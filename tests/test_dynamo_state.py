"""torch.compile(backend="forge"): what is written, gradients, autocast."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_ugc import FallbackWarning, last_reports
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
    assert len(caught) == 1 and "dynamo_check.py" in str(caught[0].message)
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
