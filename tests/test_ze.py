"""The C device layer on the software NPU, at each version of the graph extension that it tells apart."""

from __future__ import annotations

import subprocess

import pytest

from forge_ugc import softnpu
from forge_ugc.testing import software_npu
from tests import cbuild

pytestmark = [
    pytest.mark.skipif(softnpu.missing() is not None, reason=softnpu.missing() or ""),
    pytest.mark.skipif(cbuild.SANITIZE, reason="OpenVINO opens TBB with RTLD_DEEPBIND, which ASan refuses"),
]

PROGRAM = cbuild.ROOT / "tests" / "c" / "test_ze_device.c"


def run() -> str:
    done = subprocess.run([cbuild.program(PROGRAM)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("extension", ["1.4", "1.5", "1.7", "1.8", "1.11", "1.12", "1.15", "1.16"])
def test_device(extension: str) -> None:
    with software_npu(extension=extension):
        assert f"extension {extension}\n" in run()


def test_wrapped_handles() -> None:
    """The loader's layers hand out handles of their own."""
    with software_npu(intercept=True):
        assert "ran on" in run()
