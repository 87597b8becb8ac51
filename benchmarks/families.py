"""The six families at full depth: compile phases, program sizes, memory plan, fidelity and latency beside eager.

    python -m benchmarks.families                     # all; the 8B from meta weights, compile phases only
    python -m benchmarks.families --models gpt2,qwen2 --calls 9 --json out.json

Each family has a process of its own. Latency: eager and Forge in turn, the same threads, medians of the calls.
Fidelity: fp32 on the host against eager (max-abs and KL of the logits); "to f64" is the largest distance of Forge's
and of eager's logits to a float64 run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODELS = ("gpt2", "granite", "qwen2", "llama1b", "lfm2", "llama8b")
SHAPES_ONLY = ("llama8b",)  # 32 GB of weights
COMPILES = 5  # of the meta model, for the medians of the C phases


def phases(report: dict[str, Any]) -> dict[str, float]:
    found = report["phases"]
    names = ("passes_ms", "lower_ms", "alloc_ms", "schedule_ms")
    return {**{k: round(v, 3) for k, v in found.items()}, "c_ms": round(sum(found[name] for name in names), 3)}


def plan(report: dict[str, Any]) -> dict[str, Any]:
    buffers = report["buffers"]
    return {
        "captured": report["nodes_captured"],
        "executed": report["nodes_final"],
        "executed_share": report["nodes_final"] / report["nodes_captured"],
        "virtual": buffers["virtual"],
        "physical": buffers["physical"],
        "rho": buffers["rho"],
        "arena_mb": buffers["arena_bytes"] / 2**20,
        "arena_over_bound": buffers["arena_bytes"] / max(buffers["lower_bound_bytes"], 1),
        "fallbacks": len(report["fallbacks"]),
    }


def measure(name: str, calls: int, threads: int, seq: int) -> dict[str, Any]:
    import torch

    import forge_ugc
    from tests.compare import fidelity, float64_run, max_abs
    from tests.models.families import attention_blocks, build, input_ids

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    meta = name in SHAPES_ONLY
    model = build(name, device="meta" if meta else "cpu")
    ids = torch.zeros(1, seq, dtype=torch.long, device="meta") if meta else input_ids(model, seq=seq)
    result: dict[str, Any] = {"model": name, "attention_blocks": attention_blocks(name)}
    result["parameters"] = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    device = "npu:plan" if meta else "cpu"
    start = time.perf_counter()
    forge = forge_ugc.compile(model, (ids,), device=device, num_threads=threads)
    result["compile_s"] = time.perf_counter() - start
    report = forge.report.to_dict()
    result |= {
        "phases": phases(report),
        **plan(report),
        "weights": report["weights"],
        "transitions": report["transitions"],
    }
    if meta:
        again = [
            phases(forge_ugc.compile(model, (ids,), device=device).report.to_dict())["c_ms"] for _ in range(COMPILES)
        ]
        result["phases"]["c_ms"] = statistics.median(again)
        return result

    times: dict[str, list[float]] = {"eager": [], "forge": []}
    for turn in range(calls + 1):  # the first is not counted
        for which, run in (("eager", model), ("forge", forge)):
            start = time.perf_counter()
            logits = run(ids)
            times[which].append(time.perf_counter() - start)
            if turn == 0:
                result[which] = logits.clone()
    median = {which: statistics.median(seconds[1:]) for which, seconds in times.items()}
    result["latency_ms"] = {which: seconds * 1e3 for which, seconds in median.items()}
    result["eager_over_forge"] = median["eager"] / median["forge"]
    eager, ours = result.pop("eager"), result.pop("forge")
    result["max_abs"], result["kl"] = fidelity(eager, ours)
    exact = float64_run(model, ids)
    result["eager_to_float64"], result["forge_to_float64"] = max_abs(eager, exact), max_abs(ours, exact)
    return result


def machine() -> str:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    import torch

    return f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def row(r: dict[str, Any]) -> dict[str, str]:
    shown = {
        "model": r["model"],
        "capture s": f"{r['phases']['capture_ms'] / 1e3:.2f}",
        "C phases ms": f"{r['phases']['c_ms']:.1f}",
        "pack s": f"{r['phases'].get('pack_ms', 0) / 1e3:.2f}",
        "nodes": str(r["captured"]),
        "executed": f"{r['executed']} ({r['executed_share']:.0%})",
        "rho": f"{r['rho']:.2f}",
        "arena/bound": f"{r['arena_over_bound']:.3f}",
    }
    if "latency_ms" in r:
        shown |= {
            "max-abs": f"{r['max_abs']:.1e}",
            "KL": f"{r['kl']:.1e}",
            "to f64: forge / eager": f"{r['forge_to_float64']:.1e} / {r['eager_to_float64']:.1e}",
            "eager ms": f"{r['latency_ms']['eager']:.0f}",
            "forge ms": f"{r['latency_ms']['forge']:.0f}",
            "eager/forge": f"{r['eager_over_forge']:.2f}",
        }
    return shown


def table(results: list[dict[str, Any]]) -> Table:
    rows = [row(r) if "error" not in r else {"model": r["model"], "capture s": r["error"]} for r in results]
    shown = Table(title=machine(), title_justify="left")
    columns = list(dict.fromkeys(name for r in rows for name in r))
    for name in columns:
        shown.add_column(name, justify="left" if name == "model" else "right")
    for r in rows:
        shown.add_row(*(r.get(name, "-") for name in columns))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.calls, args.threads, args.seq)))
        return
    results = []
    for name in args.models.split(","):
        if name not in MODELS:
            parser.error(f"unknown model {name!r}: {', '.join(MODELS)}")
        command = [sys.executable, "-m", "benchmarks.families", "--child", name]
        command += ["--calls", str(args.calls), "--threads", str(args.threads), "--seq", str(args.seq)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.strip().splitlines()
        failed = done.returncode != 0 or not lines
        results.append({"model": name, "error": f"exit status {done.returncode}"} if failed else json.loads(lines[-1]))
    Console(width=180).print(table(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
