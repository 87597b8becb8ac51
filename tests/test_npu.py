"""Programs on an NPU: the software NPU behind the distribution's Level Zero loader stands in for it."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import forge_ugc
from forge_ugc import _core, npu
from forge_ugc.cli import main
from forge_ugc.testing import SoftwareNpu, software_npu
from tests.compare import assert_same, max_abs
from tests.models.families import FAMILIES, build, input_ids
from tests.npu_stack import EXACT, ROOT, Stack, X, compile_npu, device, needed, stack  # noqa: F401 (fixtures)
from tests.test_random_graphs import COLUMNS, EXAMPLES, QUIET, ROWS, Random

# --- what the NPU gives is what eager gives ---------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fold", ["auto", True, False])
def test_a_stack_of_equal_blocks(device: SoftwareNpu, fold: Any) -> None:
    model = stack()
    forge = compile_npu(model, X, fold=fold)
    assert forge.device == "npu" and forge.report["target"] == "npu4000" and forge.report["precision"] == "fp16"
    assert forge.report["placement"]["cpu"] == 0 and forge.report["transitions"] == {"before": 2, "after": 2}
    first = forge.report["npu"]
    assert forge.report["tier"] == int(fold is False) or fold == "auto"
    if fold is True:
        assert first["blocks"] < first["calls"] and first["weight_bytes"] > 64 * 64
    for x in (X, X * 2, X.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_same(model(x), forge(x))
    assert forge.wait(60) and forge.report["tier"] == int(fold is not True)
    if fold is not True:
        assert forge.report["npu"]["blocks"] == 1 and forge.report["npu"]["weight_bytes"] == 0
    assert_same(model(X), forge(X))
    text = str(forge.report)
    assert "npu: Software NPU" in text and "tier" in text and "1 segments with 100.0% of the operations" in text


@torch.no_grad()
def test_a_layer_that_is_used_again_and_again(device: SoftwareNpu) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU())] * 4).eval()  # no weight is an argument
    forge = compile_npu(model, X)
    assert_same(model(X), forge(X))
    assert forge.wait(60) and forge.report["tier"] == 1 and forge.report["npu"]["calls"] == 1
    assert_same(model(X), forge(X))


@torch.no_grad()
def test_f16_is_as_near_as_emulation_says(device: SoftwareNpu) -> None:
    model = stack()
    expected = model(X)
    for precision, bound in (("fp16", 5e-3), ("w8a16", 5e-2), ("w4a16", 0.6)):
        options: dict[str, Any] = {"precision": precision, "fold": False}
        got = compile_npu(model, X, npu_options={}, **options)(X)
        emulated = forge_ugc.compile(model, X, device="npu:emulate", **options)(X)
        assert 0 < max_abs(expected, got) < bound
        assert max_abs(got, emulated) < max(0.25 * max_abs(expected, emulated), 5e-3)


class Mixed(nn.Module):
    """Work for the NPU, torch's lgamma, work again, a sum that only the host takes; outputs of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> dict[str, Any]:
        a = self.first(x)
        b = self.second(torch.lgamma(a.abs() + 1))
        return {
            "a": a, "skip": a * 2 + b, "b": b, "again": b, "positive": b > 0, "x": x, "view": x[1:], "n": n + 1,
            "t": b.t(), "scan": b.cumsum(0), "bias": self.first.bias,
        }  # fmt: skip


@torch.no_grad()
def test_host_work_between_segments_and_outputs_of_all_kinds(device: SoftwareNpu) -> None:
    torch.manual_seed(0)
    model, x, n = Mixed().eval(), torch.randn(256, 512), torch.arange(3)
    with pytest.warns(forge_ugc.FallbackWarning, match="lgamma"):
        forge = compile_npu(model, x, n)
    assert forge.report["npu"]["segments"] == 2 and forge.report["placement"]["cpu"] >= 3
    for data in (x, x.flip(0)):
        got, expected = forge(data, n), model(data, n)
        assert_same(expected, got, atol=1e-4, rtol=1e-4)
        assert got["b"] is got["again"] and got["x"] is data and got["bias"] is model.first.bias
        assert got["view"].data_ptr() == data[1:].data_ptr()
    assert forge.wait(60)
    assert_same(model(x, n), forge(x, n), atol=1e-4, rtol=1e-4)


WIDE = dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2048)
NARROWED: dict[str, dict[str, Any]] = {"llama1b": WIDE, "lfm2": WIDE, "llama8b": WIDE}


