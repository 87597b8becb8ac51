"""Values of the model's own tensors that Python reads while recording: `if length <= int(self.kernel_size): ...`.

What follows from parameters, buffers and constants alone has a value while recording, too. A program for that value is
right as long as those tensors stay as they are: they are noted with their values (`Captured.fixed`), and the compiled
model refuses a call once they have others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .capture import Kind, Ref
from .record_rules import Unsupported
from .state import Slot

if TYPE_CHECKING:
    from .record import Recorder

_MAX = 1 << 16  # elements of a tensor: more are no numbers that Python counts with, and are compared at each change


class Fixed:
    """The state whose values were read so far: placeholder -> its place, and what it held."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[int, Any] = {}
        self.tensors: dict[int, tuple[Slot, torch.Tensor]] = {}

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of `func` for the values of Refs among its arguments. Unsupported if an input decides them."""
        with _disable_current_modes(), torch.no_grad():
            return func(*self._filled(args), **self._filled(kwargs))

    def _filled(self, value: Any) -> Any:
        if type(value) is Ref:
            return self._value(value.index)
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._filled, value))
        if type(value) is dict:
            return {k: self._filled(v) for k, v in value.items()}
        return value

    def _value(self, index: int) -> Any:
        if index not in self._known:
            node = self._recorder.nodes[index]
            if node.kind is Kind.CALL:
                if node.target is not operator.getitem and torch.Tag.nondeterministic_seeded in node.target.tags:
                    raise Unsupported(f"random: {node.target}")
                self._known[index] = node.target(*self._filled(node.args), **self._filled(node.kwargs))
            elif index in self._recorder.slots:
                slot = self._recorder.slots[index]
                tensor = slot.tensor()
                if tensor.numel() > _MAX or tensor.device.type != "cpu":
                    raise Unsupported(f"value known at run time only: {slot.name}")
                self.tensors[index] = slot, tensor.detach().clone()
                self._known[index] = self.tensors[index][1]
            else:
                raise Unsupported("value known at run time only: it follows from an input")
        return self._known[index]
