"""What a recording does with each operator, and the type of its result."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .capture import PURE
from .lowering.registry import CUSTOM_RULES

aten = torch.ops.aten
_MAX_OUTCOMES = 1 << 16  # remembered
Type = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class Unsupported(Exception):
    """Recording cannot be shown to be right. `early`: known before forward() ran, another try is of no use."""

    def __init__(self, reason: str, early: bool = False) -> None:
        super().__init__(reason)
        self.early = early


# --- operators ------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What to do with an operator."""

    refuse: str = ""  # reason never to record it
    value: bool = False  # its result is a Python value that depends on tensors'
    functional: Any = None  # record this out-of-place form of it
    alias: int | None = None  # the argument whose memory the result may share by the schema
    special: Callable[[tuple[Any, ...], dict[str, Any]], str] | None = None  # reason to refuse this call, or ""
    random: bool = False
    inactive: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None  # then it returns its first argument


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for i, formal in enumerate(func._schema.arguments):
        if formal.name == name:
            return args[i] if i < len(args) else kwargs.get(name, formal.default_value)
    return None


LIFT = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default}
_DROPOUT = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
# They update running statistics, which their schema does not say.
_STATISTICS = {
    "batch_norm": "training", "instance_norm": "use_input_stats", "native_batch_norm": "training",
    "_batch_norm_impl_index": "training", "cudnn_batch_norm": "training", "miopen_batch_norm": "training",
    "_native_batch_norm_legit": "training", "_batch_norm_with_update": None,
}  # fmt: skip
_VALUE = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "is_set_to"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # with dropout between layers, while training
# Their results depend on where elements lie in memory, or on whether they share memory at all.
_MEMORY = {"as_strided", "as_strided_copy", "as_strided_scatter", "data", "_debug_has_internal_overlap"}


@functools.cache
def rule_of(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        return Rule("higher-order operator")
    schema, tags = func._schema, func.tags
    name = schema.name.partition("::")[2]
    random = torch.Tag.nondeterministic_seeded in tags
    if func.namespace not in ("aten", "prims"):
        if func.name() in CUSTOM_RULES:
            return Rule()
        if func.namespace not in PURE or schema.is_mutable:
            return Rule("custom operator", random=True)
    if name in _VALUE or torch.Tag.data_dependent_output in tags:
        return Rule("value known at run time only", value=name in _VALUE)
    if name in _MEMORY:
        return Rule("depends on memory order", random=random)
    if name in _DROPOUT or (name[:-1] in _DROPOUT and name.endswith("_")):
        return Rule("random", random=True, inactive=lambda a, k: a[1] == 0 or not a[2])
    if name == "scaled_dot_product_attention":

        def drops(args: Any, kwargs: Any) -> str:
            return "random" if _argument(func, args, kwargs, "dropout_p") else ""

        return Rule(special=drops)
    if name in _RECURRENT:

        def draws(args: Any, kwargs: Any) -> str:
            drawn = _argument(func, args, kwargs, "train") and _argument(func, args, kwargs, "dropout")
            return "random" if drawn else ""

        return Rule(special=draws)
    if random:
        return Rule("random", random=True)
    if name in _STATISTICS:
        flag = _STATISTICS[name]

        def updates(args: Any, kwargs: Any) -> str:
            if flag is not None and not _argument(func, args, kwargs, flag):
                return ""
            return "running statistics" if _argument(func, args, kwargs, "running_mean") is not None else ""

        return Rule(special=updates)
    if not schema.returns:
        return Rule("operator without result")
    alias = next((i for i, a in enumerate(schema.arguments) if a.alias_info is not None), None)
    if not schema.is_mutable:
        return Rule(alias=alias if any(r.alias_info is not None for r in schema.returns) else None)
    if name == "detach_":
        return Rule(inactive=lambda a, k: True)
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    out_of_place = getattr(getattr(aten, name[:-1], None), func._overloadname, None)
    ordinary = name.endswith("_") and not name.startswith("_") and len(written) == 1 and alias == 0
    if torch.Tag.inplace_view in tags or not ordinary or out_of_place is None or out_of_place._schema.is_mutable:
        return Rule("writes in a way that is not replayed")
    return Rule(functional=out_of_place)


# --- result types ---------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """`kind`: "tensor", "tensors" or "list" of such, "same" (argument `types`), "value" (a Python value: `types`)."""

    kind: str
    types: Any
    shares: tuple[int, ...] = ()  # arguments whose memory the result shares; -1: one inside a list or keyword


_outcomes: dict[Any, Outcome] = {}
_inference = threading.Lock()
# Their kernels read values, which fake tensors have none of; the types of their results follow from types alone.
_TYPED = {
    aten.cov.default, aten.corrcoef.default, aten.combinations.default, aten.ctc_loss.IntList, aten.ctc_loss.Tensor,
}  # fmt: skip


@functools.cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _infer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """Runs an operator on fake tensors, or on ones."""
    mode = _fake_mode() if func not in _TYPED else _disable_current_modes()
    owner: dict[int, int] = {}
    fakes: list[torch.Tensor] = []

    def fake(value: Any, position: int) -> Any:
        if isinstance(value, torch.Tensor):
            made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="cpu")
            if func in _TYPED:
                made.fill_(1)
            owner[made.untyped_storage()._cdata] = position
            fakes.append(made)
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(fake(v, -1) for v in value)
        return value

    def type_of(value: Any) -> Type | None:
        if value is None:
            return None
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.device.type != "cpu":
            raise Unsupported(f"layout of the result of {func}")
        return (tuple(value.shape), tuple(value.stride()), value.dtype)

    def shares(values: Any) -> tuple[int, ...]:
        found = {owner.get(v.untyped_storage()._cdata) for v in values if v is not None}
        if found == {None}:
            return ()
        return tuple(sorted(-1 if i is None else i for i in found))  # some do, some do not: no view is certain

    with _inference, mode:
        formal = [fake(a, i) for i, a in enumerate(args)]
        named = {k: fake(a, -1) for k, a in kwargs.items()}
        try:
            out = func(*formal, **named)
        except Exception as error:
            raise Unsupported(f"no shape rule for {func}: {type(error).__name__}") from None
        if isinstance(out, torch.Tensor):
            for i, given in enumerate(formal):
                if given is out:
                    return Outcome("same", i)
            return Outcome("tensor", type_of(out), shares([out]))
        if isinstance(out, (list, tuple)) and out and all(v is None or isinstance(v, torch.Tensor) for v in out):
            if any(v is f for v in out for f in fakes):
                raise Unsupported(f"{func} hands arguments back")
            return Outcome("list" if isinstance(out, list) else "tensors", [type_of(v) for v in out], shares(out))
        if isinstance(out, (bool, int, float, torch.dtype)):
            return Outcome("value", out)
    raise Unsupported(f"result of {func}")


def outcome_of(key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """`key`: the operator, and all that decides the types of its result."""
    key = (torch.get_default_dtype(), key)
    outcome = _outcomes.get(key)
    if outcome is None:
        outcome = _infer(func, args, kwargs)
        if len(_outcomes) >= _MAX_OUTCOMES:
            _outcomes.clear()
        _outcomes[key] = outcome
    return outcome
