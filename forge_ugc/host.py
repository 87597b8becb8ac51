"""Host nodes: operators that C does not know run through torch, on zero-copy views of C's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


@dataclass(frozen=True, slots=True)
class Arg:
    """Stands for operand `index` in the arguments of a host call."""

    index: int


@dataclass
class HostCall:
    """A call of a torch function. `carried`: each result's type if C knows it; None: it is an object."""

    target: Any
    args: Any
    kwargs: Any
    carried: list[tuple[torch.dtype, tuple[int, ...]] | None]
    several: bool
    autocast: tuple[str, torch.dtype] | None
    source: str

    @property
    def name(self) -> str:
        if isinstance(self.target, torch._ops.OpOverload):
            return str(self.target)
        return str(getattr(self.target, "__name__", None) or self.target)

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Results: (address, strides, owner) of a tensor, or an object. No result shares an operand's memory."""
        tensors = [from_dlpack(v) if type(v).__name__ == "PyCapsule" else v for v in operands]
        args, kwargs = _fill(self.args, tensors), _fill(self.kwargs, tensors)
        with torch.no_grad():
            if self.autocast is not None:
                with torch.autocast(self.autocast[0], dtype=self.autocast[1]):
                    result = self.target(*args, **kwargs)
            else:
                result = self.target(*args, **kwargs)
            results = list(result) if self.several else [result] if self.carried else []
            taken = {
                t.untyped_storage().data_ptr()
                for t in tensors
                if isinstance(t, torch.Tensor) and t.layout is torch.strided
            }
            return [self._result(value, carried, taken) for value, carried in zip(results, self.carried, strict=True)]

    def _result(self, value: Any, carried: tuple[torch.dtype, tuple[int, ...]] | None, taken: set[int]) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if value.untyped_storage().data_ptr() in taken:
                value = value.clone()
        if carried is None:
            return value
        dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_cpu
        given = (value.dtype, tuple(value.shape)) if dense else type(value).__name__
        if given != carried:  # C would read memory of another size
            raise RuntimeError(f"{self.name} ({self.source}) gave {given}, but its captured type is {carried}")
        value = value.contiguous()
        return value.data_ptr(), tuple(value.stride()), value


def _fill(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, Arg):
        return tensors[value.index]
    if isinstance(value, list):
        return [_fill(v, tensors) for v in value]
    if isinstance(value, tuple):
        return tuple(_fill(v, tensors) for v in value)
    if isinstance(value, dict):
        return {k: _fill(v, tensors) for k, v in value.items()}
    return value
