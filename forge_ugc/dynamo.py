"""`torch.compile(model, backend="forge")`.

Dynamo hands over an FX graph of torch calls, with parameters, buffers and sizes among its inputs. Forge captures that
graph for the sizes at hand (never through dynamo again), makes its static inputs the program's weights, and compiles.
What it cannot take runs as torch runs it: with one FallbackWarning, and visibly in `forge_ugc.last_reports()`.

    torch.compile(model, backend="forge", options={"passes": "dce,cse", "strict": True})
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import operator
import os
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import traceback

from .capture import Captured, Kind, Ref, capture_export
from .capturing import capturing
from .compile import compile, dump
from .compiled import CompiledModel
from .dynamo_fx import Inputs, Runner, apart, is_open, is_static, readable, set_numbers_apart, take_apart
from .errors import CompileError, FallbackError, FallbackWarning, NpuWarning, source_of
from .fastcapture import Unsupported, capture_fast
from .lowering.outputs import may_share
from .overlap import Overlap
from .report import Report
from .state import Samples, Slot, Watcher, has_memory, version

__all__ = ["GraphReport", "forge", "last_reports"]

log = logging.getLogger(__name__)
_SIZES = 16  # sets of sizes and numbers that one graph is compiled for, and kept
_PATIENCE = 64  # calls that further sizes wait for, at most
_SETS = 128  # sets of weights: one graph serves all layers that are alike
_REPORTS = 256  # graphs that last_reports() remembers
_RESTLESS = 3  # so many changes in a row, each within _SOON calls of the one before: no weight but an input
_SOON = 4
_NOT_HERE = ("model", "example_inputs", "example_kwargs", "dynamic_shapes")  # of compile(): dynamo decides these


# --- what was done ----------------------------------------------------------------------------------------------------


class GraphReport:
    """One graph of torch.compile.

    `name`: dynamo's number of the graph, and the source line where it begins. `calls`: how often Forge ran it;
    `eager_calls`: how often torch did. `fallback`: why torch does, "" if Forge does. `reports`: one Report for each
    program that the graph was compiled to (for some sizes and some weights), the newest last; `report`: the newest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fallback = ""
        self._reports: deque[Report] = deque(maxlen=_SIZES)
        self._calls, self._eager_calls = itertools.count(), itertools.count()  # `next` is atomic

    @property
    def calls(self) -> int:
        """How often Forge ran it."""
        return _reached(self._calls)

    @property
    def eager_calls(self) -> int:
        """How often torch ran it."""
        return _reached(self._eager_calls)

    @property
    def reports(self) -> list[Report]:
        """Of each program that it was compiled to, the newest last."""
        return list(self._reports)

    @property
    def report(self) -> Report | None:
        """The newest."""
        return self._reports[-1] if self._reports else None

    def __repr__(self) -> str:
        number = len(self._reports)
        programs = f"{number} program{'' if number == 1 else 's'}"
        what = f"through torch: {self.fallback}" if self.fallback else programs
        return f"<graph {self.name}: {what}; {self.calls} calls of Forge, {self.eager_calls} of torch>"


def _reached(counter: itertools.count[int]) -> int:
    return int(counter.__reduce__()[1][0])


_graphs: deque[GraphReport] = deque(maxlen=_REPORTS)


def last_reports() -> list[GraphReport]:
    """The graphs that `torch.compile(..., backend="forge")` made since torch._dynamo.reset(), oldest first."""
    return list(_graphs)


# --- the backend ------------------------------------------------------------------------------------------------------


def forge(
    gm: torch.fx.GraphModule,
    example_inputs: Inputs,
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as dynamo calls it: a function that computes what `gm` does.

    Args:
        gm, example_inputs: dynamo's graph and its example.
        options: as for `forge_ugc.compile`, except the model, the example and `dynamic_shapes`.
        mode: there is none.

    Raises:
        TypeError: an unknown option.
        ValueError: a `mode`, or a wrong option.
        FallbackError: with `strict`, where torch would have to run anything.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f'options: expected a dict, as in {{"passes": "dce,cse"}}, given {options!r}')
    options = dict(options or {})
    if mode is not None:
        raise ValueError(f'backend "forge" has no mode {mode!r}; pass options={{"autotune": True}} to search for speed')
    _check_options(options)
    record = GraphReport(_name(gm))
    _graphs.append(record)
    # who compiled before a reset is not known to torch._dynamo.reset() any more
    getattr(torch._dynamo.eval_frame, "cached_backends", {}).setdefault(id(forge), forge)
    without = set_numbers_apart(gm)
    graph_module, select, finish = without or (gm, list, None)
    taken_apart = take_apart(graph_module, select(example_inputs))
    graph_module, spread = taken_apart or (graph_module, list)
    inputs = spread(select(example_inputs))
    reason = _obstacle(graph_module, inputs)
    if not reason:
        graph = _Graph(graph_module, inputs, options, record)
        reason = graph.start(inputs)
        if not reason:
            if finish is not None:
                return lambda *args: finish(args, graph(*spread(select(args))))
            return graph if taken_apart is None else lambda *args: graph(*spread(args))
    if options.get("strict"):
        raise FallbackError(f"strict=True, and graph {record.name} would run through torch: {reason}", [])
    return _through_torch(gm, example_inputs, record, reason)


