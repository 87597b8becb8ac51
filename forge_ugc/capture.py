"""Capture: a model and example inputs become one flat list of ATen calls.

`Captured` is the one interface between ways of capture and the rest: lowering, state handling and the call path read
nothing else. `capture_export` (torch.export, strict=False) is the reference implementation.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .capturing import capturing
from .containers import Containers, Watch, slides
from .errors import CompileError, explain_export_failure, reads_values, source_of
from .overlap import written_overlap
from .signature import Signature
from .state import Slot, find_slot

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Type of a tensor value. Sizes are ints or SymInts (dynamic shapes, or data-dependent sizes)."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    dense: bool  # strided, not quantised, not a subclass: memory that C can read


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the value of node `index` in arguments and outputs."""

    index: int


class Kind(enum.Enum):
    """What a placeholder stands for, or (CALL) that the node is a call."""

    CALL = "call"
    INPUT = "input"  # a leaf of the caller's arguments
    STATE = "state"  # a parameter or buffer
    CONSTANT = "constant"  # a tensor that capture found lying around: torch.tensor(...), a plain attribute
    OBJECT = "object"  # anything else: a script object, a submodule of a control-flow operator


@dataclass(slots=True)
class Node:
    """One call, or one placeholder. `meta` is a TensorMeta, a number or Sym*, None, or a tuple / list of such."""

    name: str
    kind: Kind
    target: Any  # CALL: OpOverload, HigherOrderOperator or function; else the name, leaf index or object
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: Any = None
    source: str = ""
    autocast: tuple[str, torch.dtype] | None = None  # (device type, dtype) of the region that it stands in


class Output(NamedTuple):
    """`value`: a Ref or a plain Python object. `writes`: the placeholder node that eager writes, or None."""

    value: Any
    writes: int | None = None


@dataclass
class Captured:
    """A captured program: nodes in order, placeholders among them."""

    nodes: list[Node]
    outputs: list[Output]  # user outputs, in the order of `out_spec`
    writes: list[Output]  # values that must be stored into inputs or state after the call
    out_spec: pytree.TreeSpec
    signature: Signature
    slots: dict[int, Slot]  # node index of a STATE or CONSTANT -> where its tensor lives
    nodes_captured: int
    containers: Containers | None = None  # the caller's lists, dicts and caches that forward() changes
    guards: list[tuple[Any, int | None, int | None]] = field(default_factory=list)  # (expression, least, most)
    fixed: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)  # state that Python read, and its value then
    counters: list[list[int | None]] = field(default_factory=list)  # of the caches in the result (`counters_of`)
    recorded: bool = False  # by fast capture, not torch.export; then `nodes_captured` counts recorded calls
    declined: str = ""  # why fast capture was not taken
    lender: Callable[[], Any] | None = None  # a `_core.Program` with the same weights as they are now, or None

    def refs(self, value: Any) -> Iterator[int]:
        """Node indices that an argument structure mentions."""
        if isinstance(value, Ref):
            yield value.index
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self.refs(item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from self.refs(item)
        elif isinstance(value, slice):
            yield from self.refs((value.start, value.stop, value.step))

    def text(self) -> str:
        """Readable listing, one node a line."""
        lines = []
        for i, node in enumerate(self.nodes):
            what = str(node.target) if node.kind is Kind.CALL else f"{node.kind.value} {node.target}"
            arguments = ", ".join([*map(_show, node.args), *(f"{k}={_show(v)}" for k, v in node.kwargs.items())])
            lines.append(
                f"%{i} {node.name}: {_show_meta(node.meta)} = {what}({arguments})"
                + (f"  # {node.source}" if node.source else "")
            )
        lines.append("return " + ", ".join(_show(o.value) for o in self.outputs))
        lines += [f"write %{o.writes} <- {_show(o.value)}" for o in self.writes]
        return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, Ref):
        return f"%{value.index}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_show, value)) + "]"
    return str(value)


def _show_meta(meta: Any) -> str:
    if isinstance(meta, TensorMeta):
        return f"{str(meta.dtype).removeprefix('torch.')}[{', '.join(map(str, meta.shape))}]"
    return _show(tuple(map(_show_meta, meta))) if isinstance(meta, (tuple, list)) else type(meta).__name__


