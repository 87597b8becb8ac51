"""The command line, `forge-ugc` or `python -m forge_ugc`: compile, run, bench, report and doctor.

Exit status: 0, or 1 where something was refused or failed (one line on stderr says what), or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, doctor
from .errors import FallbackWarning, NpuWarning
from .loaded import load
from .npu import PRECISIONS, parse_device
from .opening import (
    Opened,
    Refused,
    Wanted,
    kind_of,
    named_outputs,
    open_artefact,
    open_checkpoint,
    open_program,
)

if TYPE_CHECKING:
    from .report import Report

_PROFILED = 20  # calls at most
# What --check lets pass: the largest difference to eager, as a share of the largest value (of 1 where that is smaller).
_ALLOWED = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "w8": 5e-2, "w8a16": 5e-2}
_ALLOWED |= dict.fromkeys(("w4", "w4g64", "w4g32", "w4a16"), 0.3)
_MODEL = """\
MODEL is one of
  a folder      a Hugging Face checkpoint on this disk (config.json and weights); nothing is downloaded
  a .pt2 file   what torch.export.save wrote, with its example inputs
  a .forge file an artefact: what `compile`, or CompiledModel.save, wrote
"""

_TEACH = {
    "": f"""\
{_MODEL}
a first tour:
  forge-ugc doctor                                   is there an NPU, and may I use it?
  forge-ugc compile my_model -o my_model.forge       compile once ...
  forge-ugc run my_model.forge --text "Once upon" --tokenizer my_model
  forge-ugc bench my_model                           Forge beside eager PyTorch
  forge-ugc report my_model --html report.html       what the compiler did, as a page

`forge-ugc COMMAND --help` has the options and more examples. Each command takes --json.
exit status: 0 done; 1 refused or failed, with one line on stderr that says why; 2 wrong usage""",
    "compile": f"""\
{_MODEL}
An artefact runs without torch and without compiling: forge_ugc.load("m.forge"), or `forge-ugc run m.forge`.
It is compiled for the sizes of its inputs: --batch and --seq.

examples:
  forge-ugc compile my_model                         writes my_model.forge: 1 row of 128 tokens
  forge-ugc compile my_model -o m.forge --seq 512 --batch 4
  forge-ugc compile my_model --device npu --precision w8a16
  forge-ugc compile my_model --device npu:plan --openvino-ir graphs/
                                                     what an NPU would get, on any machine
  forge-ugc compile my_model --passes dce,cse,fold   without fusion""",
    "run": f"""\
{_MODEL}
Inputs are random (--seed), a text, or arrays: a .npz file names each input, a .npy file is the first one.
A folder or .pt2 file is compiled first.

examples:
  forge-ugc run my_model --text "The capital of France is"
  forge-ugc run my_model --check                     compares with eager PyTorch; status 1 if they differ
                                                     by more than the precision explains
  forge-ugc run m.forge --text "Once" --tokenizer my_model
  forge-ugc run m.forge --inputs x.npz -o y.npz      y.npz has an array for each output""",
    "bench": f"""\
{_MODEL}
Times calls of the compiled model, and of eager PyTorch beside it where MODEL is torch's: both take turns, so that they
see the same machine.

examples:
  forge-ugc bench my_model --calls 200 --threads 4
  forge-ugc bench my_model --no-eager --profile      what the time goes to
  forge-ugc bench m.forge --trace trace.json         instruction by instruction, for Perfetto
  forge-ugc bench m.forge --json""",
    "report": f"""\
{_MODEL}
Without an option the report is text for the terminal: phases, passes, memory, placement, what is left to torch.

examples:
  forge-ugc report my_model
  forge-ugc report my_model --html report.html       a page for the browser
  forge-ugc report my_model --device npu:plan        placement on an NPU, on any machine
  forge-ugc report m.forge --json""",
    "doctor": """\
examples:
  forge-ugc doctor
  forge-ugc doctor --json | jq .advice
