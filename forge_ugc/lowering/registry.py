"""The table of lowering rules: ATen overload -> function that emits our operators.

A rule is called as `rule(b, *args, **kwargs)` with the arguments of the ATen call: tensors are `Value`s, symbolic sizes
are ints. `b` is the `Emitter`; `b.out` holds the expected types of the results. It returns a Value (or a tuple of
them), or raises `Decline` when this form of the operator has to go to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import CompileError

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
# Operators of other libraries by name, since they may be registered after this is imported.
CUSTOM_RULES: dict[str, Rule] = {}


class Decline(Exception):
    """This call cannot be expressed in our operators; the text says why."""


class Refused(CompileError):
    """Eager refuses this call too, which capture let pass; the text says why."""


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ATen overloads, named as in "add.Tensor". Names that this torch lacks are skipped.

    A name with a namespace, as in "library::name", is another library's operator. It has to be functional and
    deterministic, since capturing may run it on tensors without data.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if "::" in name:
                CUSTOM_RULES[name] = rule
                continue
            packet, _, overload = name.partition(".")
            target = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if target is not None:
                RULES[target] = rule
        return rule

    return register


def rule_of(target: Any) -> Rule | None:
    return RULES.get(target) or CUSTOM_RULES.get(target.name())
