"""Loaded models that write their arguments: in place where the compiled model does; caches of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc import ArtefactError
from tests import test_in_place as written
from tests.test_in_place import seeded

transformers = pytest.importorskip("transformers")

SQUARE = [
    "read_before", "squared", "shifted", "layers", "keeps_old", "reads_old_later", "turned", "mirrored", "product",
    "gathered", "over_itself", "softmaxed",
]  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_as_the_compiled_model(name: str, tmp_path: Path) -> None:
    function = getattr(written, name)
    v = seeded(4, 1 if name in ("shifted", "layers") else 4, seed=1)
    compiled = forge_ugc.compile(function, (seeded(4, 4), v), device="cpu")
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    own = {which for _, _, kind, which in loaded._programs[0].in_place if kind == "leaf"}
    assert own == written.leaves(compiled)
    mine, eager, array = seeded(4, 4), seeded(4, 4), seeded(4, 4).numpy()
    for _ in range(2):
        version = mine._version
        got, expected, arrays = loaded(mine, v), function(eager, v), loaded(array, v.numpy())
        for g, e, a in zip(got, expected, arrays, strict=True):
            torch.testing.assert_close(g, e)
            assert np.array_equal(g.numpy(), a)
            assert (g is mine) == (e is eager) == (a is array)
        torch.testing.assert_close(mine, eager)
        assert np.array_equal(mine.numpy(), array) and mine._version > version


def test_what_is_handed_in(tmp_path: Path) -> None:
    """Other strides, parts of larger arrays, memory that may not be written, arguments that overlap."""
    compiled = forge_ugc.compile(written.piece, (seeded(4, 6), seeded(4, 2)), device="cpu")
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    assert len(loaded._programs[0].in_place) == 1
    v, eager = torch.ones(4, 2), seeded(6, 4).t()
    expected = written.piece(eager, v)
    for turned in (seeded(6, 4).t(), seeded(6, 4).numpy().T):
        got = loaded(turned, v if isinstance(turned, torch.Tensor) else v.numpy())
        np.testing.assert_allclose(np.asarray(got[0]), expected[0], rtol=1e-6)
        assert np.array_equal(np.asarray(turned), eager)
    whole, other = seeded(8, 6), seeded(8, 6)
    loaded(whole[2:6], v)
    written.piece(other[2:6], v)
    assert torch.equal(whole, other)
    frozen = seeded(4, 6).numpy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        loaded(frozen, v.numpy())
    assert np.array_equal(frozen, seeded(4, 6))
    with pytest.raises(TypeError, match="input x is written and shares memory with input v"):
        loaded(whole[:4], whole[3:5].reshape(6, 2)[:4])
    with pytest.raises(TypeError, match="shares memory"):
        loaded(whole.numpy()[:4], whole.numpy()[2:6, :2])


def test_state_is_written_in_place(tmp_path: Path) -> None:
    compiled = forge_ugc.compile(written.Counter().eval(), (torch.zeros(1, 4),), device="cpu")
    compiled.save(tmp_path / "m.forge")
    loaded, eager = forge_ugc.load(tmp_path / "m.forge", device="cpu"), written.Counter()
    assert "seen" in {which for _, _, kind, which in loaded._programs[0].in_place if kind == "state"}
    for i in range(5):
        x = seeded(1, 4, seed=i)
        assert np.array_equal(loaded(x if i % 2 else x.numpy()), eager(x))
    assert np.array_equal(loaded._state["seen"], eager.seen) and loaded._state["at"] == 5


# --- caches of transformers -------------------------------------------------------------------------------------------
LENGTH = 16


@pytest.fixture(scope="module")
def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def cache_of(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    cache.early_initialization(1, 4, 8, torch.float32, torch.device("cpu"))
    return cache


def test_static_cache(gpt2: Any, tmp_path: Path) -> None:
    """An argument of forward() as it is: the same object is handed back, and its tensors are written where they lie."""
    step = {"input_ids": torch.tensor([[3]]), "cache": cache_of(gpt2)}
    compiled = forge_ugc.compile(gpt2, (), dict(step), device="cpu")
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    assert len(loaded._programs[0].in_place) == 6  # keys, values and counters of both layers
    mine, eager = cache_of(gpt2), cache_of(gpt2)
    arrays = SimpleNamespace(  # without transformers: whatever has these attributes
        layers=[
            SimpleNamespace(
                keys=np.zeros((1, 4, LENGTH, 8), np.float32),
                values=np.zeros((1, 4, LENGTH, 8), np.float32),
                cumulative_length=np.zeros((), np.int64),
            )
            for _ in range(2)
        ]
    )
    keys = mine.layers[1].keys
    for token in (3, 9, 27):
        ids = torch.tensor([[token]])
        out, plain = loaded(input_ids=ids, cache=mine), loaded(input_ids=ids.numpy(), cache=arrays)
        with torch.no_grad():
            expected = gpt2(input_ids=ids, cache=eager)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-6, rtol=1e-4)
        assert np.array_equal(out.logits, plain.logits)
        assert out.cache is mine and plain.cache is arrays
    assert mine.layers[1].keys is keys and keys[:, :, 2].any() and not keys[:, :, 3].any()
    torch.testing.assert_close(keys, eager.layers[1].keys, atol=2e-6, rtol=1e-4)
    assert int(mine.layers[0].cumulative_length) == 3 == arrays.layers[0].cumulative_length
    del arrays.layers[1].values
    with pytest.raises(TypeError, match=r"there is no cache\.layers\[1\]\.values"):
        loaded(input_ids=ids.numpy(), cache=arrays)


def test_cache_that_grows(gpt2: Any, tmp_path: Path) -> None:
    step = {"input_ids": torch.tensor([[3]]), "cache": transformers.DynamicCache(config=gpt2.config)}
    compiled = forge_ugc.compile(gpt2, (), step, device="cpu")
    with pytest.raises(ArtefactError, match="a list, dict or cache"):
        compiled.save(tmp_path / "m.forge")