exit status: 0 if the NPU is usable, 1 if not""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for category in (FallbackWarning, NpuWarning):
            warnings.simplefilter("always", category)
        warnings.showwarning = lambda message, *_: _note(str(message))
        try:
            status: int = options.run(options)
            sys.stdout.flush()
            return status
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            if options.traceback:
                raise
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            line = kind + " ".join(str(error).split())
            print(f"{parser.prog} {options.command}: {line}", file=sys.stderr)
            if options.json:
                _print_json({"error": line})
            return 1


# --- options ----------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    name = "forge-ugc" if Path(sys.argv[0]).name.startswith("forge-ugc") else "python -m forge_ugc"
    parser = argparse.ArgumentParser(
        prog=name,
        description="Compiles PyTorch models for an Intel AI PC: its NPU, and the host CPU beside it.",
        epilog=_TEACH[""].replace("forge-ugc", name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"forge-ugc {_core.VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(key: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(
            key,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=_TEACH[key].replace("forge-ugc", name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print JSON")
        made.add_argument("--traceback", action="store_true", help="show where in the code an error comes from")
        return made

    made = command("compile", "compile a model into an artefact", _compile)
    _model_options(made)
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="the artefact (default: MODEL's name.forge)")
    made.add_argument("--openvino-ir", type=Path, metavar="FOLDER", help="also write the NPU's graphs as OpenVINO IR")

    made = command("run", "run a model once and show its outputs", _run)
    _model_options(made)
    given = made.add_mutually_exclusive_group()
    given.add_argument("--inputs", type=Path, metavar="FILE", help="arrays: .npz by input name, or .npy")
    given.add_argument("--text", help="a text, for a tokenizer in the folder")
    made.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="where the tokenizer is, if not in MODEL")
    made.add_argument("--top", type=_count, default=5, metavar="N", help="likely tokens or labels shown (default: 5)")
    made.add_argument("--check", action="store_true", help="compare with eager PyTorch")
    made.add_argument("-o", "--output", type=Path, metavar="FILE.npz", help="write the outputs")

    made = command("bench", "measure how long a call takes, beside eager PyTorch", _bench)
    _model_options(made)
    made.add_argument("--inputs", type=Path, metavar="FILE", help="arrays: .npz by input name, or .npy")
    made.add_argument("--calls", type=_count, default=100, metavar="N", help="calls that are timed (default: 100)")
    made.add_argument("--warmup", type=_count, default=5, metavar="N", help="calls before that (default: 5)")
    made.add_argument("--no-eager", action="store_true", help="time the compiled model only")
    made.add_argument("--profile", action="store_true", help="also show what the time goes to, by device and operator")
    made.add_argument(
        "--trace", type=Path, metavar="FILE", help="also write a trace that https://ui.perfetto.dev opens"
    )

    made = command("report", "show what the compiler made of a model", _report)
    _model_options(made)
    made.add_argument("--markdown", action="store_true", help="print Markdown tables")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page, with pictures of memory and schedule")

    command("doctor", "say what there is of an NPU, and what to do if it is not usable", _doctor)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder, .pt2 or .forge file: see below")
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--device", type=_device, default="auto", help="auto, cpu, npu, npu:plan[:target] or npu:emulate[:target]"
    )
    where.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="bf16, w8, w4, w4g64, w4g32: products on the host; fp16, w8a16, w4a16: the NPU",
    )
    where.add_argument("--threads", type=_count, metavar="N", help="of the host (default: torch's)")
    sizes = parser.add_argument_group("inputs of a folder")
    sizes.add_argument("--batch", type=_count, metavar="N", help="rows (default: 1)")
    sizes.add_argument("--seq", type=_count, metavar="N", help="tokens (default: 128, or as many as a --text has)")
    sizes.add_argument("--seed", type=int, default=0, help="of random inputs")
    sizes.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"),
                       help="of the weights; auto is the checkpoint's own (default: float32)")  # fmt: skip
    sizes.add_argument("--class", dest="class_name", metavar="NAME", help="transformers class, if not the config's")
    passes = parser.add_argument_group("how it is compiled (a folder or .pt2 file)")
    passes.add_argument("--passes", type=_passes, help='pass names with commas, "default" or "none"')
    passes.add_argument("--alpha", type=_fraction, help="0..1: how far operators are fused (default: 1)")
    passes.add_argument("--autotune", action="store_true", help="search for alpha")
    passes.add_argument("--strict", action="store_true", help="fail rather than leave operators to torch")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, given {text!r}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in 0..1, given {text!r}")
    return value


