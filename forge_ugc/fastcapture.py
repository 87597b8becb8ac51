"""Fast capture: records forward() (record.py) instead of exporting it; for models that it can prove it handles.

`capture_fast` returns what `capture_export` would, or raises Unsupported, and then torch.export is the way. The model
is not changed: modes of this thread see the calls, attributes that forward() sets are put back, and a tensor that
outlives forward() (stored on a module, in a cache, in a list) makes the capture fail.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import gc
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import Captured, Kind, Node, Output, Ref, capture_export
from .capturing import capturing
from .containers import Watch, counters_of
from .residue import evict, holders
from .signature import Signature
from .state import Slot, made_of_tensors, parts_of

try:
    from .record import Functions, Recorder, Symbol
    from .record_rules import Unsupported

    _MISSING = ""
except (ImportError, AttributeError) as error:  # another torch, without the names that recording needs
    _MISSING = f"this torch lacks what recording needs: {error}"

    class Unsupported(Exception):  # type: ignore[no-redef]
        early = True


__all__ = ["Unsupported", "capture_fast", "count_exported"]

_recording = threading.RLock()  # one at a time: torch has flags that are the process's
_VALUES: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range, enum.Enum)
_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def capture_fast(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any = None,
    *,
    only_operators: bool = False,
    fix: bool = False,
) -> Captured:
    """Captures by recording. Raises Unsupported, and nothing else, where that is not certainly right.

    fix: Python may read values of the model's own tensors; they are then fixed (`Captured.fixed`).
    only_operators: `model` is a function that calls torch's operators and nothing else, no compiled code; then no flag
        of the process is touched, which other threads would see.
    """
    if _MISSING:
        raise Unsupported(_MISSING)
    try:
        _refuse_early(model, dynamic_shapes)
        signature = Signature.of_callable(model, args, kwargs)
        with _recording:
            try:
                return _attempt(model, signature, *signature.canonical(args, kwargs), only_operators, fix)
            except Unsupported as first:
                # some models read values in eager mode that they do without while exporting
                exporting = _exporting_context()
                if first.early or exporting is None or only_operators:
                    raise
                with exporting:
                    return _attempt(model, signature, *signature.canonical(args, kwargs), fix=fix)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"{type(error).__name__}: {str(error)[:200]}") from error


def count_exported(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], int | None]:
    """A function that exports the model and counts nodes, or gives None. Holds the example's types, not its tensors."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    leaves = [_Like(v) if isinstance(v, torch.Tensor) else v for v in flat]

    def count() -> int | None:
        args, kwargs = pytree.tree_unflatten([v.make() if isinstance(v, _Like) else v for v in leaves], spec)
        try:
            return capture_export(model, args, kwargs).nodes_captured
        except Exception:
            return None

    return count


