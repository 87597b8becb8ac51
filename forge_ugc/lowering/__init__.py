"""Lowering: captured ATen calls become rows of the node table.

`lower` walks the capture once. Each call is, in this order: a number that is known (symbolic sizes), a rule of the
family files, a decomposition whose parts all have rules, or a `host` node that calls torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..capture import Captured, Kind, Node, Ref, TensorMeta
from ..errors import CompileError, FallbackError
from ..host import Arg, HostCall
from ..pause import collector_paused
from ..specialise import Symbols, Unbacked
from ..state import Slot, has_memory
from ..table import DTYPE_NUMBERS, LITERAL, MAX_RANK, OBJECT, STATE, Table, Value
from . import creation, elementwise, index, matmul, norm, pool, quantised, reduce, views
from .autocast import autocast_arguments
from .decompose import decompose
from .emitter import Emitter
from .outputs import OutputPlan, plan_outputs
from .recipe import PLAIN, NoForm, Recipe, add_forms, same_operands
from .registry import Decline, Refused, rule_of

__all__ = [
    "Lowered",
    "creation",
    "elementwise",
    "index",
    "lower",
    "lower_all",
    "matmul",
    "norm",
    "pool",
    "quantised",
    "reduce",
    "views",
]

aten = torch.ops.aten
_DROP = {
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    aten._functional_sym_constrain_range.default,
    torch.sym_sum,
}


@dataclass
class Fallback:
    """An operator that runs through torch: how often, where first, and why."""

    op: str
    where: str
    reason: str
    count: int = 1


@dataclass
class Lowered:
    """A table and what the call path must know about it."""

    table: Table
    inputs: list[
        tuple[int | Slot, bool]
    ]  # each program input: the leaf or state tensor, and whether it goes as an object
    input_types: list[tuple[tuple[int, ...], Any]]  # shape and dtype of each
    hosts: list[HostCall]
    plan: OutputPlan
    fallbacks: list[Fallback] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)  # of each output of the table


def lower(captured: Captured, symbols: Symbols, strict: bool = False, aliases: bool = True) -> Lowered:
    """Builds the table for the sizes that `symbols` holds. FallbackError with `strict` if anything needs torch.

    aliases: as for plan_outputs.
    """
    with collector_paused():
        return _Lowering(captured, symbols).run(strict, aliases)


def lower_all(captured: Captured, symbols: Symbols) -> tuple[Lowered, list[Node]]:
    """As `lower`, but every node's tensors are outputs of the table; also the node of each output."""
    lowering = _Lowering(captured, symbols)
    lowered = lowering.run(False)
    pairs = [
        (node, value)
        for node, known in zip(captured.nodes, lowering.env, strict=True)
        if node.kind is Kind.CALL and node.target is not operator.getitem
        for value in _values(known)
        if value.dtype != OBJECT
    ]
    return replace(lowered, table=lowering.b.finish([v for _, v in pairs]), values=[v for _, v in pairs]), [
        n for n, _ in pairs
    ]


