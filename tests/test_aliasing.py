"""Memory that is shared: outputs with inputs and with each other as in eager, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from tests.compare import assert_same, clone_args, tensors


def compiled(function: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return forge_ugc.compile(function, clone_args(args))


def pattern(*groups: Any) -> list[int]:
    """Which tensors share storage: the same number for those that do."""
    numbers: dict[int, int] = {}
    flat = [t for group in groups for t in tensors(group)]
    return [numbers.setdefault(t.untyped_storage().data_ptr(), len(numbers)) for t in flat]


def views_of_new(x: torch.Tensor) -> Any:
    y = x + 1
    z = y * 2
    return y, y.view(-1), y[1:], y.t(), y, z.split(2), y.unbind(0)[1], y.clone(), x.clone(), x.clone(), z.t(), z + 0


def views_of_inputs(x: torch.Tensor) -> Any:
    return (
        x, x.view(20), x.t(), x[1], x.expand(2, 4, 5), x.detach(), x.contiguous(), x.reshape(5, 4), x.float(),
        x.unbind(0), x.split(2), x.type_as(x), x.view_as(x), x.expand_as(x), x.real, x.diagonal(), x[None], x.mT,
        x.unfold(0, 2, 1), x.chunk(2, 1), x.broadcast_to(1, 4, 5), torch.dropout(x, 0.5, False), torch.atleast_3d(x),
        x.clone(), x.double(), x.transpose(0, 1).reshape(20), x * 1,
    )  # fmt: skip


def views_of_written(x: torch.Tensor) -> Any:
    y = x[1:3]
    y.mul_(2)
    x.t()[0] = 1
    return y, x.t(), x, x[0, 0], x + 0


def equal_constants(x: torch.Tensor) -> Any:
    """A cache's keys and values, both zero: whoever writes into one must not see it in the other."""
    keys, values, one = torch.zeros(4, 5), torch.zeros(4, 5), torch.tensor([1, 2])
    return (
        keys,
        values,
        one,
        torch.tensor([1, 2]),
        x * 2 + keys + one.sum(),
        one,
        torch.ones(2) * 2,
        torch.full((2,), 2.0),
    )


def views_of_constants(x: torch.Tensor) -> Any:
    table = torch.arange(6).view(2, 3)
    return table, table[0], x + 1, table.t(), torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "function", [views_of_new, views_of_inputs, views_of_written, equal_constants, views_of_constants]
)
def test_outputs_share_memory_where_eagers_do(function: Any) -> None:
    example = torch.randn(4, 5)
    forge = compiled(function, example)
    for _ in range(2):
        x, y = torch.randn(4, 5), None
        y = x.clone()
        expected, got = function(x), forge(y)
        assert_same(expected, got)
        assert_same(x, y)
        assert pattern(x, expected) == pattern(y, got)


def test_writing_into_an_output_shows_in_its_views_and_nowhere_else() -> None:
    forge = compiled(views_of_new, torch.zeros(4, 5))
    x = torch.zeros(4, 5)
    first, second = forge(x), forge(x)
    first[0].fill_(7)
    assert first[1].eq(7).all() and first[2].eq(7).all() and x.eq(0).all() and second[0].eq(1).all()


def add_then_double(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


def test_written_inputs_that_share_memory_are_refused() -> None:
    forge = compiled(add_then_double, torch.zeros(3), torch.zeros(3))
    x = torch.arange(6.0)
    with pytest.raises(TypeError, match="a and b share memory"):
        forge(x[:3], x[2:5])
    with pytest.raises(TypeError, match="a and b share memory"):
        forge(x[:3], x[:3])
    assert torch.equal(x, torch.arange(6.0))
    assert forge(x[:3], x[3:]).tolist() == [6, 8, 10]  # neighbours
    assert forge(x[::2], x[1::2]).tolist() == [4, 6, 10]  # interleaved, apart
    with pytest.raises(forge_ugc.CompileError, match="share memory"):
        y = torch.zeros(3)
        forge_ugc.compile(add_then_double, (y, y))


def test_read_only_inputs_may_be_the_same() -> None:
    x = torch.randn(3)
    forge = compiled(lambda a, b: a * b, x, x)
    assert torch.equal(forge(x, x), x * x)


class Buffers(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        memory = torch.zeros(2, 3)
        self.register_buffer("a", memory[0])
        self.register_buffer("b", memory[0] if shared else memory[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.add_(x)
        return self.b + 1


def test_written_buffers_that_share_memory_are_refused() -> None:
    with pytest.raises(forge_ugc.CompileError, match="a and b share memory"):
        forge_ugc.compile(Buffers(True).eval(), torch.ones(3))
    model = Buffers(False).eval()
    forge = forge_ugc.compile(model, torch.ones(3))
    assert forge(torch.ones(3)).tolist() == [1, 1, 1] and model.a.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="share memory"):
        forge(model.a)


@pytest.mark.parametrize("other", [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3)])
def test_buffers_of_another_form_are_not_read(other: torch.Tensor) -> None:
    model = Buffers(False).eval()
    forge = forge_ugc.compile(model, torch.ones(3))
    model.a = other
    with pytest.raises(TypeError, match="buffer 'a' was"):
        forge(torch.ones(3))
    model.a = torch.zeros(6)[::2]
    forge(torch.ones(3))
    assert model.a.tolist() == [1, 1, 1]


def test_writes_through_unfold_are_refused() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.unfold(1, 2, 2)[0, 0] = 3
        return y

    with pytest.raises(forge_ugc.CompileError, match="unfold"):
        forge_ugc.compile(write, torch.zeros(4, 5))
