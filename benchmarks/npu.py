"""The NPU's side measured with Intel's own compiler: what it takes, how long until a call could run, what it expects.

    python -m benchmarks.npu                          # all families and parts, about 25 minutes on 2 quiet cores
    python -m benchmarks.npu --quick                  # GPT-2, three layers: does it work?
    python -m benchmarks.npu --models gpt2 --parts compile,estimate --out out/

No NPU is needed (benchmarks/npu_compiler). "OpenVINO" is openvino.convert_model of the same exported program with
static shapes, through the same compiler with the same options. Parts:

compile      nn.Module to compiled graphs in a fresh process, the compiler included, wall clock: Forge-UGC's first tier
             (each distinct graph once, side by side on all cores) and OpenVINO's one graph. Where that takes long it is
             measured at two small depths and continued on a straight line ("fit"), unless --full is given. Of models
             too large for this machine a few layers of true width, with as much of the head, are compiled, and
             the distinct graphs of the second tier too
estimate     the compiler's estimate of latency for weights inside the graphs, at equal weight precision and with the
             embedding on the host for both: a layer (difference of two depths) and the head, times the depth.
             OpenVINO's is one graph. Forge-UGC's is what its second tier would run: one graph, or ("cut") a graph a
             layer; the figure is then a sum over graphs, and what launching each costs is not in it
transitions  changes of device a call, also with an operator in each layer that the NPU doesn't take
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import npu_compiler
from benchmarks.npu_compiler import Result, compile_ir

MODELS = ("gpt2", "granite", "qwen2", "llama1b", "lfm2", "llama8b")
PARTS = ("compile", "estimate", "transitions")
LARGE = ("lfm2", "llama8b")  # weights of 10 and 32 GB in f32: four layers stand for all
LARGE_LAYERS = 4
LARGE_VOCAB = {"llama8b": 16032}  # an eighth: two tiles of the head, as large as those of the whole
FIT = {"granite": (1, 3), "qwen2": (1, 3), "llama1b": (1, 2)}  # depths that OpenVINO's time is measured at
DEPTHS = {"lfm2": (2, 4)}  # a convolution and an attention layer each; others 1 and 2
SMALL_VOCAB = 512
SEQ = 128
TIMEOUT_S = 1500


# --- in a process of its own -----------------------------------------------------------------------------------------


def precision_of(name: str) -> str:
    return "w8a16" if name == "llama8b" else "fp16"


def build(name: str, layers: int, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from tests.models import families

    torch.set_grad_enabled(False)
    if name == "lfm2":
        kinds = families.depth(name, families.FAMILIES[name].layers)["layer_types"]
        settings.setdefault("layer_types", kinds[:layers] if layers > 4 else ["conv", "full_attention"] * (layers // 2))
    model = families.build(name, layers, **settings)
    return model, (families.input_ids(model, seq=SEQ),)


def depth_of(name: str) -> int:
    from tests.models.families import FAMILIES

    return FAMILIES[name].layers


def side_by_side(jobs: list[Callable[[], Result]]) -> list[Result]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: job(), jobs))


def distinct(folder: Path, manifest: dict[str, Any]) -> dict[Path, int]:
    """Graphs that differ in more than their weights' values, and how many calls there are of each."""
    first: dict[bytes, Path] = {}
    calls: Counter[Path] = Counter()
    for call in manifest["calls"]:
        xml = folder / manifest["blocks"][call["block"]]["xml"]
        calls[first.setdefault(xml.read_bytes(), xml)] += 1
    return dict(calls)