def _device(text: str) -> str:
    try:
        parse_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _passes(text: str) -> str:
    known = [name for name, _ in _core.passes()]
    for name in [] if text in ("default", "none") else text.split(","):
        if name.strip() not in known:
            raise argparse.ArgumentTypeError(f"no pass {name!r}; there are {', '.join(known)}")
    return text


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """An opened model, compiled or loaded."""

    opened: Opened
    model: Any  # CompiledModel or LoadedModel
    report: Report
    ms: float  # that compiling or loading took


def _open(options: argparse.Namespace) -> Ready:
    wanted = Wanted(
        batch=options.batch or 1,
        length=options.seq,
        seed=options.seed,
        text=getattr(options, "text", None),
        file=getattr(options, "inputs", None),
    )
    kind, tokenizer = kind_of(options.model), getattr(options, "tokenizer", None)
    _refuse_for(options, kind)
    where = {"device": options.device, "precision": options.precision, "num_threads": options.threads}
    if kind == "artefact":
        start = time.perf_counter()
        loaded = load(options.model, **where)
        ms = (time.perf_counter() - start) * 1e3
        opened = open_artefact(loaded, options.model, wanted, tokenizer)
        return Ready(opened, loaded, loaded.report, ms)
    import torch

    from .compile import compile

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if kind == "checkpoint":
        opened = open_checkpoint(options.model, wanted, options.dtype or "float32", options.class_name, tokenizer)
    else:
        opened = open_program(options.model, wanted)
    args, kwargs = opened.arguments(list(opened.inputs.values()))
    start = time.perf_counter()
    compiled = compile(
        opened.model,
        args,
        kwargs,
        passes=options.passes or "default",
        alpha=1.0 if options.alpha is None else options.alpha,
        autotune=options.autotune,
        strict=options.strict,
        **where,
    )
    return Ready(opened, compiled, compiled.report, (time.perf_counter() - start) * 1e3)


def _refuse_for(options: argparse.Namespace, kind: str) -> None:
    """Options that would do nothing are refused."""
    sizes, compiling = ("batch", "seq", "dtype", "class_name"), ("passes", "alpha", "autotune", "strict")
    fixed = {"checkpoint": (), "program": sizes, "artefact": (*sizes, *compiling)}[kind]
    for name in fixed:
        if getattr(options, name) not in (None, False):
            spelled = "class" if name == "class_name" else name
            what = "an exported program has its own sizes" if kind == "program" else "an artefact is compiled already"
            raise Refused(f"--{spelled}: {what}")


# --- commands ---------------------------------------------------------------------------------------------------------


