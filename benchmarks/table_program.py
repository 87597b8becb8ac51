"""The program that comes out: buffers (table 16), transitions between devices (21), and all families at a glance."""

from __future__ import annotations

from .jobs import Job, Results, Settings, main_session, plan_job, scheduling_job, tops_job
from .measure import Ratio
from .models import MODELS
from .table_compile import sessions
from .table_latency import latency
from .table_passes import plans
from .tables import Maker, Table, beside, change, missing_notes, number, systems_of


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


TRANSITION_US = 60.0  # of the cost model, csrc/npuir/cost.c


def transition_jobs(s: Settings) -> list[Job]:
    tops = tops_job(s)
    return [*plans(s), *([tops] if tops else [])]


def table_21(s: Settings, results: Results) -> Table:
    rows = []
    for job in transition_jobs(s):
        plan, subject = results(job), dict(job.arguments)["subject"]
        if plan:
            npu = plan["target"]["npu4000"]
            before, after = npu["transitions"]["before"], npu["transitions"]["after"]
            share = npu["placement"].get("npu", 0) / sum(npu["placement"].values())
            cost = npu["cost"]  # its transitions are those of the schedule
            name = subject.label + (", top 5 of each layer" if subject.tops else "")
            estimate = change(cost, cost + (before - after) * TRANSITION_US)
            rows.append([name, str(before), str(after), change(after, before), f"{share:.1%}", estimate])
    notes = [
        'Of the plan for NPU4000 (device="npu:plan"), a forward pass: in program order, and as scheduled.',
        "Placement keeps operators together before scheduling sees them: the families have no operator inside of their "
        "layers that the NPU does not take.",
        "Top 5 of each layer: GPT-2 that also returns the five largest values of each layer's states; topk runs on the "
        "host, in program order right behind each layer.",
        f"Cost change: an estimate of the cost model, {TRANSITION_US:g} us a transition. No latency on an NPU is "
        "measured here.",
    ]
    columns = ["Model", "Before", "After", "Change", "Instructions on the NPU", "Cost change"]
    missing = missing_notes(results, transition_jobs(s))
    return Table("21", "Transitions between devices", columns, rows, [*notes, *missing])


def schedule_jobs(s: Settings) -> list[Job]:
    job = scheduling_job(s)
    return [*transition_jobs(s), *([job] if job else [])]


def table_scheduling(s: Settings, results: Results) -> Table:
    def cells(moves: tuple[int, int], arenas: tuple[int, int]) -> list[str]:
        return [*map(str, moves), *(number(bytes / 1e6, 2) for bytes in arenas), change(arenas[1], arenas[0])]

    rows = []
    for job in transition_jobs(s):
        plan, subject = results(job), dict(job.arguments)["subject"]
        for target, label in (("cpu", "CPU"), ("npu4000", "NPU4000")) if plan else ():
            both = plan["program_order"][target], plan["target"][target]  # type: ignore[index]
            moves, arenas = zip(*((p["transitions"]["after"], p["buffers"]["arena_bytes"]) for p in both), strict=True)
            name = subject.label + (", top 5 of each layer" if subject.tops else "")
            rows.append([name, label, *cells(moves, arenas), "-", "-", "-"])
    job = scheduling_job(s)
    measured = results(job) if job else None
    if measured:
        both = measured["program order"], measured["scheduled"]
        moves, arenas = zip(*((p["transitions"]["after"], p["buffers"]["arena_bytes"]) for p in both), strict=True)
        low, middle, high = measured["ratio"]
        times = [number(p["p50_ms"], 1) for p in both] + [f"{middle:.2f} ({low:.2f}-{high:.2f})"]
        rows.append(["GPT-2 (125M), top 5 of each layer", "software NPU", *cells(moves, arenas), *times])
    columns = ["Model", "Target", "Transitions", "scheduled", "Arena (MB)", "scheduled (MB)", "Change"]
    columns += ["P50 (ms)", "scheduled (ms)", "Ratio (quartiles)"]
    notes = [
        "In program order (schedule=False), and as scheduled. On one device the schedule is chosen for memory alone.",
        "Software NPU: what a change of device takes is real, what the device computes OpenVINO computes on the CPU. "
        "No latency on an NPU is measured here.",
    ]
    missing = missing_notes(results, schedule_jobs(s))
    return Table("scheduling", "What scheduling is worth", columns, rows, [*notes, *missing])


def family_jobs(s: Settings) -> list[Job]:
    return [*plans(s), *sessions(s)]


def table_families(s: Settings, results: Results) -> Table:
    """Forge beside eager, for the README."""
    rows = []
    for model in s.families:
        plan = results(plan_job(s, model))
        session = results(main_session(s, model)) if model in s.runnable else None
        found = systems_of(session)
        cpu = plan["target"]["cpu"] if plan else None
        ours, eager = found.get("forge"), found.get("eager")
        row = [MODELS[model].label]
        if ours:
            phases = ours["phases"]
            row += [number(ours["compile_s"], 2), number(phases["capture"] / 1e3, 2), number(phases["pack"] / 1e3, 2)]
        else:
            row += ["-"] * 3
        if plan and cpu:
            buffers = cpu["buffers"]
            row += [number(cpu["c_ms"], 1), str(plan["nodes_captured"]), str(cpu["executed"])]
            row.append(number(buffers["arena_bytes"] / max(buffers["lower_bound_bytes"], 1), 3))
        else:
            row += ["-"] * 4
        if ours and eager and "fidelity" in ours:
            row += [f"{ours['fidelity'][what]:.1e}" for what in ("max_abs", "kl")]
            pair = beside(session, "eager")
            row += [number(latency(m).p50, 0) for m in (eager, ours)]
            row.append(str(Ratio.of(pair[0]["turns"], pair[1]["turns"])) if pair else "-")
        else:
            row += ["-"] * 5
        rows.append(row)
    columns = ["Model", "Compile (s)", "of it capture", "of it packing", "C phases (ms)", "Nodes", "Executed"]
    columns += ["Arena / bound", "Max-abs to eager", "KL", "Eager (ms)", "Forge (ms)", "Ratio (quartiles)"]
    notes = [
        f"Random weights, batch 1, {s.seq} tokens, all logits, fp32; P50. Nodes are torch.export's; executed are the "
        "instructions that run.",
        "The bound is the largest set of buffers that live at once. C phases: medians, from meta weights.",
    ]
    return Table("families", "The families", columns, rows, [*notes, *missing_notes(results, family_jobs(s))])


MAKERS = [
    Maker("16", "buffers", plans, table_16),
    Maker("families", "Forge beside eager at a glance", family_jobs, table_families),
    Maker("21", "transitions between devices", transition_jobs, table_21),
    Maker("scheduling", "program order and schedule: transitions, memory, latency", schedule_jobs, table_scheduling),
]