def forge_compile(name: str, target: str, layers: int | None, full: bool, folder: Path) -> dict[str, Any]:
    import forge_ugc

    depth = layers or (LARGE_LAYERS if name in LARGE else depth_of(name))
    settings = {"vocab_size": LARGE_VOCAB[name]} if name in LARGE_VOCAB else {}
    model, args = build(name, depth, **settings)
    start = time.perf_counter()
    forge = forge_ugc.compile(model, args, device=f"npu:plan:{target.lower()}", precision=precision_of(name))
    planned = time.perf_counter()
    manifest = forge.save_openvino_ir(folder, fold=True)
    emitted = time.perf_counter()
    files = [folder / block["xml"] for block in manifest["blocks"]]
    results = side_by_side([lambda xml=xml: compile_ir(xml, target) for xml in files])
    ready = time.perf_counter()
    blob_bytes, n_calls = sum(r.blob_bytes for r in results), len(manifest["calls"])
    report = forge.report.to_dict()
    weights = folder / "weights.bin"
    second: dict[str, Any] = {}
    if name in LARGE:
        manifest = forge.save_openvino_ir(folder / "constant", fold=False)
        found = [compile_ir(xml, target) for xml in distinct(folder / "constant", manifest)]
        results += found
        second = {"graphs": len(manifest["blocks"]), "distinct": [r.to_dict() for r in found]}
    return {
        "layers": depth,
        "second": second,
        "seconds": ready - start,
        "plan_s": planned - start,
        "emit_s": emitted - planned,
        "compiler_s": ready - emitted,
        "graphs": len(files),
        "calls": n_calls,
        "refused": [r.error for r in results if not r.ok],
        "blob_bytes": blob_bytes,
        "weight_bytes": weights.stat().st_size if weights.exists() else 0,
        "transitions": report["transitions"],
        "fallbacks": len(report["fallbacks"]),
    }


def openvino_model(name: str, depth: int, **settings: Any) -> Any:
    """Converted, with static shapes (the conversion forgets them)."""
    import openvino as ov
    import torch

    model, args = build(name, depth, **settings)
    converted = ov.convert_model(torch.export.export(model, args, strict=False))
    converted.reshape(list(args[0].shape))
    return converted


def openvino_compile(name: str, target: str, layers: int | None, full: bool, folder: Path) -> dict[str, Any]:
    import openvino as ov
    import torch  # noqa: F401  (imports don't count)

    if name in LARGE:
        return {"skipped": "its exported program and the conversion do not fit in memory"}

    def at(depth: int) -> dict[str, Any]:
        start = time.perf_counter()
        ov.save_model(openvino_model(name, depth), folder / "model.xml", compress_to_fp16=True)
        converted = time.perf_counter()
        result = compile_ir(folder / "model.xml", target, timeout=TIMEOUT_S)
        ready = time.perf_counter()
        return {
            "layers": depth,
            "seconds": ready - start,
            "convert_s": converted - start,
            "compiler_s": ready - converted,
            "graphs": 1,
            "refused": [] if result.ok else [result.error],
            "blob_bytes": result.blob_bytes,
        }

    depth = layers or depth_of(name)
    if full or layers or name not in FIT:
        return at(depth)
    low, high = (at(some) for some in FIT[name])
    steps = (depth - low["layers"]) / (high["layers"] - low["layers"])
    fit = {key: low[key] + steps * (high[key] - low[key]) for key in ("seconds", "convert_s", "compiler_s")}
    return {**high, **fit, "layers": depth, "fit": [low, high]}


def embedding_on_host(model: Any) -> None:
    """The look-up in a large table becomes an input."""
    import numpy as np
    from openvino import Type
    from openvino import opset13 as op

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather":
            continue
        table = node.input_value(0).get_node()
        while table.get_type_name() == "Convert":
            table = table.input_value(0).get_node()
        if table.get_type_name() != "Constant" or table.get_output_shape(0)[0] < SMALL_VOCAB:
            continue
        found = op.parameter(node.get_output_shape(0), np.float16, name="embedding")
        wanted = node.get_output_element_type(0)
        value = found if wanted == Type.f16 else op.convert(found, wanted)
        for reader in node.output(0).get_target_inputs():
            reader.replace_source_output(value.output(0))
        model.add_parameters([found])
        break
    else:
        raise RuntimeError("no embedding found in the converted model")
    model.validate_nodes_and_infer_types()
    for parameter in model.get_parameters():
        if not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)


def quantise(model: Any) -> None:
    """Weights of MatMul as int8, symmetric, a scale a row: what Forge-UGC's w8a16 is."""
    import numpy as np
    from openvino import Type
    from openvino import opset13 as op

    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        while source.get_type_name() == "Convert":
            source = source.input_value(0).get_node()
        if source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
            continue
        weight = source.get_data().astype(np.float32)
        axis = 1 if node.get_attributes()["transpose_b"] else 0
        scale = np.maximum(np.abs(weight).max(axis, keepdims=True) / 127, 2.0**-24).astype(np.float16)
        levels = np.clip(np.round(weight / scale.astype(np.float32)), -127, 127).astype(np.int8)
        made = op.multiply(op.convert(op.constant(levels), np.float16), op.constant(scale))
        wanted = node.get_input_element_type(1)
        value = made if wanted == Type.f16 else op.convert(made, wanted)
        node.input(1).replace_source_output(value.output(0))