def _compile(options: argparse.Namespace) -> int:
    if kind_of(options.model) == "artefact":
        raise Refused(f"{options.model}: an artefact is compiled already; `run`, `bench` and `report` take it")
    target = options.output or Path(options.model.resolve().name).with_suffix(".forge")
    if not target.parent.is_dir():
        raise Refused(f"{target.parent}: no such folder")
    ready = _open(options)
    ready.model.save(target)
    size = target.stat().st_size
    if options.openvino_ir is not None:
        ready.model.save_openvino_ir(options.openvino_ir)
    if options.json:
        _print_json({"artefact": str(target), "bytes": size, **_facts(ready), "report": ready.report.to_dict()})
        return 0
    print(ready.report)
    print(f"\nwrote {target} ({size / 2**20:.1f} MiB) in {ready.ms / 1e3:.2f} s of compiling")
    if options.openvino_ir is not None:
        print(f"wrote the NPU's graphs to {options.openvino_ir}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.check and kind_of(options.model) == "artefact":
        raise Refused("--check: an artefact has no eager model; check the folder or .pt2 file that it was made from")
    ready = _open(options)
    opened = ready.opened
    start = time.perf_counter()
    kinds = ready.model.result_types() if opened.kind == "artefact" else None
    outputs = named_outputs(opened.call(ready.model), kinds)
    ms = (time.perf_counter() - start) * 1e3
    if not outputs:
        raise Refused("the model returns no tensor")
    if options.output is not None:
        with open(options.output, "wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]
    likely = _likely(opened, outputs, options.top)
    differs = _difference(opened, outputs, ready.report["precision"]) if options.check else None
    good = differs is None or all(row["close"] for row in differs.values())
    if options.json:
        found = {key: {"dtype": str(a.dtype), "shape": list(a.shape)} for key, a in outputs.items()}
        result = {**_facts(ready), "call_ms": ms, "outputs": found, "top": likely, "notes": opened.notes}
        _print_json({**result, **({"check": differs} if differs is not None else {})})
        return 0 if good else 1
    for note in opened.notes:
        _note(note)
    print(f"{ready.model.device}, {'loaded' if opened.kind == 'artefact' else 'compiled'} in {ready.ms:.0f} ms, "
          f"called in {ms:.1f} ms\n")  # fmt: skip
    _table(
        ("output", "dtype", "shape", "min", "max", "first values"),
        [(key, str(a.dtype), str(list(a.shape)), *_glimpse(a)) for key, a in outputs.items()],
    )
    if likely:
        print()
        _table(("likely", "id", "probability"), [(r["text"], str(r["id"]), f"{r['probability']:.4f}") for r in likely])
    if differs is not None:
        print()
        rows = [(key, f"{r['max_abs']:.3g}", f"{r['allowed']:.3g}", "yes" if r["close"] else "NO")
                for key, r in differs.items()]  # fmt: skip
        _table(("output", "max-abs to eager", "allowed", "close"), rows)
    if options.output is not None:
        print(f"\nwrote {options.output}")
    return 0 if good else 1


def _bench(options: argparse.Namespace) -> int:
    ready = _open(options)
    opened, model = ready.opened, ready.model
    model.wait()
    calls: dict[str, Callable[[], Any]] = {"forge": lambda: opened.call(model)}
    if opened.eager is not None and not options.no_eager:
        eager = opened.eager
        calls["eager"] = lambda: opened.call(eager)
    times = _interleaved(calls, options.warmup, options.calls)
    torch = sys.modules.get("torch")
    result = {
        **_facts(ready),
        "threads": options.threads or (torch.get_num_threads() if torch is not None else model._threads),
        "cpu": doctor.cpu_model(),
        "calls": options.calls,
        "inputs": {key: {"dtype": str(v.dtype).removeprefix("torch."), "shape": list(v.shape)}
                   for key, v in opened.inputs.items()},
        "times_ms": {name: _percentiles(spent) for name, spent in times.items()},
    }  # fmt: skip
    if "eager" in times:
        result["eager_over_forge"] = result["times_ms"]["eager"]["median"] / result["times_ms"]["forge"]["median"]
    profile = None
    if options.profile or options.trace is not None:
        args, kwargs = opened.arguments(list(opened.inputs.values()))
        profile = model.profile(*args, calls=min(options.calls, _PROFILED), **kwargs)
    if profile is not None and options.trace is not None:
        profile.save_trace(options.trace)
    if options.json:
        _print_json({**result, **({"profile": profile.to_dict()} if profile is not None else {})})
        return 0
    shapes = ", ".join(f"{key} {v['dtype']}{v['shape']}" for key, v in result["inputs"].items())
    print(f"{opened.name}: {shapes}")
    print(f"{result['device']}: {result['device_reason']}; {result['threads']} threads, {result['cpu']}")
    print(f"{options.calls} calls each, {'loaded' if opened.kind == 'artefact' else 'compiled'} in {ready.ms:.0f} ms\n")
    _table(
        ("ms a call", "median", "P90", "P99", "min", "max"),
        [(name, *(f"{row[k]:.3f}" for k in ("median", "p90", "p99", "min", "max")))
         for name, row in result["times_ms"].items()],
    )  # fmt: skip
    if "eager" in times:
        print(f"\neager / forge: {result['eager_over_forge']:.2f}")
    if profile is not None and options.profile:
        print(f"\n{profile}")
    if options.trace is not None:
        print(f"\nwrote {options.trace}")
    return 0


def _report(options: argparse.Namespace) -> int:
    report = _open(options).report
    if options.html is not None:
        options.html.write_text(report.to_html(), encoding="utf-8")
        if not (options.json or options.markdown):
            print(f"wrote {options.html}")
            return 0
    if options.json:
        _print_json(report.to_dict())
    elif options.markdown:
        print(report.to_markdown(), end="")
    else:
        print(report)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    found = doctor.examine()
    if options.json:
        _print_json(found)
    else:
        doctor.show(found)
    return 0 if found["usable"] else 1


# --- what they share --------------------------------------------------------------------------------------------------


def _facts(ready: Ready) -> dict[str, Any]:
    return {
        "model": ready.opened.name,
        "device": ready.model.device,
        "device_reason": ready.report["device_reason"],
        "precision": ready.report["precision"],
        "loaded_ms" if ready.opened.kind == "artefact" else "compiled_ms": ready.ms,
    }


def _likely(opened: Opened, outputs: dict[str, np.ndarray[Any, Any]], count: int) -> list[dict[str, Any]]:
    """The most probable tokens after the last position of the first row, or labels."""
    logits = outputs.get("logits")
    if logits is None or logits.dtype.kind != "f" or logits.ndim not in (2, 3) or 0 in logits.shape:
        return []
    tokens = logits.ndim == 3
    scores = logits[0, opened.position if opened.position is not None else -1] if tokens else logits[0]
    wide = scores.astype(np.float64)
    chances = np.exp(wide - wide.max())
    chances /= chances.sum()

    def text(index: int) -> str:
        if tokens:
            return repr(opened.tokenizer.decode([index])) if opened.tokenizer is not None else ""
        return str(opened.labels.get(index, ""))

    best = np.argsort(-chances, kind="stable")[:count].tolist()
    return [{"id": i, "text": text(i), "probability": float(chances[i])} for i in best]


def _difference(opened: Opened, outputs: dict[str, np.ndarray[Any, Any]], precision: str) -> dict[str, dict[str, Any]]:
    import torch

    assert opened.eager is not None
    with torch.no_grad():
        result = opened.call(opened.eager)
    leaves = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    half = any(t.is_floating_point() and t.itemsize < 4 for t in leaves)
    allowed = max(_ALLOWED[precision], _ALLOWED["fp16"] if half else 0.0)
    found = {}
    for key, theirs in named_outputs(result).items():
        ours = outputs[key]
        worst = float(np.max(np.abs(ours.astype(np.complex128) - theirs.astype(np.complex128)), initial=0.0))
        scale = float(np.max(np.abs(theirs), initial=0.0))
        found[key] = {
            "max_abs": worst,
            "relative": worst / scale if scale else worst,
            "allowed": allowed * max(scale, 1.0),
            "close": worst <= allowed * max(scale, 1.0),
        }
    return found


def _interleaved(calls: dict[str, Callable[[], Any]], warmup: int, count: int) -> dict[str, list[float]]:
    """Milliseconds of each call; they take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(-warmup, count):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round >= 0:
                spent[name].append((time.perf_counter() - start) * 1e3)
    return spent


def _percentiles(times: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return {"median": p50, "p90": p90, "p99": p99, "min": min(times), "max": max(times)}


def _glimpse(array: np.ndarray[Any, Any]) -> tuple[str, str, str]:
    if array.size == 0:
        return "", "", ""
    ordered = array.dtype.kind != "c"
    first = " ".join(f"{v:.4g}" for v in array.ravel()[:4].tolist()) + (" ..." if array.size > 4 else "")
    return (f"{array.min():.4g}", f"{array.max():.4g}", first) if ordered else ("", "", first)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _note(text: str) -> None:
    print("note: " + " ".join(text.split()), file=sys.stderr)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    print()
