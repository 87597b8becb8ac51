"""Progress while compiling: phases of Python and C, on a terminal, in a notebook, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import progress
from tests import ze_client

ROOT = Path(__file__).resolve().parent.parent


class Slow(nn.Module):
    """Capturing it takes a while; its weight is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return x @ self.weight


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(progress, "_writer", lambda wanted: lambda: (seen.append, seen.append))
    monkeypatch.setattr(progress, "PERIOD_S", 0.01)
    return seen


def test_phases(lines: list[str]) -> None:
    forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu", progress=True)
    assert any("capturing forward()" in line for line in lines)
    assert lines[-1].startswith("forge: compiled in ")
    assert not [t for t in threading.enumerate() if t.name == "forge-progress"]


def test_torch_export_is_named(lines: list[str]) -> None:
    forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu", progress=True, capture="export")
    assert any("torch.export" in line for line in lines)


def test_only_after_a_while(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 60)
    forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu")
    assert lines == []
    monkeypatch.setattr(progress, "DELAY_S", 0.1)
    forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu")
    assert lines
    del lines[:]
    forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu", progress=False)
    assert lines == []


def test_an_error_ends_it(lines: list[str]) -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(forge_ugc.CompileError):
        forge_ugc.compile(bad, torch.ones(3), progress=True)
    assert not [t for t in threading.enumerate() if t.name == "forge-progress"]
    assert progress.counters() is None


def test_what_the_core_counts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_writer", lambda wanted: lambda: ((lambda line: None), (lambda line: None)))
        with progress.shown(True) as now:
            assert now is not None and progress.counters() is now.counters
            forge = forge_ugc.compile(Slow().eval(), torch.randn(4, 512), device="cpu", progress=False)
    packed = forge.report["weights"]["packed_bytes"]
    assert packed > 0 and now.counters.tolist() == [5, packed, packed]
    assert str(now) == f"packing weights: {packed / 1e6:,.0f} of {packed / 1e6:,.0f} MB"
    now.counters[:] = 2, 3, 12
    assert str(now) == "passes: 3 of 12"
    now.counters[:] = 4, 9, 4  # read between two writes
    assert str(now) == "compiling the NPU's graphs: 4 of 4"
    now.counters[:] = 99, 0, 0
    assert isinstance(str(now), str)


@pytest.mark.parametrize("given", [np.zeros(2, np.int64), np.zeros(4, np.int64), b"123456789012345678901234", 7])
def test_wrong_counters_are_refused(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "counters", lambda: given)
    with pytest.raises((TypeError, ValueError, BufferError)):
        forge_ugc.compile(nn.Linear(2, 2).eval(), torch.ones(1, 2), device="cpu")


def test_graphs_of_the_npu(lines: list[str]) -> None:
    ze_client.require_software_npu()
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval()
    with forge_ugc.testing.software_npu(compiler="sleep 0.2"), torch.no_grad():
        forge_ugc.compile(model, torch.randn(4, 32), device="npu", fold=False, progress=True)
    assert any("the NPU's graphs: 0 of 1" in line for line in lines), lines


def test_nowhere_to_show_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stderr", nowhere)
        with progress.shown(None) as now:
            assert now is None
    assert capfd.readouterr() == ("", "")


PROGRAM = """
import time, torch, forge_ugc
from forge_ugc import progress
progress.DELAY_S = 0.2
def slow(x):
    time.sleep(0.8)
    return x + 1
forge_ugc.compile(slow, torch.ones(3), device="cpu", progress={wanted})
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.parametrize("wanted", [None, False])
def test_on_a_terminal(wanted: bool | None) -> None:
    ours, theirs = os.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(wanted=wanted)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert done.wait(60) == 0 and done.stdout is not None and done.stdout.read() == b""
    assert (b"forge: capturing forward()" in said) is (wanted is None), said
    assert wanted is None or b"forge" not in said