def total(results: list[tuple[Result, int]]) -> dict[str, Any]:
    """Sums over calls of graphs."""
    refused = [result.error for result, _ in results if not result.ok or result.estimate is None]
    if refused:
        return {"refused": refused[0]}
    graphs = [{"calls": n, "blob_bytes": r.blob_bytes, **r.to_dict()["estimate"]} for r, n in results]
    keys = ("blob_bytes", "latency_us", "dma_us", "dpu_us", "shave_us", "zero_cost_tasks")
    return {"graphs": graphs, **{key: sum(g["calls"] * (g[key] or 0) for g in graphs) for key in keys}}


def estimates(name: str, target: str, layers: int | None, full: bool, folder: Path) -> dict[str, Any]:
    """Both ways at two depths, and the head. Of graphs that are alike one is compiled."""
    import openvino as ov
    import torch

    import forge_ugc
    from forge_ugc.openvino import save
    from tests.models.families import FAMILIES

    precision = precision_of(name)
    depths = DEPTHS.get(name, (1, 2))
    parts: dict[str, dict[Path, int]] = {}  # graphs, and calls of each

    def forge(key: str, model: Any, args: tuple[Any, ...], fold: Any = "constant") -> bool:
        compiled = forge_ugc.compile(model, args, device=f"npu:plan:{target.lower()}", precision=precision)
        if compiled.report.to_dict()["npu"]["segments"] != 1:
            raise RuntimeError(f"{key}: more than one segment")
        manifest = save(compiled, folder / key, fold)
        parts[key] = distinct(folder / key, manifest)
        return len(manifest["blocks"]) > 1

    low, high = depths
    cut = forge(f"forge {high}", *build(name, high, vocab_size=SMALL_VOCAB))
    other = 2 * high - low if cut else low  # what is not repeated is not cut
    if forge(f"forge {other}", *build(name, other, vocab_size=SMALL_VOCAB)) != cut:
        raise RuntimeError(f"{name}: cut at one of the depths {high}, {other} only")
    for depth in depths:
        model = openvino_model(name, depth, vocab_size=SMALL_VOCAB)
        embedding_on_host(model)
        if precision == "w8a16":
            quantise(model)
        file = folder / f"openvino-{depth}.xml"
        ov.save_model(model, file, compress_to_fp16=True)
        parts[f"openvino {depth}"] = {file: 1}
    config = FAMILIES[name].config(**FAMILIES[name].settings)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False).eval()
    forge("head", head, (torch.zeros(1, SEQ, config.hidden_size),), "cut" if cut else "never")
    first: dict[bytes, Path] = {}
    same = {xml: first.setdefault(xml.read_bytes(), xml) for calls in parts.values() for xml in calls}
    files = sorted(first.values(), key=lambda xml: -xml.with_suffix(".bin").stat().st_size)
    found = side_by_side([lambda xml=xml: compile_ir(xml, target, estimate=True) for xml in files])
    results = dict(zip(files, found, strict=True))
    return {
        "depths": {"forge": sorted((high, other)), "openvino": [low, high]},
        "cut": cut,
        "layers": depth_of(name),
        "precision": precision,
        **{key: total([(results[same[xml]], n) for xml, n in calls.items()]) for key, calls in parts.items()},
    }


