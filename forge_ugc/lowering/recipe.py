"""Lowering of calls that repeat: what one call emitted is emitted again for the next call of the same form.

Layers of a model differ in their operands and nothing else. A rule sees no more of an operand than its type and which
operands are the same, so a call with an equal `form` gives equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..capture import Ref
from ..table import Value
from .emitter import Emitter

PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class NoForm(Exception):
    """An argument that is not compared here; the call is lowered by itself."""


def form_of(value: Any, env: Sequence[Any], operands: list[Value]) -> Hashable:
    """What a rule can know of an argument; its values are appended to `operands`."""
    kind = type(value)
    if kind is Ref:
        value = env[value.index]
        kind = type(value)
    if kind is Value:
        operands.append(value)
        return value.dtype, value.shape
    if kind in PLAIN:
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, tuple([form_of(v, env, operands) for v in value])
    if kind is float:
        return kind, value, math.copysign(1.0, value)
    raise NoForm


def same_operands(operands: Sequence[Value]) -> Hashable:
    """Which of them are the same value."""
    count = len(operands)
    if count < 2 or (count == 2 and operands[0].id != operands[1].id):
        return None
    ids = [v.id for v in operands]
    return None if len(set(ids)) == count else tuple(map(ids.index, ids))


class Recipe:
    """Rows that a call emitted, with its operands by position: `k` is operand k, `~k` is new value k."""

    __slots__ = ("_nodes", "_results", "_types", "_values")

    def __init__(self, nodes: list[Any], values: list[Any], types: list[Any], results: Any) -> None:
        self._nodes, self._values, self._types, self._results = nodes, values, types, results

    @staticmethod
    def of(b: Emitter, before: Sequence[int], operands: Sequence[Value], results: Any) -> Recipe | None:
        """Of all that was emitted since the sizes were `before` (Emitter.sizes); None if that depends on more."""
        after = b.sizes()
        if after[2:] != before[2:]:  # constants or strings
            return None
        first = before[1]
        places = {v.id: k for k, v in reversed(list(enumerate(operands)))}
        places |= {first + k: ~k for k in range(after[1] - first)}
        nodes = []
        for op, n_results, at, count, attr, words, _ in b.nodes[before[0] :]:
            slots = [places.get(v) for v in b.operands[at : at + count]]
            if None in slots:
                return None
            nodes.append((op, n_results, slots, count, attr, words))
        single = not isinstance(results, tuple)
        given = [places.get(v.id) if type(v) is Value else None for v in ((results,) if single else results)]
        if None in given:
            return None
        values = b.values[first:]
        types = [b.type_of(v) for v in values]
        return Recipe(nodes, values, types, given[0] if single else tuple(given))

    def emit(self, b: Emitter, operands: Sequence[Value]) -> Any:
        """The rows for other operands; the call's result, or a tuple of results."""
        first, source = len(b.values), b.source
        for op, n_results, slots, count, attr, words in self._nodes:
            b.nodes.append((op, n_results, len(b.operands), count, attr, words, source))
            b.operands.extend([operands[k].id if k >= 0 else first + ~k for k in slots])
        b.values.extend(self._values)
        results = self._results
        if type(results) is int:
            return operands[results] if results >= 0 else Value(first + ~results, *self._types[~results])
        return tuple([operands[k] if k >= 0 else Value(first + ~k, *self._types[~k]) for k in results])
