"""Lowering of calls that repeat: what one call emitted is emitted again for the next call of the same form.

Layers of a model differ in their operands and nothing else. A rule sees no more of an operand than its type and which
operands are the same, so a call with an equal `form` gives equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from ..capture import Ref
from ..table import VALUE_NONE, Value
from .emitter import Emitter

PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class NoForm(Exception):
    """An argument that is not compared here; the call is lowered by itself."""


def add_forms(form: list[Any], values: Iterable[Any], env: Sequence[Any], operands: list[Value]) -> None:
    """Appends what a rule can know of each of `values`, as a pair, to `form`, and their table values to `operands`."""
    for value in values:
        kind = type(value)
        if kind is Ref:
            value = env[value.index]
            kind = type(value)
        if kind is Value:
            operands.append(value)
            form += (value.dtype, value.shape)
        elif kind in PLAIN:
            form += (kind, value)
        elif isinstance(value, (list, tuple)):
            items: list[Any] = []
            add_forms(items, value, env, operands)
            form += (kind, tuple(items))
        elif kind is float:
            form += (kind, (value, math.copysign(1.0, value)))
        else:
            raise NoForm


def same_operands(operands: Sequence[Value]) -> Hashable:
    """Which of them are the same value."""
    count = len(operands)
    if count < 2 or (count == 2 and operands[0].id != operands[1].id):
        return None
    ids = [v.id for v in operands]
    return None if len(set(ids)) == count else tuple(map(ids.index, ids))


class Recipe:
    """Rows that a call emitted. Their operands and the call's results are places in a list of value ids: those of the
    call's operands, VALUE_NONE, and those of the new values backwards, so that `~k` is new value k."""

    __slots__ = ("_nodes", "_operands", "_results", "_types", "_values")

    def __init__(
        self, nodes: list[Any], operands: list[Any], values: list[Any], types: list[Any], results: Any
    ) -> None:
        self._nodes, self._operands, self._values, self._types = nodes, operands, values, types
        self._results = results

    @staticmethod
    def of(b: Emitter, before: Sequence[int], operands: Sequence[Value], results: Any) -> Recipe | None:
        """Of all that was emitted since the sizes were `before` (Emitter.sizes); None if that depends on more."""
        after = b.sizes()
        if after[3:] != before[3:]:  # constants or strings
            return None
        first = before[1]
        places = {v.id: k for k, v in reversed(list(enumerate(operands)))}
        places |= {first + k: ~k for k in range(after[1] - first)}
        single = not isinstance(results, tuple)
        given = [places.get(v.id) if type(v) is Value else None for v in ((results,) if single else results)]
        places[VALUE_NONE] = len(operands)
        found = [places.get(v) for v in b.operands[before[2] :]]
        if None in given or None in found:
            return None
        values = b.values[first:]
        types = [b.type_of(v) for v in values]
        return Recipe(b.nodes[before[0] :], found, values, types, given[0] if single else tuple(given))

    def emit(self, b: Emitter, operands: Sequence[Value]) -> Any:
        """The rows for other operands; the call's result, or a tuple of results."""
        first = len(b.values)
        b.nodes += self._nodes
        b.node_sources += [b.source] * len(self._nodes)
        b.values += self._values
        ids = [v.id for v in operands]
        ids.append(VALUE_NONE)
        ids += range(len(b.values) - 1, first - 1, -1)
        b.operands += [ids[k] for k in self._operands]
        results = self._results
        if type(results) is int:
            return operands[results] if results >= 0 else Value(ids[results], *self._types[~results])
        return tuple([operands[k] if k >= 0 else Value(ids[k], *self._types[~k]) for k in results])
