"""Calls: latency (tables 7, 8, 20, 22), energy (9), fidelity (6), variance (19), encoders."""

from __future__ import annotations

import math
import statistics
from typing import Any

from . import machine
from .jobs import SMALL_GB, Job, Results, Settings, encoder_session, glue_session, main_session, plan_job, variance_job
from .measure import Latency, Ratio
from .models import MODELS
from .systems import label
from .table_compile import cei, sessions
from .tables import Maker, Table, beside, change, missing_notes, number, systems_of, times

PAPER = ("forge", "openvino", "onnxruntime")  # its columns
INTERLEAVED = "Systems in turn, each turn a call that is not counted and then the counted ones, on the same threads."
RANDOM = "Random weights and random tokens: the time of a call depends on neither."


def latency(measured: dict[str, Any]) -> Latency:
    return Latency.of([seconds for turn in measured["turns"] for seconds in turn])


def ratio(pair: tuple[Any, Any]) -> Ratio:
    return Ratio.of(pair[0]["turns"], pair[1]["turns"])


def paper_latency(name: str, title: str, s: Settings, results: Results, jobs: list[Job], notes: list[str]) -> Table:
    columns = ["Model", *(f"{label(n)} {what}" for n in PAPER for what in ("mean", "P50", "P90", "P99"))]
    rows = []
    for model, job in zip(s.runnable, jobs, strict=True):
        found = systems_of(results(job))
        row = [MODELS[model].label]
        for n in PAPER:
            of = latency(found[n]) if n in found else None
            row += [number(value, 1) for value in (of.mean, of.p50, of.p90, of.p99)] if of else ["-"] * 4
        rows.append(row)
    return Table(name, title, columns, rows, [*notes, *missing_notes(results, jobs)])


def table_7(s: Settings, results: Results) -> Table:
    notes = [INTERLEAVED, RANDOM, "Host CPU, fp32; the paper's figures are of an NPU in fp16."]
    return paper_latency("7", f"Latency (ms), batch 1, {s.seq} tokens, all logits", s, results, sessions(s), notes)


def glue_sessions(s: Settings) -> list[Job]:
    return [glue_session(s, model) for model in s.runnable]


def table_8(s: Settings, results: Results) -> Table:
    notes = [INTERLEAVED, "As a classifier reads it (GLUE): the last position's logits only.", RANDOM]
    title = f"Latency (ms), batch 1, {s.seq} tokens, last position"
    return paper_latency("8", title, s, results, glue_sessions(s), notes)


def table_latency(s: Settings, results: Results) -> Table:
    columns = ["Model", "System", "Mean", "P50", "P90", "P99", "P99/P50", "/ Forge (quartiles)", "FLOP share", "Calls"]
    rows, geometric = [], dict[str, list[float]]()
    peak = machine_peak(results, s.threads)
    for model in s.runnable:
        result = results(main_session(s, model))
        flops = next((g["eager"]["flops"] for g in (result or {}).get("groups", []) if "eager" in g), None)
        for name, measured in systems_of(result).items():
            of, pair = latency(measured), beside(result, name)
            share = flops / (of.p50 * 1e-3) / (peak * 1e9) if flops and peak else None
            against = ratio(pair) if pair else None
            if against:
                geometric.setdefault(name, []).append(against.median)
            rows.append(
                [
                    MODELS[model].label,
                    label(name),
                    *(number(v, 1) for v in (of.mean, of.p50, of.p90, of.p99)),
                    number(of.tail, 2),
                    str(against or "-"),
                    number(share and share * 100, 0, "%"),
                    str(of.calls),
                ]
            )
    means = [
        f"{label(n)} {math.exp(statistics.fmean(map(math.log, r))):.2f}" for n, r in geometric.items() if n != "forge"
    ]
    notes = [
        INTERLEAVED + " / Forge: median over the turns of the ratio of medians; above 1 Forge is faster.",
        f"Geometric mean of the ratios: {', '.join(means) or '-'}.",
        f"FLOP share: multiply-adds of the products with weights, of {peak:,.0f} GFLOP/s on {s.threads} threads."
        if peak
        else "FLOP share needs the machine's peak.",
    ]
    if s.brief:
        notes.append(f"With --budget, models of more than {SMALL_GB:g} GB meet OpenVINO f32, ONNX Runtime and eager.")
    return Table(
        "latency", "Latency of all systems (ms)", columns, rows, [*notes, *missing_notes(results, sessions(s))]
    )


