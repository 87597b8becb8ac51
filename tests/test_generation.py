"""Generation with a static cache: same tokens as eager, through Forge, and the cache stays where it is."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import forge_ugc
from forge_ugc.dynamo import forge

transformers = pytest.importorskip("transformers")
from forge_ugc.integrations.transformers import compile_config  # noqa: E402

NAMES = ["GPT2", "Granite", "Qwen2", "Llama", "Lfm2"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", forge_ugc.FallbackWarning)
        yield
    torch._dynamo.reset()


def model_of(name, **more):
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=99, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    if name == "Lfm2":
        sizes.update(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    if name == "GPT2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=256)
        sizes.update(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    head = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**sizes)).eval()
    with torch.no_grad():  # so that the choice of a token is no matter of rounding
        model.get_output_embeddings().weight.mul_(20)
    return model


def prompts(lengths):
    """Token numbers, padded on the left, and the mask."""
    longest, g = max(lengths), torch.Generator().manual_seed(sum(lengths))
    ids, mask = (
        torch.zeros(len(lengths), longest, dtype=torch.int64),
        torch.zeros(len(lengths), longest, dtype=torch.int64),
    )
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, 90, (length,), generator=g)
        mask[row, longest - length :] = 1
    return dict(input_ids=ids, attention_mask=mask)


def generate(model, inputs, steps, **kwargs):
    return model.generate(
        **inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, cache_implementation="static", **kwargs
    )


def forge_calls():
    """Calls of Forge, after a look that torch has not run any."""
    graphs = forge_ugc.last_reports()
    assert all(g.fallback == "" and g.eager_calls == 0 for g in graphs)
    return sum(g.calls for g in graphs)


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    model = model_of(name)
    before = 0
    for lengths in ([5], [1], [11], [7, 3], [2, 9, 9]):
        steps = 24 if lengths == [5] else 6
        inputs = prompts(lengths)
        expected = generate(model, inputs, steps)
        assert forge_calls() == before
        got = generate(model, inputs, steps, compile_config=compile_config())
        assert torch.equal(got, expected)
        assert forge_calls() == before + steps - 1  # all but the prompt
        before = forge_calls()


@pytest.mark.parametrize("window", [6, 64])
def test_sliding_window(window):
    """Its cache counts its length in Python, too: that must not make a program of each step."""
    model, inputs, steps = model_of("Mistral", sliding_window=window), prompts([9, 4]), 24
    expected = generate(model, inputs, steps)
    assert torch.equal(generate(model, inputs, steps, compile_config=compile_config()), expected)
    assert forge_calls() == steps - 1
    assert sum(len(graph.reports) for graph in forge_ugc.last_reports()) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generate_128_tokens(name):
    model, inputs, steps = model_of(name), prompts([5]), 128
    expected = generate(model, inputs, steps)
    assert torch.equal(generate(model, inputs, steps, compile_config=compile_config()), expected)
    assert forge_calls() == steps - 1


@pytest.mark.parametrize("name", NAMES)
def test_loop_over_a_static_cache(name):
    model = model_of(name)
    step = torch.compile(model, backend=forge, fullgraph=name != "Lfm2")
    found = []
    for run in (model, step):
        inputs, tokens = prompts([6, 4]), []
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        token, addresses = inputs["input_ids"], set()
        with torch.no_grad():
            for _ in range(8):
                out = (run if tokens else model)(  # the prompt eagerly: it makes the cache
                    token, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
                token = out.logits[:, -1:].argmax(-1)
                tokens.append(token)
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                positions = positions[:, -1:] + 1
                keys = [layer.keys for layer in cache.layers if hasattr(layer, "keys")]
                addresses.add(tuple(k.data_ptr() for k in keys))
        found.append((torch.cat(tokens, 1), [k.clone() for k in keys]))
        assert len(addresses) == 1
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)
    assert forge_calls() == 7


@pytest.mark.parametrize("name", NAMES)
def test_cache_is_written_in_place(name, monkeypatch):
    """All of the cache but its counters: no step computes a new one and copies it."""
    from forge_ugc import dynamo

    made, compile = [], dynamo.compile
    monkeypatch.setattr(dynamo, "compile", lambda *a, **k: made.append(compile(*a, **k)) or made[-1])
    generate(model_of(name), prompts([5]), 4, compile_config=compile_config())
    assert forge_calls() == 3
    (compiled,) = [c for c in made if c._kept().lowered.plan.writes]
    plan = compiled._kept()
    sizes = {where: shape for (where, _), (shape, _) in zip(plan.sources, plan.lowered.input_types, strict=True)}
    copied = {where for where, _ in plan.lowered.plan.writes} - {where for _, _, where in plan.in_place}
    assert all(len(sizes[where]) <= 1 for where in copied)
    assert sum(len(sizes[where]) > 1 for _, _, where in plan.in_place) == (4 if name != "Lfm2" else 2 + 2)


def test_options_reach_the_compiler():
    model = model_of("Llama")
    generate(model, prompts([4]), 3, compile_config=compile_config(passes="dce", fullgraph=True))
    (graph,) = forge_ugc.last_reports()
    assert {p["name"] for p in graph.report["passes"]} == {"dce"}
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no option 'alfa'"):
        generate(model, prompts([4]), 3, compile_config=compile_config(alfa=0.5))


def test_same_config_compiles_once():
    model = model_of("GPT2")
    for _ in range(3):
        generate(model, prompts([4]), 3, compile_config=compile_config())
    assert len(forge_ugc.last_reports()) == 1 and forge_calls() == 6
    assert compile_config() == compile_config() and compile_config().to_dict()["backend"] == "forge"


def test_growing_cache_stays_eager():
    """Only caches of a fixed size are compiled for, as compile_config says."""
    model = model_of("GPT2")
    model.generate(**prompts([4]), max_new_tokens=3, do_sample=False, compile_config=compile_config())
    assert forge_ugc.last_reports() == []


@pytest.mark.parametrize("name", ["GPT2", "Qwen2", "Lfm2"])
def test_prompt_in_chunks(name):
    """prefill_chunk_size makes transformers compile the prompt's steps too."""
    model, steps, before = model_of(name), 4, 0
    for lengths, chunks in ([9], 3), ([8, 5], 2):
        inputs = prompts(lengths)
        expected = generate(model, inputs, steps)
        got = generate(model, inputs, steps, compile_config=compile_config(), prefill_chunk_size=4)
        assert torch.equal(got, expected)
        assert forge_calls() == before + steps - 1 + chunks
        before = forge_calls()


