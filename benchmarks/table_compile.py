"""Compile time and what it costs: tables 4 and 13, phases, memory, growth with depth, new shapes."""

from __future__ import annotations

from typing import Any

from .jobs import Job, Results, Settings, capture_jobs, growth_job, main_session, shapes_job
from .measure import Latency
from .models import MODELS
from .systems import label
from .tables import Maker, Table, beside, missing_notes, number, systems_of, times

PEERS = ("openvino", "onnxruntime", "inductor")
FRESH = "Each in a fresh process with imports done, once."


def sessions(s: Settings) -> list[Job]:
    return [main_session(s, model) for model in s.runnable]


def without_export(measured: dict[str, Any]) -> float:
    """Seconds to the callable, torch.export or Forge's capture taken out."""
    return (
        float(measured["compile_s"])
        - (measured["phases"].get("export", 0) + measured["phases"].get("capture", 0)) / 1e3
    )


def table_4(s: Settings, results: Results) -> Table:
    names = [n for n in ("forge", *PEERS) if n in s.systems]
    columns = ["Model", *(label(n) for n in names), *(f"{label(n)} / Forge" for n in names[1:]), "torch.export / Forge"]
    rows = []
    for model in s.runnable:
        found = systems_of(results(main_session(s, model)))
        ms = {n: found[n]["compile_s"] * 1e3 if n in found else None for n in names}
        exports = [m["phases"]["export"] for m in found.values() if "export" in m["phases"]]
        ours = ms.get("forge")
        rows.append(
            [
                MODELS[model].label,
                *(number(ms[n], 0) for n in names),
                *(times(ms[n], ours) for n in names[1:]),
                times(min(exports, default=None), ours),
            ]
        )
    notes = [
        f"From nn.Module to callable, weights packed. {FRESH} The first result's time is in the table of phases.",
        "inductor compiles in its first call: that call less a usual one.",
        "torch.export: the fastest of the peers' own exports, which is their first phase.",
    ]
    return Table("4", "Compilation time (ms)", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def table_phases(s: Settings, results: Results) -> Table:
    columns = [
        "Model",
        "System",
        "Phases (ms)",
        "To callable (s)",
        "First call (s)",
        "To first result (s)",
        "/ Forge",
        "Without export (s)",
        "/ Forge",
    ]
    rows = []
    for model in s.runnable:
        found = systems_of(results(main_session(s, model)))
        ours = found.get("forge")
        for name, m in found.items():
            if name == "eager":
                continue
            phases = ", ".join(
                f"{phase} {ms:.1f}" if ms < 10 else f"{phase} {ms:.0f}" for phase, ms in m["phases"].items()
            )
            whole = m["compile_s"] + m["first_s"]
            rest = without_export(m)
            rows.append(
                [
                    MODELS[model].label,
                    label(name),
                    phases,
                    number(m["compile_s"], 2),
                    number(m["first_s"], 2),
                    number(whole, 2),
                    times(whole, ours["compile_s"] + ours["first_s"] if ours else None),
                    number(rest, 2),
                    times(rest, without_export(ours) if ours else None),
                ]
            )
    notes = [f"{FRESH} Without export: torch.export taken out of the peers' times, the capture out of Forge's."]
    return Table("phases", "Compilation by phases", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def table_memory(s: Settings, results: Results) -> Table:
    columns = [
        "Model",
        "System",
        "Weights (MB)",
        "Peak while compiling (MB)",
        "x weights",
        "Added after first run (MB)",
        "x weights",
    ]
    rows = []
    for model in s.runnable:
        for name, m in systems_of(results(main_session(s, model))).items():
            if name in ("eager", "openvino-default"):  # the second compilation of its process
                continue
            weights = m["weight_bytes"]
            cells = []
            for which in ("peak_bytes", "added_bytes"):
                cells += [number(m[which] / 2**20, 0), number(m[which] / weights, 2)]
            rows.append([MODELS[model].label, label(name), number(weights / 2**20, 0), *cells])
    notes = ["Resident memory above what there was before compiling, the torch model with its weights being alive."]
    return Table("memory", "Memory of compiling", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def table_13(s: Settings, results: Results) -> Table:
    rows = []
    for model in s.runnable:
        result = results(main_session(s, model))
        ours = systems_of(result).get("forge")
        cells = [cei(result, name) for name in ("openvino", "onnxruntime")]
        took = number(ours["compile_s"] if ours else None, 3)
        rows.append([MODELS[model].label, *(number(c, 2) for c in cells), took])
    notes = ["CEI = (mean latency of the peer / mean latency of Forge) / compile time of Forge in seconds."]
    columns = ["Model", "CEI OpenVINO", "CEI ONNX Runtime", "Compile (s)"]
    return Table("13", "Compilation Efficiency Index", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def cei(result: dict[str, Any] | None, name: str) -> float | None:
    pair = beside(result, name)
    if pair is None:
        return None
    peer, ours = (Latency.of([t for turn in m["turns"] for t in turn]).mean for m in pair)
    return peer / ours / float(pair[1]["compile_s"])


def table_growth(s: Settings, results: Results) -> Table:
    result = results(growth_job(s))
    names = ("capture_ms", "table_ms", "passes_ms", "lower_ms", "schedule_ms", "alloc_ms")
    rows, notes = [], missing_notes(results, [growth_job(s)])
    if result:
        for at in [*result["depths"], result["large"]]:
            table = at["phases"]["table_ms"] / at["nodes"] * 1e3
            cells = [number(at["phases"][n], 2) for n in names]
            rows.append(
                [str(at["layers"]), f"{at['nodes']:,}", *cells, number(at["after_capture_ms"], 1), number(table, 1)]
            )
        slope, start, r2 = line([(at["layers"], at["after_capture_ms"]) for at in result["depths"]])
        notes.insert(
            0,
            f"After capture = {start:.2f} ms + {slope:.3f} ms a layer, R2 = {r2:.4f}, up to "
            f"{result['depths'][-1]['layers']} layers.",
        )
    columns = [
        "Layers",
        "Nodes",
        *(n.removesuffix("_ms") + " (ms)" for n in names),
        "After capture (ms)",
        "table (us a node)",
    ]
    return Table("growth", "Growth of compile time with depth (GPT-2 blocks)", columns, rows, notes)


def line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(slope, value at 0, R2) of the least squares line."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    start = mean_y - slope * mean_x
    whole = sum((y - mean_y) ** 2 for _, y in points)
    rest = sum((y - start - slope * x) ** 2 for x, y in points)
    return slope, start, 1 - rest / whole if whole else 1.0


def table_shapes(s: Settings, results: Results) -> Table:
    rows = []
    jobs = [shapes_job(s, model) for model in s.runnable[:2]]
    for model, job in zip(s.runnable, jobs, strict=False):
        result = results(job)
        if result is None:
            continue
        for at in result["sizes"]:
            rows.append(
                [
                    MODELS[model].label,
                    number(result["compile_s"], 2),
                    str(at["seq"]),
                    number(at["new_ms"], 1),
                    number(at["call_ms"], 1),
                ]
            )
    notes = ["dynamic_shapes: what a first call with a new length takes beyond the fastest of three more."]
    columns = ["Model", "Compile (s)", "New length", "New shape (ms)", "Call (ms)"]
    return Table("shapes", "New shapes of a compiled model", columns, rows, [*notes, *missing_notes(results, jobs)])


def all_captures(s: Settings) -> list[Job]:
    return [job for model in s.families for job in capture_jobs(s, model).values()]


def table_capture(s: Settings, results: Results) -> Table:
    rows = []
    for model in s.families:
        found = {way: results(job) for way, job in capture_jobs(s, model).items()}
        seconds = {way: result["capture_s"] if result else None for way, result in found.items()}
        fast = found["fast"]
        rows.append(
            [
                MODELS[model].label,
                fast["way"] if fast else "-",
                *(number(seconds[way], 3) for way in ("fast", "export", "alone")),
                times(seconds["alone"], seconds["fast"]),
                times(seconds["alone"], fast["compile_s"] if fast else None),
            ]
        )
    columns = ["Model", "Way taken", 'capture="auto" (s)', 'capture="export" (s)', "torch.export alone (s)"]
    columns += ["alone / auto", "alone / whole compile"]
    notes = ["Each in a fresh process with imports done, from meta weights (nothing is packed)."]
    return Table("capture", "Capture", columns, rows, [*notes, *missing_notes(results, all_captures(s))])


MAKERS = [
    Maker("4", "compilation time", sessions, table_4),
    Maker("13", "compilation efficiency index", sessions, table_13),
    Maker("phases", "compilation by phases", sessions, table_phases),
    Maker("memory", "memory of compiling", sessions, table_memory),
    Maker("capture", "capture beside torch.export alone", all_captures, table_capture),
    Maker("growth", "compile time by depth, 50,000 nodes", lambda s: [growth_job(s)], table_growth),
    Maker(
        "shapes", "new shapes of a compiled model", lambda s: [shapes_job(s, m) for m in s.runnable[:2]], table_shapes
    ),
]