@torch.no_grad()
@pytest.mark.parametrize("name", list(FAMILIES))
def test_families(device: SoftwareNpu, name: str) -> None:
    model = build(name, layers=2, vocab_size=4000, **NARROWED.get(name, {}))
    ids = input_ids(model, seq=32)
    expected = model(ids)
    for fold in (True, False):
        forge = compile_npu(model, ids, fold=fold)
        assert max_abs(expected, forge(ids)) < 1e-4
        assert forge.report["transitions"]["after"] == 2 and forge.report["npu"]["segments"] == 1
        flops = forge.report["npu"]["flops"]
        assert flops["npu"] > 0.99 * (flops["npu"] + flops["cpu"])


@torch.no_grad()
def test_random_graphs(device: SoftwareNpu) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=QUIET, derandomize=True)
    @given(EXAMPLES)
    def run(example: Any) -> None:
        steps, outputs, _, alpha, seed = example
        model = Random(steps, outputs).eval()
        draw = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", forge_ugc.NpuWarning)  # some graphs have no work for it
            forge = compile_npu(model, x, y, alpha=alpha, fold=seed % 2 == 0)
        for _ in range(2):
            assert_same(model(x, y), forge(x, y), atol=1e-4, rtol=1e-3)

    run()


@torch.no_grad()
def test_many_threads_on_two_models(device: SoftwareNpu) -> None:
    models = [stack(2, seed) for seed in (0, 1)]
    forges = [compile_npu(model, X) for model in models]
    inputs = [X * (k + 1) / 4 for k in range(4)]
    expected = [[forge(x) for x in inputs] for forge in forges]
    wrong: list[Any] = []

    def work(number: int) -> None:
        for k in range(100):
            which = (number + k) % 2
            got = forges[which](inputs[k % 4])
            if max_abs(got, expected[which][k % 4]) > 2e-6:  # the second tier may sum in another order
                wrong.append((number, k))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@torch.no_grad()
def test_changed_weights_copies_and_other_sizes(device: SoftwareNpu) -> None:
    model = stack(2)
    sizes = {"x": {1: torch.export.Dim("s", min=2, max=64)}}
    forge = compile_npu(model, X, dynamic_shapes=sizes)
    longer = torch.randn(1, 20, 64)
    for x in (X, longer, X):
        assert_same(model(x), forge(x))
    twin = copy.deepcopy(forge)
    before = forge(X)
    model.layers[1].up.weight.mul_(3)
    assert_same(model(X), forge(X))
    assert_same(model(longer), forge(longer))
    assert_same(before, twin(X))
    assert twin.device == "npu" and twin.report["device"] == "npu"
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    assert_same(model(X), forge(X))
    assert forge.wait(60) and twin.wait(60)
    assert_same(model(X), forge(X))
    assert_same(before, twin(X))


@torch.no_grad()
def test_nothing_is_kept_that_is_not_used(device: SoftwareNpu) -> None:
    model = stack(2)
    forge = compile_npu(model, X)
    forge(X)
    gone = weakref.ref(forge)
    forge.wait(60)
    del forge
    gc.collect()
    assert gone() is None and set(device.live()) <= {"context", "queue", "fence", "list"}
    npu.forget()
    gc.collect()
    assert not device.live()


@torch.no_grad()
def test_a_compiled_graph_is_read_from_the_cache(device: SoftwareNpu) -> None:
    model = stack(2)
    for options, hits in (({}, False), ({}, True), ({"npu_options": {**EXACT, "cache": False}}, False)):
        report = compile_npu(model, X, fold=False, **options).report["npu"]
        assert (report["cache_hits"] > 0) is hits, options
    model.layers[0].up.weight.mul_(2)
    assert compile_npu(model, X, fold=False).report["npu"]["cache_hits"] == 0
    assert compile_npu(model, X, fold=False, npu_options={}).report["npu"]["cache_hits"] == 0


# --- which device -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_auto(device: SoftwareNpu) -> None:
    model = stack(1)
    forge = forge_ugc.compile(model, X)
    assert forge.device == "npu" and "Software NPU" in forge.report["device_reason"]
    assert 0 < max_abs(model(X), forge(X)) < 5e-3  # fp16
    exact = forge_ugc.compile(model, X, precision="fp32")
    assert exact.device == "cpu" and "fp32" in exact.report["device_reason"]
    assert_same(model(X), exact(X))
    assert forge_ugc.compile(model, X, precision="w8a16").report["precision"] == "w8a16"


