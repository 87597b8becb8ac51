"""The report and the texts of the stages: what users and benchmarks read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import _core


@pytest.fixture(scope="module")
def forge() -> forge_ugc.CompiledModel:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    return forge_ugc.compile(model, torch.randn(1, 5, 16))


def test_keys(forge: forge_ugc.CompiledModel) -> None:
    d = forge.report.to_dict()
    assert {"capture_ms", "table_ms", "passes_ms", "lower_ms", "alloc_ms", "schedule_ms", "total_ms"} <= set(
        d["phases"]
    )
    assert all(isinstance(ms, float) and ms >= 0 for ms in d["phases"].values())
    assert d["phases"]["total_ms"] >= d["phases"]["capture_ms"]
    for p in d["passes"]:
        assert {"name", "ms", "nodes_before", "nodes_after", "cost_before", "cost_after"} <= set(p)
    assert {p["name"] for p in d["passes"]} == {name for name, default in _core.passes() if default}
    assert 0 < d["nodes_final"] < d["nodes_captured"]
    b = d["buffers"]
    assert set(b) >= {"virtual", "physical", "rho", "arena_bytes", "lower_bound_bytes"}
    assert b["rho"] == pytest.approx(1 - b["physical"] / b["virtual"])
    assert set(d["transitions"]) == {"before", "after"}
    assert sum(d["placement"].values()) == d["nodes_final"]
    assert d["fallbacks"] == [] and set(d["weights"]) == {"borrowed_bytes", "packed_bytes", "quantised_bytes"}
    weights = sum(p.numel() * p.element_size() for p in forge._model.parameters())
    assert d["weights"]["borrowed_bytes"] == weights
    json.dumps(d)


def test_it_is_a_mapping() -> None:
    report = forge_ugc.compile(nn.Linear(2, 2).eval(), torch.ones(1, 2), device="cpu").report
    assert "device" in report and "key" not in report and 0 not in report
    assert report.get("device") == "cpu" and report.get("key") is None
    assert report._counter is not None  # none of this has exported the model
    assert dict(report) == report.to_dict() and len(report) == len(list(report))
    assert {report: 1}[report] == 1 and report != dict(report)


def test_to_dict_is_a_copy(forge: forge_ugc.CompiledModel) -> None:
    forge.report.to_dict()["phases"].clear()
    assert forge.report.to_dict()["phases"]


def test_texts(forge: forge_ugc.CompiledModel) -> None:
    text, markdown = str(forge.report), forge.report.to_markdown()
    for word in ("captured", "executed", "rho", "arena", "transitions", "borrowed", "attention_fusion", "capture"):
        assert word in text and word in markdown
    assert "| pass |" in markdown and repr(forge.report).startswith("<Report")
    assert "CompiledModel of TransformerEncoderLayer" in repr(forge)


def test_fallbacks_have_operator_count_and_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) * torch.lgamma(x)

    with pytest.warns(forge_ugc.FallbackWarning):
        report = forge_ugc.compile(function, torch.ones(2)).report
    (entry,) = report.to_dict()["fallbacks"]
    assert entry["op"] == "aten.lgamma.default" and entry["count"] == 2 and set(entry) == {"op", "count", "where"}
    assert "aten.lgamma.default" in str(report) and "aten.lgamma.default" in report.to_markdown()


def test_every_stage_has_text(forge: forge_ugc.CompiledModel) -> None:
    assert "aten.linear.default" in forge.ir("aten")
    stages = ["capture", *(f"after:{name}" for name, default in _core.passes() if default), "final"]
    for stage in stages:
        text = forge.ir(stage)
        assert text.startswith("graph {") and "return" in text
        assert _core.optimize_text(text, passes="none")
    assert forge.ir("npuir").startswith("npuir cpu") and "offset" in forge.ir("schedule")
    with pytest.raises(ValueError):
        forge.ir("after:nothing")


def test_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_DUMP", str(tmp_path / "dump"))
    forge_ugc.compile(nn.Linear(3, 2).eval(), torch.ones(1, 3))
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names[0] == "00_aten.txt" and "report.md" in names
    assert "03_after_cse.txt" in names and "06_after_cse_2.txt" in names and any("schedule" in n for n in names)
    assert all((tmp_path / "dump" / n).read_text().strip() for n in names)
    aten = (tmp_path / "dump" / names[0]).read_text()
    for number in (2, 3):  # earlier ones stay
        forge_ugc.compile(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), torch.ones(number, 3))
        assert f"[{number}, 3]" in (tmp_path / "dump" / str(number) / names[0]).read_text().replace(",3]", ", 3]")
    assert (tmp_path / "dump" / names[0]).read_text() == aten and not (tmp_path / "dump" / "4").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORGE_DUMP", str(tmp_path / "file"))
    with pytest.raises(FileExistsError, match="FORGE_DUMP names no folder"):
        forge_ugc.compile(nn.Linear(3, 2).eval(), torch.ones(1, 3))
