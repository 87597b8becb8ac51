"""`compile`: a model and example inputs in, a CompiledModel out."""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from . import _core, npu
from .adapters import Adapters, find_adapters
from .capture import Captured, capture_export
from .compiled import CompiledModel
from .containers import check_cache, register_caches, register_dataclasses
from .errors import CompileError, FallbackWarning, reads_values
from .fastcapture import Unsupported, capture_fast, count_exported
from .pause import collector_paused
from .plan import Options
from .progress import phase, shown
from .report import Report


def compile(
    model: Any,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device: Any = "auto",
    precision: str = "auto",
    passes: str = "default",
    alpha: float = 1.0,
    autotune: bool = False,
    strict: bool = False,
    dynamic_shapes: Any = None,
    capture: str = "auto",
    num_threads: int | None = None,
    pack: bool = True,
    schedule: bool = True,
    progress: bool | None = None,
    fold: str | bool = "auto",
    npu_options: Mapping[str, Any] | None = None,
) -> CompiledModel:
    """Compiles `model` for inputs like the example's.

    Args:
        model: nn.Module, function, torch.export.ExportedProgram, or what was captured of one (`capture.Captured`).
            It is neither changed nor run.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments; any pytree inside.
        example_kwargs: more keyword arguments.
        device: "auto" (the NPU where one is usable, else the host; `report["device_reason"]` says which and why),
            "cpu", "npu" (NpuError where there is none), "npu:plan[:target]" (plan for an NPU, without running) or
            "npu:emulate[:target]" (on the host, in the NPU's numbers).
        precision: what the NPU computes in, or the host. The NPU: "fp16" (weights and activations; what "auto" takes),
            "w8a16" or "w4a16" (weights of linear layers in 8 or 4 bits, a scale for each output). The host: "fp32" (the
            model's own dtypes), "bf16" (weights of linear layers kept as bf16, what they are multiplied with rounded to
            it, sums in f32; ValueError where the CPU has no AVX512-BF16), "w8" (weights of linear layers as int8, a
            scale for each output), "w4" (as int4, a scale for each 128 inputs of an output), "w4g64" or "w4g32" (for
            each 64 or 32; with int8 and int4 activations and sums stay f32).
        passes: pass names in order ("dce,cse,fold"), "default" or "none".
        alpha: 0..1, how far operator fusion goes.
        autotune: search alpha by the cost model.
        strict: raise FallbackError instead of running operators through torch that C does not know.
        dynamic_shapes: as for torch.export; a call with other sizes is then specialised from the same capture.
        capture: "auto" records forward() where that is certain to give what torch.export would, in a tenth of the time,
            and exports where it is not (`report["capture"]` says which, "capture_declined" why); "export" always
            exports.
        num_threads: of the host's kernels; default torch.get_num_threads().
        pack: keep copies of weights in the order in which the host's products read them, where that is faster than
            using them as they lie (transformers' Conv1D, few rows); `report["weights"]["packed_bytes"]` says how much.
            False keeps none, which is slower there; the results are the same (of bf16, but for rounding).
        schedule: order the instructions so that the device changes as seldom as it can, in little memory. False keeps
            the program's order, to see what that is worth.
        progress: show the phases on stderr or in the notebook: True at once, None once a second has gone by and where
            there is a terminal or notebook, False never.
        fold: compile repeated blocks once for the NPU, with their weights as arguments. "auto" returns with such graphs
            and compiles graphs with constant weights, which are faster to run, in the background (`wait()`); True keeps
            to the first, False waits for the second.
        npu_options: "types" and "border": "f16" or "f32", of the graphs' constants and of what crosses the NPU's
            border; "config": options of the graph compiler, as in {"PERFORMANCE_HINT": "LATENCY"}; "cache": False keeps
            compiled graphs out of the disk cache (FORGE_CACHE_DIR).

    Raises:
        CompileError: (a RuntimeError) the model cannot be captured; the text has the user's source line.
        FallbackError: with `strict`.
        NpuError: (a RuntimeError with `reason`) device="npu" has no NPU, or its compiler refuses a graph.
        ValueError: an option that cannot be.
    """
    settings: dict[str, Any] = {
        "device": device,
        "precision": precision,
        "passes": passes,
        "alpha": alpha,
        "autotune": autotune,
        "strict": strict,
        "dynamic_shapes": dynamic_shapes,
        "capture": capture,
        "num_threads": num_threads,
        "pack": pack,
        "schedule": schedule,
        "progress": progress,
        "fold": fold,
        "npu_options": npu_options,
    }
    choice = npu.choose(str(device), precision, fold, npu_options)
    options = _options(choice, passes, alpha, autotune, strict, num_threads, pack, schedule)
    if isinstance(dynamic_shapes, (int, float, str, torch.export.Dim)):
        raise TypeError(
            "dynamic_shapes: expected a dict or tuple that says which sizes of which input are open, as in "
            f'{{"x": {{0: torch.export.Dim("batch")}}}}, given {dynamic_shapes!r}'
        )
    if capture not in ("auto", "export"):
        raise ValueError(f'unknown capture {capture!r}; use "auto" or "export"')
    args, kwargs = _arguments(example_inputs, example_kwargs)
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("compile() inside torch.autocast: put the autocast region into forward(), where it is kept")
    _refuse_torchscript(model)
    if isinstance(model, torch.nn.Module) and model.training:
        warnings.warn("the model is in training mode; compile(model.eval()) for inference", UserWarning, stacklevel=2)
    with shown(progress):
        start = time.perf_counter()
        captured, example, meta = _capture(model, args, kwargs, dynamic_shapes, capture)
        captured_at = time.perf_counter()
        phase("lowering")
        if meta and options.executable:
            why = "the model was compiled from meta tensors, which have no values: its plan can be read, not run"
            options = replace(options, executable=False, why_not=why)
        # some objects for each weight and each instruction; graphs for a device take long, and hold no collector off
        dispatched = choice.npu is not None and choice.npu.mode == "dispatch"
        with nullcontext() if dispatched else collector_paused():
            compiled = CompiledModel(model, captured, options, example)
            if isinstance(model, torch.export.ExportedProgram) and not meta:
                compiled.check_example(example)
            end = time.perf_counter()
            compiled.report = _report(compiled, captured, options, captured_at - start, end - captured_at)
    if find_adapters(model):
        compiled._adapters = Adapters(model, compiled, settings)
    _warn_fallbacks(compiled.report["fallbacks"])
    if model is captured:
        return compiled
    if captured.recorded:
        compiled.report.count_later(count_exported(model, args, kwargs))
    directory = os.environ.get("FORGE_DUMP")
    if directory:
        dump(compiled, directory)
    return compiled


