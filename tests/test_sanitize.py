"""The C tests, and a short run of the whole package, with AddressSanitizer and UndefinedBehaviorSanitizer built in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize-python"
CC = os.environ.get("CC", "gcc")


def run_time(name: str) -> str | None:
    path = subprocess.run([CC, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else None


pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.environ.get("FORGE_SANITIZE") == "1", reason="this is such a run already"),
    pytest.mark.skipif(run_time("libasan.so") is None, reason=f"{CC} has no AddressSanitizer"),
]


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "FORGE_SANITIZE": "1", **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-12000:]}"


def test_c_tests():
    run([sys.executable, "-m", "pytest", "-q", "tests/test_c.py", "-k", "test_c"])


def test_python_smoke():
    run([sys.executable, "setup.py", "-q", "build", "--build-lib", str(BUILD)])
    # Python is not instrumented, so the run-times are preloaded; libstdc++ with them, or C++ exceptions miss their
    # interceptor. Leaks are left to the C tests: an interpreter has many of its own.
    preload = [run_time(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    run(
        [sys.executable, "tests/smoke.py"],
        LD_PRELOAD=" ".join(filter(None, preload)),
        ASAN_OPTIONS="detect_leaks=0",
        PYTHONMALLOC="malloc",
        PYTHONPATH=str(BUILD),
        OMP_NUM_THREADS="1",
    )
