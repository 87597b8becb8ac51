"""Passes: nodes (table 5), time (10, 11), costs (12, 14, 17, 18), what fusion is worth in measured latency (15, 17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .jobs import ABLATED, SWEEP, Job, Results, Settings, ablation_session, alpha_session, plan_job
from .measure import Ratio
from .models import FULL_DEPTH, MODELS
from .table_latency import latency
from .tables import Maker, Table, beside, change, missing_notes, number, systems_of

Plan = dict[str, Any]  # what a plan job found
Cells = Callable[[Plan, str], list[str]]
Rows = list[list[str]]
MODEL_COST = "Cost: the cost model's score in us (csrc/npuir/cost.c); a heuristic, no measured time."


def plans(s: Settings) -> list[Job]:
    return [plan_job(s, model) for model in s.families]


def table_5(s: Settings, results: Results) -> Table:
    found = {model: results(plan_job(s, model)) for model in s.families}
    first = next((plan for plan in found.values() if plan), None)
    stages = [p["name"] for p in first["target"]["cpu"]["passes"]] if first else []
    columns = ["Model", "torch.export", "Table", *stages, "Executed", "Change", "%"]
    rows = []
    for model, plan in found.items():
        if plan is None:
            continue
        target, start = plan["target"]["cpu"], plan["nodes_captured"]
        after = [p["nodes_after"] for p in target["passes"]]
        drop = f"{(after[-1] - start) / start * 100:+.1f}%" if start else "-"
        rows.append(
            [
                MODELS[model].label,
                str(start),
                str(plan["nodes_table"]),
                *map(str, after),
                str(target["executed"]),
                f"{after[-1] - start:+d}" if start else "-",
                drop,
            ]
        )
    notes = [
        "Nodes after each run of a pass. Change: from torch.export's count to that after the last pass.",
        "Executed: instructions; views cost none.",
    ]
    return Table("5", "Graph nodes after each pass", columns, rows, [*notes, *missing_notes(results, plans(s))])


def table_10(s: Settings, results: Results) -> Table:
    plan = results(plan_job(s, s.families[0], "eager"))
    rows: list[list[str]] = []
    if plan:
        passes = plan["target"]["cpu"]["passes"]
        for name in dict.fromkeys(p["name"] for p in passes):
            runs = [p for p in passes if p["name"] == name]
            delta = sum(p["nodes_after"] - p["nodes_before"] for p in runs)
            rows.append([name, number(sum(p["ms"] for p in runs), 3), f"{delta:+d}", str(len(runs))])
        rows.append(
            [
                "all",
                number(sum(p["ms"] for p in passes), 3),
                f"{passes[-1]['nodes_after'] - passes[0]['nodes_before']:+d}",
                str(len(passes)),
            ]
        )
    notes = [f"{MODELS[s.families[0]].label}, attention written out; medians of several compilations."]
    return Table(
        "10",
        "Time of each pass",
        ["Pass", "Time (ms)", "Change of nodes", "Runs"],
        rows,
        [*notes, *missing_notes(results, [plan_job(s, s.families[0], "eager")])],
    )


def written_out(s: Settings) -> list[Job]:
    return [plan_job(s, model, "eager") for model in s.families]


def table_11(s: Settings, results: Results) -> Table:
    rows = []
    for model, job in zip(s.families, written_out(s), strict=True):
        plan = results(job)
        if plan:
            target = plan["target"]["cpu"]
            fusion = {name: sum(p["ms"] for p in target["passes"] if p["name"] == name) for name in ABLATED}
            rows.append(
                [
                    MODELS[model].label,
                    str(s.layers or FULL_DEPTH[model]),
                    number(target["phases"]["passes_ms"], 2),
                    *(number(fusion[name], 3) for name in ABLATED[:2]),
                    number(target["c_ms"], 2),
                ]
            )
    notes = [
        "Attention written out. All C phases: passes, lowering, schedule, allocation. Medians of several compilations."
    ]
    columns = ["Model", "Layers", "Passes (ms)", "Attention fusion (ms)", "Operator fusion (ms)", "All C phases (ms)"]
    return Table("11", "Time of optimization", columns, rows, [*notes, *missing_notes(results, written_out(s))])


def _of_both_targets(s: Settings, results: Results, columns: Sequence[str], cells: Cells) -> tuple[list[str], Rows]:
    """(columns, rows) of a table with the same cells for the NPU and for the host, a row a family."""
    rows = []
    for model, job in zip(s.families, plans(s), strict=True):
        plan = results(job)
        if plan:
            rows.append([MODELS[model].label, *(cell for t in ("npu4000", "cpu") for cell in cells(plan, t))])
    return ["Model", *(f"{target} {what}" for target in ("NPU4000", "CPU") for what in columns)], rows


def table_12(s: Settings, results: Results) -> Table:
    def cells(plan: Plan, target: str) -> list[str]:
        zero, one = (plan["alpha"][target][alpha]["cost"] for alpha in ("0.0", "1.0"))
        return [number(zero, 0), number(one, 0), number(zero / one, 3)]

    columns, rows = _of_both_targets(s, results, ("alpha 0", "alpha 1", "FGR"), cells)
    notes = [MODEL_COST, "FGR = cost at alpha 0 / cost at alpha 1."]
    return Table("12", "Fusion Gain Ratio", columns, rows, [*notes, *missing_notes(results, plans(s))])


def table_14(s: Settings, results: Results) -> Table:
    model = s.families[0]
    plan, measured = results(plan_job(s, model, "eager")), results(ablation_session(s, model))
    rows = []
    if plan:
        full = {target: plan["target"][target]["cost"] for target in ("npu4000", "cpu")}
        rows.append(
            [
                "all passes",
                number(full["npu4000"], 0),
                "-",
                number(full["cpu"], 0),
                "-",
                str(plan["target"]["cpu"]["executed"]),
                _ms(measured, "forge"),
                "-",
            ]
        )
        for name, cpu in plan["ablation"]["cpu"].items():
            npu = plan["ablation"]["npu4000"][name]
            rows.append(
                [
                    f"without {name}",
                    number(npu["cost"], 0),
                    change(npu["cost"], full["npu4000"]),
                    number(cpu["cost"], 0),
                    change(cpu["cost"], full["cpu"]),
                    str(cpu["executed"]),
                    _ms(measured, f"forge:without={name}"),
                    _effect(measured, f"forge:without={name}"),
                ]
            )
    columns = [
        "Configuration",
        "Cost NPU4000",
        "vs all",
        "Cost CPU",
        "vs all",
        "Executed",
        "Latency P50 (ms)",
        "/ all (quartiles)",
    ]
    notes = [f"{MODELS[model].label}, attention written out. {MODEL_COST} Latency is measured on the host."]
    jobs = [plan_job(s, model, "eager"), ablation_session(s, model)]
    return Table("14", "Without each pass", columns, rows, [*notes, *missing_notes(results, jobs)])


def _ms(result: object, name: str) -> str:
    found = systems_of(result)  # type: ignore[arg-type]
    return number(latency(found[name]).p50, 1) if name in found else "-"


def _effect(result: object, name: str) -> str:
    pair = beside(result, name)  # type: ignore[arg-type]
    return str(Ratio.of(pair[0]["turns"], pair[1]["turns"])) if pair else "-"


def ablations(s: Settings) -> list[Job]:
    return [ablation_session(s, model) for model in s.runnable]


def table_15(s: Settings, results: Results) -> Table:
    rows = []
    for model, job in zip(s.runnable, ablations(s), strict=True):
        result = results(job)
        if result:
            row = [MODELS[model].label, str(s.layers or FULL_DEPTH[model]), _ms(result, "forge")]
            for name in ABLATED:
                row += [_ms(result, f"forge:without={name}"), _effect(result, f"forge:without={name}")]
            rows.append(row)
    columns = ["Model", "Layers", "All (ms)"]
    columns += [cell for name in ABLATED for cell in (f"without {name} (ms)", "/ all (quartiles)")]
    notes = [
        'Measured on the host, P50, in turn; attention written out (attn_implementation="eager").',
        "Above 1: the pass makes it faster.",
    ]
    return Table("15", "What fusion is worth", columns, rows, [*notes, *missing_notes(results, ablations(s))])


def sweep_jobs(s: Settings) -> list[Job]:
    return [plan_job(s, s.families[0]), *([alpha_session(s, s.runnable[0])] if s.runnable else [])]


def table_17(s: Settings, results: Results) -> Table:
    plan = results(plan_job(s, s.families[0]))
    measured = results(alpha_session(s, s.runnable[0])) if s.runnable else None
    rows = []
    for alpha in SWEEP:
        if plan is None:
            break
        npu, cpu = (plan["alpha"][target][alpha] for target in ("npu4000", "cpu"))
        name = f"forge:alpha={alpha}"
        rows.append(
            [
                alpha,
                number(npu["cost"], 0),
                number(cpu["cost"], 0),
                str(cpu["nodes"]),
                str(cpu["executed"]),
                str(cpu["fused"]),
                _ms(measured, name),
                _effect(measured, name),
            ]
        )
    notes = [
        f"{MODELS[s.families[0]].label}. {MODEL_COST}",
        "Fused: matches of operator fusion. Latency is measured on the host.",
    ]
    columns = [
        "alpha",
        "Cost NPU4000",
        "Cost CPU",
        "Nodes",
        "Executed",
        "Fused",
        "Latency P50 (ms)",
        "/ default (quartiles)",
    ]
    return Table("17", "Fusion aggressiveness", columns, rows, [*notes, *missing_notes(results, sweep_jobs(s))])


def table_18(s: Settings, results: Results) -> Table:
    def cells(plan: Plan, target: str) -> list[str]:
        usual, tuned = plan["target"][target]["cost"], plan["autotune"][target]
        costs = number(usual, 1), number(tuned["cost"], 1), change(tuned["cost"], usual)
        return [*costs, number(tuned["added_ms"], 1)]

    columns, rows = _of_both_targets(s, results, ("default", "autotuned", "change", "added ms"), cells)
    notes = [MODEL_COST]
    if rows and all(cell == "+0.0%" for row in rows for cell in row[3::4]):
        notes.append("No change: the default alpha, length of fused programs and layout are what costs least.")
    return Table("18", "Autotuning", columns, rows, [*notes, *missing_notes(results, plans(s))])


MAKERS = [
    Maker("5", "nodes after each pass", plans, table_5),
    Maker("10", "time of each pass", lambda s: [plan_job(s, s.families[0], "eager")], table_10),
    Maker("11", "time of optimization", written_out, table_11),
    Maker("12", "fusion gain ratio", plans, table_12),
    Maker(
        "14",
        "without each pass: cost and latency",
        lambda s: [plan_job(s, s.families[0], "eager"), *ablations(s)[:1]],
        table_14,
    ),
    Maker("15", "latency without each fusion", ablations, table_15),
    Maker("17", "alpha sweep: cost and latency", sweep_jobs, table_17),
    Maker("18", "autotuning", plans, table_18),
]