def _refuse_torchscript(model: Any) -> None:
    """torch.export does not take it, and says little."""
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, torch.jit.ScriptModule):
            raise CompileError(
                f"{name or 'the model'} is TorchScript ({type(module).__name__}), which cannot be captured: compile "
                "the nn.Module that it was made from"
            )


def _options(
    choice: npu.Choice,
    passes: str,
    alpha: float,
    autotune: bool,
    strict: bool,
    threads: int | None,
    pack: bool = True,
    schedule: bool = True,
) -> Options:
    why_not = ""
    if choice.npu is not None and choice.npu.mode == "none":
        why_not = (
            f'compiled with device={choice.device!r}: only the plan exists; compile with device="cpu" or "npu:emulate" '
            "to run"
        )
    if not isinstance(passes, str):
        raise TypeError(f'passes: expected names in one string, as in "dce,cse,fold", given {passes!r}')
    known = [name for name, _ in _core.passes()]
    for name in [] if passes.strip() in ("default", "none", "") else passes.split(","):
        if name.strip() not in known:
            raise ValueError(f'unknown pass {name.strip()!r}; known are {", ".join(known)} (or "default", "none")')
    if not isinstance(alpha, (int, float)) or not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be a number in [0, 1], given {alpha!r}")
    for name, flag in (("autotune", autotune), ("strict", strict), ("pack", pack), ("schedule", schedule)):
        if not isinstance(flag, (bool, int, np.bool_)):  # "no" would be True
            raise TypeError(f"{name}: expected True or False, given {flag!r}")
    threads = torch.get_num_threads() if threads is None else npu.threads(threads)
    flags = bool(autotune), bool(strict)
    return Options(choice, not why_not, why_not, passes, float(alpha), *flags, threads, bool(pack), bool(schedule))


def _arguments(example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise TypeError(
            f"example_kwargs: expected a dict of arguments by name, given {type(example_kwargs).__name__}; several "
            "positional arguments go into example_inputs as a tuple"
        )
    kwargs = dict(example_kwargs or {})
    if isinstance(example_inputs, np.ndarray):
        raise TypeError("example_inputs: expected tensors, given a numpy array; torch.from_numpy makes one of it")
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **kwargs}
    if isinstance(example_inputs, (tuple, list)) and not hasattr(example_inputs, "_fields"):
        return tuple(example_inputs), kwargs
    return (example_inputs,), kwargs


