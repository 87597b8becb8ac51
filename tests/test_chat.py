"""examples/chat.py with the small GPT-2: it writes what eager writes, through Forge, and needs only the folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
CHAT = ROOT / "examples" / "chat.py"


def chat(*options, text=None):
    return subprocess.run(
        [sys.executable, str(CHAT), *options],
        input=text, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def test_compare():
    done = chat("--prompt", "And it came to pass in those days, that", "--tokens", "24", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    said, figures, verdict = done.stdout.strip().rsplit("\n", 2)
    assert len(said.split()) > 8
    assert re.fullmatch(r"\[24 tokens; 23 steps by Forge; forge \d+\.\d tokens/s, eager \d+\.\d tokens/s\]", figures)
    assert verdict == "[the same tokens as eager]"


def test_prompts_from_a_pipe():
    done = chat("--tokens", "6", "--temperature", "0.8", text="The LORD is my\n\nThen Jesus said\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\[6 tokens; 5 steps by Forge; forge \d", done.stdout)) == 2


@pytest.mark.parametrize("options", [["no/such/folder"], ["--tokens", "0"], ["--tokens", "128", "--prompt", "a"]])
def test_refusals(options):
    done = chat(*options)
    assert done.returncode != 0 and "Traceback" not in done.stderr and done.stderr.strip()