def machine_peak(results: Results, threads: int) -> float | None:
    described = results.machine
    return machine.peak_gflops(described["peak"], threads) if described else None


def table_22(s: Settings, results: Results) -> Table:
    names = list(s.systems)
    rows = []
    for model in s.runnable:
        found = systems_of(results(main_session(s, model)))
        rows.append([MODELS[model].label, *(number(latency(found[n]).tail if n in found else None, 2) for n in names)])
    return Table("22", "P99/P50 of latency", ["Model", *map(label, names)], rows, missing_notes(results, sessions(s)))


def table_9(s: Settings, results: Results) -> Table:
    rows, reasons = [], []
    for model in s.runnable:
        found = systems_of(results(main_session(s, model)))
        joules = {n: found[n]["energy"]["joules"] if n in found else None for n in PAPER}
        reasons += [m["energy"]["reason"] for m in found.values() if m["energy"].get("reason")]
        cells = [
            number(j * 1e3, 1) if j is not None else ("no counter" if n in found else "-") for n, j in joules.items()
        ]
        changes = [change(joules["forge"], joules[n]) for n in PAPER[1:]]
        rows.append([MODELS[model].label, *cells, *changes])
    notes = ["RAPL counters of the CPU packages, over calls of two seconds; all that the package draws is counted."]
    notes += sorted(set(reasons))
    columns = ["Model", *(f"{label(n)} (mJ)" for n in PAPER), *(f"vs {label(n)}" for n in PAPER[1:])]
    return Table("9", "Energy of an inference", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def table_6(s: Settings, results: Results) -> Table:
    names = [n for n in s.systems if n != "eager"]
    columns = ["Model", "PPL eager", "PPL Forge", "eager to float64", "Forge to float64"]
    columns += [f"{label(n)} {what}" for n in names for what in ("max-abs", "KL")]
    rows = []
    for model in s.runnable:
        found = systems_of(results(main_session(s, model)))
        near = {n: m["fidelity"] for n, m in found.items() if "fidelity" in m}
        row = [
            MODELS[model].label,
            *(number(near[n]["perplexity"] if n in near else None, 2) for n in ("eager", "forge")),
        ]
        exact = [found[n].get("to_float64") if n in found else None for n in ("eager", "forge")]
        row += ["-" if distance is None else f"{distance:.1e}" for distance in exact]
        for n in names:
            row += [f"{near[n]['max_abs']:.1e}", f"{near[n]['kl']:.1e}"] if n in near else ["-", "-"]
        rows.append(row)
    notes = [
        f"Logits against eager's over {s.plan.sequences} sequences of {s.seq} random tokens; KL: mean of positions.",
        "To float64: largest distance to a run of the model in float64, which tells float32's own error.",
        "Random weights: the perplexity is no quality of a model, only the same before and after.",
        "OpenVINO's default precision is the one that it chooses for this CPU (bf16 where there are units for it).",
    ]
    return Table("6", "Fidelity", columns, rows, [*notes, *missing_notes(results, sessions(s))])


def table_19(s: Settings, results: Results) -> Table:
    model = s.runnable[0]
    result = results(variance_job(s, model))
    plan = results(plan_job(s, model))
    rows = []
    if result:
        runs = [run["groups"][0]["forge"] for run in result["runs"] if run["groups"]]
        each = [latency(run) for run in runs]
        metrics = {
            "Compilation time (ms)": [run["compile_s"] * 1e3 for run in runs],
            "Inference latency, mean (ms)": [of.mean for of in each],
            "Inference latency, P50 (ms)": [of.p50 for of in each],
            "P99 latency (ms)": [of.p99 for of in each],
        }
        for name, values in metrics.items():
            mean, spread = statistics.fmean(values), statistics.stdev(values)
            rows.append([name, number(mean, 2), number(spread, 2), number(spread / mean * 100, 2)])
    if plan:
        exact = {
            "Node reduction (%)": (1 - plan["target"]["cpu"]["nodes"] / plan["nodes_captured"]) * 100,
            "FGR": plan["alpha"]["cpu"]["0.0"]["cost"] / plan["alpha"]["cpu"]["1.0"]["cost"],
        }
        rows += [[name, number(value, 2), "0.00", "0.00"] for name, value in exact.items()]
    runs_text = f"{len(result['runs'])} fresh processes" if result else "Fresh processes"
    notes = [f"{runs_text}, {MODELS[model].label}. Node counts and costs are computed, the same in each run."]
    jobs = [variance_job(s, model), plan_job(s, model)]
    return Table(
        "19", "Variance", ["Metric", "Mean", "Std dev", "CV (%)"], rows, [*notes, *missing_notes(results, jobs)]
    )


def summary_jobs(s: Settings) -> list[Job]:
    return [*sessions(s), *(plan_job(s, model) for model in s.runnable)]


def table_20(s: Settings, results: Results) -> Table:
    columns = [
        "Model",
        *(f"{label(n)} (ms)" for n in PAPER),
        "Latency vs best",
        "Compile vs best",
        "FGR",
        "CEI OpenVINO",
        "rho",
    ]
    rows = []
    for model in s.runnable:
        result, plan = results(main_session(s, model)), results(plan_job(s, model))
        found = {n: m for n, m in systems_of(result).items() if n in PAPER}
        means = {n: latency(m).mean for n, m in found.items()}
        compiles = {n: m["compile_s"] for n, m in found.items()}
        fgr = plan["alpha"]["cpu"]["0.0"]["cost"] / plan["alpha"]["cpu"]["1.0"]["cost"] if plan else None
        rho = plan["target"]["cpu"]["buffers"]["rho"] * 100 if plan else None
        row = [MODELS[model].label, *(number(means.get(n), 1) for n in PAPER)]
        for values in (means, compiles):
            row.append(change(values.get("forge"), min((v for n, v in values.items() if n != "forge"), default=None)))
        rows.append([*row, number(fgr, 2), number(cei(result, "openvino"), 2), number(rho, 1, "%")])
    notes = ["Host CPU, fp32. Negative changes: Forge is faster than the better of OpenVINO and ONNX Runtime."]
    return Table("20", "Summary", columns, rows, [*notes, *missing_notes(results, summary_jobs(s))])


def encoder_jobs(s: Settings) -> list[Job]:
    sizes = [(8, 1)] if s.quick else [(seq, batch) for batch in (1, 8) for seq in (32, 128, 512)]
    return [encoder_session(s, model, seq, batch) for model in s.encoders for seq, batch in sizes]


def table_encoders(s: Settings, results: Results) -> Table:
    rows = []
    jobs = encoder_jobs(s)
    for job in jobs:
        result = results(job)
        subject = dict(job.arguments)["subject"]
        for name, measured in systems_of(result).items():
            of, pair = latency(measured), beside(result, name)
            rows.append(
                [
                    subject.label,
                    str(subject.batch),
                    str(subject.seq),
                    label(name),
                    number(of.mean, 2),
                    number(of.p50, 2),
                    number(of.p99, 2),
                    str(ratio(pair)) if pair else "-",
                    times(measured["compile_s"], pair and pair[1]["compile_s"]) if name != "eager" else "-",
                ]
            )
    columns = [
        "Model",
        "Batch",
        "Tokens",
        "System",
        "Mean (ms)",
        "P50",
        "P99",
        "/ Forge (quartiles)",
        "Compile / Forge",
    ]
    return Table("encoders", "Sentence encoders", columns, rows, [INTERLEAVED, *missing_notes(results, jobs)])


MAKERS = [
    Maker("6", "fidelity", sessions, table_6),
    Maker("7", "latency, all logits", sessions, table_7),
    Maker("8", "latency, last position", glue_sessions, table_8),
    Maker("9", "energy", sessions, table_9),
    Maker("19", "variance over runs", lambda s: [variance_job(s, s.runnable[0]), plan_job(s, s.runnable[0])], table_19),
    Maker("20", "summary", summary_jobs, table_20),
    Maker("22", "P99/P50", sessions, table_22),
    Maker("latency", "latency of all systems, FLOP share", sessions, table_latency),
    Maker("encoders", "MiniLM and BERT-base", encoder_jobs, table_encoders),
]
