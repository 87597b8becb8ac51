"""What to hand back after a call: new tensors, the caller's own objects, or views of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture import Captured, Kind, Node, Ref, TensorMeta
from ..containers import SameContainer
from ..specialise import Symbols, Unbacked
from ..state import Slot
from ..table import Value

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
    """A leaf of the arguments or a state tensor, seen through view operators."""

    root: int | Slot
    steps: tuple[Step, ...]


@dataclass
class OutputPlan:
    """`values`: outputs of the program. `user`: what forward() returns. `containers`: leaves of each changed container.
    `writes`: (where to, program output)."""

    values: list[Value] = field(default_factory=list)
    user: list[Any] = field(default_factory=list)
    containers: list[list[Any]] = field(default_factory=list)
    writes: list[tuple[int | Slot, int]] = field(default_factory=list)


def plan_outputs(captured: Captured, env: list[Any], symbols: Symbols) -> OutputPlan:
    """Decides for each output of forward() which of Fresh, Known, Alias or SameContainer it is."""
    plan = OutputPlan()
    positions: dict[int, int] = {}
    made: dict[int, Any] = {}
    written = {w.value.index: w.writes for w in captured.writes if isinstance(w.value, Ref)}
    targets = {w.writes for w in captured.writes}

    def fresh(value: Value) -> int:
        if value.id not in positions:
            positions[value.id] = len(plan.values)
            plan.values.append(value)
        return positions[value.id]

    def decide(value: Any) -> Any:
        if isinstance(value, SameContainer):
            return value
        if not isinstance(value, Ref):
            return Known(symbols.number(value))
        if value.index not in made:
            alias = _alias(captured, value.index, written, targets, env, symbols)
            known = env[value.index]
            made[value.index] = alias or (Fresh(fresh(known)) if isinstance(known, Value) else Known(known))
        return made[value.index]

    plan.user = [decide(o.value) for o in captured.outputs]
    if captured.containers is not None:
        plan.containers = [[decide(o.value) for o in change.outputs] for change in captured.containers.changes]
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
) -> Alias | None:
    """The way back from a value through views to something that the caller owns, or None."""
    steps: list[Step] = []
    while True:
        root = written.get(index)
        if root is not None:
            return Alias(_place(captured, root), tuple(reversed(steps)))
        node = captured.nodes[index]
        if node.kind is Kind.INPUT and isinstance(node.meta, TensorMeta) and index not in targets:
            return Alias(node.target, tuple(reversed(steps)))
        if node.kind in (Kind.STATE, Kind.CONSTANT) and index not in targets and not captured.slots[index].constant:
            return Alias(captured.slots[index], tuple(reversed(steps)))
        if node.kind is not Kind.CALL or not node.args or not isinstance(node.args[0], Ref):
            return None
        below = node.args[0].index
        if node.target is operator.getitem and captured.nodes[below].kind is Kind.CALL:
            steps.append(operator.itemgetter(node.args[1]))
            index = below
            continue
        step = _view_step(node, env, symbols)
        if step is None:
            return None
        steps.append(step)
        index = below


def _view_step(node: Node, env: list[Any], symbols: Symbols) -> Step | None:
    """The node as a function of its first operand, if it may return that operand's memory."""
    target = node.target
    if target is torch.ops.aten.dropout.default and not (node.args[2] and node.args[1] > 0):
        return lambda t: t
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    arguments, returns = target._schema.arguments, target._schema.returns
    if not arguments or arguments[0].alias_info is None or not returns or returns[0].alias_info is None:
        return None
    if arguments[0].alias_info.is_write and target is not torch.ops.aten.detach_.default:
        return None
    if target is torch.ops.aten.lift_fresh.default:
        return lambda t: t

    def fixed(value: Any) -> Any:
        if isinstance(value, Ref):
            value = env[value.index]
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
    call = torch.ops.aten.detach.default if target is torch.ops.aten.detach_.default else target
    return lambda t: call(t, *args, **kwargs)
