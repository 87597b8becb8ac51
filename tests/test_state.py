"""Weights that change after compiling, buffers that forward() writes, weights kept once."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import _core
from forge_ugc.state import Samples
from tests.compare import assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)
        self.register_buffer("shift", torch.zeros(3))
        self.plain = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) + self.shift * 2 + self.plain


CHANGES: dict[str, Any] = {
    "in place": lambda m: m.first.weight.mul_(2),
    "bias": lambda m: m.first.bias.add_(1),
    "buffer": lambda m: m.shift.fill_(3),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data": lambda m: setattr(m.first.weight, "data", torch.randn(8, 6)),
    "data of other strides": lambda m: setattr(m.first.weight, "data", torch.randn(6, 8).t()),
    "data of the same memory, as a view": lambda m: setattr(m.first.weight, "data", m.first.weight.data.view(6, 8).t()),
    "new parameter": lambda m: setattr(m.last, "weight", nn.Parameter(torch.randn(3, 8))),
    "new buffer": lambda m: setattr(m, "shift", torch.ones(3)),
    "attribute in place": lambda m: m.plain.add_(1),
    "new attribute": lambda m: setattr(m, "plain", torch.zeros(3)),
    "view": lambda m: m.first.weight[0].zero_(),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changes_are_noticed(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 6)
    forge = forge_ugc.compile(model, x)
    before = forge(x)
    CHANGES[name](model)
    assert_same(model(x), forge(x))
    assert not torch.equal(before, forge(x))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def trained(model: nn.Module, **options: Any) -> None:
    """One step of an optimizer, in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    with torch.enable_grad():
        model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def statistics(model: Any) -> None:
    model.train()
    model(torch.randn(64, 6) * 3 + 1)
    model.eval()


def test_another_mode_is_warned_of() -> None:
    x = torch.ones(2, 6)
    for compiled_as, change, says in [
        (True, lambda m: m.eval(), "evaluation"),
        (False, lambda m: m.train(), "training"),
        (False, lambda m: m[1].train(), "training"),  # as for Monte Carlo dropout
        (False, lambda m: m.train().eval(), ""),
    ]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train(compiled_as)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forge = forge_ugc.compile(model, x, device="cpu")
        forge(x)
        change(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            forge(x), forge(x)
        assert [w.filename for w in found] == [__file__] * bool(says)  # once
        assert all(f"was put into {says} mode after compiling" in str(w.message) for w in found)


UNCOUNTED: dict[str, Any] = {
    "statistics of a norm": statistics,
    "fused optimizer": lambda m: trained(m, fused=True),
    "data.copy_": lambda m: m.first.weight.data.copy_(torch.randn(40, 6)),
    "data.mul_": lambda m: m.last.weight.data.mul_(5),
    "numpy": lambda m: m.norm.weight.detach().numpy().fill(3),
}


@pytest.mark.parametrize("precision", ["auto", "w8"])
@pytest.mark.parametrize("name", UNCOUNTED)
@torch.no_grad()
def test_changes_that_torch_does_not_count(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(5, 6)
    forge = forge_ugc.compile(model, x, device="cpu", precision=precision)
    before = forge(x)
    for _ in range(2):
        UNCOUNTED[name](model)
        assert torch.equal(forge_ugc.compile(model, x, device="cpu", precision=precision)(x), forge(x))
    assert not torch.allclose(before, forge(x), atol=0.01)
    if precision == "auto":
        assert_same(model(x), forge(x))


@pytest.mark.parametrize("name", UNCOUNTED)
@torch.no_grad()
def test_changes_that_torch_does_not_count_in_its_graphs(name: str) -> None:
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(5, 6)
    forge = torch.compile(model, backend="forge", options={"precision": "w8", "device": "cpu"})
    before = forge(x)
    UNCOUNTED[name](model)
    assert torch.equal(forge_ugc.compile(model, x, device="cpu", precision="w8")(x), forge(x))
    assert not torch.allclose(before, forge(x), atol=0.01)


def test_changes_of_inference_tensors(tmp_path: Path) -> None:
    with torch.inference_mode():
        model, x = Normed().eval(), torch.randn(5, 6)
        forge = forge_ugc.compile(model, x, device="cpu", precision="w8")
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        before = forge_ugc.compile(model, x, device="cpu", precision="w8")(x)
        assert torch.equal(before, forge(x))
        model.last.weight.mul_(2)
        forge.save(tmp_path / "model.forge")  # as it is now
        assert torch.equal(forge_ugc.load(tmp_path / "model.forge")(x), forge(x))
        assert not torch.allclose(before, forge(x), atol=0.01)


def test_samples_are_elements() -> None:
    """Of any strides, dtype and size; those of other tensors in the same memory do not count."""
    whole = torch.zeros(6, 8, dtype=torch.float64)
    tensors = [whole[1:5:2, ::3].t(), torch.zeros(()), torch.zeros(0, 3), torch.zeros(3, dtype=torch.bool)]
    tensors += [torch.zeros(5, 2).expand(4, 5, 2), torch.zeros(2, dtype=torch.complex64), torch.zeros(9).half()]
    names = [str(i) for i in range(len(tensors))]
    samples = Samples(tensors, names)
    whole[0] += 1
    whole[:, 1] += 1
    assert not samples.changed() and samples.changes() == []
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            samples = Samples(tensors, names)
            tensor.data[(-1,) * tensor.dim()] = 1
            assert samples.changed() and samples.changes() == [i]
    assert not Samples([], []).changed()
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    assert not Samples([freed], ["freed"]).changed()


@pytest.mark.parametrize("size", [0, 3, 9, 1 << 40])
def test_samples_of_wrong_sizes(size: int) -> None:
    at = np.arange(4.0)
    with pytest.raises(ValueError, match=f"{size} bytes at once"):
        _core.samples(np.array([[at.ctypes.data, 8], [at.ctypes.data, size]], np.uint64))
    with pytest.raises(ValueError, match="24 bytes"):
        _core.samples(np.zeros(3, np.uint64))
    assert _core.samples(np.array([[at[3:].ctypes.data, 8]], np.uint64)) == at[3:].tobytes()


@torch.no_grad()
def test_refresh_takes_over_what_torch_does_not_count() -> None:
    model, x = Net().eval(), torch.randn(2, 6)
    forge = forge_ugc.compile(model, x)
    model.first.weight.numpy()[1, 0] = 0.5
    forge.refresh()
    assert_same(model(x), forge(x))


@pytest.mark.parametrize("size", [0, 16])
@torch.no_grad()
def test_weights_that_lost_their_memory_are_errors(size: int) -> None:
    model, x = nn.Linear(512, 512).eval(), torch.randn(2, 512)
    forge = forge_ugc.compile(model, x, device="cpu")
    model.weight.untyped_storage().resize_(size)
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError), match=r"'weight'.*(storage|no data)"):
            forge(x)
    model.weight.untyped_storage().resize_(4 * 512 * 512)
    model.weight.copy_(torch.eye(512))
    assert_same(model(x), forge(x))


