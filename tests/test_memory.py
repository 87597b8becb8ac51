"""Memory of large outputs: used again only when nothing refers to it."""

import gc
import threading

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc import memory
from forge_ugc.memory import OutputMemory

SIZE = 3 * 4096


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(memory, "LEAST_BYTES", SIZE)


class Two(torch.nn.Module):
    def forward(self, x):
        return x * 2, (x + 1).sum(0)


def compiled(x):
    return forge_ugc.compile(Two().eval(), (x,), device="cpu")


def test_a_dropped_output_lends_its_memory_to_the_next():
    x = torch.randn(3, 1024)
    model = compiled(x)
    seen = set()
    out = None
    for _ in range(6):
        out = model(x)  # the result before is alive meanwhile
        seen.add(out[0].data_ptr())
        assert torch.equal(out[0], x * 2)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[1:, ::2],
        lambda t: t.view(-1).unsqueeze(0),
        lambda t: t.numpy(),
        lambda t: np.from_dlpack(t),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: (t.clone().requires_grad_() * t).grad_fn,
    ],
    ids=["tensor", "view", "reshaped", "numpy", "dlpack", "storage", "memoryview", "graph"],
)
def test_what_is_held_is_not_written(hold):
    x = torch.randn(3, 1024)
    model = compiled(x)
    first = model(x)[0]
    address, kept = first.data_ptr(), hold(first)
    del first
    for _ in range(5):
        other = model(torch.zeros(3, 1024))[0]
        assert other.data_ptr() != address
    del kept, other
    gc.collect()
    taken = [model(x)[0] for _ in range(3)]
    assert address in {t.data_ptr() for t in taken}


def test_held_outputs_keep_their_values():
    xs = [torch.randn(3, 1024) for _ in range(9)]
    model = compiled(xs[0])
    outs = [model(x)[0] for x in xs]
    assert all(torch.equal(out, x * 2) for out, x in zip(outs, xs, strict=True))
    assert len({t.data_ptr() for t in outs}) == 9
    assert len(model._memory._blocks) <= 4


def test_threads():
    model = compiled(torch.zeros(3, 1024))
    wrong = []

    def work(seed):
        x = torch.full((3, 1024), float(seed))
        for _ in range(50):
            out = model(x)[0]
            if not torch.equal(out, x * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_it_is_the_tensor_that_empty_gives():
    x = torch.randn(3, 1024)
    model = compiled(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, plain = model(x)[0], torch.empty(3, 1024)
            assert out.is_inference() == plain.is_inference() and not out._is_view()
            assert out.stride() == plain.stride() and out.data_ptr() % 64 == 0
            out.add_(1)
            assert torch.equal(model(x)[0], x * 2)
    with pytest.raises(RuntimeError, match="not resizable"):
        model(x)[0].resize_(9, 1024)


def test_sizes_that_change():
    pool = OutputMemory()
    a = pool.take(SIZE)
    address = id(a)
    del a
    b = pool.take(2 * SIZE)  # what nobody has of another size is given back
    assert len(pool._blocks) == 1 and len(b) == 2 * SIZE
    assert id(pool.take(SIZE)) != id(b) and address
    with pytest.raises(MemoryError, match=r"out of memory: \d+ bytes for an output"):
        pool.take(1 << 62)


def test_an_artefact_does_the_same(tmp_path):
    x = torch.randn(3, 1024)
    path = tmp_path / "m.forge"
    compiled(x).save(path)
    model = forge_ugc.load(path)
    held = model(x.numpy())[0]
    seen = set()
    for value in (x, x.numpy()) * 4:
        out = model(value)[0]
        seen.add(out.data_ptr() if isinstance(out, torch.Tensor) else out.ctypes.data)
        assert np.array_equal(np.asarray(out), x.numpy() * 2)
    assert len(seen) == 2 and held.ctypes.data not in seen
    assert np.array_equal(held, x.numpy() * 2)
