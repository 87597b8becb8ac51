"""A call that repeats the one before is not looked at again, and one that does not is."""

from __future__ import annotations

import pytest
import torch

import forge_ugc
from forge_ugc.overlap import Overlap


def step(cache, count, x):
    """Writes into a cache and counts, as a decode step does."""
    at = torch.arange(1) + count
    count.add_(1)
    cache.index_copy_(0, at, x)
    return cache.sum(0) + x[0]


def state():
    return torch.zeros(8, 3), torch.tensor(0)


@pytest.fixture
def compiled():
    return forge_ugc.compile(step, (*state(), torch.ones(1, 3)), device="cpu")


def test_steps_are_eagers_and_in_place(compiled):
    (cache, count), (theirs, expected) = state(), state()
    plan = compiled._kept()
    assert len(plan.in_place) == 2  # the counter too, since it is written last
    for i in range(6):
        x = torch.full((1, 3), float(i))
        version = cache._version, count._version
        got = compiled(cache, count, x)
        torch.testing.assert_close(got, step(theirs, expected, x))
        assert torch.equal(cache, theirs) and torch.equal(count, expected) and int(count) == i + 1
        assert cache._version > version[0] and count._version > version[1]
    known = compiled._repeat
    compiled(cache, count, x)
    assert compiled._repeat is known and known.user is not None


@pytest.mark.parametrize("change", ["data", "resize", "transpose"])
def test_the_same_tensor_in_another_form(compiled, change):
    cache, count = state()
    x = torch.ones(1, 3)
    for _ in range(2):
        compiled(cache, count, x)
    if change == "data":
        x.data = torch.ones(1, 3, dtype=torch.float64)
    elif change == "resize":
        x.resize_(1, 2)
    else:
        cache.t_()
    with pytest.raises(TypeError, match="expected float32"):
        compiled(cache, count, x)


def test_rows_that_lie_apart(compiled):
    """Not row major: a copy is passed, and what is written goes into the caller's."""
    (cache, count), (theirs, expected) = state(), state()
    wide = torch.zeros(8, 6)[:, ::2]
    compiled(cache, count, torch.ones(1, 3))
    for given in (wide, wide, cache, wide):
        x = torch.randn(1, 3)
        theirs.copy_(given)
        expected.copy_(count)
        torch.testing.assert_close(compiled(given, count, x), step(theirs, expected, x))
        assert torch.equal(given, theirs) and torch.equal(count, expected)


def test_memory_that_comes_to_be_shared(compiled):
    base, count = torch.zeros(9, 3), torch.tensor(0)
    compiled(base[:8], count, base[8:])
    compiled(base[:8], count, base[8:])
    for _ in range(2):
        with pytest.raises(Overlap):
            compiled(base[:8], count, base[7:8])
    compiled(base[:8], count, base[8:])


def test_inference_mode(compiled):
    cache, count = state()
    x = torch.ones(1, 3)
    for _ in range(2):
        compiled(cache, count, x)
    with torch.inference_mode():
        theirs = cache.clone()
        for _ in range(2):
            compiled(cache, count, x)
            compiled(theirs, count, x)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
        compiled(theirs, count, x)
    compiled(cache, count, x)
    assert int(count) >= 7


def test_tensors_of_another_class(compiled):
    class Mine(torch.Tensor):
        pass

    cache, count = state()
    x = torch.ones(1, 3)
    compiled(cache, count, x)
    compiled(cache, count, x)
    compiled(cache, count, x.as_subclass(Mine))
    compiled(cache, count, torch.nn.Parameter(x, requires_grad=False))
    assert int(count) == 4
    for wrong in (3.0, None, torch.ones(1, 3, device="meta"), torch.ones(1, 3).to_sparse()):
        with pytest.raises(TypeError):
            compiled(cache, count, wrong)


def test_weights_that_change_between_repetitions():
    model = torch.nn.Linear(3, 2).eval()
    compiled = forge_ugc.compile(model, (torch.ones(1, 3),), device="cpu")
    x = torch.randn(1, 3)
    with torch.no_grad():
        for change in (
            lambda: model.weight.mul_(2),
            lambda: model.load_state_dict(torch.nn.Linear(3, 2).state_dict()),
            lambda: setattr(model.bias, "data", torch.randn(2)),
            lambda: setattr(model, "weight", torch.nn.Parameter(torch.randn(2, 3))),
        ):
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
            change()
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
