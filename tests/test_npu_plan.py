"""Folding of the six families at full depth: few distinct graphs, one call a layer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import forge_ugc
from tests import cbuild
from tests.models.families import FAMILIES, build, input_ids

PROGRAM = Path(__file__).resolve().parent / "c" / "test_plan.c"
MAX_GRAPHS = 4
MAX_SHARE_COMPILED = 0.2  # of the instructions
MAX_MS = 100  # a few in truth; other processes may be running


@pytest.mark.parametrize("name", FAMILIES)
def test_family_at_full_depth(name: str, tmp_path: Path) -> None:
    model = build(name, device="meta")
    compiled = forge_ugc.compile(model, (input_ids(model).to("meta"),), device="npu:plan")
    text = tmp_path / "graph.txt"
    text.write_text(compiled.ir("final"))
    done = subprocess.run([cbuild.program(PROGRAM), text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = re.match(r"1 segments, (\d+) instructions, (\d+) blocks, (\d+) calls, ([\d.]+) ms;(.*)", done.stdout)
    assert found, done.stdout
    blocks = [tuple(map(int, b)) for b in re.findall(r"(\d+)x(\d+)", found[5])]
    assert int(found[2]) == len(blocks) <= MAX_GRAPHS, done.stdout
    layers = sorted(blocks, key=lambda b: -b[1])[: 2 if name == "lfm2" else 1]
    assert sum(calls for calls, _ in layers) == FAMILIES[name].layers, done.stdout
    assert sum(instrs for _, instrs in blocks) <= MAX_SHARE_COMPILED * int(found[1]), done.stdout
    assert re.search(r"columns", found[5]), "the head is not cut into tiles"
    assert float(found[4]) <= MAX_MS
