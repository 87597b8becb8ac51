"""Programs on an NPU that fails: refused graphs, lost devices, forked children, and how each recovers."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import npu
from forge_ugc.testing import SoftwareNpu, software_npu
from tests.compare import assert_same, max_abs
from tests.npu_stack import EXACT, ROOT, X, compile_npu, device, needed, stack  # noqa: F401 (fixtures)

# --- what fails -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_graph_that_the_compiler_refuses() -> None:
    model = stack(2)
    with software_npu(refuse=["Gelu"]):
        with pytest.raises(forge_ugc.NpuError, match="Gelu") as caught:
            compile_npu(model, X)
        assert caught.value.reason == "compile-failed" and "npu_stack.py" in str(caught.value)
        with pytest.warns(forge_ugc.NpuWarning, match="compile-failed") as seen:
            forge = forge_ugc.compile(model, X)
        assert len(seen) == 1 and forge.device == "cpu" and "compile-failed" in forge.report["device_reason"]
        assert_same(model(X), forge(X))
    npu.forget()


@torch.no_grad()
@pytest.mark.parametrize("wanted", ["npu", "auto"])
def test_a_lost_device_is_opened_again(wanted: str) -> None:
    model = stack(2)
    with software_npu() as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        forge = compile_npu(model, X, device=wanted)
        other = compile_npu(model, X, device=wanted)
        forge(X)
        for _ in range(2):
            device.lose()
            assert_same(model(X), forge(X))
            assert_same(model(X), other(X))
            assert forge.device == "npu"
        assert forge.wait(60)
    npu.forget()


@torch.no_grad()
def test_a_device_that_stays_lost() -> None:
    model = stack(2)
    with software_npu(recovers=False) as device:
        forge, strict = forge_ugc.compile(model, X, npu_options=EXACT), compile_npu(model, X)
        forge(X), strict(X)
        device.lose()
        with pytest.warns(forge_ugc.NpuWarning, match="the model runs on the host") as seen:
            got = forge(X)
        assert_same(model(X), got)
        assert len(seen) == 1 and forge.device == "cpu" and "device-lost" in forge.report["device_reason"]
        assert_same(model(X), forge(X))
        with pytest.raises(forge_ugc.NpuError) as caught:
            strict(X)
        assert caught.value.reason == "device-lost"
        with pytest.raises(forge_ugc.NpuError):
            strict(X)
    npu.forget()


FIRST, SECOND = nn.Linear(512, 512).eval(), nn.Linear(512, 512).eval()


def written_first(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    h = FIRST(x)
    y.mul_(2)
    n.add_(1)
    return SECOND(torch.lgamma(h.abs() + 1))


def written_between(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    h = torch.lgamma(FIRST(x).abs() + 1)
    n.add_(1)
    y.copy_(y * 3 + h)
    return SECOND(h)


def written_last(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    h = SECOND(torch.lgamma(FIRST(x).abs() + 1))
    y.add_(h)
    n.add_(1)
    return h


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # lgamma runs through torch; the NPU is lost
@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("function", [written_first, written_between, written_last])
def test_what_a_repeated_call_writes_is_written_once(function: Any, recovers: bool) -> None:
    """The device is lost in the first or the second of two segments; what has been done on the host is done again."""
    args = (torch.randn(256, 512), torch.randn(256, 512), torch.tensor([3] * 512))
    expected = [t.clone() for t in args]
    result = function(*expected)
    for segments in (0, 1):  # that run before
        with software_npu(recovers=recovers, lose_after=segments) as device:
            forge = forge_ugc.compile(function, tuple(t.clone() for t in args), fold=False, npu_options=EXACT)
            assert forge.report["npu"]["segments"] == 2
            if segments == 0:
                device.lose()
            got = [t.clone() for t in args]
            assert_same(result, forge(*got), atol=1e-4, rtol=1e-4)
            assert_same(expected, got, atol=1e-4, rtol=1e-4)
            assert forge.device == ("npu" if recovers else "cpu") and not device.misuses()
            del forge
            npu.forget()


@torch.no_grad()
def test_another_program_reads_what_it_writes_over() -> None:
    """A call shares memory of input and output as the program allows that is lost; the next program does not."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = y.clone()
        y.mul_(2)
        return FIRST(x) + old

    x, y = torch.randn(256, 512), torch.randn(256, 512)
    host = forge_ugc.compile(function, (x, y.clone()), device="cpu")._now()
    (where, index), number = host.lowered.plan.writes[0], [source for source, _ in host.sources].index(1)
    assert where == 1 and not host.program.may_share(number, index)

    class Lost:
        def run(self, *arguments: Any) -> None:
            error = forge_ugc.NpuError("lost")
            error.reason = "failed"
            raise error

    class Falling(npu.Dispatched):
        def build(self, choice: npu.Choice, settings: dict[str, Any]) -> Any:
            return Lost() if choice.device == "stub" else host.program

    settings = npu.NpuSettings("none", "fp16", False, False)
    falling = Falling(npu.Choice("stub", "npu4000", "fp16", "", settings))
    inputs, _ = host.gather([x, y])
    results = [torch.empty(shape, dtype=dtype) for shape, dtype in host.out_types]
    for call in range(2):
        before = y.clone()
        outputs = [y.data_ptr() if i == index else t.data_ptr() for i, t in enumerate(results)]
        with pytest.warns(forge_ugc.NpuWarning) if call == 0 else contextlib.nullcontext():
            falling.run(inputs, outputs, None)
        assert torch.equal(y, before * 2)
        assert_same(FIRST(x) + before, results[1 - index], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_other_failures_of_a_call(device: SoftwareNpu) -> None:
    model = stack(2)
    forge, strict = forge_ugc.compile(model, X, npu_options=EXACT), compile_npu(model, X)
    assert forge.wait(60) and strict.wait(60)
    expected = strict(X)
    device.fail("execution", result="unknown")
    with pytest.raises(forge_ugc.NpuError, match=r"NPU segment 0.*npu_stack.py") as caught:
        strict(X)
    assert caught.value.reason == "failed"
    assert_same(expected, strict(X))  # the next call works
    device.fail("execution", result="unknown")
    with pytest.warns(forge_ugc.NpuWarning, match="failed"):
        assert_same(model(X), forge(X))
    assert forge.device == "cpu"


@torch.no_grad()
def test_a_second_tier_that_fails_leaves_the_first(device: SoftwareNpu) -> None:
    model = stack(3)
    blocks = compile_npu(model, X, fold=True).report["npu"]["blocks"]
    device.fail("pfnCreate3", nth=blocks + 1, times=1000, result="unknown", log="no room for it")
    forge = compile_npu(model, X, npu_options={**EXACT, "cache": False})
    with pytest.warns(forge_ugc.NpuWarning, match="the folded ones go on serving"):
        assert forge.wait(60)
    device.heal()
    assert forge.report["tier"] == 0 and "no room for it" in forge.report["npu"]["upgrade_error"]
    assert "graphs with constant weights" in str(forge.report)
    assert_same(model(X), forge(X))


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("FORGE_CACHE_BYTES", ["4GiB", "-1", "1e9", "9" * 30], ["0", "1000000"]),
        ("FORGE_NPU_TIMEOUT_S", ["a minute", "0", "-1", "inf", "1e400"], ["0.5", "60", "5."]),
    ],
)
def test_wrong_numbers_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: list[str], right: list[str]
) -> None:
    with software_npu():
        for text in wrong:
            monkeypatch.setenv(name, text)
            with pytest.raises(ValueError, match=f"the environment's {name} must be .*{re.escape(repr(text))}"):
                compile_npu(stack(1), X)
        for text in right:
            monkeypatch.setenv(name, text)
            compile_npu(stack(1), X)
        monkeypatch.delenv(name)