def _capture(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, capture: str = "export"
) -> tuple[Captured, list[Any], bool]:
    """(capture, leaves of the example, whether the model has no values)."""
    if isinstance(model, Captured):
        return model, model.signature.flatten(model.signature.values(args, kwargs)), False
    if isinstance(model, torch.export.ExportedProgram):
        if dynamic_shapes is not None:
            raise ValueError("dynamic_shapes: an ExportedProgram has its own; give them to torch.export.export")
        if not args and not kwargs and model.example_inputs is not None:
            args, kwargs = model.example_inputs
        state: list[torch.Tensor] = [t for t in model.state_dict.values() if isinstance(t, torch.Tensor)]
    elif isinstance(model, torch.nn.Module):
        state = [*model.parameters(), *model.buffers()]
    elif isinstance(model, CompiledModel):
        raise TypeError("model: it is compiled already; compile the model that it was made from")
    elif isinstance(model, type):
        raise TypeError(f"model: expected an instance, given the class {model.__name__}")
    elif callable(model):
        state = []
    else:
        raise TypeError(f"model: expected an nn.Module, a function or an ExportedProgram, given {type(model).__name__}")
    register_dataclasses((args, kwargs))
    leaves = pytree.tree_leaves((args, kwargs))
    register_caches(model, leaves)
    leaves = pytree.tree_leaves((args, kwargs))
    for cache in _nodes((args, kwargs)):
        check_cache(cache)
    devices = {t.device.type for t in [*state, *(v for v in leaves if isinstance(v, torch.Tensor))]}
    if devices - {"cpu", "meta"}:
        raise TypeError(
            f"the model or its inputs are on {', '.join(sorted(devices - {'cpu', 'meta'}))}; move them to the cpu"
        )
    meta = "meta" in devices
    captured, declined = None, ""
    phase("capturing forward()")
    if capture == "auto":
        try:
            with collector_paused():
                captured = capture_fast(model, args, kwargs, dynamic_shapes)
        except Unsupported as reason:
            declined = str(reason)
    if captured is None:
        phase("capturing with torch.export")
        try:
            captured = capture_export(model, args, kwargs, dynamic_shapes)
        except CompileError as error:
            if capture != "auto" or not reads_values(error.__cause__ or error):
                raise
            try:  # the values of the model's own tensors may be all that Python reads
                captured = capture_fast(model, args, kwargs, dynamic_shapes, fix=True)
            except Unsupported:
                raise error from error.__cause__
        captured.declined = declined if not captured.recorded else ""
    example = captured.signature.flatten(captured.signature.values(args, kwargs))
    return captured, example, meta


def _nodes(tree: Any) -> list[Any]:
    found: list[Any] = []

    def visit(value: Any) -> bool:
        found.append(value)
        return False

    pytree.tree_flatten(tree, is_leaf=visit)
    return found


def _report(compiled: CompiledModel, captured: Captured, options: Options, capture_s: float, rest_s: float) -> Report:
    plan = next(iter(compiled._plans.values()))
    core = plan.program.report()
    lowered = plan.lowered
    parts = ("table_ms", "passes_ms", "lower_ms", "alloc_ms", "schedule_ms", "npu_ms", "pack_ms")
    inside = sum(core[k] for k in parts)
    return Report(
        core,
        capture_ms=capture_s * 1e3,
        table_ms=max(0.0, rest_s * 1e3 - inside),
        total_ms=(capture_s + rest_s) * 1e3,
        nodes_captured=captured.nodes_captured,
        capture="fast" if captured.recorded else "export",
        capture_declined=captured.declined,
        fallbacks=[{"op": f.op, "count": f.count, "where": f.where} for f in lowered.fallbacks],
        borrowed_bytes=lowered.table.borrowed_bytes,
        live=weakref.WeakMethod(compiled._live),
        sources=lowered.table.arrays["sources"],
        operators=lowered.table.count_operators(),
        schedule=plan.program.schedule(),
        title=compiled._title(),
    )


def _warn_fallbacks(fallbacks: list[dict[str, Any]]) -> None:
    if fallbacks:
        rows = ", ".join(f"{f['op']} x{f['count']} ({f['where'] or 'unknown line'})" for f in fallbacks)
        warnings.warn(f"these operators run through torch: {rows}", FallbackWarning, stacklevel=3)


_dumps: dict[str, itertools.count[int]] = {}  # how many there were, by folder; `next` and `setdefault` are atomic


def dump(compiled: CompiledModel, directory: str) -> None:
    """Writes every stage's text and the report into `directory` (FORGE_DUMP); of further compilations of this process
    into folders "2", "3", ... of it."""
    number = next(_dumps.setdefault(os.path.abspath(directory), itertools.count(1)))
    if number > 1:
        directory = os.path.join(directory, str(number))
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise type(error)(
            error.errno, f"FORGE_DUMP names no folder to write into: {error.strerror}", directory
        ) from None
    names = [p["name"] for p in compiled.report["passes"]]
    runs = [f"after:{name}#{names[: i + 1].count(name)}" for i, name in enumerate(names)]
    stages = ["aten", "capture", *runs, "final", "npuir", "schedule"]
    for number, stage in enumerate(stages):
        file_name = stage.removesuffix("#1").replace(":", "_").replace("#", "_")
        with open(os.path.join(directory, f"{number:02}_{file_name}.txt"), "w", encoding="utf-8") as file:
            file.write(compiled.ir(stage))
    with open(os.path.join(directory, "report.md"), "w", encoding="utf-8") as file:
        file.write(compiled.report.to_markdown())


__all__ = ["CompileError", "compile", "dump"]