@torch.no_grad()
def test_weights_turned_where_they_lie_are_noticed() -> None:
    model, x = nn.Linear(6, 6).eval(), torch.randn(2, 6)
    forge, graph = forge_ugc.compile(model, x, device="cpu"), torch.compile(model, backend="forge")
    for _ in range(2):
        assert_same(model(x), forge(x))
        assert_same(model(x), graph(x))
        model.weight.data = model.weight.data.t()


def test_removed_or_reshaped_weights_are_errors() -> None:
    model, x = Net().eval(), torch.randn(2, 6)
    forge = forge_ugc.compile(model, x)
    for other in (torch.randn(8, 7), model.first.weight.data[:4]):
        model.first.weight.data = other
        with pytest.raises(RuntimeError, match=r"first.weight"):
            forge(x)
    del model.first.weight
    with pytest.raises(RuntimeError, match=r"first.weight"):
        forge(x)


@torch.no_grad()
def test_buffers_are_written_and_read_back() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 4, 2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
            self.keys.index_copy_(1, at, x)
            self.count += 1
            return self.keys.sum(), self.count, self.keys

    ours, theirs = Cache().eval(), Cache().eval()
    forge = forge_ugc.compile(ours, (torch.ones(1, 1, 2), torch.tensor([0])))
    program = forge._plans[None].program
    for i in range(4):
        x, at = torch.randn(1, 1, 2), torch.tensor([i])
        out, expected = forge(x, at), theirs(x, at)
        assert_same(expected, out)
        assert out[1] is ours.count and out[2] is ours.keys
        assert_same(dict(theirs.named_buffers()), dict(ours.named_buffers()))
    assert forge._plans[None].program is program  # its own writes are no reason to build again
    ours.keys.zero_()
    theirs.keys.zero_()
    assert_same(theirs(x, at), forge(x, at))
    versions = ours.keys._version
    forge(x, at)
    assert ours.keys._version > versions


@torch.no_grad()
def test_inputs_are_written() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x[:, 0] = y.sum()
        y.add_(1)
        return x.t(), y, x * 1

    forge = forge_ugc.compile(function, (torch.ones(2, 3), torch.ones(2)))
    a, b = torch.randn(3, 2).t(), torch.randn(4)[::2]
    ours, theirs = (a.clone(), b.clone()), (a.clone(), b.clone())
    out, expected = forge(*ours), function(*theirs)
    assert_same(expected, out)
    assert_same(theirs, ours)
    assert out[1] is ours[1] and out[0].untyped_storage().data_ptr() == ours[0].untyped_storage().data_ptr()


@torch.no_grad()
def test_tied_weights_are_one_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model, ids = Tied().eval(), torch.randint(0, 40, (2, 5))
    forge = forge_ugc.compile(model, ids)
    assert len(forge._plans[None].lowered.table.arrays["constants"]) == 1
    assert forge.report["weights"]["borrowed_bytes"] == 40 * 16 * 4
    model.head.weight.mul_(2)
    assert_same(model(ids), forge(ids))


@torch.no_grad()
def test_inference_tensors_and_frozen_models() -> None:
    with torch.inference_mode():
        model = Net().eval()
    x = torch.randn(2, 6)
    forge = forge_ugc.compile(model, x)
    assert_same(model(x), forge(x))
    with torch.inference_mode():
        assert_same(model(x), forge(x))


@torch.no_grad()
def test_deepcopied_program_has_weights_of_its_own() -> None:
    model, x = Net().eval(), torch.randn(2, 6)
    forge = forge_ugc.compile(model, x)
    twin = copy.deepcopy({"f": forge})["f"]
    before = forge(x)
    model.shift.fill_(5)
    assert_same(model(x), forge(x))
    assert_same(before, twin(x))