def test_auto_without_an_npu_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZE_ENABLE_ALT_DRIVERS", "FORGE_ZE_LOADER"):
        monkeypatch.delenv(name, raising=False)
    if _core.npu_likely():
        pytest.skip("this machine has an NPU")
    times = []
    for _ in range(50):
        start = time.perf_counter()
        choice = npu.choose("auto", "auto", "auto", None)
        times.append(time.perf_counter() - start)
    assert choice.device == "cpu" and "no NPU" in choice.reason and statistics.median(times) < 1e-3
    forge = forge_ugc.compile(stack(1), X, precision="fp16")
    assert forge.report["device"] == "cpu" and forge.report["precision"] == "fp32" and forge.report["npu"] is None
    assert "cpu: there is no NPU" in str(forge.report)


def refused(**options: Any) -> forge_ugc.NpuError:
    with software_npu(**options), pytest.raises(forge_ugc.NpuError) as caught:
        compile_npu(stack(1), X)
    return caught.value


def test_missing_parts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(extension="0.0").reason == "old-extension"
    assert refused(extension="1.2").reason == "old-extension"
    assert refused(no_compiler=True).reason == "no-compiler"
    assert refused(firmware_mismatch=True).reason == "version-mismatch"
    monkeypatch.setenv("FORGE_ZE_LOADER", "/nowhere/libze_loader.so.1")
    monkeypatch.setenv("ZE_ENABLE_ALT_DRIVERS", "/nowhere/driver.so")
    with pytest.raises(forge_ugc.NpuError, match=r"/nowhere/libze_loader") as caught:
        compile_npu(stack(1), X)
    assert caught.value.reason == "no-loader" and isinstance(caught.value, RuntimeError)
    forge = forge_ugc.compile(stack(1), X)
    assert forge.device == "cpu" and "no usable NPU (no-loader)" in forge.report["device_reason"]


def test_a_model_without_work_for_the_npu(device: SoftwareNpu) -> None:
    x = torch.tensor([[3, 1, 2]])
    with pytest.warns(forge_ugc.NpuWarning, match="nothing of the model is placed"):
        forge = compile_npu(lambda x: x.sort(-1).values + 1, x)
    assert_same(x.sort(-1).values + 1, forge(x))
    assert "nothing of the model" in forge.report["device_reason"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": "npu:plan:npu1"}, ValueError, "unknown NPU target 'npu1'"),
        ({"device": "npu:"}, ValueError, "unknown device"),
        ({"device": "npu:plan:"}, ValueError, "unknown device"),
        ({"npu_options": ["types"]}, TypeError, "npu_options: expected a dict, given list"),
        ({"device": "npu:run"}, ValueError, "unknown device"),
        ({"device": "npu", "precision": "fp32"}, ValueError, "keeps to the host"),
        ({"precision": "int3"}, ValueError, "unknown precision"),
        ({"fold": "yes"}, ValueError, "fold"),
        ({"npu_options": {"tiles": 2}}, ValueError, "unknown key 'tiles'; known are types, border, config, cache"),
        ({"npu_options": {"types": "f8"}}, ValueError, "types"),
        ({"npu_options": {"cache": "no"}}, TypeError, "cache"),
        ({"npu_options": {"config": "NPU_TILES=2"}}, TypeError, "config"),
        ({"npu_options": {"config": {"A": '"'}}}, ValueError, "quotes"),
        ({"npu_options": {"config": {"A B": 1}}}, ValueError, "no name"),
    ],
)
def test_wrong_requests_are_refused_before_capture(options: Any, error: Any, says: str) -> None:
    calls: list[Any] = []
    with pytest.raises(error, match=says):
        forge_ugc.compile(lambda x: calls.append(x), X, **options)
    assert not calls


@torch.no_grad()
def test_options_of_the_graph_compiler(device: SoftwareNpu) -> None:
    model = stack(1)
    forge = compile_npu(model, X, npu_options={**EXACT, "config": {"PERFORMANCE_HINT": "LATENCY"}})
    assert_same(model(X), forge(X))
    with pytest.raises(ValueError, match="does not know the option NO_SUCH_OPTION"):
        compile_npu(model, X, npu_options={**EXACT, "config": {"NO_SUCH_OPTION": 1}})


# --- models for others ------------------------------------------------------------------------------------------------


