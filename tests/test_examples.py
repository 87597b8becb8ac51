"""Examples for text, images and sound: they run through Forge without fallbacks, and give what eager gives."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")


@pytest.fixture
def example(monkeypatch):
    """The module of an example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = ("embed", "classify_image", "transcribe")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def calls(monkeypatch):
    """How often compiled models were called."""
    from forge_ugc.compiled import CompiledModel

    made, call = [], CompiledModel.__call__
    monkeypatch.setattr(CompiledModel, "__call__", lambda self, *a, **k: made.append(self) or call(self, *a, **k))
    return made


def error(output):
    """What an example says of itself: how far from eager."""
    (found,) = re.findall(r"; (\S+) from eager; fallbacks: none\]", output)
    return float(found)


@pytest.mark.parametrize("options", [[], ["--pooling", "cls"], ["--rerank"]])
def test_embed(example, calls, capsys, options):
    assert example("embed").main(options) == 0
    out = capsys.readouterr().out
    assert error(out) < 5e-6 and len(calls) == (1 if "--rerank" in options else 2)
    order = [line.split("  ")[-1] for line in out.splitlines() if not line.startswith("[")]
    assert len(order) == 5
    if "random" not in out:
        assert {*order[:2]} == {*example("embed").TEXTS[:2]}


@pytest.mark.parametrize("rerank", [False, True])
def test_embed_a_folder(example, calls, capsys, tmp_path, rerank):
    module = example("embed")
    tokenizer, encoder = module.random_encoder()
    tokenizer.save_pretrained(tmp_path)
    if rerank:
        encoder.config.num_labels = 1
        encoder = transformers.BertForSequenceClassification(encoder.config)
    encoder.save_pretrained(tmp_path)
    texts = tmp_path / "texts"
    texts.write_text("one\n\nand another\n")
    assert module.main([str(tmp_path), "--texts", str(texts), *(["--rerank"] if rerank else ["--pooling", "cls"])]) == 0
    out = capsys.readouterr().out
    assert error(out) < 5e-6 and "random" not in out and len(out.splitlines()) == 3 and calls


def test_classify_image(example, calls, capsys, tmp_path):
    module = example("classify_image")
    assert module.main([]) == 0
    out = capsys.readouterr().out
    assert error(out) < 5e-6 and len(calls) == 1 and len(out.splitlines()) == 7
    model = module.random_model()
    model.save_pretrained(tmp_path)
    assert module.main([str(tmp_path)]) == 0
    again = capsys.readouterr().out
    assert "random" not in again and again.splitlines()[0] == out.splitlines()[1]


def test_classify_photo(example, calls, capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    module = example("classify_image")
    module.random_model().save_pretrained(tmp_path)
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    image.linear_gradient("L").save(tmp_path / "photo.png")
    assert module.main([str(tmp_path), str(tmp_path / "photo.png")]) == 0
    assert error(capsys.readouterr().out) < 5e-6 and len(calls) == 1


def test_transcribe(example, capsys):
    torch._dynamo.reset()
    assert example("transcribe").main(["--tokens", "12", "--compare"]) == 0
    out = capsys.readouterr().out
    # the encoder, and a step a token but for the first, which comes with the prompt
    assert re.search(r"\[(\d+) tokens; (\d+) calls of Forge; fallbacks: none\]\n\[the same tokens as eager\]", out)
    tokens, ran = map(int, re.findall(r"\[(\d+) tokens; (\d+) calls", out)[0])
    assert tokens >= 4 and tokens - 1 <= ran <= tokens + 1
    torch._dynamo.reset()