def test_the_cache_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORGE_CACHE_DIR", "~/graphs")
    assert npu.cache_dir() == tmp_path / "graphs"


def test_wait_gives_up_after_its_time() -> None:
    with software_npu(compiler="sleep 0.7"):
        forge = compile_npu(stack(3), X, num_threads=8)
        assert not forge.wait(0.05)
        assert forge.wait() and forge.report["tier"] == 1
        del forge
        npu.forget()


def test_the_device_stays_while_graphs_are_compiled() -> None:
    """Drivers read the environment while they compile; the block's end changes it."""
    with software_npu(compiler="sleep 0.7"):
        forge = compile_npu(stack(3), X, num_threads=8)
        assert not forge.wait(0)
    assert forge.wait(0) and forge.report["tier"] == 1


EXIT = """
import torch, forge_ugc
from tests.npu_stack import X, compile_npu, stack  # noqa: F401
running = forge_ugc.testing.software_npu(compiler="sleep 0.7")
running.__enter__()  # and never leaves, which would wait
forge = compile_npu(stack(3), X, num_threads=8)
forge(X)
print(forge.report["tier"], flush=True)
"""


def test_the_interpreter_ends_while_graphs_are_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "0", (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr


def in_child(work: Any) -> str:
    """What `work()` returns in a child of fork()."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(work()).encode())
        except BaseException as error:  # os._exit below: no test may go on in the child
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    end = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reader) as told:
        return told.read()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # Python 3.12's of fork() beside threads; NpuWarning
def test_a_forked_child_keeps_off_the_parents_npu(device: SoftwareNpu, tmp_path: Path) -> None:
    model = stack(1)
    forge, strict = forge_ugc.compile(model, X, npu_options=EXACT), compile_npu(model, X)
    strict.save(tmp_path / "model.forge")
    loaded = forge_ugc.load(tmp_path / "model.forge", npu_options=EXACT)
    expected = model(X)
    for run in (forge, strict, loaded):
        assert_same(expected, run(X))
    for run in (forge, loaded):
        assert in_child(lambda run=run: (max_abs(expected, run(X)) < 2e-5, run.device)) == "(True, 'cpu')"
    assert "before this process was forked" in in_child(lambda: strict(X))
    assert "before this process was forked" in in_child(lambda: compile_npu(model, X))
    new = in_child(lambda: (lambda f: (f.device, f.report["device_reason"], max_abs(expected, f(X)) < 2e-5))(
        forge_ugc.compile(model, X)
    ))  # fmt: skip
    assert new.startswith("('cpu', 'no usable NPU (failed)") and new.endswith("True)")
    assert forge.wait(60) and strict.wait(60) and loaded.wait(60)
    for run in (forge, strict, loaded):
        assert_same(expected, run(X))


@torch.no_grad()
def test_artefacts_recover_as_models_do() -> None:
    model = stack(2)
    with software_npu(recovers=True) as device:
        strict = pickle.loads(pickle.dumps(compile_npu(model, X)))
        assert strict.device == "npu"
        device.lose()
        assert_same(model(X), strict(X))  # opened again; exact: pickling keeps npu_options
        assert strict.wait(60)
        del strict
        npu.forget()
    with software_npu(recovers=False) as device:
        strict = pickle.loads(pickle.dumps(compile_npu(model, X)))
        forge = pickle.loads(pickle.dumps(forge_ugc.compile(model, X, npu_options=EXACT)))
        forge = pickle.loads(pickle.dumps(forge))
        assert_same(model(X), forge(X))
        device.lose()
        with pytest.warns(forge_ugc.NpuWarning, match="the model runs on the host"):
            assert_same(model(X), forge(X))
        assert forge.device == "cpu"
        assert_same(model(X), forge(X))
        with pytest.raises(forge_ugc.NpuError) as caught:
            strict(X)
        assert caught.value.reason == "device-lost"
        del strict, forge
        npu.forget()


def test_options_survive_pickling(device: SoftwareNpu) -> None:
    options = {"types": "f32", "border": "f16", "config": {"PERFORMANCE_HINT": "LATENCY", "A-B": "x y"}, "cache": False}
    choice = npu.choose("auto", "w8a16", True, options)
    assert choice.request() == {"device": "auto", "precision": "w8a16", "fold": True, "npu_options": options}
    assert npu.choose(**{"wanted" if k == "device" else "options" if k == "npu_options" else k: v
                         for k, v in choice.request().items()}) == choice  # fmt: skip
    assert npu.choose("cpu", "auto", "auto", None).request() == {"device": "cpu", "precision": "fp32"}