def transitions(name: str, target: str, layers: int | None, full: bool, folder: Path) -> dict[str, Any]:
    import torch

    import forge_ugc
    from tests.models.families import input_ids

    class Scanned(torch.nn.Module):
        """The feed-forward, and beside it a scan, which only the host does."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + torch.cumsum(x, -1)

    def count(forced: bool) -> dict[str, Any]:
        model, _ = build(name, layers or depth_of(name), device="meta")
        changed = 0
        for module in list(model.modules()):
            for child in ("mlp", "feed_forward"):
                if forced and isinstance(getattr(module, child, None), torch.nn.Module):
                    setattr(module, child, Scanned(getattr(module, child)))
                    changed += 1
        ids = input_ids(model, seq=SEQ).to("meta")
        report = forge_ugc.compile(model, (ids,), device=f"npu:plan:{target.lower()}").report.to_dict()
        return {"scans": changed, **report["transitions"]}

    plain, forced = count(False), count(True)
    # Each scan reads what the NPU made of the layer before, and the NPU reads it: two changes a layer, and two ends.
    return {"plain": plain, "forced": forced, "least": 2 + 2 * forced["scans"]}


CHILDREN: dict[str, Callable[[str, str, int | None, bool, Path], dict[str, Any]]] = {
    "compile-forge": forge_compile,
    "compile-openvino": openvino_compile,
    "estimate": estimates,
    "transitions": transitions,
}


# --- the report ------------------------------------------------------------------------------------------------------


def child(what: str, name: str, target: str, layers: int | None, full: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.npu", "--child", what, "--models", name, "--target", target]
    command += ["--layers", str(layers)] if layers else []
    command += ["--full"] if full else []
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        tail = errors.read()[-600:]
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit status {done.returncode}: {tail}"}
    return {**json.loads(lines[-1]), "whole_s": time.perf_counter() - start}


def us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def whole(e: dict[str, Any], way: str) -> dict[str, float] | None:
    """Estimate of the whole model in us: layers by the difference of two depths, and the head."""
    low, high = e["depths"][way]
    a, b, head = e[f"{way} {low}"], e[f"{way} {high}"], e["head"]
    if any("refused" in part for part in (a, b, head)):
        return None

    def a_layer(key: str) -> float:
        return float(b[key] - a[key]) / (high - low)

    return {
        "layer": a_layer("latency_us"),
        "zero_cost": a_layer("zero_cost_tasks"),
        "head": head["latency_us"],
        "model": a_layer("latency_us") * e["layers"] + head["latency_us"],
        "blob_bytes": a_layer("blob_bytes") * e["layers"] + head["blob_bytes"],
    }


def compile_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, r in results.items():
        forge, openvino, estimate = (r.get(key, {}) for key in ("compile-forge", "compile-openvino", "estimate"))
        if not forge:
            continue
        row = {"model": name}
        rows.append(row)
        if "failed" in forge:
            row["first call s"] = forge["failed"]
            continue
        row |= {
            "layers": str(forge["layers"]),
            "first call s": f"{forge['seconds']:.1f}",
            "plan + emit + compiler": f"{forge['plan_s']:.1f} + {forge['emit_s']:.1f} + {forge['compiler_s']:.1f}",
            "graphs / calls": f"{forge['graphs']} / {forge['calls']}",
            "refused": str(len(forge["refused"])),
            "blobs MB": f"{forge['blob_bytes'] / 1e6:.1f}",
        }
        unfolded = whole(estimate, "forge") if "depths" in estimate else None
        if unfolded and name not in LARGE:
            row["of unfolded"] = f"{forge['blob_bytes'] / unfolded['blob_bytes']:.1%}"
        if forge["second"]:
            times = ", ".join(f"{r['seconds']:.1f}" for r in forge["second"]["distinct"] if r["ok"])
            row["second tier's graphs s"] = f"{times} ({forge['second']['graphs']} graphs)"
        if "seconds" in openvino:
            refused = "; ".join(openvino["refused"])[:60]
            fit = " (fit {}, {} layers)".format(*(at["layers"] for at in openvino["fit"])) if "fit" in openvino else ""
            row["OpenVINO s"] = f"{openvino['seconds']:.1f}{fit}" + (f" refused: {refused}" if refused else "")
            row["ratio"] = f"{openvino['seconds'] / forge['seconds']:.1f}"
        elif openvino:
            row["OpenVINO s"] = openvino.get("skipped") or openvino.get("failed", "-")
    return rows


def estimate_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, r in results.items():
        e = r.get("estimate")
        if e is None:
            continue
        row = {"model": name}
        rows.append(row)
        if "failed" in e:
            row["Forge layer us"] = e["failed"]
            continue
        ours, theirs = whole(e, "forge"), whole(e, "openvino")
        row |= {"weights": e["precision"], "layers": str(e["layers"]), "graphs": "cut" if e["cut"] else "one"}
        for title, found in (("Forge", ours), ("OpenVINO", theirs)):
            row[f"{title} layer us"] = us(found["layer"]) if found else "refused"
            row[f"{title} zero-cost"] = f"{found['zero_cost']:.0f}" if found else "-"
        row["head us"] = us(ours["head"]) if ours else "-"
        row["Forge model us"] = us(ours["model"]) + (" (sum)" if e["cut"] else "") if ours else "refused"
        row["OpenVINO model us"] = us(theirs["model"]) if theirs else "refused"
        if ours and theirs:
            like = "" if round(ours["zero_cost"]) == round(theirs["zero_cost"]) else " (unlike)"
            row["layer"] = f"{ours['layer'] / theirs['layer'] - 1:+.1%}{like}"
            row["whole"] = f"{ours['model'] / theirs['model'] - 1:+.1%}"
    return rows


def transition_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, r in results.items():
        t = r.get("transitions")
        if t is None:
            continue
        if "failed" in t:
            rows.append({"model": name, "a call": t["failed"]})
            continue
        rows.append(
            {
                "model": name,
                "a call": str(t["plain"]["after"]),
                "host operator in each layer": str(t["forced"]["after"]),
                "least possible": str(t["least"]),
            }
        )
    return rows


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[dict[str, str]]]]] = {
    "compile": ("Time to the first call, Intel's compiler included", compile_rows),
    "estimate": (
        "The compiler's estimate, weights inside the graphs, embedding on the host, launches not counted",
        estimate_rows,
    ),
    "transitions": ("Changes of device a call", transition_rows),
}


def columns_of(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def markdown(title: str, rows: list[dict[str, str]]) -> str:
    names = columns_of(rows)
    lines = [f"## {title}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(row.get(name, "-").replace("\n", " ") for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(console: Console, title: str, rows: list[dict[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in columns_of(rows):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(*(row.get(name, "-") for name in columns_of(rows)))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--target", default="NPU4000", choices=npu_compiler.TARGETS)
    parser.add_argument("--layers", type=int, help="another depth for the parts compile and transitions")
    parser.add_argument("--full", action="store_true", help="compile OpenVINO's graphs at full depth, however long")
    parser.add_argument("--quick", action="store_true", help="GPT-2, three layers")
    parser.add_argument("--out", type=Path, help="folder for npu.json and npu.md")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with tempfile.TemporaryDirectory(prefix="forge-npu-") as folder:
            found = CHILDREN[args.child](args.models, args.target, args.layers, args.full, Path(folder))
        print(json.dumps(found))
        return 0
    if args.quick:
        args.models, args.layers = "gpt2", 3
    models, parts = args.models.split(","), args.parts.split(",")
    for given, known in ((models, MODELS), (parts, PARTS)):
        for word in given:
            if word not in known:
                parser.error(f"unknown {word!r}: {', '.join(known)}")
    if not npu_compiler.available():
        parser.error(f"Intel's NPU compiler is not installed: bash {npu_compiler.HERE / 'setup.sh'}")
    console = Console(width=200)
    results: dict[str, Any] = {}
    for name in models:
        results[name] = {}
        for what in CHILDREN:
            if what.split("-")[0] not in parts:
                continue
            with console.status(f"{name}: {what}"):
                results[name][what] = child(what, name, args.target, args.layers, args.full)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "npu.json").write_text(json.dumps(results, indent=1) + "\n")
    texts = []
    for part in parts:
        title, rows_of = TABLES[part]
        rows = rows_of(results)
        show(console, title, rows)
        texts.append(markdown(title, rows))
    if args.out:
        (args.out / "npu.md").write_text(f"# {args.target}\n\n" + "\n".join(texts))
    failed = [f"{n}: {w}" for n, r in results.items() for w, found in r.items() if "failed" in found]
    refused = [n for n, r in results.items() if r.get("compile-forge", {}).get("refused")]
    if failed or refused:
        console.print(f"failed: {failed}; refused: {refused}", style="red")
    return 1 if failed or refused else 0


if __name__ == "__main__":
    sys.exit(main())
