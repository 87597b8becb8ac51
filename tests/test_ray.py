"""Ray Data: an actor pool on a local cluster of two workers, with a compiled model that came by pickle."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import forge_ugc

ray = pytest.importorskip("ray", reason="pip install 'ray[data]'; it has no wheel for each Python")
pytest.importorskip("tokenizers")
EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")
ROWS, LENGTH = 4, 8


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(64, 16)
        self.out = torch.nn.Linear(16, 8)

    def forward(self, ids, mask):
        keep = mask[:, :, None].to(torch.float32)
        return self.out((self.words(ids) * keep).sum(1) / keep.sum(1).clamp(min=1))


def tokenizer():
    """Letters as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {t: i for i, t in enumerate(["[PAD]", "[UNK]", *map(chr, range(97, 123))])}
    made = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made.to_str()


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("ray_embed")
    for name in ("ray_embed", "embed"):
        sys.modules.pop(name, None)


@pytest.fixture
def cluster(monkeypatch, tmp_path_factory):
    for name in ("RAY_ADDRESS", "RAY_RUNTIME_ENV"):
        monkeypatch.delenv(name, raising=False)
    # workers find the example as this process does; each computes on one thread
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([EXAMPLES, str(Path(EXAMPLES).parent)]))
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=80 << 20
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()
    assert not ray.is_initialized()


@pytest.mark.timeout(300)
def test_map_batches(example, cluster):
    torch.manual_seed(0)
    model = Mean().eval()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    fast = forge_ugc.compile(model, (ids, ids), num_threads=1, strict=True)
    assert type(pickle.loads(pickle.dumps(fast))) is forge_ugc.LoadedModel
    texts = ["".join(chr(97 + (3 * i + 5 * j) % 26) for j in range(1 + i % 11)) for i in range(42)]
    rows = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=6)
    found = example.embed(rows, fast, tokenizer(), ROWS, LENGTH, workers=2).take_all()
    assert sorted(r["text"] for r in found) == sorted(texts)
    plain = example.Embedder(lambda ids, mask: model(torch.tensor(ids), torch.tensor(mask)).detach().numpy(),
                             tokenizer(), ROWS, LENGTH)  # fmt: skip
    expected = np.concatenate([plain({"text": np.array(texts[i : i + 4])})["embedding"] for i in range(0, 42, 4)])
    by_text = dict(zip(texts, expected, strict=True))
    for row in found:
        np.testing.assert_allclose(row["embedding"], by_text[row["text"]], atol=1e-6)
    calls = [(r["by"], r["call"]) for r in found]  # of the compiled model, in each actor
    assert max(calls.count(c) for c in set(calls)) <= ROWS and len(set(calls)) >= len(texts) / ROWS
    workers = {r["by"] for r in found}
    assert 1 <= len(workers) <= 2 and str(os.getpid()) not in {w.rpartition(":")[2] for w in workers}
