"""CompiledModel.profile: every instruction has a time, sums add up, and nothing changes by looking."""

from __future__ import annotations

import gc
import io
import itertools
import json
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import forge_ugc
from forge_ugc.testing import software_npu


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Softmax(-1)).eval()


@pytest.fixture(scope="module")
def profile() -> forge_ugc.Profile:
    x = torch.randn(4, 16)
    return forge_ugc.compile(model(), x, device="cpu").profile(x, calls=3)


def test_every_instruction_has_a_time(profile: forge_ugc.Profile) -> None:
    schedule = forge_ugc.compile(model(), torch.randn(4, 16), device="cpu").report.schedule
    assert schedule is not None
    assert [(r.operator, r.device, r.type) for r in profile.rows] == [
        (i["op"], i["device"], i["type"]) for i in schedule["instructions"]
    ]
    assert all("torch/nn/modules" in r.source and "forward" in r.source for r in profile.rows)
    assert [r.first for r in profile.rows] == list(range(len(profile.rows))) and {r.count for r in profile.rows} == {1}
    assert all(len(r.ms) == 3 and min(r.ms) > 0 for r in profile.rows) and len(profile.total_ms) == 3
    for call, total in enumerate(profile.total_ms):
        assert sum(r.ms[call] for r in profile.rows) <= total


