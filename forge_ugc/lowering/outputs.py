"""What to hand back after a call: new tensors, the caller's own objects, or views of them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture import Captured, Kind, Node, Ref, TensorMeta
from ..containers import SameContainer
from ..specialise import Symbols, Unbacked
from ..state import Slot
from ..table import OBJECT, Value

Step = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Fresh:
    """Program output `index`."""

    index: int


@dataclass(frozen=True)
class Known:
    """A Python value."""

    value: Any


@dataclass(frozen=True)
class Alias:
    """A leaf of the arguments, a state tensor or a new tensor (Fresh), seen through view operators."""

    root: int | Slot | Fresh
    steps: tuple[Step, ...]


@dataclass
class OutputPlan:
    """`values`: outputs of the program. `user`: what forward() returns. `containers`: leaves of each changed container.
    `writes`: (where to, program output)."""

    values: list[Value] = field(default_factory=list)
    user: list[Any] = field(default_factory=list)
    containers: list[list[Any]] = field(default_factory=list)
    writes: list[tuple[int | Slot, int]] = field(default_factory=list)


def plan_outputs(captured: Captured, env: list[Any], symbols: Symbols, aliases: bool = True) -> OutputPlan:
    """Decides for each output of forward() which of Fresh, Known, Alias or SameContainer it is.

    aliases: False makes each tensor Fresh, for a program that knows no views of torch's, and of its caller's objects
    only the arguments that forward() writes.
    """
    plan = OutputPlan()
    positions: dict[tuple[int, int | None], int] = {}
    made: dict[int, Any] = {}
    written = {w.value.index: w.writes for w in captured.writes if isinstance(w.value, Ref)}
    targets = {w.writes for w in captured.writes}
    changes = captured.containers.changes if captured.containers is not None else []
    outputs = [*captured.outputs, *(o for change in changes for o in change.outputs)]
    seen = {o.value.index for o in outputs if isinstance(o.value, Ref)}
    paths: dict[int, tuple[int | Slot | Fresh, tuple[Step, ...]]] = {i: (Fresh(i), ()) for i in seen}
    if not aliases:
        own = {i: _place(captured, at) for i, at in written.items() if at is not None}
        paths |= {i: (place, ()) for i, place in own.items() if not isinstance(place, Slot)}
    else:
        paths = {i: _alias(captured, i, written, targets, env, symbols) for i in seen}
    # a new tensor that several outputs are views of is handed out once, the views are replayed on it
    views = Counter(base for base, _ in paths.values() if isinstance(base, Fresh))

    def fresh(value: Value, origin: int | None = None) -> int:
        """Its position among the program's outputs: one for each node that eager has memory for. None: any will do."""
        key = positions.get((value.id, origin))
        if key is None:
            key = positions[value.id, origin] = len(plan.values)
            positions.setdefault((value.id, None), key)
            plan.values.append(value)
        return key

    def make(index: int) -> Any:
        base, steps = paths[index]
        if not isinstance(base, Fresh):
            return Alias(base, steps)
        whole, known = env[base.index], env[index]
        if steps and views[base] > 1 and isinstance(whole, Value) and isinstance(known, Value):
            return Alias(Fresh(fresh(whole, base.index)), steps)
        return Fresh(fresh(known, base.index)) if isinstance(known, Value) else Known(known)

    def decide(value: Any) -> Any:
        if isinstance(value, SameContainer):
            return value
        if not isinstance(value, Ref):
            return Known(symbols.number(value))
        if value.index not in made:
            made[value.index] = make(value.index)
        return made[value.index]

    plan.user = [decide(o.value) for o in captured.outputs]
    plan.containers = [[decide(o.value) for o in change.outputs] for change in changes]
    for w in captured.writes:
        assert w.writes is not None
        value = env[w.value.index]
        if isinstance(w.value, Ref) and w.value.index == w.writes:
            continue  # nothing was changed in the end
        plan.writes.append((_place(captured, w.writes), fresh(value)))
    return plan


def _place(captured: Captured, index: int) -> int | Slot:
    node = captured.nodes[index]
    return node.target if node.kind is Kind.INPUT else captured.slots[index]


def _alias(
    captured: Captured, index: int, written: dict[int, int | None], targets: set[Any], env: list[Any], symbols: Symbols
) -> tuple[int | Slot | Fresh, tuple[Step, ...]]:
    """The way back from a value through views: to something that the caller owns, or the node (Fresh) that made it."""
    steps: list[Step] = []
    while True:
        base: int | Slot | Fresh | None = None
        root = written.get(index)
        node = captured.nodes[index]
        if root is not None:
            base = _place(captured, root)
        elif node.kind is Kind.INPUT and isinstance(node.meta, TensorMeta) and index not in targets:
            base = node.target
        elif node.kind in (Kind.STATE, Kind.CONSTANT) and index not in targets and not captured.slots[index].constant:
            base = captured.slots[index]
        elif node.kind is not Kind.CALL or not node.args or not isinstance(node.args[0], Ref):
            base = Fresh(index)
        elif node.target is operator.getitem:
            below = captured.nodes[node.args[0].index]
            if below.kind is Kind.CALL and below.args and _view_step(below, env, symbols) is not None:
                steps.append(operator.itemgetter(node.args[1]))
            else:
                base = Fresh(index)
        else:
            step = _view_step(node, env, symbols)
            if step is None:
                base = Fresh(index)
            else:
                steps.append(step)
        if base is not None:
            return base, tuple(reversed(steps))
        index = node.args[0].index


_ATEN = torch.ops.aten
# views whose other operand is a tensor that counts by its shape or dtype alone
_LIKE = {
    _ATEN.view_as.default,
    _ATEN.expand_as.default,
    _ATEN.reshape_as.default,
    _ATEN.type_as.default,
    _ATEN.to.other,
}
# may return their operand, though their schemas do not say so
_UNMARKED = {_ATEN.type_as.default, _ATEN.atleast_1d.default, _ATEN.atleast_2d.default, _ATEN.atleast_3d.default}
_DROPOUTS = {_ATEN.dropout.default, _ATEN.feature_dropout.default, _ATEN.alpha_dropout.default}


def may_share(node: Node) -> bool:
    """Whether a call may return its first operand's memory."""
    target = node.target
    if target in _DROPOUTS:
        return not (node.args[2] and node.args[1] > 0)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    arguments, returns = target._schema.arguments, target._schema.returns
    if target in _UNMARKED:
        return True
    if not arguments or arguments[0].alias_info is None or not returns or returns[0].alias_info is None:
        return False
    return not arguments[0].alias_info.is_write or target is _ATEN.detach_.default


def _view_step(node: Node, env: list[Any], symbols: Symbols) -> Step | None:
    """The node as a function of its first operand, if it may return that operand's memory."""
    target = node.target
    if not may_share(node):
        return None
    if target in _DROPOUTS or target is _ATEN.lift_fresh.default:
        return lambda t: t

    def fixed(value: Any) -> Any:
        if isinstance(value, Ref):
            value = env[value.index]
            if isinstance(value, Value) and target in _LIKE and value.dtype != OBJECT:
                return torch.empty((), dtype=value.dtype).expand(value.shape)
            if isinstance(value, Value) or value is None:
                raise Unbacked
            return value
        if isinstance(value, (list, tuple)):
            return [fixed(v) for v in value]
        return symbols.number(value)

    try:
        args, kwargs = [fixed(v) for v in node.args[1:]], {k: fixed(v) for k, v in node.kwargs.items()}
    except Unbacked:
        return None
    call = _ATEN.detach.default if target is _ATEN.detach_.default else target
    return lambda t: call(t, *args, **kwargs)
