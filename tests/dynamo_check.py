"""What the tests of torch.compile(backend="forge") share: Forge beside eager, with proof that Forge ran."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_ugc import last_reports
from forge_ugc.dynamo import forge
from tests.compare import assert_same, clone_args

# of the modules that use this: a fallback that a test does not expect is an error
MARKS = [
    pytest.mark.filterwarnings("error::forge_ugc.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
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
