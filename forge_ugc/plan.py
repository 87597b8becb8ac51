"""A program for one set of shapes: what it reads, what it writes, and which of that lies where the caller's does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import npu
from .lowering import Lowered
from .lowering.outputs import Alias, Fresh
from .state import Slot
from .table import OBJECT


@dataclass(frozen=True)
class Options:
    """What `compile` was asked for."""

    choice: npu.Choice
    executable: bool
    why_not: str  # why it cannot be called, if so
    passes: str
    alpha: float
    autotune: bool
    strict: bool
    threads: int
    pack: bool
    schedule: bool


class Plan(npu.Dispatched):
    """A program for one set of shapes."""

    def __init__(self, options: Options, lowered: Lowered, share: Any = None) -> None:
        """share: a program with the same weights, as they are now."""
        self.lowered = lowered
        self.options = options
        self._share = share
        super().__init__(options.choice)
        self._share = None
        self.sources = self.lowered.inputs
        self.in_place = self._in_place()
        plan = self.lowered.plan
        self.out_types = [(v.shape, v.dtype) for v in plan.values]
        self.any_opaque = any(dtype == OBJECT for _, dtype in self.out_types)
        self.fresh = all(isinstance(item, Fresh) for item in plan.user)
        # results are the outputs, one by one; of a value that is written, too, there may be one only
        self.plain = not plan.writes and [Fresh(i) for i in range(len(plan.values))] == plan.user
        hosts = self.lowered.hosts
        self.host = (lambda callee, args: hosts[callee](args)) if hosts else None

    def _in_place(self) -> list[tuple[int, int, int | Slot]]:
        """(program input, program output, what forward() writes): outputs that are made in the memory of what they are
        the new value of. Only where nothing else is handed out of that output, and the program allows it."""
        plan = self.lowered.plan
        handed_out = plan.user + [item for items in plan.containers for item in items]
        roots = (item.root if isinstance(item, Alias) else item for item in handed_out)
        taken = Counter([index for _, index in plan.writes] + [r.index for r in roots if isinstance(r, Fresh)])
        inputs = {_identity(where): i for i, (where, opaque) in enumerate(self.sources) if not opaque}
        found = []
        for where, index in plan.writes:
            number = inputs.get(_identity(where))
            value = plan.values[index]
            if number is None or taken[index] > 1 or self.lowered.input_types[number] != (value.shape, value.dtype):
                continue
            if self.program.may_share(number, index):
                found.append((number, index, where))
        return found

    def gather(self, leaves: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """Addresses (or objects) for the program's inputs, and the tensors that own the memory."""
        inputs: list[Any] = []
        keep: list[torch.Tensor] = []
        for (source, opaque), (shape, dtype) in zip(self.sources, self.lowered.input_types, strict=True):
            if type(source) is int:
                t = leaves[source]  # has been checked
            else:
                t = source.tensor()  # type: ignore[union-attr]
                if not opaque and (t.shape != shape or t.dtype is not dtype or not t.is_cpu):
                    raise TypeError(
                        f"buffer {source.name!r} was {str(dtype).removeprefix('torch.')}{list(shape)} on cpu when it "  # type: ignore[union-attr]
                        f"was compiled, and is {str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device} now; "
                        "compile the model again"
                    )
            if opaque:
                inputs.append(t)
                continue
            if not t.is_contiguous() or t.is_neg() or t.is_conj():
                t = t.detach().resolve_neg().resolve_conj().contiguous()
            keep.append(t)
            inputs.append(t.data_ptr())
        return inputs, keep

    def build(self, choice: npu.Choice, settings: dict[str, Any]) -> Any:
        return self.compile(replace(self.options, choice=choice), self.lowered, **settings)

    def executable(self) -> bool:
        return self.options.executable

    def compile(self, options: Options, lowered: Lowered, **changes: Any) -> Any:
        settings: dict[str, Any] = {
            "target": options.choice.target,
            "passes": options.passes,
            "alpha": options.alpha,
            "autotune": options.autotune,
            "executable": options.executable,
            "pack": options.executable and options.pack,
            "schedule": options.schedule,
            "threads": options.threads,
            "host_precision": npu.host_precision(options.choice),
            "share": self._share,
        }
        return lowered.table.compile(**{**settings, **changes})


def _identity(where: int | Slot) -> Any:
    return where.place if isinstance(where, Slot) else where