class _Lowering:
    def __init__(self, captured: Captured, symbols: Symbols) -> None:
        self.captured, self.symbols = captured, symbols
        self.b = Emitter()
        self.env: list[Any] = [None] * len(captured.nodes)
        self.inputs: list[tuple[int | Slot, bool]] = []
        self.input_types: list[tuple[tuple[int, ...], Any]] = []
        self.hosts: list[HostCall] = []
        self.fallbacks: dict[tuple[str, str], Fallback] = {}
        self.used, self.parts = _uses(captured)
        self.recipes: dict[Any, Recipe] = {}

    def run(self, strict: bool, aliases: bool = True) -> Lowered:
        written = {w.writes for w in self.captured.writes}
        for i, node in enumerate(self.captured.nodes):
            self.b.set_source(node.source)
            if node.kind is Kind.CALL:
                self.env[i] = self.call(i, node)
            else:
                self.env[i] = self.placeholder(i, node, i in written)
        if strict and self.fallbacks:
            rows = [{"op": f.op, "count": f.count, "where": f.where} for f in self.fallbacks.values()]
            text = "\n".join(
                f"  {f.op} x{f.count} at {f.where or 'unknown line'}: {f.reason}" for f in self.fallbacks.values()
            )
            raise FallbackError(f"strict=True, and these operators would run through torch:\n{text}", rows)
        plan = plan_outputs(self.captured, self.env, self.symbols, aliases)
        table = self.b.finish(plan.values)
        return Lowered(
            table, self.inputs, self.input_types, self.hosts, plan, list(self.fallbacks.values()), plan.values
        )

    # --- placeholders -----------------------------------------------------------------------------------------------

    def placeholder(self, i: int, node: Node, written: bool) -> Any:
        if node.kind is Kind.OBJECT:
            return node.target
        if node.kind is Kind.INPUT:
            if not isinstance(node.meta, TensorMeta):
                return self.number(node.meta)
            if i not in self.used and not written:
                return None
            return self.program_input(node.meta, node.target)
        slot = self.captured.slots[i]
        if i not in self.used and not written:
            return None
        tensor = slot.tensor()
        if written or not has_memory(tensor) or not self.carried(node.meta):
            return self.program_input(node.meta, slot)
        if tensor.dtype != node.meta.dtype or tuple(tensor.shape) != self.shape(node.meta):
            raise CompileError(
                f"{slot.name!r} has another shape or dtype than when it was captured; compile the model again"
            )
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_neg().resolve_conj()
        return self.b.constant(tensor, slot.name, LITERAL if slot.constant else STATE)

    def program_input(self, meta: TensorMeta, source: int | Slot) -> Value:
        carried = self.carried(meta)
        self.inputs.append((source, not carried))
        value = self.b.input(meta.dtype, self.shape(meta)) if carried else self.b.input(OBJECT, ())
        self.input_types.append((value.shape, value.dtype))
        return value

    # --- types ------------------------------------------------------------------------------------------------------

    def shape(self, meta: TensorMeta) -> tuple[int, ...]:
        for size in meta.shape:
            if type(size) is not int:
                return tuple(map(self.symbols.size, meta.shape))
        return tuple(meta.shape)

    def carried(self, meta: Any) -> bool:
        """Whether C has tensors of this type and the sizes are known before the call."""
        if (
            not isinstance(meta, TensorMeta)
            or not meta.dense
            or meta.dtype not in DTYPE_NUMBERS
            or len(meta.shape) > MAX_RANK
        ):
            return False
        try:
            self.shape(meta)
        except Unbacked:
            return False
        return True

    def number(self, value: Any) -> Any:
        """A plain number or object; raises Unbacked if it depends on data."""
        return self.symbols.number(value)

    def concrete(self, value: Any) -> Any:
        """An argument structure with Refs replaced by what they stand for."""
        if isinstance(value, Ref):
            return self.env[value.index]
        if isinstance(value, (list, tuple)):
            return [self.concrete(v) for v in value]
        if isinstance(value, dict):
            return {k: self.concrete(v) for k, v in value.items()}
        return self.number(value)

    # --- calls ------------------------------------------------------------------------------------------------------

    def call(self, i: int, node: Node) -> Any:
        """As `call_by_itself`, from a recipe where the same was lowered before."""
        meta: Any = node.meta
        if type(meta) is TensorMeta:
            meta = (meta.dtype, meta.shape, meta.dense)
        elif meta is not None and not isinstance(meta, tuple):  # a symbolic number: its hash would guard on its value
            return self.call_by_itself(i, node)
        if node.target is operator.getitem:
            return self.call_by_itself(i, node)
        operands: list[Value] = []
        used = self.parts.get(i)
        form = [id(node.target), meta, node.autocast, None if used is None else frozenset(used)]
        try:
            add_forms(form, node.args, self.env, operands)
            for name, value in node.kwargs.items():
                form.append(name)
                add_forms(form, (value,), self.env, operands)
            key = (same_operands(operands), *form)
            recipe = self.recipes.get(key)
        except (NoForm, TypeError):  # TypeError: symbolic sizes have no hash
            return self.call_by_itself(i, node)
        if recipe is not None:
            return recipe.emit(self.b, operands)
        before, hosts = self.b.sizes(), len(self.hosts)
        result = self.call_by_itself(i, node)
        if isinstance(node.target, torch._ops.OpOverload) and len(self.hosts) == hosts:
            recipe = Recipe.of(self.b, before, operands, result)
            if recipe is not None:
                self.recipes[key] = recipe
        return result

    def call_by_itself(self, i: int, node: Node) -> Any:
        if node.target in _DROP:
            return None
        if node.meta is not None and not isinstance(node.meta, (TensorMeta, tuple)):
            try:
                return self.number(node.meta)
            except Unbacked:
                return self.host(node, "value known at run time only")
        if node.target is operator.getitem:
            whole = self.env[node.args[0].index]
            if isinstance(whole, (list, tuple)):
                return whole[node.args[1]]
        args, kwargs = self.concrete(node.args), self.concrete(node.kwargs)
        if node.target is aten._assert_scalar.default and not isinstance(args[0], Value):
            if not args[0]:
                raise TypeError(str(args[1]))
            return None
        metas = _results(node.meta)
        reason = self.obstacle(node, metas, args, kwargs)
        if reason is None:
            expected = [self.exact(m) for m in metas]
            try:
                if node.autocast is not None:
                    args, kwargs = autocast_arguments(self.b, node.target, node.autocast, args, kwargs)
                return self.native(node, expected, self.parts.get(i), args, kwargs)
            except Decline as declined:
                reason = str(declined)
            except Refused as refused:
                raise CompileError(
                    f"{node.source or 'unknown line'}: {node.target._schema.name.replace('::', '.')}: {refused}; eager "
                    "PyTorch refuses it too. Convert the input, or the model with model.to(dtype)"
                ) from None
        return self.host(node, reason)

    def exact(self, meta: Any) -> Any:
        return TensorMeta(meta.dtype, self.shape(meta), meta.dense) if isinstance(meta, TensorMeta) else meta

    def obstacle(self, node: Node, metas: list[Any], args: Any, kwargs: Any) -> str | None:
        """Why no rule can apply, whatever the operator."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return "higher-order operator"
        if not metas or node.meta is None:
            return "effect"
        for meta in metas:
            if meta is not None and not self.carried(meta):
                return "result that C does not carry"
            if meta is not None and meta.dtype.is_complex:
                return "complex numbers"
        for value in _values((args, kwargs)):
            if value.dtype == OBJECT:
                return "operand known at run time only"
            if value.dtype.is_complex:
                return "complex numbers"
        return None

    def native(self, node: Node, expected: list[Any], used: set[int] | None, args: Any, kwargs: Any) -> Any:
        """Emits the call by a rule or a decomposition; Decline (with nothing emitted) if there is none."""
        b, target = self.b, node.target
        rule = rule_of(target)
        if (
            rule is None
            and not any(True for _ in _values((args, kwargs)))
            and torch.Tag.nondeterministic_seeded not in target.tags
        ):
            b.out = expected
            return creation.literal(b, target, args, kwargs)
        mark, reason = b.mark(), "no rule"
        if rule is not None:
            b.out, b.used, b.target_name = expected, used, target._schema.name.partition("::")[2]
            try:
                return _checked(rule(b, *args, **kwargs), expected, node, used)
            except Decline as declined:
                b.rollback(mark)
                reason = str(declined)
        if torch.Tag.nondeterministic_seeded in target.tags or reason == "random":
            raise Decline("random")
        try:
            results = decompose(b, target, args, kwargs, self.emit_part)
            single = not isinstance(node.meta, tuple)
            return _checked(results[0] if single else tuple(results), expected, node, used)
        except (Decline, CompileError):
            b.rollback(mark)
            raise Decline(reason) from None

    def emit_part(self, node: Node, args: Any, kwargs: Any, used: set[int] | None) -> Any:
        """One call of a decomposition."""
        if node.target is operator.getitem:
            return args[0][args[1]]
        if isinstance(node.target, type) and issubclass(node.target, tuple):
            return tuple(args[0] if len(args) == 1 and isinstance(args[0], list) else args)
        if node.meta is not None and not isinstance(node.meta, (TensorMeta, tuple)):
            return node.meta
        metas = _results(node.meta)
        if self.obstacle(node, metas, args, kwargs) is not None:
            raise Decline("part")
        return self.native(node, metas, used, args, kwargs)

    # --- the host -----------------------------------------------------------------------------------------------------

    def host(self, node: Node, reason: str) -> Any:
        operands: list[Value] = []
        numbers: dict[int, int] = {}

        def template(value: Any) -> Any:
            if isinstance(value, Ref):
                value = self.env[value.index]
            if isinstance(value, Value):
                if value.id not in numbers:
                    numbers[value.id] = len(operands)
                    operands.append(value)
                return Arg(numbers[value.id])
            if isinstance(value, (list, tuple)):
                return type(value)(map(template, value)) if type(value) is tuple else [template(v) for v in value]
            if isinstance(value, dict):
                return {k: template(v) for k, v in value.items()}
            return self.number(value)

        args, kwargs = template(node.args), template(node.kwargs)
        metas = _results(node.meta)
        carried = [self.carried(m) for m in metas]
        results = [(m.dtype, self.shape(m)) if ok else (OBJECT, ()) for m, ok in zip(metas, carried, strict=True)]
        random = (
            isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        )
        effect = random or reason in ("random", "effect", "higher-order operator") or not results
        types = [(m.dtype, self.shape(m)) if ok else None for m, ok in zip(metas, carried, strict=True)]
        call = HostCall(node.target, args, kwargs, types, isinstance(node.meta, tuple), node.autocast, node.source)
        self.hosts.append(call)
        values = self.b.emit(
            "host", operands, results, index=len(self.hosts) - 1, name=self.b.string(call.name), effect=effect
        )
        if _is_aten_work(node):
            key = (call.name, node.source)
            known = self.fallbacks.get(key)
            if known is None:
                self.fallbacks[key] = Fallback(call.name, node.source, reason)
            else:
                known.count += 1
        return tuple(values) if isinstance(node.meta, tuple) else values[0] if values else None


def _is_aten_work(node: Node) -> bool:
    """Bookkeeping on sizes is no fallback worth a warning; tensor work is."""
    return isinstance(node.meta, (TensorMeta, tuple)) and node.target is not operator.getitem


def _results(meta: Any) -> list[Any]:
    if meta is None:
        return []
    return list(meta) if isinstance(meta, tuple) else [meta]


def _values(value: Any) -> Any:
    if isinstance(value, Value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item)
    elif isinstance(value, dict):
        yield from _values(list(value.values()))


def _checked(result: Any, expected: list[Any], node: Node, used: set[int] | None) -> Any:
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(expected):
        raise CompileError(f"internal error: {node.target} gave {len(results)} results for {len(expected)}")
    for k, (value, meta) in enumerate(zip(results, expected, strict=True)):
        if meta is None or (used is not None and k not in used):
            continue
        if not isinstance(value, Value) or value.dtype != meta.dtype or value.shape != tuple(meta.shape):
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Value) else repr(value)
            raise CompileError(
                f"internal error: lowering {node.target} ({node.name}, {node.source or 'unknown line'}) gave {got}, "
                f"torch says {meta.dtype}{list(meta.shape)}"
            )
    return result


def _uses(captured: Captured) -> tuple[set[int], dict[int, set[int]]]:
    """Nodes that anything reads, and for nodes with several results, which of them (if only getitem reads it)."""
    used: set[int] = set()
    parts: dict[int, set[int]] = {}
    whole: set[int] = set()
    for i, node in enumerate(captured.nodes):
        if node.kind is not Kind.CALL:
            continue
        if isinstance(node.meta, tuple):
            parts.setdefault(i, set())
        if node.target is operator.getitem and isinstance(node.args[0], Ref):
            parts.setdefault(node.args[0].index, set()).add(node.args[1])
            used.add(node.args[0].index)
            continue
        for value in node.args:
            kind = type(value)
            if kind is Ref:
                whole.add(value.index)
            elif kind not in PLAIN and not (kind is list and PLAIN.issuperset(map(type, value))):
                whole.update(captured.refs(value))  # a structure: of torch.export, subclasses of list and dict
        if node.kwargs:
            whole.update(captured.refs(node.kwargs))
    used |= whole
    for output in (*captured.outputs, *captured.writes):
        for ref in captured.refs(output.value):
            used.add(ref)
            whole.add(ref)
    return used, {i: p for i, p in parts.items() if i not in whole}
