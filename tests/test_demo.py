"""`make demo` on a short window: it runs, and ends by saying that both models agree with eager."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def test_demo():
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--rounds", "3", "--window", "40"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "both agree with eager" in done.stdout
    assert done.stdout.count("tokens equal to eager's") == 3


def test_shipped_model_is_small():
    assert sum(p.stat().st_size for p in (EXAMPLES / "small_gpt2").iterdir()) < 8_000_000
