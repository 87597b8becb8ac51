"""The program that comes out: buffers (table 16) and transitions between devices (21)."""

from __future__ import annotations

from .jobs import Results, Settings, plan_job
from .models import MODELS
from .table_passes import plans
from .tables import Maker, Table, change, missing_notes, number


def table_16(s: Settings, results: Results) -> Table:
    columns = [
        "Model",
        "V-regs",
        "Phys.",
        "rho",
        "Transitions",
        "CPU: v-regs",
        "phys.",
        "rho",
        "arena (MB)",
        "arena / bound",
    ]
    rows = []
    for model in s.families:
        plan = results(plan_job(s, model))
        if plan:
            npu, cpu = plan["target"]["npu4000"], plan["target"]["cpu"]
            row = [MODELS[model].label, *_buffers(npu["buffers"])]
            moves = npu["transitions"]
            row.append(change(moves["after"], moves["before"]))
            bound = max(cpu["buffers"]["lower_bound_bytes"], 1)
            arena = cpu["buffers"]["arena_bytes"]
            rows.append([*row, *_buffers(cpu["buffers"]), number(arena / 2**20, 1), number(arena / bound, 3)])
    notes = [
        'NPU4000: the plan of device="npu:plan". rho = 1 - physical / virtual.',
        "Bound: the largest set of bytes that live at once.",
    ]
    return Table("16", "Buffers", columns, rows, [*notes, *missing_notes(results, plans(s))])


def _buffers(buffers: dict[str, float]) -> list[str]:
    return [str(buffers["virtual"]), str(buffers["physical"]), f"{buffers['rho']:.1%}"]


def table_21(s: Settings, results: Results) -> Table:
    rows = []
    for model in s.families:
        plan = results(plan_job(s, model))
        if plan:
            npu = plan["target"]["npu4000"]
            before, after = npu["transitions"]["before"], npu["transitions"]["after"]
            share = npu["placement"].get("npu", 0) / sum(npu["placement"].values())
            rows.append(
                [MODELS[model].label, str(before), str(after), change(after, before), f"{share:.1%}", "not measured"]
            )
    notes = [
        'Of the plan for NPU4000 (device="npu:plan"), a forward pass, before and after scheduling.',
        "Placement keeps operators together before scheduling sees them.",
        "Latency on an NPU is not measured: this machine has none.",
    ]
    columns = ["Model", "Before", "After", "Change", "Instructions on the NPU", "Latency change"]
    return Table("21", "Transitions between devices", columns, rows, [*notes, *missing_notes(results, plans(s))])


MAKERS = [
    Maker("16", "buffers", plans, table_16),
    Maker("21", "transitions between devices", plans, table_21),
]