def meta_of(value: Any) -> Any:
    """Meta of a (fake or real) tensor, number, or structure of them."""
    if isinstance(value, torch.Tensor):
        dense = value.layout is torch.strided and not value.is_quantized
        dense = dense and not (
            type(value) not in _PLAIN and torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)
        )
        return TensorMeta(value.dtype, tuple(value.shape), dense)
    if isinstance(value, (list, tuple)):
        return tuple(meta_of(v) for v in value)
    return value


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
PURE = ("torchao", "quantized_decomposed")  # namespaces whose operators do nothing but compute their results

# --- torch.export ---------------------------------------------------------------------------------------------------

# In-place operators that change no value: their graphs need no functionalisation.
_HARMLESS = {aten.detach_.default, aten.lift_fresh.default, aten._assert_tensor_metadata.default}
# What is left in a graph of an assignment to `.data`.
_SET_DATA = aten._has_compatible_shallow_copy_type.default


def capture_export(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> Captured:
    """Captures through torch.export. `model`: nn.Module, function, or ExportedProgram. Raises CompileError."""
    if isinstance(model, torch.export.ExportedProgram):
        signature = Signature.of_exported(model, args, kwargs)
        return _Reader(model, signature, model, prefix="").read(None)
    signature = Signature.of_callable(model, args, kwargs)
    traced, (args, kwargs) = _traceable(model, signature.canonical(args, kwargs))
    watch = Watch(traced, signature, always=slides(traced))
    shapes = signature.dynamic_shapes(dynamic_shapes)
    grown = _at_least_two(signature, args, kwargs, shapes) if shapes else None
    rng, seed = torch.get_rng_state(), torch.initial_seed()

    def export(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
        with capturing(exporting=True), torch.no_grad(), _named_frames(model), _noticed_numbers(traced):
            return torch.export.export(watch.module, args, kwargs, strict=False, dynamic_shapes=shapes)

    strict = None
    try:
        try:
            program = export(*(grown or (args, kwargs)))
        except Exception as first:
            if "not a known type" in str(first) and not watch.active:
                watch = Watch(traced, signature, always=True)  # sees the result, and makes its dataclasses known
            elif grown is None:
                raise
            program = export(args, kwargs)
    except Exception as error:
        strict = None if watch.mutable else _export_strictly(model, error, *(grown or (args, kwargs)), shapes)
        if strict is None:
            raise explain_export_failure(error) from error
        program = strict
    finally:
        seeded = torch.initial_seed() != seed  # not the whole state: other threads may draw numbers
        torch.set_rng_state(rng)
    if seeded:
        raise CompileError(
            "forward() seeds torch's generator of random numbers, which torch.export leaves out: call "
            "torch.manual_seed() before the model"
        )
    seen = watch if strict is None else None
    owner = model if isinstance(model, torch.nn.Module) else seen.module if seen is not None else None
    try:
        captured = _Reader(program, signature, owner, seen.prefix if seen is not None else "").read(seen)
        if not any(getattr(dim, "min", None) == 2 for dim in pytree.tree_leaves(shapes)):
            # nobody asked for 2 or more: torch takes it for granted of every size that it keeps open
            captured.guards = [(s, 0 if least == 2 else least, most) for s, least, most in captured.guards]
        return captured
    except CompileError:
        raise
    except Exception as error:
        # functionalising fails, and says little, where what is written has other names
        module = owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()
        state = [*module.named_parameters(), *module.named_buffers()]  # tied: one tensor, which does no harm
        leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        inputs = [(f"input {i}", v) for i, v in enumerate(leaves)]
        pair = written_overlap([*inputs, *state], [])
        if pair is None:
            raise explain_export_failure(error) from error
        raise CompileError(
            f"{pair[0]} and {pair[1]} share memory, and forward() writes into a tensor: give each memory of its own"
        ) from error


def _export_strictly(
    model: Any, failure: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> torch.export.ExportedProgram | None:
    """The program by torch.export's other way, which reads Python's bytecode: to it int(t), len(t) and
    torch.tensor([t]) of what is known at run time are operators. None where it fails, too, or would not do all that
    forward() does."""
    if isinstance(model, torch.fx.GraphModule) or not reads_values(failure) or "Could not guard on" in str(failure):
        return None  # a branch is no operator in either way
    if not isinstance(model, torch.nn.Module):
        model = _Called(model)
    from torch._dynamo import config

    with (
        capturing(exporting=True),
        torch.no_grad(),
        _memberships_of_constants(),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        try:
            with config.patch(trace_numpy=False):  # numpy's results would become tensors
                program = torch.export.export(model, args, kwargs, strict=True, dynamic_shapes=shapes)
        except Exception:
            return None
    return None if any("side effects" in str(warning.message) for warning in said) else program


@contextlib.contextmanager
def _memberships_of_constants() -> Iterator[None]:
    """Stops dynamo at `2 in numbers` where numbers are known at run time only: it takes 2 for none of them."""
    from torch._dynamo import exc
    from torch._dynamo.variables import lists

    original = getattr(lists, "iter_contains", None)
    if original is None:
        yield
        return

    def checked(items: Any, search: Any, *rest: Any, **named: Any) -> Any:
        items = list(items)
        if any(type(item).__name__ == "SymNodeVariable" for item in items):
            raise exc.Unsupported("membership among numbers that are known at run time only")
        return original(items, search, *rest, **named)

    lists.iter_contains = checked  # type: ignore[attr-defined]
    try:
        yield
    finally:
        lists.iter_contains = original  # type: ignore[attr-defined]


class _Called(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _at_least_two(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The example with 2 for each dynamic size that is 1, which torch.export takes for fixed; None if there is none."""
    changed = False

    def grow(value: Any, shape: Any) -> Any:
        nonlocal changed
        if isinstance(value, torch.Tensor):
            sizes = shape.items() if isinstance(shape, dict) else enumerate(shape or ())
            for d, size in sizes:
                if size is not None and not isinstance(size, int) and -value.dim() <= d < value.dim():
                    if value.shape[d] == 1 and size is not torch.export.Dim.STATIC:
                        value, changed = value.repeat_interleave(2, d), True
            return value
        if type(value) is dict and isinstance(shape, dict):
            return {k: grow(v, shape.get(k)) for k, v in value.items()}
        if type(value) in (list, tuple) and isinstance(shape, (list, tuple)) and len(shape) == len(value):
            return type(value)(map(grow, value, shape))
        return value

    values = [*args, *kwargs.values()]
    by_name = isinstance(shapes, dict)
    each = [shapes.get(label) for label in signature.labels] if by_name else [*shapes, *[None] * len(values)]
    with torch.no_grad():
        values = [grow(value, shape) for value, shape in zip(values, each, strict=False)]
    return (tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))) if changed else None


def _traceable(model: Any, arguments: Any) -> Any:
    """Model and arguments for tracing.

    Export takes no meta tensors together with real ones, nor inference tensors: where the model holds such, a twin with
    fake cpu tensors is traced in its place.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    if not any(t.device.type == "meta" or t.is_inference() for t in tensors):
        return model, arguments
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    made: dict[int, Any] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            with mode:
                new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
            made[id(t)] = torch.nn.Parameter(new, t.requires_grad) if isinstance(t, torch.nn.Parameter) else new
        return made[id(t)]

    for t in tensors:
        fake(t)
    return copy.deepcopy(model, made.copy()), pytree.tree_map_only(torch.Tensor, fake, arguments)


@contextlib.contextmanager
def _noticed_numbers(model: Any) -> Iterator[None]:
    """Warns of Python numbers on modules that forward() changes (torch does of tensors): export forgets the change."""
    if not isinstance(model, torch.nn.Module):
        yield
        return

    def numbers() -> dict[str, Any]:
        return {
            f"{prefix}.{key}".lstrip("."): value
            for prefix, module in model.named_modules()
            for key, value in module.__dict__.items()
            if type(value) in (bool, int, float, str)
        }

    before, after = numbers(), {}
    handle = model.register_forward_hook(lambda *_: after.update(numbers()))
    try:
        yield
    finally:
        handle.remove()
    changed = [name for name, value in before.items() if name in after and after[name] != value]
    if changed:
        warnings.warn(
            f"forward() changes {', '.join(changed)} (of {type(model).__name__}): the compiled model leaves it as it "
            "is, and computes with the value that it had while compiling; keep it in a buffer instead",
            UserWarning,
            stacklevel=5,
        )


@contextlib.contextmanager
def _named_frames(model: Any) -> Iterator[None]:
    """Lets stack traces of nodes show the frames of a plain function: torch keeps only those called `forward`."""
    anchors = getattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS", None)
    code = getattr(model, "__code__", None)
    if anchors is None or code is None or (code.co_filename, code.co_name) in anchors:
        yield
        return
    anchors.add((code.co_filename, code.co_name))
    try:
        yield
    finally:
        anchors.discard((code.co_filename, code.co_name))


def _takes_apart(node: torch.fx.Node) -> bool:
    """Whether a call names one of the tensors that a tensor (quantised weights) is made of."""
    return getattr(node.target, "name", None) is not None and str(node.target).startswith(
        "export.access_subclass_inner_tensor"
    )


def _calls(graph_module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function":
                yield node


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether a call neither writes nor belongs to a functorch transform (vmap leaves its levels in the graph)."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return not schema.is_mutable or node.target in _HARMLESS
    return not str(getattr(node.target, "__module__", "")).startswith("torch._functorch")


def _functionalised(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without writes, its results one flat tuple. Slow, hence only where needed."""
    signature = program.module_call_graph[0].signature
    assert signature is not None and signature.out_spec is not None
    whole, count = signature.out_spec, signature.out_spec.num_leaves
    # torch would make the results' containers anew and trace that: a transformers cache copies what it is made of
    signature.out_spec = pytree.tree_structure((0,) * count)
    try:
        return program.run_decompositions({})  # the empty table keeps composite operators whole
    finally:
        signature.out_spec = whole


class _Reader:
    """Reads an ExportedProgram into a Captured."""

    def __init__(self, program: torch.export.ExportedProgram, signature: Signature, owner: Any, prefix: str) -> None:
        out_spec = program.call_spec.out_spec
        self.captured_count = sum(node.op == "call_function" for node in program.graph.nodes)
        for node in _calls(program.graph_module):
            if node.target is _SET_DATA:
                where = source_of(node.meta.get("stack_trace"))
                raise CompileError(
                    f"`tensor.data = ...` at {where or 'unknown line'}: torch.export loses it; use copy_()"
                )
        if not all(map(_is_plain, _calls(program.graph_module))):
            program = _functionalised(program)
            if any(n.target is aten.unfold_backward.default for n in program.graph.nodes):
                raise CompileError(
                    "forward() writes through x.unfold(), which torch.export gets wrong; write into slices instead"
                )
        self.program, self.signature, self.owner, self.prefix = program, signature, owner, prefix
        self.out_spec = out_spec
        self.nodes: list[Node] = []
        self.slots: dict[int, Slot] = {}
        self.parts: dict[torch.fx.Node, Slot] = {}  # state that is made of tensors, and is taken apart

    def read(self, watch: Watch | None) -> Captured:
        program = self.program
        env: dict[torch.fx.Node, Any] = {}
        by_name: dict[str, int] = {}
        inputs = program.graph_signature.input_specs
        leaf = 0
        for node, spec in zip((n for n in program.graph.nodes if n.op == "placeholder"), inputs, strict=True):
            kind = spec.kind.name
            index = len(self.nodes)
            if kind == "USER_INPUT":
                entry = Node(node.name, Kind.INPUT, leaf, meta=meta_of(node.meta.get("val")))
                by_name[node.name] = index
                leaf += 1
            elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                name = spec.target
                entry = Node(node.name, Kind.STATE if kind != "CONSTANT_TENSOR" else Kind.CONSTANT, name)
                slot = find_slot(program, self.owner, name, self.prefix)
                entry.meta = meta_of(node.meta["val"])
                by_name[name] = index
                if any(map(_takes_apart, node.users)):
                    self.parts[node] = slot
                if self.parts.get(node) is slot and all(map(_takes_apart, node.users)):
                    entry.kind, entry.target = Kind.OBJECT, None
                else:
                    self.slots[index] = slot
            elif kind == "CUSTOM_OBJ":
                entry = Node(node.name, Kind.OBJECT, program.constants.get(spec.target))
            else:
                raise CompileError(f"input {node.name!r} of kind {kind} is not supported")
            self.nodes.append(entry)
            env[node] = Ref(index)
        results = self._block(program.graph_module, env, None)
        outputs: list[Output] = []
        writes: list[Output] = []
        for value, out in zip(results, program.graph_signature.output_specs, strict=True):
            if out.kind.name == "USER_OUTPUT":
                outputs.append(Output(value))
            elif out.kind.name in ("BUFFER_MUTATION", "USER_INPUT_MUTATION", "PARAMETER_MUTATION"):
                writes.append(Output(value, by_name[out.target]))
            else:
                raise CompileError(f"output of kind {out.kind.name} is not supported")
        assert self.out_spec is not None
        captured = Captured(
            self.nodes,
            outputs,
            writes,
            self.out_spec,
            self.signature,
            self.slots,
            self.captured_count,
            guards=_guards(program),
        )
        if watch is not None and watch.active:
            captured.outputs, captured.out_spec, captured.containers = watch.split(outputs)
            captured.counters = watch.counters
        return captured

    def _block(self, module: torch.fx.GraphModule, env: dict[torch.fx.Node, Any], autocast: Any) -> Any:
        """Appends the calls of one graph; returns its outputs with nodes replaced by Refs."""

        def convert(value: Any) -> Any:
            return torch.fx.node.map_aggregate(value, lambda v: env[v] if isinstance(v, torch.fx.Node) else v)

        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return convert(node.args[0])
            if node.op == "get_attr":
                value: Any = module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                self.nodes.append(Node(node.name, Kind.OBJECT, value))
                env[node] = Ref(len(self.nodes) - 1)
                continue
            name = getattr(node.target, "__name__", "")
            if name == "wrap_with_set_grad_enabled":
                env[node] = self._inline(module, env, node.args[1], node.args[2:], autocast)
            elif name == "wrap_with_autocast":
                device, dtype, enabled = node.args[:3]
                if dtype is None:
                    dtype = torch.get_autocast_dtype(str(device))
                region = (str(device), dtype) if enabled and device == "cpu" else None
                env[node] = self._inline(module, env, node.args[4], node.args[5:], region)
            elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple):
                env[node] = env[node.args[0]][node.args[1]]
            elif _takes_apart(node) and node.args[0] in self.parts:
                env[node] = self._part(node)
            else:
                self._call(node, convert, autocast)
                env[node] = Ref(len(self.nodes) - 1)
        raise AssertionError("graph without output")

    def _inline(
        self, module: torch.fx.GraphModule, env: dict[torch.fx.Node, Any], body: Any, args: Any, autocast: Any
    ) -> tuple[Any, ...]:
        inner = getattr(module, body.target)
        formal = [n for n in inner.graph.nodes if n.op == "placeholder"]
        actual = [env[a] if isinstance(a, torch.fx.Node) else a for a in args]
        result = self._block(inner, dict(zip(formal, actual, strict=True)), autocast)
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    def _part(self, node: torch.fx.Node) -> Ref:
        """One of the tensors that a weight is made of, as state of its own."""
        slot = self.parts[node.args[0]].part(str(node.args[1]))  # type: ignore[index]
        if any(map(_takes_apart, node.users)):
            self.parts[node] = slot
        known = next((i for i, s in self.slots.items() if s.place == slot.place), None)
        if known is None:
            known = len(self.nodes)
            self.nodes.append(Node(node.name, Kind.STATE, slot.name, meta=meta_of(slot.tensor())))
            self.slots[known] = slot
        return Ref(known)

    def _call(self, node: torch.fx.Node, convert: Callable[[Any], Any], autocast: Any) -> None:
        meta = meta_of(node.meta["val"]) if "val" in node.meta else None
        source = source_of(node.meta.get("stack_trace"))
        self.nodes.append(
            Node(
                node.name,
                Kind.CALL,
                node.target,
                tuple(convert(node.args)),
                dict(convert(node.kwargs)),
                meta,
                source,
                autocast,
            )
        )


def _guards(program: torch.export.ExportedProgram) -> list[tuple[Any, int | None, int | None]]:
    """Ranges of the symbols that input shapes must keep to."""

    def bound(value: Any) -> int | None:
        try:
            return int(value)
        except Exception:
            return None  # one of sympy's infinities

    return [(symbol, bound(rng.lower), bound(rng.upper)) for symbol, rng in program.range_constraints.items()]