_checked = {"{}"}  # options that are right
forge.reset = _graphs.clear  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _check_options(options: dict[str, Any]) -> None:
    """Raises what compile() raises for a wrong option, before anything may fall back."""
    known = [name for name in inspect.signature(compile).parameters if name not in _NOT_HERE]
    for name in options:
        if name not in known:
            hint = "; use torch.compile(dynamic=...)" if name == "dynamic_shapes" else ""
            raise TypeError(f'backend "forge" has no option {name!r}{hint}; known are {", ".join(known)}')
    if repr(options) in _checked:
        return
    with torch.autocast("cpu", enabled=False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NpuWarning)  # that nothing of this one is placed on the NPU
        compiled = compile(torch.neg, (torch.zeros(1),), **options)
        compiled(torch.zeros(1))  # says why, if with these options nothing can be run
    if len(_checked) < _REPORTS:
        _checked.add(repr(options))


def _name(gm: torch.fx.GraphModule) -> str:
    number = torch._guards.CompileContext.current_compile_id()
    where = next((s for n in gm.graph.nodes if (s := source_of(n.meta.get("stack_trace")))), "")
    return f"{number}" + (f" ({where})" if where else "")


def _obstacle(gm: torch.fx.GraphModule, example_inputs: Inputs) -> str:
    """Why Forge does not take a graph, or ""."""
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"an input is a {type(t).__name__}"
        if t.device.type != "cpu":
            return f"an input is on {t.device}"
        if not has_memory(t):
            return f"an input is {'quantised' if t.is_quantized else t.layout}"
        if torch._C._functorch.is_functorch_wrapped_tensor(t) or torch._is_functional_tensor(t):
            return "an input belongs to a torch.func transform"
    for node in gm.graph.nodes:
        if node.op == "call_module":
            return "the graph calls modules (torch._dynamo.config.inline_inbuilt_nn_modules is off)"
        transform = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if transform.endswith("_increment_nesting") and "vmap" not in transform:
            where = source_of(node.meta.get("stack_trace"))
            return "it differentiates inside" + (f" ({where})" if where else "")
    if _gives_grad(gm):
        return (
            "its outputs require grad (for inference, call the model under torch.no_grad() or torch.inference_mode()); "
            "gradients come from aot_eager"
        )
    return ""


def _gives_grad(gm: torch.fx.GraphModule) -> bool:
    """Whether outputs of the graph carry a gradient."""
    output = next(iter(reversed(gm.graph.nodes)))
    values = [n.meta.get("example_value") for n in output.all_input_nodes]
    return _grad_enabled(gm) and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _grad_enabled(gm: torch.fx.GraphModule) -> bool:
    """Whether gradients are on in some part of the graph."""
    return torch.is_grad_enabled() or any(
        n.target is torch._C._set_grad_enabled and n.args[0] is not False for n in gm.graph.nodes
    )


def _through_torch(
    gm: torch.fx.GraphModule, example_inputs: Inputs, record: GraphReport, reason: str
) -> Callable[..., Any]:
    """The graph as torch runs it, for all calls."""
    _warn(record, reason)
    record.fallback = reason
    run: Callable[..., Any] = gm.forward
    if _gives_grad(gm):
        from torch._dynamo.backends.debugging import aot_eager

        with contextlib.suppress(Exception):  # then plain eager, which has gradients too
            run = aot_eager(gm, list(example_inputs))
    count = record._eager_calls

    def call(*args: Any) -> Any:
        next(count)
        return run(*args)

    return call


def _warn(record: GraphReport, reason: str) -> None:
    warnings.warn(f"forge: graph {record.name} runs through torch: {reason}", FallbackWarning, stacklevel=2)


