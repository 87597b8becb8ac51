"""torch.compile(backend="forge") of transformers' models and of tests/cases: Forge ran, and the numbers are eager's."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import tokenizers
import transformers

from forge_ugc import FallbackWarning, last_reports
from forge_ugc.dynamo import forge
from tests import cases
from tests.architectures import tiny
from tests.compare import assert_same, clone_args, tensors

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
WIDTH = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=99, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Dynamo takes no graph of it: a loop around a break.
NO_GRAPH = {"c11_moe_nonzero"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def calls() -> int:
    return sum(graph.calls for graph in last_reports())


def assert_all_forge() -> None:
    assert last_reports()
    assert all(not graph.fallback and not graph.eager_calls for graph in last_reports()), last_reports()


def language_model(name: str):
    if name != "Lfm2":
        return tiny(name)[0]
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**WIDTH, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
    return transformers.Lfm2ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["GPT2", "Granite", "Qwen2", "Llama", "Lfm2"])
def test_language_models_of_any_size(name):
    model = language_model(name)
    compiled = torch.compile(model, backend=forge, fullgraph=True, dynamic=True)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    with torch.no_grad():
        for batch, length in ((2, 9), (3, 7), (2, 12)):
            ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))
            mask = (torch.arange(length) >= torch.tensor([[0]] + [[2]] * (batch - 1))).long()  # padded on the left
            before = calls()
            got = compiled(input_ids=ids, attention_mask=mask, use_cache=False)
            expected = model(input_ids=ids, attention_mask=mask, use_cache=False)
            assert type(got) is type(expected) and calls() == before + 1
            assert_same(got.logits[mask.bool()], expected.logits[mask.bool()], atol=2.1e-5)
    assert_all_forge()
    assert len(last_reports()) == 1
    assert last_reports()[0].report["weights"]["borrowed_bytes"] >= sum(weights.values())


@pytest.mark.parametrize("name", ["Bert", "ViT"])
def test_encoders(name):
    model, kwargs = tiny(name)
    compiled = torch.compile(model, backend=forge)
    with torch.no_grad():
        for _ in range(2):
            assert_same(tensors(compiled(**kwargs)), tensors(model(**kwargs)), atol=2.1e-5)
    assert_all_forge()
    assert calls() == 2


def test_generate_with_a_growing_cache():
    model = language_model("Llama")
    ids = torch.randint(3, 90, (1, 5), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.forward = torch.compile(model.forward, backend=forge)
    with pytest.warns(FallbackWarning, match="come repeatedly"):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    first = calls()
    assert first >= 16  # prefill, and the sizes that are kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    assert calls() >= first + 16


def test_static_cache():
    model = language_model("Llama")
    step = torch.compile(model, backend=forge, fullgraph=True)
    ids = torch.randint(3, 90, (1, 6), generator=torch.Generator().manual_seed(0))
    tokens = []
    for run in (model, step):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        found, token = [], ids
        with torch.no_grad():
            for _ in range(6):
                past = cache.get_seq_length()
                positions = torch.arange(int(past), int(past) + token.shape[1])
                logits = run(token, past_key_values=cache, position_ids=positions[None], use_cache=True).logits
                token = logits[:, -1:].argmax(-1)
                found.append(int(token))
        tokens.append(found)
    assert tokens[0] == tokens[1]
    assert calls() == 6
    assert_all_forge()


def test_pipeline():
    words = ["[PAD]", "[UNK]", "the", "model", "runs", "on", "a", "small", "machine"]
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=len(words)
    )
    model = transformers.BertForSequenceClassification(config).eval()
    texts = ["the model runs", "on a small machine", "a model", "the small model runs on the small machine"]
    expected = [transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)(text) for text in texts]
    model.forward = torch.compile(model.forward, backend=forge)
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for text, (best,) in zip(texts, expected, strict=True):
        (got,) = classify(text)
        assert got["label"] == best["label"] and got["score"] == pytest.approx(best["score"], abs=1e-5)
    assert len(classify(texts, batch_size=2)) == 4
    assert calls() == 6
    assert_all_forge()


@pytest.mark.filterwarnings("ignore::forge_ugc.FallbackWarning")
@pytest.mark.parametrize("name", sorted(m.name for m in pkgutil.iter_modules(cases.__path__)))
def test_cases(name):
    module = importlib.import_module(f"tests.cases.{name}")
    model, *example = module.case()
    twin, _, _ = module.case()
    more = module.more() if hasattr(module, "more") else []
    compiled = torch.compile(model, backend=forge)
    with torch.no_grad():
        for seed, (args, kwargs) in enumerate([example, *more, example]):
            ours, theirs = clone_args((args, kwargs)), clone_args((args, kwargs))
            torch.manual_seed(seed)
            expected = twin(*theirs[0], **theirs[1])
            torch.manual_seed(seed)
            assert_same(compiled(*ours[0], **ours[1]), expected)
            assert_same(ours, theirs)
    if isinstance(model, torch.nn.Module):
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    if name in NO_GRAPH:
        assert not last_reports()
    else:
        assert_all_forge()
        assert calls() >= 2 + len(more)
