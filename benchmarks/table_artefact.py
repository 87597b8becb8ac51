"""What loading a saved model costs, beside OpenVINO's."""

from __future__ import annotations

import statistics
from typing import Any

from .jobs import Job, Results, Settings, artefact_job
from .models import MODELS
from .systems import label
from .tables import Maker, Table, missing_notes, number


def jobs(s: Settings) -> list[Job]:
    return [artefact_job(s, model) for model in s.runnable[:1]]


def table_artefact(s: Settings, results: Results) -> Table:
    rows = []
    for model, job in zip(s.runnable, jobs(s), strict=False):
        result = results(job) or {}
        for name in [n for n in ("forge", "openvino") if n in result]:
            rows.append([MODELS[model].label, label(name), *cells(result, name)])
    columns = [
        "Model",
        "System",
        "File (MB)",
        "Load (ms)",
        "/ OpenVINO",
        "First call (ms)",
        "Later (ms)",
        "first / later",
    ]
    notes = [
        "Medians of fresh processes in turn, imports done, the files in memory. Load: until it can be called, "
        "forge_ugc.load beside compile_model of the saved xml (f32).",
        "First / later: of each process its first call, and the median of its further ones.",
    ]
    return Table("artefact", "Loading a saved model", columns, rows, [*notes, *missing_notes(results, jobs(s))])


def cells(result: dict[str, Any], name: str) -> list[str]:
    found = result[name]
    ms = statistics.median(found["load_s"]) * 1e3
    peer = statistics.median(result["openvino"]["load_s"]) * 1e3 if "openvino" in result else None
    later = [statistics.median(calls) for calls in found["call_s"]]
    ratio = statistics.median(first / usual for first, usual in zip(found["first_s"], later, strict=True))
    return [
        number(result["bytes"][name] / 1e6, 0),
        number(ms, 1),
        "-" if peer is None else f"{ms / peer:.2%}",
        number(statistics.median(found["first_s"]) * 1e3, 1),
        number(statistics.median(later) * 1e3, 1),
        f"{ratio:.2f}",
    ]


MAKERS = [Maker("artefact", "loading a saved model", jobs, table_artefact)]