# --- a graph ----------------------------------------------------------------------------------------------------------


class _Weights:
    """One set of static inputs, and the programs that borrow them."""

    def __init__(self, statics: Sequence[torch.Tensor], names: Sequence[str], forget: Callable[[], object]) -> None:
        self.names = names
        # aliases with the same memory and version counter: the caller's tensors live as long as the caller wants
        self.holder: dict[str, Any] = {name: t.detach() for name, t in zip(names, statics, strict=True)}
        self.pointers = [t.data_ptr() for t in statics]
        self.storages = {t.untyped_storage().data_ptr() for t in statics}
        self.versions = list(map(version, statics))
        self.samples = Samples(statics, self.names)
        self.counted = not any(t.is_inference() for t in statics)
        # addresses of written inputs that are known to share no memory with any of them, in which epoch
        self.apart: tuple[int, list[int]] = (-1, [])
        self.epoch = 0  # of the weights; each program remembers the one that it packed
        self.calls = itertools.count()
        self.streaks: dict[int, tuple[int, int]] = {}  # index -> changes in a row, call of the last
        self.programs: OrderedDict[Any, tuple[CompiledModel, int]] = OrderedDict()
        self.alive = [weakref.ref(t, lambda _: forget()) for t in statics]

    def lend(self) -> Any:
        """A program that has packed the weights as they are now, if there is one."""
        plans = (compiled._kept() for compiled, epoch in self.programs.values() if epoch == self.epoch)
        return next((plan.program for plan in plans if plan is not None), None)

    def changed(self, statics: Sequence[torch.Tensor]) -> list[int]:
        """Which tensors were written or given other memory since they were packed."""
        versions = [t._version for t in statics] if self.counted else list(map(version, statics))
        pointers = [t.data_ptr() for t in statics]
        if versions == self.versions and pointers == self.pointers:
            return self.samples.changes() if self.samples.changed() else []
        before, now = zip(self.versions, self.pointers, strict=True), zip(versions, pointers, strict=True)
        return [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]

    def take(self, statics: Sequence[torch.Tensor], changed: list[int]) -> list[int]:
        """Takes the weights as they are now. Returns those that change all the time."""
        call = next(self.calls)
        # first: no other thread may go from pointers of now to samples of memory that is freed
        self.samples = Samples(statics, self.names)
        for i in changed:
            self.holder[self.names[i]] = statics[i].detach()
            self.versions[i], self.pointers[i] = version(statics[i]), statics[i].data_ptr()
            streak, last = self.streaks.get(i, (0, -_SOON))
            self.streaks[i] = (streak + 1 if call - last < _SOON else 1, call)
        self.storages = {t.untyped_storage().data_ptr() for t in statics}
        self.epoch += 1
        return [i for i in changed if self.streaks[i][0] > _RESTLESS]


