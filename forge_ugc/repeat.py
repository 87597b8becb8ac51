"""Calls that repeat the one before: what has been checked of a call's tensors is not looked at again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .memory import OutputMemory


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes the items of these numbers."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda items: tuple(items[i] for i in numbers)


class Repeat:
    """A call that was admitted, of a program whose inputs are all tensors among the arguments.

    A call that `fits` has tensors of the same classes, dtypes, devices, layouts, sizes, strides and bits (conjugate,
    negative, made in inference mode): whatever follows from these is known. Dynamo's own check finds that out, in some
    70 ns a tensor.
    """

    def __init__(
        self,
        plan: Any,
        tensors: Sequence[torch.Tensor],
        inputs: Sequence[int],
        own: dict[int, int],
        memory: OutputMemory,
    ) -> None:
        """`inputs`: which of the tensors are the program's inputs. `own`: results that are made in the memory of one of
        the tensors, and of which."""
        self.plan = plan
        self.apart: list[int] = []  # addresses of tensors of which those that are written lie apart from all others
        outputs = plan.lowered.plan
        settled = plan.fresh and not outputs.containers and all(index in own for _, index in outputs.writes)
        self.user = picker([item.index for item in outputs.user]) if settled else None  # None: more is to be done
        self._inference = torch.is_inference_mode_enabled()
        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        self._guards = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )
        self._inputs = picker(inputs)
        self._results = [(own.get(i), shape, dtype) for i, (shape, dtype) in enumerate(plan.out_types)]
        self._written = picker(list(own.values()))
        self._memory = memory

    def fits(self, tensors: Sequence[Any]) -> bool:
        return torch.is_inference_mode_enabled() is self._inference and bool(self._guards.check(*tensors))

    def run(self, tensors: Sequence[torch.Tensor], at: list[int]) -> list[torch.Tensor]:
        """What the program writes. `at`: where the tensors are."""
        results = [
            self._memory.tensor(shape, dtype) if own is None else tensors[own] for own, shape, dtype in self._results
        ]
        written = self._written(tensors)
        try:
            self.plan.run(self._inputs(at), [t.data_ptr() for t in results], self.plan.host)
        finally:
            if written:  # autograd and other compiled models have to know
                torch.autograd.graph.increment_version(written)
        return results


def repeat_of(
    plan: Any,
    numbers: Sequence[int],
    leaves: Sequence[Any],
    inputs: Sequence[int],
    own: dict[int, Any],
    memory: OutputMemory,
) -> Repeat | None:
    """Of a call that was admitted. None: the program reads other things than tensors among the arguments, or copies.

    `numbers`: the leaves that are tensors; `inputs`: addresses that the program got; `own`: results that are made in
    the memory of a leaf.
    """
    read = [where for where, opaque in plan.sources if type(where) is int and not opaque]
    if len(read) < len(plan.sources) or any(leaves[k].data_ptr() != at for k, at in zip(read, inputs, strict=True)):
        return None
    place = {leaf: i for i, leaf in enumerate(numbers)}
    mine = {index: place[leaf] for index, leaf in own.items()}
    return Repeat(plan, [leaves[i] for i in numbers], [place[leaf] for leaf in read], mine, memory)
