"""Goldens: IR text through `forge-opt`, compared with what is written down.

A file of tests/golden/ holds cases, divided by lines of `====`. A case is header lines (`# passes: ...`, and where it
is not the default `# emit: ...`, `# target: ...`, `# alpha: ...`, `# weight-bits: ...`; other `#` lines say what it
shows), the graph that goes in, a line `----`, and what comes out. FORGE_BLESS=1 rewrites what comes out (run it in
one process): read the difference before you commit it."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import cbuild

GOLDEN = Path(__file__).resolve().parent / "golden"
BLESS = os.environ.get("FORGE_BLESS") == "1"
OPTIONS = ("passes", "emit", "target", "alpha", "weight-bits", "weight-group")


def cases() -> list[tuple[Path, int]]:
    return [(path, k) for path in sorted(GOLDEN.glob("*.txt")) for k in range(len(path.read_text().split("\n====\n")))]


def name_of(case: tuple[Path, int]) -> str:
    path, k = case
    text = path.read_text().split("\n====\n")[k]
    title = next(
        (m[1] for m in re.finditer(r"^# (.+)", text, re.MULTILINE) if m[1].split(":")[0] not in OPTIONS), str(k)
    )
    return f"{path.stem}-{k}-{re.sub(r'[^A-Za-z0-9]+', '_', title)[:40]}"


@pytest.fixture(scope="session")
def forge_opt() -> Path:
    cbuild.BUILD.mkdir(parents=True, exist_ok=True)
    with open(cbuild.BUILD / "forge-opt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the test processes builds, the others find it built
        return cbuild.program(cbuild.CSRC / "tool" / "forge_opt.c")


def run(forge_opt: Path, arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forge_opt, *arguments, "-"], input=text, capture_output=True, text=True, timeout=60)


def expected_and_actual(forge_opt: Path, case: str) -> tuple[str, str, str]:
    source, _, expected = f"{case}\n".partition("\n----\n")
    arguments = [
        f"--{m[1]}={m[2].strip()}" for m in re.finditer(rf"^# ({'|'.join(OPTIONS)}):(.*)", source, re.MULTILINE)
    ]
    done = run(forge_opt, arguments, source)
    actual = done.stdout if done.returncode == 0 else f"error: {done.stderr}"
    assert done.returncode in (0, 1), f"exit code {done.returncode}: {done.stderr}"
    return source, expected.strip("\n"), actual.strip("\n")


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_golden(forge_opt: Path, case: tuple[Path, int]) -> None:
    path, k = case
    texts = path.read_text().split("\n====\n")
    source, expected, actual = expected_and_actual(forge_opt, texts[k])
    if BLESS and actual != expected:
        texts[k] = f"{source.strip(chr(10))}\n----\n{actual}" + ("\n" if k == len(texts) - 1 else "")
        path.write_text("\n====\n".join(texts))
        return
    assert actual == expected


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_output_is_a_fixed_point_of_printing(forge_opt: Path, case: tuple[Path, int]) -> None:
    """What comes out parses, verifies and prints as itself."""
    path, k = case
    _, _, actual = expected_and_actual(forge_opt, path.read_text().split("\n====\n")[k])
    if actual.startswith("graph"):
        assert run(forge_opt, ["--passes=none"], actual).stdout.strip("\n") == actual


def test_every_pass_has_a_golden(forge_opt: Path) -> None:
    text = "".join(p.read_text() for p in GOLDEN.glob("*.txt"))
    names = {n.strip() for m in re.finditer(r"^# passes:(.*)", text, re.MULTILINE) for n in m[1].split(",")}
    listed = subprocess.run([forge_opt, "--list-passes"], capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) <= names


@pytest.mark.parametrize(
    "arguments", [["--passes=nothing"], ["--emit=nothing"], ["--target=nothing"], ["--alpha=2"], ["--wrong"]]
)
def test_wrong_arguments(forge_opt: Path, arguments: list[str]) -> None:
    done = run(forge_opt, arguments, "graph { return }")
    assert done.returncode == 1 and not done.stdout and "forge-opt: " in done.stderr


def test_help(forge_opt: Path) -> None:
    done = subprocess.run([forge_opt, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: forge-opt")


def test_autotune_is_no_worse_than_the_default(forge_opt: Path) -> None:
    golden = (GOLDEN / "pipeline.txt").read_text()
    graph = golden.split("\n----\n")[0]
    tuned = run(forge_opt, ["--passes=default", "--autotune"], graph)
    given = run(forge_opt, ["--passes=default"], graph)
    assert tuned.returncode == 0 and len(tuned.stdout.splitlines()) <= len(given.stdout.splitlines())
    assert run(forge_opt, ["--passes=default"], golden).stdout == given.stdout  # of a golden it reads what goes in