class _Graph:
    """A dynamo graph: captured once for each set of sizes, compiled for these and each set of weights."""

    def __init__(
        self, gm: torch.fx.GraphModule, example_inputs: Inputs, options: dict[str, Any], record: GraphReport
    ) -> None:
        self._gm, self._record = gm, record
        self._strict = bool(options.get("strict"))
        self._capture_how = options.pop("capture", "auto")
        self._options = options
        self._lock = threading.RLock()
        self._count = record._calls
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._names = [readable(n) for n in placeholders]
        # Python numbers that dynamo keeps open arrive as tensors whose first use is item()
        items = {n.args[0]: n for n in gm.graph.nodes if n.op == "call_method" and n.target == "item"}
        self._numbers = {
            i: items[n] for i, n in enumerate(placeholders) if n in items and n.meta.get("tensor_dict") is None
        }
        self._open = [i for i, n in enumerate(placeholders) if i in self._numbers or is_open(n)]
        self._static = tuple(
            i
            for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
            if isinstance(value, torch.Tensor) and has_memory(value) and i not in self._open and is_static(node, value)
        )
        self._sets: OrderedDict[tuple[int, ...], _Weights] = OrderedDict()
        self._captures: OrderedDict[Any, Captured | None] = OrderedDict()
        self._seen: OrderedDict[Any, int] = OrderedDict()  # further sizes, and how often they came
        self._patience = 2
        self._full = False
        self._short_lived = 0  # sets of weights that died after a few calls
        self._written: set[int] = set()  # inputs that some capture writes
        self._higher_order = any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in gm.graph.nodes)
        # what holds around the graph; dynamo compiles another one where it is different
        self._autocast = torch.is_autocast_enabled("cpu")
        self._region = torch.get_autocast_dtype("cpu")
        self._grad = _grad_enabled(gm)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def start(self, example_inputs: Inputs) -> str:
        """Compiles for the example. Returns why that cannot be, or ""."""
        args = [v.node.hint if isinstance(v, (torch.SymInt, torch.SymFloat)) else v for v in example_inputs]
        if any(a is None for a in args):
            return ""  # sizes that are known at run time only: the first call has them
        try:
            self._make(self._key(args), args)
        except FallbackError:
            raise
        except Exception as error:
            log.debug("forge: graph %s", self._record.name, exc_info=True)
            return _brief(error)
        return ""

    def _capture(self, args: Inputs) -> Captured:
        """The graph for the sizes and numbers of `args`. Raises CompileError."""
        run = Runner(self._gm, args, self._numbers, self._region if self._autocast else None)
        # aliases, without attributes or history
        given = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        with apart():
            captured, declined = None, ""
            if self._higher_order:
                declined = "higher-order operator"
            elif self._capture_how != "export":
                try:
                    captured = capture_fast(run.graph, given, {}, only_operators=True)
                except Unsupported as reason:
                    declined = str(reason).partition("\n")[0]
            if captured is None:
                with capturing(exporting=True), traceback.preserve_node_meta():  # the flag is the process's
                    captured = capture_export(run.graph, given, {})
                captured.declined = declined
        if self._grad and captured.writes and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
            raise CompileError("it writes into tensors while gradients are on")
        self._keep_inputs(captured)
        for node in captured.nodes:
            if node.kind is Kind.INPUT:
                node.name = self._names[node.target]
        captured.signature.paths[:] = self._names
        return captured

    def _keep_inputs(self, captured: Captured) -> None:
        """Inputs that are written or handed out again are no weights."""
        roots = {w.writes for w in captured.writes}
        for output in captured.outputs:
            value = output.value
            while isinstance(value, Ref):
                roots.add(value.index)
                node = captured.nodes[value.index]
                value = node.args[0] if node.args and (node.target is operator.getitem or may_share(node)) else None
        nodes = [captured.nodes[w.writes] for w in captured.writes if w.writes is not None]
        self._written |= {n.target for n in nodes if n.kind is Kind.INPUT}
        leaves = {captured.nodes[i].target for i in roots if i is not None and captured.nodes[i].kind is Kind.INPUT}
        if not leaves.isdisjoint(self._static):
            self._demote([i for i in self._static if i in leaves])

    def _demote(self, leaves: Sequence[int]) -> None:
        """Makes ordinary inputs of some static ones."""
        self._static = tuple(i for i in self._static if i not in leaves)
        self._sets.clear()

    def _bind(self, captured: Captured, weights: _Weights) -> Captured:
        """The capture with the static inputs as state."""
        static = {leaf: self._names[leaf] for leaf in self._static}
        nodes, slots = list(captured.nodes), dict(captured.slots)
        for i, node in enumerate(nodes):
            if node.kind is Kind.INPUT and node.target in static:
                name = static[node.target]
                nodes[i] = replace(node, kind=Kind.STATE, target=name)
                slots[i] = Slot(name, weights.holder, name)
        lender = weakref.WeakMethod(weights.lend)
        return replace(captured, nodes=nodes, slots=slots, lender=lambda: (lend := lender()) and lend())

    def _program(self, args: Inputs) -> CompiledModel | None:
        """The program for these sizes and weights; compiles it if need be. None: these sizes run through torch."""
        with self._lock:
            key = self._key(args)
            if key in self._captures:
                if self._captures[key] is None:
                    return None
            elif len(self._captures) >= _SIZES and not self._again(key):
                return None
            try:
                return self._make(key, args)
            except Exception as error:
                if self._strict or key is None:
                    raise
                _warn(self._record, f"for {_shown(key)}: {_brief(error)}")
                self._captures[key] = None
                return None

    def _again(self, key: Any) -> bool:
        """Whether sizes beyond the first few come often: while a cache grows, each comes once and is not worth it.

        How often is doubled whenever other sizes must go for them, so that compiling does not take over.
        """
        self._seen[key] = self._seen.pop(key, 0) + 1
        if self._seen[key] >= self._patience:
            del self._seen[key]
            self._patience = min(2 * self._patience, _PATIENCE)
            return True
        while len(self._seen) > 4 * _SIZES:
            self._seen.popitem(last=False)
        if not self._full:
            self._full = True
            _warn(self._record, f"it has had {_SIZES} sets of sizes; others are compiled when they come repeatedly")
        return False

    def _make(self, key: Any, args: Inputs) -> CompiledModel:
        captured = self._captures.get(key)
        if captured is None:
            captured = self._captures[key] = self._capture(args)
            while len(self._captures) > _SIZES:
                old, _ = self._captures.popitem(last=False)
                for weights in list(self._sets.values()):
                    weights.programs.pop(old, None)
        if len(self._sets) > _SETS or self._short_lived > _SIZES:  # other tensors all the time: nothing to keep
            self._short_lived = 0
            self._demote(self._static)
        statics = [args[i] for i in self._static]
        weights = self._set(statics)
        changed = weights.changed(statics)
        if changed:
            restless = weights.take(statics, changed)
            if restless:
                self._demote([self._static[i] for i in restless])
                return self._make(key, args)
        compiled, epoch = weights.programs.get(key, (None, 0))
        if compiled is None:
            compiled = self._compile(self._bind(captured, weights), args)
        elif epoch != weights.epoch:
            compiled.refresh()
        weights.programs[key] = (compiled, weights.epoch)
        return compiled

    def _compile(self, captured: Captured, args: Inputs) -> CompiledModel:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            compiled = compile(captured, tuple(args), **self._options)
        compiled._watcher = Watcher([])  # the graph watches
        compiled._warned_grad = True  # dynamo knows what requires grad, and so do we
        self._record._reports.append(compiled.report)
        directory = os.environ.get("FORGE_DUMP")
        if directory:
            dump(compiled, os.path.join(directory, "graph_" + self._record.name.split()[0].replace("/", "_")))
        return compiled

    def _set(self, statics: Sequence[torch.Tensor]) -> _Weights:
        ids = tuple(map(id, statics))
        weights = self._sets.get(ids)
        if weights is None:
            graph = weakref.ref(self)

            def forget() -> None:
                alive = graph()
                gone = alive._sets.pop(ids, None) if alive is not None else None
                if alive is not None and gone is not None and _reached(gone.calls) < _SOON:
                    alive._short_lived += 1

            weights = self._sets[ids] = _Weights(statics, [self._names[i] for i in self._static], forget)
        return weights

    # --- calling ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        statics = [args[i] for i in self._static]
        weights = self._sets.get(tuple(map(id, statics)))
        compiled, key = None, self._key(args)
        if weights is not None:
            next(weights.calls)
            if not weights.changed(statics):
                compiled, epoch = weights.programs.get(key, (None, 0))
                if epoch != weights.epoch:
                    compiled = None
        if compiled is None:
            compiled = self._program(args)
        elif self._open:
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self._captures.move_to_end(key)
        if compiled is not None and not (self._written and self._shares(args, statics, weights)):
            try:
                if self._autocast:
                    with torch.autocast("cpu", enabled=False):
                        result = compiled(*args)
                else:
                    result = compiled(*args)
                next(self._count)
                return result
            except Overlap:
                pass  # raised before anything ran
        next(self._record._eager_calls)
        return self._gm.forward(*args)

    def _shares(self, args: Inputs, statics: Sequence[torch.Tensor], weights: _Weights | None) -> bool:
        """Whether a weight, which programs read when they please, lies in memory that is written."""
        written = [args[i] for i in self._written]
        at = weights.epoch if weights is not None else 0, [t.data_ptr() for t in written]
        if weights is not None and at == weights.apart and not self._open:  # dynamo has seen to the sizes
            return False
        memory = {t.untyped_storage().data_ptr() for t in written}
        known = weights.storages if weights is not None else {t.untyped_storage().data_ptr() for t in statics}
        if not memory.isdisjoint(known):
            return True
        if weights is not None:
            weights.apart = at
        return False

    def _key(self, args: Inputs) -> Any:
        """The sizes and numbers that a program is made for."""
        return tuple(map(_size, map(args.__getitem__, self._open))) if self._open else None


def _brief(error: Exception) -> str:
    text = str(error).partition("\n\nWhile executing")[0]
    return text if isinstance(error, CompileError) else f"{type(error).__name__}: {text}"


def _size(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape if value.dim() else _size(value.item())
    return value.hex() if isinstance(value, float) else value  # -0.0 is not 0.0


def _shown(key: Any) -> str:
    return ", ".join(str(list(k) if isinstance(k, torch.Size) else k) for k in key or ())
