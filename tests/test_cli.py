"""The command line: each command on each kind of model, and what it refuses."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import forge_ugc
from forge_ugc import cli
from tests.architectures import tiny

ROOT = Path(__file__).resolve().parent.parent
GPT2 = ROOT / "examples" / "small_gpt2"


def forge(*arguments: Any) -> int:
    return cli.main([str(a) for a in arguments])


def forge_json(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    assert forge(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def eager_logits(ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(GPT2).eval()(ids).logits


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "m.forge"
    assert forge("compile", GPT2, "-o", path, "--seq", 8) == 0
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, pair: Any, *, scale: torch.Tensor) -> Any:
            return {"y": self.linear(pair["a"]) * scale, "rest": [pair["b"] + 1]}

    path = tmp_path_factory.mktemp("cli") / "pair.pt2"
    args = ({"a": torch.randn(2, 4), "b": torch.arange(3)},)
    torch.export.save(torch.export.export(Pair().eval(), args, {"scale": torch.tensor(2.0)}), path)
    return path


# --- compile ----------------------------------------------------------------------------------------------------------


def test_compile(artefact: Path) -> None:
    ids = torch.randint(0, 2048, (1, 8))
    torch.testing.assert_close(forge_ugc.load(artefact)(ids).logits, eager_logits(ids), rtol=1e-5, atol=2.1e-5)


def test_compile_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = forge_json(capsys, "compile", GPT2, "--seq", 4, "--batch", 2, "--passes", "dce,fold", "--alpha", 0.5)
    assert found["artefact"] == "small_gpt2.forge" and (tmp_path / "small_gpt2.forge").stat().st_size == found["bytes"]
    report = found["report"]
    assert [p["name"] for p in report["passes"]] == ["dce", "fold"] and report["alpha"] == 0.5
    assert report["fallbacks"] == [] and report["device"] == found["device"]


def test_compile_for_an_npu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = tmp_path / "graphs"
    arguments = ("compile", GPT2, "--seq", 4, "-o", tmp_path / "m.forge", "--device", "npu:plan", "--openvino-ir")
    assert forge(*arguments, graphs) == 0
    assert "wrote the NPU's graphs" in capsys.readouterr().out
    assert (graphs / "manifest.json").exists() and list(graphs.glob("*.xml"))


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_text(artefact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "And God said"
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(GPT2)(text)["input_ids"]])
    expected = eager_logits(ids)[0, -1]
    found = forge_json(capsys, "run", GPT2, "--text", text, "--check", "--top", 3)
    assert [row["id"] for row in found["top"]] == expected.argsort(descending=True)[:3].tolist()
    assert abs(found["top"][0]["probability"] - expected.softmax(-1).max().item()) < 1e-5
    assert found["check"]["logits"]["close"] and found["outputs"]["logits"]["shape"] == [1, ids.shape[1], 2048]
    # The artefact has 8 places: the text is padded, and its last token is the one that counts.
    again = forge_json(capsys, "run", artefact, "--text", text, "--tokenizer", GPT2, "--top", 3)
    assert [row["id"] for row in again["top"]] == [row["id"] for row in found["top"]] and "padded" in again["notes"][0]
    assert forge("run", artefact, "--text", text, "--tokenizer", GPT2, "-o", tmp_path / "y.npz") == 0
    assert "likely" in capsys.readouterr().out
    with np.load(tmp_path / "y.npz") as y:
        np.testing.assert_allclose(y["logits"][0, ids.shape[1] - 1], expected, atol=2.1e-5)


def test_run_inputs(artefact: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(0, 2048, (1, 8))
    np.savez(tmp_path / "x.npz", input_ids=ids.numpy())
    np.save(tmp_path / "x.npy", ids.numpy())
    for model, name in ((artefact, "x.npz"), (artefact, "x.npy"), (GPT2, "x.npz"), (GPT2, "x.npy")):
        assert forge("run", model, "--inputs", tmp_path / name, "-o", tmp_path / "y.npz") == 0
        with np.load(tmp_path / "y.npz") as y:
            np.testing.assert_allclose(y["logits"], eager_logits(ids), atol=2.1e-5)
    a, b = np.ones((2, 4), np.float32), np.arange(3)
    np.savez(tmp_path / "pair.npz", **{"args[0]['a']": a, "args[0]['b']": b, "scale": np.float32(3)})
    assert forge("run", exported, "--inputs", tmp_path / "pair.npz", "--check", "-o", tmp_path / "z.npz") == 0
    program = torch.export.load(exported).module()
    expected = program({"a": torch.tensor(a), "b": torch.tensor(b)}, scale=torch.tensor(3.0))
    with np.load(tmp_path / "z.npz") as z:
        np.testing.assert_allclose(z["y"], expected["y"].detach(), rtol=1e-5, atol=1e-6)
        assert np.array_equal(z["rest.0"], b + 1) and len(z.files) == 2
    # What it was compiled to takes the same inputs.
    assert forge("compile", exported, "-o", tmp_path / "pair.forge") == 0
    assert forge("run", tmp_path / "pair.forge", "--inputs", tmp_path / "pair.npz", "-o", tmp_path / "w.npz") == 0
    with np.load(tmp_path / "w.npz") as w, np.load(tmp_path / "z.npz") as z:
        np.testing.assert_allclose(w["y"], z["y"], rtol=1e-6)


def test_artefacts_of_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bfloat16 is shown as numbers, caches are made up, a file may have any name."""

    class Layer:
        def __init__(self) -> None:
            self.keys, self.values = torch.zeros(2), torch.ones(2)

    class Cache:
        def __init__(self) -> None:
            self.layers = [Layer(), Layer()]

    def flatten(cache: Cache) -> Any:
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        layers = [{"_t": "obj", "s": {n: {"_t": "tensor", "i": i}}} for i, n in enumerate(("keys", "values") * 2)]
        merged = [{"_t": "obj", "s": {**layers[i]["s"], **layers[i + 1]["s"]}} for i in (0, 2)]
        return tensors, {"_t": "obj", "s": {"layers": merged}}  # as transformers describes its own

    def unflatten(tensors: Any, context: Any) -> Cache:
        cache = Cache()
        for i, t in enumerate(tensors):
            setattr(cache.layers[i // 2], ("keys", "values")[i % 2], t)
        return cache

    torch.utils._pytree.register_pytree_node(Cache, flatten, unflatten)

    def function(x: torch.Tensor, cache: Cache) -> Any:
        return {"y": [x * 0 + 1.5], "z": x.max(0)}, cache.layers[1].values + x.float()

    # of the cache's four tensors forward() reads one
    forge_ugc.compile(function, (torch.ones(2, dtype=torch.bfloat16), Cache()), device="cpu").save(tmp_path / "model")
    assert forge("run", tmp_path / "model", "-o", tmp_path / "y.npz") == 0
    with np.load(tmp_path / "y.npz") as y:
        assert y["0.y.0"].tolist() == [1.5, 1.5] and y["0.z.values"].dtype == np.float32 and len(y.files) == 4
    assert forge("bench", tmp_path / "model", "--calls", 2, "--warmup", 1) == 0
    forge_ugc.compile(lambda x, unread: x + 1, (torch.ones(2), torch.ones(3)), device="cpu").save(tmp_path / "m.forge")
    np.savez(tmp_path / "x.npz", x=np.ones(2, np.float32), unread=np.ones(3, np.float32))
    assert forge("run", tmp_path / "m.forge") == forge("run", tmp_path / "m.forge", "--inputs", tmp_path / "x.npz") == 0


def test_random_inputs_repeat(tmp_path: Path) -> None:
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        assert forge("run", GPT2, "--seq", 4, "--seed", seed, "-o", tmp_path / f"{name}.npz") == 0
    a, b, c = (np.load(tmp_path / f"{name}.npz")["logits"] for name in "abc")
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize("name", ["Bert", "ViT", "Llama", "T5", "Whisper", "CLIP", "labels", "Roberta"])
def test_architectures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    wide = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=99)
    small = dict(d_model=16, num_heads=2, d_kv=8, d_ff=16, num_layers=1, vocab_size=50, decoder_start_token_id=0)
    whisper = dict(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=50, num_mel_bins=8, max_source_positions=12,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    width = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    clip = dict(
        text_config=dict(**width, vocab_size=50, max_position_embeddings=16, eos_token_id=49, bos_token_id=1),
        vision_config=dict(**width, image_size=16, patch_size=8), projection_dim=8,
    )  # fmt: skip
    made = {
        "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**small)),
        "Whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**whisper)),
        "labels": lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(**wide, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
        ),
        # positions begin after the padding's: there are fewer than the default length
        "Roberta": lambda: transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(**wide, max_position_embeddings=66)
        ),
        "CLIP": lambda: transformers.CLIPModel(transformers.CLIPConfig(**clip)),
    }
    model = made[name]() if name in made else tiny(name)[0]
    model.save_pretrained(tmp_path / "model")
    length = [] if name in ("ViT", "Whisper", "Roberta") else ["--seq", 7]
    found = forge_json(capsys, "run", tmp_path / "model", "--check", *length)
    assert found["check"] and all(row["close"] for row in found["check"].values())
    assert name != "labels" or {row["text"] for row in found["top"]} == {"good", "bad"}


@pytest.mark.parametrize(
    "options", ["--dtype bfloat16", "--device npu:emulate", "--device npu:emulate --precision w8a16"]
)
def test_check_knows_the_precision(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("Llama")[0].save_pretrained(tmp_path / "model")
    found = forge_json(capsys, "run", tmp_path / "model", "--seq", 7, "--check", *options.split())
    row = found["check"]["logits"]
    assert row["close"] and 1e-3 < row["allowed"] and 0 < row["max_abs"]


def test_check_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 where Forge and eager differ."""
    inner = cli.named_outputs
    calls: list[int] = []

    def shifted(value: Any, *kinds: Any) -> dict[str, Any]:
        calls.append(1)
        return {key: array + len(calls) for key, array in inner(value, *kinds).items()}

    monkeypatch.setattr(cli, "named_outputs", shifted)
    assert forge("run", GPT2, "--seq", 4, "--check") == 1
    assert re.search(r"logits +1 .*NO", capsys.readouterr().out)


# --- bench, report ----------------------------------------------------------------------------------------------------


def test_bench(artefact: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (GPT2, exported):
        length = ["--seq", 4] if model is GPT2 else []
        found = forge_json(capsys, "bench", model, "--calls", 3, "--warmup", 1, *length)
        assert set(found["times_ms"]) == {"forge", "eager"} and found["threads"] >= 1 and found["cpu"]
        for row in found["times_ms"].values():
            assert 0 < row["min"] <= row["median"] <= row["p90"] <= row["p99"] <= row["max"]
    assert "eager" not in forge_json(capsys, "bench", exported, "--calls", 2, "--no-eager")["times_ms"]
    assert forge("bench", artefact, "--calls", 3, "--threads", 1) == 0
    out = capsys.readouterr().out
    assert "input_ids int64[1, 8]" in out and "1 threads" in out and "P99" in out and "eager" not in out


def test_bench_profile(artefact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert forge("bench", GPT2, "--seq", 4, "--calls", 2, "--no-eager", "--profile") == 0
    out = capsys.readouterr().out
    assert "attention" in out and "median of 2" in out and "modeling_gpt2.py" in out
    found = forge_json(capsys, "bench", artefact, "--calls", 2, "--trace", tmp_path / "t.json")
    assert found["profile"]["calls"] == 2 and found["profile"]["devices"][0]["name"] == "cpu"
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_report(artefact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("report", GPT2, "--seq", 4) == 0
    assert "operator_fusion" in capsys.readouterr().out
    assert forge("report", GPT2, "--seq", 4, "--device", "npu:plan", "--markdown") == 0
    assert "| npu | 1 segments" in capsys.readouterr().out
    found = forge_json(capsys, "report", artefact)
    assert found["capture"] == "artefact" and found["instructions"]["linear"] > 0 and found["passes"] == []
    assert forge("report", artefact) == 0
    assert "an artefact of GPT2LMHeadModel" in capsys.readouterr().out


def test_without_torch(artefact: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
from forge_ugc.cli import main
for arguments in (["run"], ["bench", "--calls", "2", "--profile"], ["report"], ["run", "--json"]):
    assert main([*arguments[:1], sys.argv[1], *arguments[1:]]) == 0, arguments
assert main(["doctor", "--json"]) in (0, 1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(artefact)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals(artefact: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    for name in ("broken.pt2", "broken.forge", "other.onnx", "broken.npz"):
        (tmp_path / name).write_bytes(b"nothing")
    np.savez(tmp_path / "odd.npz", other=np.zeros(3))
    cases: list[tuple[list[Any], str]] = [
        (["run", tmp_path / "nowhere"], "no such file or folder"),
        (["run", tmp_path / "empty"], "no config.json"),
        (["run", tmp_path / "broken"], "model_type"),
        (["run", tmp_path / "broken.pt2"], "torch.export.load cannot read it"),
        (["run", tmp_path / "broken.forge"], "not an artefact"),
        (["run", tmp_path / "other.onnx"], "not a checkpoint folder"),
        (["run", artefact, "--inputs", tmp_path / "broken.npz"], "not a .npz or .npy file"),
        (["run", artefact, "--inputs", tmp_path / "object.npy"], "not a .npz or .npy file"),
        (["run", artefact, "--inputs", tmp_path / "nowhere.npz"], "nowhere.npz: No such file"),
        (["run", artefact, "--threads", 99999], "num_threads must be from 1 to 1024"),
        (["run", artefact, "--inputs", tmp_path / "odd.npz"], "the model's inputs are input_ids"),
        (["run", GPT2, "--inputs", tmp_path / "odd.npz"], "has no input 'other'"),
        (["run", artefact, "--text", "x"], "--tokenizer"),
        (["run", artefact, "--text", "word " * 90, "--tokenizer", GPT2], "the length is fixed to 8"),
        (["run", exported, "--text", "x"], "--text needs"),
        (["run", artefact, "--check"], "no eager model"),
        (["run", artefact, "--seq", 4], "--seq: an artefact is compiled already"),
        (["run", exported, "--class", "GPT2Model"], "--class: an exported program"),
        (["run", GPT2, "--class", "NoSuchModel"], "no model class 'NoSuchModel'"),
        (["compile", artefact], "compiled already"),
        (["compile", GPT2, "-o", tmp_path / "no" / "m.forge"], "no such folder"),
        (["compile", GPT2, "--seq", 4, "--device", "cpu", "--precision", "fp16"], "ValueError: precision='fp16'"),
        (["report", GPT2, "--seq", 4, "--device", "npu:plan:npu1"], "unknown NPU target"),
        (["run", GPT2, "--seq", 4, "--device", "npu:plan"], "only the plan exists"),
        (["compile", GPT2, "--seq", 129], "129 tokens, and GPT2LMHeadModel has 128 positions"),
    ]
    for arguments, expected in cases:
        assert forge(*arguments) == 1, arguments
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1 and expected in lines[0] and not out and "pickle" not in err, (arguments, err)
    assert forge("run", tmp_path / "nowhere", "--json") == 1
    assert "no such file" in json.loads(capsys.readouterr().out)["error"]
    with pytest.raises(Exception, match="no such file"):
        forge("run", tmp_path / "nowhere", "--traceback")


@pytest.mark.parametrize(
    "arguments",
    ["", "run", "run x --device gpu", "run x --batch 0", "run x --alpha 2", "bench x --calls many",
     "compile x --passes dce,nothing", "run x --text a --inputs b", "run x --precision int3", "paint x"],
)  # fmt: skip
def test_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "usage:" in said
    assert "--device" not in arguments or "unknown device 'gpu'; there are auto, cpu, npu" in said


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example in the help is a command line that parses."""
    examples = 0
    for command in ("", "compile", "run", "bench", "report", "doctor"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"] if command else ["--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "exit status" in text or command not in ("", "doctor")
        for line in re.findall(r"^  python -m forge_ugc (.*)$", text, re.M):
            words = shlex.split(re.split(r"   +| \| ", line)[0])
            options = cli.make_parser().parse_args(words)
            assert options.run
            examples += 1
    assert examples > 15


def test_console_script() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r'^forge-ugc = "([\w.]+):(\w+)"$', text, re.M)
    assert match and getattr(importlib.import_module(match[1]), match[2]) is cli.main