def run_models(folder: Path, x: torch.Tensor) -> np.ndarray:
    """What the saved models give when OpenVINO runs them as the manifest says."""
    openvino = pytest.importorskip("openvino")
    manifest = json.loads((folder / "manifest.json").read_text())
    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    blocks = [core.compile_model(str(folder / b["xml"]), "CPU", exact) for b in manifest["blocks"]]
    weights = (folder / manifest["weights"]).read_bytes() if manifest["weights"] else b""
    types = {"f32": np.float32, "f16": np.float16, "i8": np.int8}
    memory = {"input 0": x.numpy()}
    for call in manifest["calls"]:
        block = manifest["blocks"][call["block"]]
        feeds = [
            memory[name].reshape(port["shape"]).astype(types[port["dtype"]])
            for name, port in zip(call["inputs"], block["inputs"], strict=True)
        ]
        for w in call["weights"]:
            data = weights[w["offset"] : w["offset"] + w["bytes"]]
            feeds.append(np.frombuffer(data, types[w["dtype"]]).reshape(w["shape"]))
        results = blocks[call["block"]](feeds)
        for name, result in zip(call["outputs"], results.values(), strict=True):
            memory[name] = np.array(result)
    return memory["output 0"]


@torch.no_grad()
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("options", [{}, {"npu_options": EXACT}, {"precision": "w8a16"}])
def test_saved_models_are_the_program(tmp_path: Path, fold: bool, options: Any) -> None:
    model = stack(3)
    plan = forge_ugc.compile(model, X, device="npu:plan", **options)
    manifest = plan.save_openvino_ir(tmp_path / "models", fold=fold)
    assert len(manifest["calls"]) == (3 if fold else 1) and len(manifest["blocks"]) == 1
    assert manifest["inputs"] == ["x"] and manifest["target"] == "npu4000"
    if fold:
        names = {w["constant"] for call in manifest["calls"] for w in call["weights"]}
        assert any("layers.2.up.weight" in name for name in names)
    got = run_models(tmp_path / "models", X)
    bound = 2e-5 if options.get("npu_options") else 5e-2 if options else 5e-3
    assert max_abs(model(X), torch.from_numpy(got.astype(np.float32))) < bound


def test_models_that_cannot_be_saved(tmp_path: Path, device: SoftwareNpu) -> None:
    model = stack(1)
    with pytest.raises(RuntimeError, match='compile with device="npu:plan"'):
        forge_ugc.compile(model, X, device="cpu").save_openvino_ir(tmp_path)
    with torch.device("meta"):
        shell = Stack(1).eval()
    with pytest.raises(ValueError, match=r"layers.0.*meta"):
        forge_ugc.compile(shell, X.to("meta"), device="npu:plan").save_openvino_ir(tmp_path)
    assert forge_ugc.compile(model, X, device="npu:emulate").save_openvino_ir(tmp_path / "e")["blocks"]
    assert compile_npu(model, X).save_openvino_ir(tmp_path / "n")["blocks"]


def test_writing_that_fails_is_the_callers_exception() -> None:
    program = forge_ugc.compile(stack(2), X, device="npu:plan")._now().program

    def full(wanted: str, kind: str, number: int, data: bytes) -> None:
        assert isinstance(data, bytes)
        if kind == wanted:
            raise OSError(28, "No space left on device")

    for wanted in ("xml", "bin", "weight"):
        with pytest.raises(OSError, match="No space left"):
            program.openvino_models(functools.partial(full, wanted))
    seen: list[str] = []
    program.openvino_models(lambda kind, number, data: seen.append(kind))
    assert set(seen) == {"xml", "bin", "weight"}


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor(device: SoftwareNpu, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "The NPU is usable." in text and "Software NPU" in text and 'device="auto"' in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] and found["npu"]["target"] == "npu4000" and found["auto"]["device"] == "npu"
    assert found["settings"]["FORGE_ZE_LOADER"] and found["versions"]["forge_ugc"] == forge_ugc.__version__


def test_doctor_without_an_npu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORGE_ZE_LOADER", "/nowhere/libze_loader.so.1")
    monkeypatch.setenv("ZE_ENABLE_ALT_DRIVERS", "/nowhere/driver.so")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "No usable NPU (no-loader)" in text and "What to do: install the Level Zero loader" in text
    done = subprocess.run(
        [sys.executable, "-m", "forge_ugc", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1 and json.loads(done.stdout)["reason"] == "no-loader"