class _Like:
    """The type of a tensor."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype, self.device = t.shape, t.stride(), t.dtype, t.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()


# --- before -----------------------------------------------------------------------------------------------------------


def _refuse_early(model: Any, dynamic_shapes: Any) -> None:
    def refuse(reason: str) -> None:
        raise Unsupported(reason, early=True)

    if isinstance(model, torch.export.ExportedProgram):
        refuse("an exported program is captured already")
    if dynamic_shapes is not None:
        refuse("dynamic shapes")
    if torch.overrides._get_current_function_mode() is not None or torch._C._len_torch_dispatch_stack():
        refuse("compile() inside another torch mode")
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        refuse("global hooks")
    if not isinstance(model, torch.nn.Module):
        return
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if module.training:
            refuse(f"{where} is in training mode")
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ in ("OptimizedModule", "GraphModule"):
            refuse(f"{where} is compiled code")


def _exporting_context() -> contextlib.AbstractContextManager[Any] | None:
    try:
        from torch._export.utils import _compiling_state_context
    except ImportError:
        return None
    return _compiling_state_context()


def _state(model: Any) -> tuple[dict[int, tuple[Kind, Slot]], list[torch.Tensor]]:
    """The place of each tensor of the model by its id, and the tensors, so that ids stay theirs."""
    places: dict[int, tuple[Kind, Slot]] = {}
    keep: list[torch.Tensor] = []
    for prefix, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        tables = ((module._parameters, Kind.STATE), (module._buffers, Kind.STATE), (module.__dict__, Kind.CONSTANT))
        for where, kind in tables:
            for key, value in where.items():
                if isinstance(value, torch.Tensor) and id(value) not in places:
                    _place(places, keep, value, kind, Slot(f"{prefix}.{key}" if prefix else key, where, key))
    return places, keep


def _place(places: dict[int, tuple[Kind, Slot]], keep: list[torch.Tensor], value: Any, kind: Kind, slot: Slot) -> None:
    places[id(value)] = (kind, slot)
    keep.append(value)
    if made_of_tensors(type(value)):
        for name in parts_of(value)[0]:
            _place(places, keep, getattr(value, name), kind, slot.part(name))


# --- recording --------------------------------------------------------------------------------------------------------


def _attempt(
    model: Any,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    only_operators: bool = False,
    fix: bool = False,
) -> Captured:
    """Records; what a recording that failed has put into caches is taken out of them."""
    places, keep = _state(model)
    recorder = Recorder(places, fix)
    try:
        return _record(recorder, model, signature, args, kwargs, only_operators)
    except Exception as error:
        early, reason = getattr(error, "early", False), str(error)
        if not isinstance(error, Unsupported):
            reason = f"{type(error).__name__}: {reason[:200]}"
    recorder.failure = None  # and with it the frames of forward()
    recorder.leaves.clear()
    recorder.known.clear()
    if any(symbol() is not None for symbol in recorder.symbols):
        gc.collect()
        left = [value for symbol in recorder.symbols if (value := symbol()) is not None]
        if left:
            evict(left)
    del keep
    raise Unsupported(reason, early)


def _record(
    recorder: Recorder,
    model: Any,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    only_operators: bool,
) -> Captured:
    flat, spec = pytree.tree_flatten((args, kwargs))
    watch = Watch(model, signature)
    call = watch.module if watch.active else model
    with (
        capturing(),
        _without_collector(),
        contextlib.nullcontext() if only_operators else _without_dynamo(),
        _unchanged(model, recorder),
        _below_autograd(),
        recorder,
        Functions(recorder),
    ):
        with torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_unflatten(_inputs(recorder, signature, flat), spec)
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            raise recorder.failure or Unsupported(f"{type(error).__name__}: {str(error)[:200]}") from error
        del args, kwargs
    leaves, out_spec = pytree.tree_flatten(result)
    counters = watch.counters if watch.active else counters_of(result)
    values = [_output(recorder, leaf) for leaf in leaves]
    del leaves, result
    if recorder.failure is not None:
        raise recorder.failure
    _check_writes(recorder)
    _check_foreign(recorder)
    fixed = recorder.fixed.tensors if recorder.fixed is not None else {}
    if not recorder.written.keys().isdisjoint(fixed):
        raise Unsupported("a value is read that forward() changes")
    nodes, slots, outputs, writes = _prune(recorder, values)
    _check_leaks(recorder)
    captured = Captured(
        nodes,
        outputs,
        writes,
        out_spec,
        signature,
        slots,
        sum(node.kind is Kind.CALL for node in nodes),
        recorded=True,
        fixed=list(fixed.values()),
        counters=counters,
    )
    if watch.active:
        captured.outputs, captured.out_spec, captured.containers = watch.split(outputs)
    return captured


def _inputs(recorder: Recorder, signature: Signature, flat: list[Any]) -> list[Any]:
    """What forward() is given. A tensor passed twice becomes two Symbols: the next call may pass two tensors."""
    given: list[Any] = []
    for number, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            if id(value) in recorder.state:
                raise Unsupported("an input is a tensor of the model", early=True)
            if value.__dict__:
                raise Unsupported(f"input {signature.paths[number]} has attributes of its own", early=True)
            given.append(recorder.leaf(value, Kind.INPUT, number))
        elif _is_value(value):
            recorder.nodes.append(Node(f"input_{number}", Kind.INPUT, number, meta=value))
            given.append(value)
        else:
            raise Unsupported(f"input {signature.paths[number]} is a {type(value).__name__}", early=True)
    return given


def _output(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = recorder.symbol(value) if type(value) is not Symbol else value
        return Ref(recorder.returned(value) if type(value) is Symbol else recorder.constant(value, returned=True))
    if not _is_value(value):
        raise Unsupported(f"an output is a {type(value).__name__}")
    return value


def _is_value(value: Any) -> bool:
    """Whether a leaf of arguments or results is a constant that holds no tensor."""
    if isinstance(value, slice):
        return all(map(_is_value, (value.start, value.stop, value.step)))
    return isinstance(value, _VALUES)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keeps what recording makes in the collector's youngest generation, where `_check_leaks` finds cycles fast."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Operators skip autograd's kernels, which would take composite ones apart."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """What forward() would compile (torch.cond does) runs as it is; dynamo would remember that it failed."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()


