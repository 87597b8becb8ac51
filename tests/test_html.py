"""Reports as HTML: well-formed, self-contained, escaped, and their pictures show the program's own plan."""

from __future__ import annotations

import itertools
import pickle
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import cli, html

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert("&")</script>'


@pytest.fixture(scope="module")
def mixed() -> forge_ugc.CompiledModel:
    """Two devices, an operator that torch runs, names and source lines that want escaping."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)).eval()
    space: dict[str, Any] = {"torch": torch, "model": model}
    code = "def f(x):\n    y = model(x)\n    return y + torch.linalg.inv(x @ y.T @ y).sum(), y.softmax(-1)\n"
    exec(compile(code, f"/a/b/c/{HOSTILE}.py", "exec"), space)
    space["f"].__name__ = HOSTILE
    with pytest.warns(forge_ugc.FallbackWarning):
        return forge_ugc.compile(space["f"], torch.randn(16, 16), device="npu:plan")


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def pictures(text: str) -> dict[str, ET.Element]:
    return {svg.get("aria-label", ""): svg for svg in parse(text).iter(f"{SVG}svg")}


def test_self_contained_and_escaped(mixed: forge_ugc.CompiledModel) -> None:
    for text in (mixed.report.to_html(), mixed.report._repr_html_(), mixed._repr_html_()):
        parse(text)
        assert "<script" not in text and "alert(&quot;&amp;&quot;)" in text
        bare = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|src=|href=|url\(|@import|<link|<iframe|onload", bare)
        for heading in ("Phases", "Passes", "Graph before and after", "Memory plan", "Schedule", "Remarks"):
            assert f"<h3>{heading}</h3>" in text
        assert "aten.linalg_inv.default" in text and ":3 in f" in text
    assert mixed.report.to_html().startswith("<!DOCTYPE html>\n<html lang=")
    assert f"on {mixed.device}" in mixed._repr_html_()


def test_no_fallbacks_no_buffers() -> None:
    text = forge_ugc.compile(lambda x: x + 1, torch.ones(3)).report.to_html()
    parse(text)
    assert "no operator is run by torch" in text and "Memory plan" not in text and "Schedule" in text
    parse(forge_ugc.compile(lambda x: x, torch.ones(3)).report.to_html())


def test_pictures(mixed: forge_ugc.CompiledModel) -> None:
    schedule = mixed.report.schedule
    assert schedule is not None
    drawn = pictures(mixed.report.to_html())
    assert set(drawn) == {"memory plan of cpu", "memory plan of npu", "schedule"}
    for device in ("cpu", "npu"):
        boxes = list(drawn[f"memory plan of {device}"].iter(f"{SVG}rect"))
        rows = [b for b in schedule["buffers"] if b["device"] == device]
        assert len(boxes) == len(rows) > 0
        for box, b in zip(boxes, rows, strict=True):
            assert box.findtext(f"{SVG}title", "").startswith(f"buffer {b['id']}, ")
            x, y, width, height = (float(box.get(k, "")) for k in ("x", "y", "width", "height"))
            assert 78 <= x and x + width <= 1000.1 and 19.9 <= y and y + height <= 210.1
    lanes = list(drawn["schedule"].iter(f"{SVG}rect"))
    assert len(lanes) == len(schedule["instructions"])
    heights = {row["device"]: box.get("y") for row, box in zip(schedule["instructions"], lanes, strict=True)}
    assert len(set(heights.values())) == 2
    devices = [row["device"] for row in schedule["instructions"]]
    changes = sum(a != b for a, b in itertools.pairwise(devices))
    assert len(list(drawn["schedule"].iter(f"{SVG}line"))) == changes > 0
    assert changes + (devices[0] != "cpu") == mixed.report["transitions"]["after"]  # a call begins on the host


def test_schedule_is_the_program(mixed: forge_ugc.CompiledModel) -> None:
    """What is drawn is what ir("schedule") says."""
    schedule, text = mixed.report.schedule, mixed.ir("schedule")
    assert schedule is not None
    placed = re.findall(r"^  b(\d+) : arena (\w+), (\d+) bytes, offset (\d+), slot (\d+)", text, re.M)
    ours = [tuple(str(b[k]) for k in ("id", "device", "bytes", "offset", "slot")) for b in schedule["buffers"]]
    assert ours == placed
    order = re.findall(r" = (\w+) [^\n]* on (\w+)(?: inplace \d+)? loc\(.*?\) # live", text)
    assert [d for _, d in order] == [row["device"] for row in schedule["instructions"]]
    assert [op for op, _ in order] == [
        row["op"] if "." not in row["op"] else "host" for row in schedule["instructions"]
    ]
    assert schedule["instructions"][0]["type"] == "f32[16,64]" and ".py:2 in f" in schedule["instructions"][0]["source"]
    for device, size in re.findall(r"^  arena (\w+) (\d+)$", text, re.M):
        assert schedule["arena_bytes"][device] == int(size)
    ((first, count),) = schedule["segments"]
    devices = [row["device"] for row in schedule["instructions"]]
    assert devices[first : first + count] == ["npu"] * count and devices.count("npu") == count
    buffers = schedule["buffers"]
    for i, a in enumerate(buffers):
        for b in buffers[:i]:
            together = a["first"] < b["last"] and b["first"] < a["last"]  # one ends where another begins: in place
            apart = a["offset"] + a["bytes"] <= b["offset"] or b["offset"] + b["bytes"] <= a["offset"]
            assert not together or apart or a["device"] != b["device"]


def test_graph_counts() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu().t()

    report = forge_ugc.compile(function, torch.ones(2, 3)).report
    assert report["operators"] == {"add": 1, "mul": 1, "permute": 1, "relu": 1}
    assert sum(report["operators"].values()) == report["nodes_table"]
    assert sum(report["instructions"].values()) == report["nodes_final"]


def test_many_instructions_are_drawn_as_runs(mixed: forge_ugc.CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_MANY", 4)
    lanes = list(pictures(mixed.report.to_html())["schedule"].iter(f"{SVG}rect"))
    assert len(lanes) == mixed.report["transitions"]["after"]  # the first is from the host to the first lane
    assert lanes[0].findtext(f"{SVG}title", "").endswith(" on npu")


def test_save(mixed: forge_ugc.CompiledModel, tmp_path: Path) -> None:
    for name, start in (("r.html", "<!DOCTYPE"), ("r.md", "| | |"), ("r.json", "{"), ("r.txt", "       device")):
        mixed.report.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    with pytest.raises(ValueError, match=r"\.html, \.md, \.json, \.txt"):
        mixed.report.save(tmp_path / "r.pdf")
    copy = pickle.loads(pickle.dumps(mixed.report))
    assert copy.to_html() == mixed.report.to_html()


def test_of_an_artefact(tmp_path: Path) -> None:
    forge_ugc.compile(nn.Linear(4, 4).eval(), torch.ones(2, 4)).save(tmp_path / "m.forge")
    assert cli.main(["report", str(tmp_path / "m.forge"), "--html", str(tmp_path / "r.html")]) == 0
    assert "an artefact of Linear" in (tmp_path / "r.html").read_text()
    assert cli.main(["report", str(tmp_path / "m.forge"), "--html", str(tmp_path / "no" / "r.html")]) == 1


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_in_a_browser(mixed: forge_ugc.CompiledModel, tmp_path: Path) -> None:
    """A browser shows the page: what it makes of it has every box, and it has reported no error."""
    mixed.report.save(tmp_path / "r.html")
    done = subprocess.run(
        [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", (tmp_path / "r.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert mixed.report.schedule is not None
    boxes = len(mixed.report.schedule["buffers"]) + len(mixed.report.schedule["instructions"])
    assert done.stdout.count("<rect") == boxes and done.stdout.count("<svg") == 3
