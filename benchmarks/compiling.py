"""What is learnt by compiling alone, with Forge: programs, costs and phases from shapes without weights, growth with
depth, new shapes. Each runs in a process of its own and prints one line of JSON.

    python -m benchmarks.compiling plan '{"model": "gpt2"}'
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from .artefact import artefact
from .measure import end_with_parent
from .models import Subject, build

TARGETS = ("cpu", "npu4000")
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
C_PHASES = ("passes_ms", "lower_ms", "alloc_ms", "schedule_ms")
REPEATS = 7


def plan(subject: Subject, repeats: int = REPEATS) -> dict[str, Any]:
    """The program for the host and for an NPU, with all passes and without each, at each alpha, and autotuned.

    From meta tensors: what is compiled is what real weights would give, and nothing is packed.
    """
    import forge_ugc

    model, args = build(subject, device="meta")

    def compiled(target: str, **options: Any) -> Any:
        device = "cpu" if target == "cpu" else f"npu:plan:{target}"
        return forge_ugc.compile(model, args, device=device, progress=False, **options).report

    result: dict[str, Any] = {"ablation": {}, "alpha": {}, "autotune": {}, "program_order": {}, "target": {}}
    first = compiled("cpu")
    names = [p["name"] for p in first["passes"]]
    result["nodes_captured"], result["nodes_table"] = first["nodes_captured"], first["nodes_table"]
    for target in TARGETS:
        reports = [compiled(target) for _ in range(repeats)]
        result["target"][target] = _summary(reports)
        result["ablation"][target] = {
            name: _final(compiled(target, passes=",".join(n for n in names if n != name)))
            for name in dict.fromkeys(names)
        }
        result["program_order"][target] = _plan_of(compiled(target, schedule=False))
        result["alpha"][target] = {str(alpha): _final(compiled(target, alpha=alpha)) for alpha in ALPHAS}
        tuned = compiled(target, autotune=True)
        usual = statistics.median(r["phases"]["passes_ms"] for r in reports)
        result["autotune"][target] = {
            **_final(tuned),
            "added_ms": max(0.0, tuned["phases"]["passes_ms"] - usual),
            "remark": next((r["text"] for r in tuned["remarks"] if r["pass"] == "autotune"), ""),
        }
    return result


def _final(report: Any) -> dict[str, Any]:
    passes = report["passes"]
    fused = sum(
        r["count"] for r in report["remarks"] if r["pass"] == "operator_fusion" and r["text"].startswith("matched")
    )
    return {
        "cost": passes[-1]["cost_after"],
        "nodes": passes[-1]["nodes_after"],
        "executed": report["nodes_final"],
        "fused": fused,
    }


def _plan_of(report: Any) -> dict[str, Any]:
    return {"buffers": report["buffers"], "transitions": report["transitions"]}


def _summary(reports: list[Any]) -> dict[str, Any]:
    """One compilation; the times are medians over all of them."""
    one = reports[0]
    found = {
        **_final(one),
        "cost_captured": one["passes"][0]["cost_before"],
        **_plan_of(one),
        "placement": one["placement"],
        "phases": {name: statistics.median(r["phases"][name] for r in reports) for name in one["phases"]},
        "c_ms": statistics.median(sum(r["phases"][name] for name in C_PHASES) for r in reports),
        "passes": [],
    }
    for i, record in enumerate(one["passes"]):
        ms = statistics.median(r["passes"][i]["ms"] for r in reports)
        found["passes"].append({**record, "ms": ms})
    return found


def growth(layers: list[int], nodes: int, width: int = 64) -> dict[str, Any]:
    """Phases of GPT-2 by depth, and of one deep enough for `nodes` nodes.

    Meta weights; narrow, since no phase depends on width.
    """
    import forge_ugc
    from tests.models import families

    settings: dict[str, Any] = dict(n_embd=width, n_head=4, vocab_size=1000)
    result: dict[str, Any] = {"depths": []}

    def at(depth: int, repeats: int) -> dict[str, Any]:
        model = families.build("gpt2", depth, "meta", **settings)
        args = (families.input_ids(model, seq=128).to("meta"),)
        reports = [forge_ugc.compile(model, args, device="cpu", progress=False).report for _ in range(repeats)]
        phases = {n: statistics.median(r["phases"][n] for r in reports) for n in reports[0]["phases"]}
        after = sum(phases[n] for n in (*C_PHASES, "table_ms"))
        return {"layers": depth, "nodes": reports[0]["nodes_table"], "phases": phases, "after_capture_ms": after}

    for depth in layers:
        result["depths"].append(at(depth, 3))
    slope = result["depths"][-1]["nodes"] / layers[-1]
    result["large"] = at(max(1, round(nodes / slope)), 1)
    return result


def shapes(subject: Subject, sizes: list[int], threads: int) -> dict[str, Any]:
    """What the first call with a new length costs a model that was compiled for any length."""
    import torch

    import forge_ugc

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, args = build(subject)
    dynamic = {"input_ids": {1: torch.export.Dim("length", min=2, max=1024)}}
    start = time.perf_counter()
    compiled = forge_ugc.compile(model, args, dynamic_shapes=dynamic, device="cpu", num_threads=threads, progress=False)
    result: dict[str, Any] = {
        "compile_s": time.perf_counter() - start,
        "capture": compiled.report["capture"],
        "sizes": [],
    }
    compiled(*args)
    for size in sizes:
        ids = torch.randint(0, 1000, (1, size))
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            compiled(ids)
            seconds.append(time.perf_counter() - start)
        usual = min(seconds[1:])
        result["sizes"].append({"seq": size, "new_ms": (seconds[0] - usual) * 1e3, "call_ms": usual * 1e3})
    return result


def capture(subject: Subject, way: str) -> dict[str, Any]:
    """Seconds of capturing in this fresh process: Forge's "fast" or "export" way, or torch.export "alone".

    From meta tensors, so that the time is of capture alone and all families have room.
    """
    import torch

    import forge_ugc

    from .systems import Export, Forge

    (Forge() if way == "fast" else Export()).prepare()
    torch.set_grad_enabled(False)
    model, args = build(subject, device="meta")
    start = time.perf_counter()
    if way == "alone":
        torch.export.export(model, args, strict=False)
        return {"capture_s": time.perf_counter() - start}
    report = forge_ugc.compile(
        model, args, device="cpu", capture="auto" if way == "fast" else "export", progress=False
    ).report
    whole = time.perf_counter() - start
    return {"capture_s": report["phases"]["capture_ms"] / 1e3, "compile_s": whole, "way": report["capture"]}


def scheduling(subject: Subject, calls: int) -> dict[str, Any]:
    """Calls with the device changing as in program order and as scheduled, in turn, on the software NPU.

    What a change of device takes is real (copies, submission, waiting, the loader and driver between); what the device
    computes, OpenVINO computes on the CPU.
    """
    import numpy as np
    import torch

    import forge_ugc
    from forge_ugc.testing import software_npu

    torch.set_grad_enabled(False)
    model, args = build(subject)
    with software_npu():
        both = {
            name: forge_ugc.compile(model, args, device="npu", fold=False, schedule=name == "scheduled", progress=False)
            for name in ("program order", "scheduled")
        }
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(calls + 1):
            for name, fast in both.items():
                start = time.perf_counter()
                fast(*args)
                seconds[name].append(time.perf_counter() - start)
        ratios = np.divide(seconds["program order"][1:], seconds["scheduled"][1:])
        return {
            "ratio": [float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75])],
            **{
                name: {"p50_ms": statistics.median(seconds[name][1:]) * 1e3, **_plan_of(fast.report)}
                for name, fast in both.items()
            },
        }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan,
    "growth": growth,
    "shapes": shapes,
    "capture": capture,
    "scheduling": scheduling,
    "artefact": artefact,
}


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    arguments = json.loads(sys.argv[2])
    if "subject" in arguments:
        arguments["subject"] = Subject(**arguments["subject"])
    print(json.dumps(JOBS[sys.argv[1]](**arguments)), file=replies)


if __name__ == "__main__":
    main()