def test_times_are_real() -> None:
    """An operator that is known to take long is seen to."""

    @torch.library.custom_op("forge_test::sleep", mutates_args=())
    def sleep(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    sleep.register_fake(lambda x: torch.empty_like(x))
    with pytest.warns(forge_ugc.FallbackWarning):
        forge = forge_ugc.compile(lambda x: sleep(x.relu()) + 1, torch.ones(3), device="cpu")
    profile = forge.profile(torch.ones(3), calls=2)
    dearest = profile.by("operator")[0]
    assert "sleep" in dearest["name"] and 20 <= dearest["ms"] <= max(profile.total_ms) and dearest["share"] > 0.5
    assert "test_profile.py" in profile.by("source")[0]["name"]


def test_sums(profile: forge_ugc.Profile) -> None:
    whole = sum(r.median_ms for r in profile.rows)
    for what in ("instruction", "operator", "device", "source"):
        entries = profile.by(what)
        assert sum(e["ms"] for e in entries) == pytest.approx(whole)
        assert sum(e["share"] for e in entries) == pytest.approx(1)
        assert sum(e["count"] for e in entries) == len(profile.rows)
        assert all(a["ms"] >= b["ms"] for a, b in itertools.pairwise(entries))
    assert {e["name"] for e in profile.by("operator")} == {"linear", "layer_norm", "softmax"}
    assert [e["name"] for e in profile.by("device")] == ["cpu"]
    with pytest.raises(ValueError, match="expected one of instruction, operator, device, source"):
        profile.by("line")


def test_looking_at_it(profile: forge_ugc.Profile) -> None:
    found = json.loads(json.dumps(profile.to_dict()))
    assert found["calls"] == 3 and found["operators"][0]["ms"] > 0
    assert [i["operator"] for i in found["instructions"]] == [r.operator for r in profile.rows]
    console = Console(file=io.StringIO(), width=120)
    console.print(profile.to_table())
    console.print(profile.to_table("instruction", limit=1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "linear" in text and f"{len(profile.rows) - 1} others" in text and "median of 3" in text
    assert "layer_norm" in str(profile) and "source" in str(profile) and "Sequential on cpu" in repr(profile)
    ET.fromstring(profile._repr_html_())


def test_trace(profile: forge_ugc.Profile, tmp_path: Path) -> None:
    """Chrome's trace format: complete events with times in microseconds, named lanes, in a call one after another."""
    profile.save_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {"call", "cpu"}
    spans = [e for e in events if e["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(e) and e["dur"] >= 0 for e in spans)
    assert {e["ph"] for e in events} == {"M", "X"} and min(e["ts"] for e in spans) == 0
    calls = [e for e in spans if lanes[e["tid"]] == "call"]
    work = [e for e in spans if lanes[e["tid"]] == "cpu"]
    assert len(calls) == 3 and len(work) == 3 * len(profile.rows)
    for a, b in itertools.pairwise(work):
        assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    for call, first in zip(calls, work[:: len(profile.rows)], strict=True):
        assert call["ts"] == first["ts"]
    assert sum(e["dur"] for e in calls) / 1e3 == pytest.approx(sum(profile.total_ms))


def test_nothing_changes() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            x.add_(1)
            return x + torch.rand(2)

    counter, x = Counter().eval(), torch.zeros(2)
    with pytest.warns(forge_ugc.FallbackWarning):
        forge = forge_ugc.compile(counter, x)
    torch.manual_seed(3)
    forge.profile(x)
    assert counter.count.tolist() == [0, 0] and x.tolist() == [0, 0]
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)


def test_artefact(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    x = torch.zeros(2)
    forge_ugc.compile(Counter().eval(), x, device="cpu").save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge", device="cpu")
    for given in (x, x.numpy()):
        profile = loaded.profile(given, calls=2)
        assert "add" in {r.operator for r in profile.rows} and len(profile.total_ms) == 2
    assert loaded(x).tolist() == [1, 1]  # profiling has not counted
    with pytest.raises(TypeError, match="expected f32"):
        loaded.profile(torch.zeros(3))
    with pytest.raises(ValueError, match="calls must be positive"):
        loaded.profile(x, calls=0)


def test_an_error_inside() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x.relu()) + 1

    with pytest.warns(forge_ugc.FallbackWarning):
        forge = forge_ugc.compile(fails, torch.eye(3))
    for _ in range(3):
        with pytest.raises(torch.linalg.LinAlgError):
            forge.profile(torch.zeros(3, 3))
    assert forge.profile(torch.eye(3)).rows and torch.equal(forge(torch.eye(3)), torch.eye(3) + 1)


def test_nothing_leaks() -> None:
    x = torch.ones(2, 16)
    forge = forge_ugc.compile(model(), x, device="cpu")
    program = forge._now().program

    def blocks() -> int:
        for _ in range(50):
            forge.profile(x, calls=1)
            program.schedule()
        gc.collect()
        return sys.getallocatedblocks()

    blocks()
    before = blocks()
    assert blocks() - before < 50


def test_refusals() -> None:
    x = torch.ones(2, 16)
    forge = forge_ugc.compile(model(), x)
    with pytest.raises(TypeError, match=r"expected float32\[2, 16\]"):
        forge.profile(torch.ones(3, 16))
    with pytest.raises(ValueError, match="calls must be positive"):
        forge.profile(x, calls=0)
    with pytest.raises(RuntimeError, match="only the plan"):
        forge_ugc.compile(model(), x, device="npu:plan").profile(x)


def test_weights_changed_and_dynamic_shapes() -> None:
    net = model()
    forge = forge_ugc.compile(net, torch.ones(2, 16), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))
    with torch.no_grad():
        net[0].weight.mul_(2)
    profile = forge.profile(torch.ones(7, 16), calls=1)
    assert profile.rows[0].type == "f32[7,64]"


def test_emulated_npu() -> None:
    x = torch.randn(4, 16)
    profile = forge_ugc.compile(model(), x, device="npu:emulate").profile(x, calls=2)
    assert {r.device for r in profile.rows} == {"npu"} and all(r.count == 1 for r in profile.rows)


def test_segments(tmp_path: Path) -> None:
    """What the NPU runs in one go is one row, in its device's lane."""
    net, x = model(), torch.randn(16, 16)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return net(x), torch.lgamma(x)

    with software_npu(), pytest.warns(forge_ugc.FallbackWarning):
        forge = forge_ugc.compile(function, x, device="npu")
        profile = forge.profile(x, calls=2)
        schedule = forge.report.schedule
        assert schedule is not None and schedule["segments"]
        rows = [(r.first, r.count) for r in profile.rows if r.device == "npu"]
        assert rows == [tuple(s) for s in schedule["segments"]]
        assert sum(r.count for r in profile.rows) == len(schedule["instructions"])
        assert {e["name"] for e in profile.by("device")} == {"cpu", "npu"}
        assert any(r.operator.startswith("segment (") for r in profile.rows)
        profile.save_trace(tmp_path / "t.json")
        names = [
            e["args"]["name"]
            for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
            if e["name"] == "thread_name"
        ]
        assert set(names) == {"call", "cpu", "npu"}
        del forge
