"""Operators without a rule, by torch's own decompositions, as long as all parts have rules."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch

from ..capture import PURE, Kind, Node, Ref, meta_of
from ..table import Value
from .emitter import Emitter
from .registry import Decline

_MAX_PARTS = 64
# Composites whose parts lose digits or speed against torch's own kernel.
_KEEP_WHOLE = frozenset(
    "erfc special_erfc special_erfcx lgamma digamma polygamma grid_sampler_2d upsample_bicubic2d logaddexp logaddexp2 "
    "hypot".split()
)


@functools.cache
def _table() -> dict[Any, Any]:
    return dict(torch._decomp.decomposition_table)


def decompose(
    b: Emitter, target: Any, args: Any, kwargs: Any, emit: Callable[[Node, Any, Any, set[int] | None], Any]
) -> list[Any]:
    """Emits `target` through its decomposition and returns its results. Decline if it has none, or one that is long."""
    name = target._schema.name.partition("::")[2]
    if name in _KEEP_WHOLE or target.namespace not in ("aten", *PURE) or b.depth > 3:
        raise Decline("kept whole")
    nodes, outputs, constants = _trace(target, *_key((args, kwargs)))
    inputs = list(_values((args, kwargs)))
    env: list[Any] = []
    parts: dict[int, set[int]] = {}
    for node in nodes:
        if node.target is operator.getitem:
            parts.setdefault(node.args[0].index, set()).add(node.args[1])

    def convert(value: Any) -> Any:
        if isinstance(value, Ref):
            return env[value.index]
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        return {k: convert(v) for k, v in value.items()} if isinstance(value, dict) else value

    b.depth += 1
    try:
        for i, node in enumerate(nodes):
            if node.kind is Kind.INPUT:
                env.append(inputs[node.target])
            elif node.kind is Kind.CONSTANT:
                env.append(b.literal(constants[node.target]))
            else:
                env.append(emit(node, convert(node.args), convert(node.kwargs), parts.get(i)))
    finally:
        b.depth -= 1
    results = [convert(v) for v in outputs]
    return list(results[0]) if len(results) == 1 and isinstance(results[0], tuple) else results


def _key(value: Any) -> tuple[Any, ...]:
    """A hashable stand-in for the arguments: tensors by type and order of appearance."""
    order: dict[int, int] = {}

    def walk(v: Any) -> Any:
        if isinstance(v, Value):
            return ("tensor", order.setdefault(v.id, len(order)), v.dtype, v.shape)
        if isinstance(v, (list, tuple)):
            return ("list", *map(walk, v))
        if isinstance(v, dict):
            return ("dict", *((k, walk(x)) for k, x in v.items()))
        return (type(v).__name__, v, math.copysign(1.0, v) if isinstance(v, float) else 0)

    return (walk(value),)


def _values(value: Any) -> list[Value]:
    """Distinct tensors in order of appearance."""
    found: dict[int, Value] = {}

    def walk(v: Any) -> None:
        if isinstance(v, Value):
            found.setdefault(v.id, v)
        elif isinstance(v, (list, tuple)):
            for item in v:
                walk(item)
        elif isinstance(v, dict):
            for item in v.values():
                walk(item)

    walk(value)
    return list(found.values())


@functools.lru_cache(maxsize=1024)
def _trace(target: Any, key: Any) -> tuple[list[Node], list[Any], list[torch.Tensor]]:
    """The calls that a decomposition makes, its outputs as Refs, and tensors that it made on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    keys = torch._C.DispatchKey
    composite = target.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
    function = target.decompose if composite else _table().get(target)
    explicit = keys.CompositeExplicitAutograd
    if target.namespace in PURE and not composite and target.has_kernel_for_dispatch_key(explicit):
        function = functools.partial(target._op_dk, explicit)  # written in Python
    if function is None:
        raise Decline("no decomposition")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}

    def rebuild(v: Any) -> Any:
        kind, *rest = v
        if kind == "tensor":
            number, dtype, shape = rest
            if number not in fakes:
                with mode:
                    fakes[number] = torch.empty(shape, dtype=dtype)
            return ("fake", number)
        if kind == "list":
            return [rebuild(x) for x in rest]
        if kind == "dict":
            return {k: rebuild(x) for k, x in rest}
        return rest[0]

    args, kwargs = rebuild(key)

    def fill(v: Any, tensors: Any) -> Any:
        if isinstance(v, tuple) and len(v) == 2 and v[0] == "fake":
            return tensors[v[1]]
        if isinstance(v, list):
            return [fill(x, tensors) for x in v]
        return {k: fill(x, tensors) for k, x in v.items()} if isinstance(v, dict) else v

    def run(*tensors: Any) -> Any:
        return function(*fill(args, tensors), **fill(kwargs, tensors))

    try:
        with torch.no_grad():
            traced = make_fx(run)(*(fakes[i] for i in range(len(fakes))))
    except Exception as error:
        raise Decline(f"decomposition failed: {type(error).__name__}") from None
    return _read(traced, target)


def _read(traced: torch.fx.GraphModule, target: Any) -> tuple[list[Node], list[Any], list[torch.Tensor]]:
    nodes: list[Node] = []
    env: dict[torch.fx.Node, Ref] = {}
    constants: list[torch.Tensor] = []
    count = 0

    def refer(value: Any) -> Any:
        return torch.fx.node.map_aggregate(value, lambda v: cast(Any, env[v]) if isinstance(v, torch.fx.Node) else v)

    for node in traced.graph.nodes:
        if node.op == "output":
            result = refer(node.args[0])
            return nodes, list(result) if isinstance(result, (list, tuple)) else [result], constants
        env[node] = Ref(len(nodes))
        if node.op == "placeholder":
            nodes.append(Node(node.name, Kind.INPUT, count))
            count += 1
        elif node.op == "get_attr":
            constants.append(getattr(traced, node.target))
            nodes.append(Node(node.name, Kind.CONSTANT, len(constants) - 1))
        else:
            if node.target is target:
                raise Decline("decomposition is no simpler")
            args, kwargs = refer((node.args, node.kwargs))
            called, schema = node.target, getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                called = _functional(node)
                env[node.args[0]] = env[node]  # who reads it later means the new value
            nodes.append(Node(node.name, Kind.CALL, called, tuple(args), dict(kwargs), meta_of(node.meta.get("val"))))
        if len(nodes) > _MAX_PARTS:
            raise Decline("decomposition is long")
    raise Decline("no output")


def _functional(node: torch.fx.Node) -> Any:
    """The out-of-place form of an in-place call, where nothing else shares the memory that it writes."""
    written = node.args[0]
    packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
    called = getattr(getattr(torch.ops.aten, packet.removesuffix("_"), None), overload, None)
    if (
        called is None
        or not packet.endswith("_")
        or not isinstance(written, torch.fx.Node)
        or written.op != "call_function"
    ):
        raise Decline("writes in place")
    others = [u for u in written.users if u is not node]
    if _writes(written):
        others += [u for u in written.args[0].users if u is not written]  # type: ignore[union-attr]
    if any(map(_writes, others)):
        raise Decline("writes in place more than once")
    for other in (written, *written.users):
        schema = getattr(other.target, "_schema", None)
        shares = schema is not None and any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        if schema is None or shares:
            raise Decline("writes in place through a view")
    return called


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
