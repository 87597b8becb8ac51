"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
INSTALLED = "forge_ugc" in entry_points(group="pytest11").names

MODELS = """
import torch

class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def forward(self, ids):
        return self.head(self.embed(ids))

IDS = torch.arange(8).reshape(2, 4)

def test_right(forge_fidelity):
    figures = forge_fidelity(Language().eval(), IDS, atol=2e-5, top1=1.0, dataset=torch.arange(9).repeat(4))
    assert figures.compiled(IDS).shape == (2, 4, 9)
"""
WRONG = """
def test_wrong(forge_fidelity):
    forge_fidelity(Language().eval(), IDS, top1=1.1)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    def run(*args):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        plugin = () if INSTALLED else ("-p", "pytest_forge_ugc")
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *plugin, *args)

    return run


def test_fixture_and_summary(pytester, run):
    pytester.makepyfile(MODELS + WRONG)
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*top1: 1, asserted at least 1.1*",
            "=* Forge-UGC fidelity =*",
            "test*model*device*max_abs*relative*kl*top1*perplexity*",
            "*::test_right*Language*auto*1*->*passed",
            "*::test_wrong*Language*auto*1*-*failed",
        ]
    )
    assert "def assert_fidelity" not in result.stdout.str(), "the plugin's own frames are hidden"


def test_device_and_dump(pytester, run):
    pytester.makepyfile(
        MODELS
        + """
def test_device(forge_fidelity):
    model = Language().eval()
    assert forge_fidelity(model, IDS).device == "cpu"
    forge_fidelity(model, IDS, device="auto", passes="none")
"""
    )
    result = run("--forge-device", "cpu", "--forge-dump", "dumped", "-k", "not right")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*::test_device*Language*cpu*passed", "*::test_device*Language*auto*passed"])
    folders = sorted(p.name for p in Path(pytester.path, "dumped").iterdir())
    assert len(folders) == 2 and folders[0].endswith("test_device") and folders[1].endswith("test_device-2")
    assert all(Path(pytester.path, "dumped", f, "report.md").exists() for f in folders)


def test_a_wrong_device_fails(pytester, run):
    pytester.makepyfile(MODELS)
    result = run("--forge-device", "abacus")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*unknown device 'abacus'*"])


def test_nothing_is_shown_or_imported_unless_it_is_used(pytester, run):
    pytester.makepyfile(
        "import sys\ndef test_plain():\n    assert 'torch' not in sys.modules and 'forge_ugc' not in sys.modules"
    )
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*Forge-UGC fidelity*")
    result = run("--help")
    result.stdout.fnmatch_lines(["*--forge-device=DEVICE*", "*--forge-dump=FOLDER*"])
    result = run("--fixtures")
    result.stdout.fnmatch_lines(["forge_fidelity*"])


def test_the_plugin_module_is_light():
    program = "import sys, pytest_forge_ugc; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ).returncode == 0