@contextlib.contextmanager
def _unchanged(model: Any, recorder: Recorder) -> Iterator[None]:
    """Puts back what forward() assigns to modules, and torch's generator; notes that it did."""
    saved = [(name, holder, copy.copy(holder)) for name, holder in holders(model)]
    generator = torch.get_rng_state()
    try:
        yield
    finally:
        for name, holder, before in saved:
            if len(holder) == len(before) and _same_items(holder, before):
                continue
            what = f"forward() changes {name}"
            if isinstance(holder, dict):
                names = [k for k in {**before, **holder} if holder.get(k, recorder) is not before.get(k, recorder)]
                what = f"forward() sets {', '.join(map(str, names))} of {name}"
            holder.clear()
            holder.extend(before) if isinstance(holder, (list, deque)) else holder.update(before)
            recorder.fail(what)
        if not torch.equal(generator, torch.get_rng_state()):
            torch.set_rng_state(generator)
            recorder.fail("forward() draws random numbers")


def _same_items(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return all(now.get(k, now) is v for k, v in before.items())
    return now == before if isinstance(now, set) else all(map(operator.is_, now, before))


# --- after ------------------------------------------------------------------------------------------------------------


def _check_writes(recorder: Recorder) -> None:
    """A written input or buffer must not share memory with another leaf: who reads that would see the write."""
    if not recorder.written:
        return
    seen: dict[int, int] = {}
    for index, _, tensor in recorder.leaves.values():
        other = seen.setdefault(tensor.untyped_storage()._cdata, index)
        if other != index and not recorder.written.keys().isdisjoint((other, index)):
            raise Unsupported("an input or buffer is written that shares memory with another")


def _check_foreign(recorder: Recorder) -> None:
    for tensor, before in recorder.foreign:
        if tensor.device.type != "meta" and not torch.equal(tensor.isnan(), before.isnan()):
            raise Unsupported("a tensor that was there before is written")
        if tensor.device.type != "meta" and not torch.equal(tensor.nan_to_num(), before.nan_to_num()):
            raise Unsupported("a tensor that was there before is written")


def _check_leaks(recorder: Recorder) -> None:
    """No tensor of the recording may live on in the model or anywhere else."""
    symbols, made = recorder.symbols, recorder.made
    recorder.leaves.clear()
    recorder.known.clear()

    def alive() -> bool:
        return any(symbol() is not None for symbol in symbols) or len(made) > 0

    for generation in (0, 2):
        if not alive():
            return
        gc.collect(generation)
    if alive():
        raise Unsupported("forward() keeps a tensor", early=True)


def _prune(recorder: Recorder, values: list[Any]) -> tuple[list[Node], dict[int, Slot], list[Output], list[Output]]:
    """Drops what no output needs and renumbers the rest."""
    nodes = recorder.nodes
    live = {v.index for v in values if isinstance(v, Ref)} | set(recorder.written) | set(recorder.written.values())

    def mark(value: Any) -> None:
        if type(value) is Ref:
            live.add(value.index)
        elif type(value) is list or type(value) is tuple:
            for item in value:
                mark(item)

    for index in range(len(nodes) - 1, -1, -1):
        if index in live:
            mark(nodes[index].args)
            for value in nodes[index].kwargs.values():
                mark(value)
    number: dict[int, int] = {}

    def renumber(value: Any) -> Any:
        if type(value) is Ref:
            return Ref(number[value.index])
        if type(value) is list or type(value) is tuple:
            return type(value)(map(renumber, value))
        return value

    kept: list[Node] = []
    for index, node in enumerate(nodes):
        if index in live or node.kind is Kind.INPUT:
            number[index] = len(kept)
            node.args = renumber(node.args)
            node.kwargs = {k: renumber(v) for k, v in node.kwargs.items()}
            kept.append(node)
    slots = {number[i]: slot for i, slot in recorder.slots.items() if i in number}
    outputs = [Output(renumber(v)) for v in values]
    writes = [Output(Ref(number[v]), number[leaf]) for leaf, v in recorder.written.items()]
    return kept, slots, outputs, writes