def test_head_of_the_last_position_only():
    """logits_to_keep=1, as generate() has it: logits of one row a sequence, whatever the length of the prompt."""
    model = model_of("Llama")
    inputs = prompts([6, 4])
    step = torch.compile(model, backend=forge, fullgraph=True)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    kwargs = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.no_grad():
        model(**inputs, **kwargs)  # makes the cache
        cache.reset()
        expected = model(**inputs, **kwargs).logits
        cache.reset()
        got = step(**inputs, **kwargs).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    (graph,) = forge_ugc.last_reports()
    assert forge_calls() == 1 and got.shape == (2, 1, 99) and graph.report is not None


@torch.no_grad()
def test_an_encoder_and_a_decoder_compile_as_they_are_called():
    sizes = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    first = dict(input_ids=torch.randint(3, 90, (2, 7)), decoder_input_ids=torch.randint(3, 90, (2, 4)))
    forge, expected = forge_ugc.compile(model, first, device="cpu", strict=True), model(**first)
    given = forge(**first)
    torch.testing.assert_close(given.logits, expected.logits, atol=2e-5, rtol=1e-4)

    def step(cache):
        return dict(encoder_outputs=(expected[-1],), decoder_input_ids=torch.tensor([[5], [6]]), cache=cache)

    forge = forge_ugc.compile(model, step(copy.deepcopy(given.cache)), device="cpu", strict=True)
    torch.testing.assert_close(
        forge(**step(given.cache)).logits, model(**step(expected.cache)).logits, atol=2e-5, rtol=1e-4
    )
    assert given.cache.get_seq_length() == expected.cache.get_seq_length() == 5


@pytest.mark.parametrize("capture", ["auto", "export"])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
def test_a_returned_cache_holds_the_results_themselves(name, capture):
    # Mistral's layers slide: they keep some of the keys, and count all of them
    model = model_of(name, **({"sliding_window": 5} if name == "Mistral" else {}))
    ids = prompts([9])["input_ids"]
    compiled = forge_ugc.compile(model, (ids,), device="cpu", capture=capture)
    outs = []
    for _ in range(3):
        with torch.profiler.profile() as seen:
            outs.append(compiled(ids))
        assert "aten::cat" not in {event.key for event in seen.key_averages()}
    with torch.no_grad():
        want = model(ids)
    kept = [[t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)] for out in (*outs, want)]
    for tensors in kept[:-1]:
        torch.testing.assert_close(tensors, kept[-1], atol=2e-5, rtol=2e-5)
    assert [layer.get_seq_length() for layer in outs[0].past_key_values.layers] == [9, 9]
    assert len({t.untyped_storage().data_ptr() for tensors in kept[:-1] for t in tensors}) == 3 * len(kept[0])
    with torch.no_grad():  # it grows as eager's does
        after = [model(ids[:, :1], past_key_values=out.past_key_values).logits for out in (outs[0], want)]
    torch.testing.assert_close(*after, atol=2e-4, rtol=2e-4)


def test_a_cache_that_grows_holds_the_results_themselves():
    model = model_of("Llama")
    ids = prompts([6])["input_ids"]
    with torch.no_grad():
        caches = [model(ids).past_key_values for _ in range(3)]
    step = dict(use_cache=True, logits_to_keep=1)
    compiled = forge_ugc.compile(model, (ids[:, :1],), {"past_key_values": caches[0], **step}, device="cpu")
    compiled(ids[:, :1], past_key_values=caches[0], **step)
    with torch.profiler.profile() as seen:
        got = compiled(ids[:, :1], past_key_values=caches[1], **step).logits
    assert "aten::cat" not in {event.key for event in seen.key_averages()}
    with torch.no_grad():
        want = model(ids[:, :1], past_key_values=caches[2], **step).logits
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    for mine, eager in zip(caches[1].layers, caches[2].layers, strict=True):
        torch.testing.assert_close((mine.keys, mine.values), (eager.keys, eager.values), atol=2e-5, rtol=2e-5)
