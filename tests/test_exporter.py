"""Export format "forge" of transformers.exporters, beside its OpenVINO exporter: same outputs, same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import forge_ugc

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.exporters.auto", reason="transformers before 5.24 has no exporters")
from transformers.exporters.auto import AutoExportConfig, AutoHfExporter  # noqa: E402
from transformers.exporters.base import ExportedModel  # noqa: E402
from transformers.exporters.configs import OpenVINOConfig  # noqa: E402

from forge_ugc.integrations.transformers import ForgeConfig, ForgeExporter  # noqa: E402
from tests.architectures import tiny  # noqa: E402

LENGTH = 16  # of the static cache
PROMPT = torch.tensor([[5, 17, 42, 8, 77]])


def generate(exported, config, steps=8):
    """Greedy tokens by the components of a static export: what `generate` does, spelled out."""
    cache = transformers.StaticCache(config=config, max_cache_len=LENGTH)
    n = PROMPT.shape[1]
    prompt = dict(input_ids=PROMPT, position_ids=torch.arange(n)[None], cache=cache)
    out = exported.runners["prefill"](**prompt)
    tokens = [out.logits[:, -1:].argmax(-1)]
    for i in range(n, n + steps - 1):
        mask = (torch.arange(LENGTH) <= i)[None, None, None]
        step = dict(input_ids=tokens[-1], attention_mask=mask, position_ids=torch.tensor([[i]]), cache=out.cache)
        out = exported.runners["decode"](**step)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


@pytest.fixture(scope="module")
def llama():
    return tiny("Llama")[0]


@pytest.fixture(scope="module")
def exports(llama):
    """Forge's export and OpenVINO's."""
    static = transformers.GenerationConfig(cache_implementation="static", max_cache_len=LENGTH, do_sample=False)
    inputs = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    return [
        AutoHfExporter.from_config(c).export_for_generation(llama, dict(inputs), c, generation_config=static)
        for c in (ForgeConfig(), OpenVINOConfig(stateful=False))
    ]


def test_generation_beside_openvino(llama, exports):
    forge, openvino = exports
    assert forge.export_format == "forge" and list(forge.components) == list(openvino.components)
    expected = llama.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False)[:, PROMPT.shape[1] :]
    assert torch.equal(generate(forge, llama.config), expected)
    assert torch.equal(generate(openvino, llama.config), expected)
    assert forge.runners["prefill"].calls == 1 and forge.runners["decode"].calls == 7
    for component in forge.components.values():
        assert component.program.report["fallbacks"] == []


def test_cache_is_written_in_place(llama, exports):
    cache = transformers.StaticCache(config=llama.config, max_cache_len=LENGTH)
    out = exports[0].runners["prefill"](input_ids=PROMPT, position_ids=torch.arange(5)[None], cache=cache)
    keys = [layer.keys for layer in out.cache.layers]
    mask = (torch.arange(LENGTH) <= 5)[None, None, None]
    step = dict(input_ids=PROMPT[:, :1], attention_mask=mask, position_ids=torch.tensor([[5]]), cache=out.cache)
    after = exports[0].runners["decode"](**step)
    assert all(layer.keys is k and k[:, :, 5].any() for layer, k in zip(after.cache.layers, keys, strict=True))
    (plan,) = exports[0].components["decode"].program._plans.values()
    assert len(plan.in_place) >= 4 and not [v for v in plan.lowered.plan.user if v.index >= len(plan.out_types)]


def test_saved_generation_in_a_fresh_process(llama, exports, tmp_path):
    expected = llama.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False)[:, PROMPT.shape[1] :]
    exports[0].save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"prefill.forge", "decode.forge", "export.json", "config.json"}
    assert json.loads((tmp_path / "export.json").read_text())["export_format"] == "forge"
    code = """
        import sys
        import torch
        from transformers.exporters.base import ExportedModel
        import forge_ugc.integrations.transformers
        from tests.test_exporter import generate

        exported = ExportedModel.from_pretrained(sys.argv[1])
        tokens = generate(exported, exported.config)
        assert exported.runners["decode"].calls == 7
        assert type(exported.runners["decode"].program).__name__ == "LoadedModel"
        exported.save_pretrained(sys.argv[1])  # over itself
        assert torch.equal(generate(ExportedModel.from_pretrained(sys.argv[1], num_threads=1), exported.config), tokens)
        print(tokens.tolist())
    """
    run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected.tolist()


def check(exported, model, call, atol=2e-6, rtol=1e-4):
    with torch.no_grad():
        expected = model(**call)
    got = exported(**call)
    assert type(got) is type(expected) and list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=atol, rtol=rtol)


def test_encoder_beside_openvino():
    model, inputs = tiny("Bert")
    forge, openvino = (
        AutoHfExporter.from_config(c).export(model, dict(inputs), c) for c in (ForgeConfig(), OpenVINOConfig())
    )
    check(forge, model, inputs)
    check(openvino, model, inputs, atol=2e-2, rtol=2e-2)  # bf16 where the CPU has units for it
    assert forge.runners["model"].calls == 1 and forge.program.report["fallbacks"] == []
    emulated = forge.to("npu:emulate")  # another device: compiled again
    assert emulated.runners["model"].program.device.startswith("npu:emulate")
    with torch.no_grad():
        torch.testing.assert_close(emulated(**inputs)[0], model(**inputs)[0], atol=2e-2, rtol=2e-2)


def test_whisper(tmp_path):
    """Speech to text: convolutions over the sound, an encoder, a decoder that attends to it."""
    torch.manual_seed(0)
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes |= dict(encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16, max_target_positions=20)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    config = transformers.WhisperConfig(vocab_size=60, d_model=32, num_mel_bins=8, **sizes, **ids)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = dict(input_features=torch.randn(1, 8, 32), decoder_input_ids=torch.tensor([[3, 5, 6]]), use_cache=False)
    exported = AutoHfExporter.from_config(ForgeConfig()).export(model, dict(inputs), ForgeConfig())
    del inputs["use_cache"]  # fixed by the export
    assert exported.program.report["fallbacks"] == []
    exported.save_pretrained(tmp_path)
    loaded = ExportedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False)
    for runs in (exported, loaded):
        got = runs(**inputs)
        assert list(got) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=2e-6, rtol=1e-4)
    assert loaded.runners["model"].calls == 1


def test_dynamic_shapes(tmp_path):
    model, inputs = tiny("Bert")
    axes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=1, max=64)}
    config = ForgeConfig(dynamic_shapes=dict.fromkeys(inputs, axes))
    exported = AutoHfExporter.from_config(config).export(model, dict(inputs), config)
    calls = [inputs, {k: v[:1, :4] for k, v in inputs.items()}, {k: v[:1, :1] for k, v in inputs.items()}]
    for call in calls:
        check(exported, model, call)
    exported.save_pretrained(tmp_path)  # with the shapes that were called
    loaded = ExportedModel.from_pretrained(tmp_path)
    for call in calls:
        assert torch.equal(loaded(**call).last_hidden_state, exported(**call).last_hidden_state)
    assert exported.runners["model"].calls == 6 and loaded.runners["model"].calls == 3
    with pytest.raises(TypeError, match=r"input input_ids: expected i64\[2, 9\].*given i64\[1, 3\]"):
        loaded(**{k: v[:1, :3] for k, v in inputs.items()})


def test_weights_may_change_after_the_export(llama):
    model, inputs = tiny("Bert")
    exported = ForgeExporter().export(model, dict(inputs), {})
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(0.5)
        torch.testing.assert_close(exported(**inputs)[0], model(**inputs)[0], atol=2e-6, rtol=1e-4)


def test_config_round_trip():
    config = ForgeConfig(passes="dce,cse", device="cpu")
    assert AutoExportConfig.from_dict(config.to_dict()) == config
    assert isinstance(AutoHfExporter.from_config({"export_format": "forge"}), ForgeExporter)


class Sorts(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x)[1]


def test_errors(llama, exports):
    runner = exports[0].runners["prefill"]
    positions = torch.arange(5)[None]
    cache = transformers.StaticCache(config=llama.config, max_cache_len=LENGTH)
    with pytest.raises(TypeError, match="input 'cache' is missing"):
        runner(input_ids=PROMPT, position_ids=positions)
    with pytest.raises(TypeError, match="input cache: this DynamicCache has not the structure"):
        runner(input_ids=PROMPT, position_ids=positions, cache=transformers.DynamicCache())
    with pytest.raises(TypeError, match=r"not traced"):
        runner(input_ids=PROMPT, position_ids=positions, cache=cache, labels=PROMPT)
    with pytest.raises(TypeError, match=r"input input_ids: expected int64\[1, 5\].*given int64\[1, 3\]"):
        runner(input_ids=PROMPT[:, :3], position_ids=positions, cache=cache)
    with pytest.raises(TypeError, match="unexpected keyword"):
        exports[0].to(providers=["x"])
    with pytest.raises(forge_ugc.FallbackError, match="linalg"):
        ForgeExporter().export(Sorts(), {"x": torch.randn(3, 3)}, ForgeConfig(allow_fallbacks=False))
