"""Weights and buffers: where they live, and how a change since compiling is noticed."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _core

_SAMPLES = 8  # elements of a tensor


class Slot(NamedTuple):
    """The place that holds a parameter or buffer: `where[key]`, read again before each call."""

    name: str
    where: dict[str, Any]
    key: str
    constant: bool = False  # not reachable from the model: lifted by capture
    inner: tuple[str, ...] = ()  # attributes that lead from a tensor made of tensors to the one that is meant

    @property
    def place(self) -> tuple[int, str, tuple[str, ...]]:
        """The same for slots that mean the same tensor."""
        return (id(self.where), self.key, self.inner)

    def outer(self) -> torch.Tensor:
        """What lies in the place itself."""
        value = self.where.get(self.key)
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(
                f"parameter or buffer {self.name!r} was removed after compiling; compile the model again"
            )
        return value

    def tensor(self) -> torch.Tensor:
        value = self.outer()
        for name in self.inner:
            value = getattr(value, name, None)  # type: ignore[assignment]
            if not isinstance(value, torch.Tensor):
                raise self.another_kind()
        return value

    def another_kind(self) -> RuntimeError:
        return RuntimeError(f"{self.name!r} is of another kind than when it was compiled; compile the model again")

    def part(self, name: str) -> Slot:
        """The place of the tensor that attribute `name` of this one's is."""
        return self._replace(name=f"{self.name}.{name}", inner=(*self.inner, name))


def find_slot(program: torch.export.ExportedProgram, owner: Any, name: str, prefix: str) -> Slot:
    """The place of the tensor that an exported program calls `name`. `owner`: the caller's module, or the program."""
    if isinstance(owner, torch.nn.Module) and name.startswith(prefix):
        path, _, key = name.removeprefix(prefix).rpartition(".")
        try:
            module = owner.get_submodule(path)
        except AttributeError:
            module = None
        for where in (module._parameters, module._buffers, module.__dict__) if module is not None else ():
            if isinstance(where.get(key), torch.Tensor):
                return Slot(name.removeprefix(prefix), where, key)
    for where in (program.state_dict, program.constants):
        if isinstance(where.get(name), torch.Tensor):
            return Slot(name, where, name, constant=where is program.constants)
    raise KeyError(name)


def version(tensor: torch.Tensor) -> int:
    """Version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


class Samples:
    """A few elements of each tensor, first and last among them (of up to 8 in one dimension: all). They tell of writes
    that torch does not count: through `.data`, by fused optimizers, of a norm's statistics, to inference tensors. A
    write to other elements alone goes unseen."""

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """`tensors`: plain memory, which the caller keeps alive and compares the addresses of; what is not on the host
        is left out. RuntimeError if one reaches past the end of its storage."""
        for tensor, name in zip(tensors, names, strict=True):
            if _is_cut(tensor):
                raise RuntimeError(f"{name!r}: its storage was made smaller than the tensor; give it memory again")
        self._of = [i for i, t in enumerate(tensors) if t.is_cpu and t.numel() and t.data_ptr()]  # 0: storage was freed
        tensors = [tensors[i] for i in self._of]
        last, strides = np.zeros((2, len(tensors), max((t.dim() for t in tensors), default=0)), np.int64)
        for i, t in enumerate(tensors):
            last[i, : t.dim()], strides[i, : t.dim()] = t.shape, t.stride()
            last[i, : t.dim()] -= 1
        size = np.array([t.element_size() for t in tensors], np.int64)
        start = np.array([t.data_ptr() for t in tensors], np.int64)
        steps = last[:, None] * np.arange(_SAMPLES)[:, None] // (_SAMPLES - 1)  # along the diagonal
        at = (steps * strides[:, None]).sum(2)
        self._places = np.empty((len(tensors), _SAMPLES, 2), np.uint64)
        self._places[:, :, 0] = start[:, None] + at * size[:, None]
        self._places[:, :, 1] = np.minimum(size, 8)[:, None]
        self._seen = _core.samples(self._places)

    def changed(self) -> bool:
        return _core.samples(self._places) != self._seen

    def changes(self) -> list[int]:
        """Which tensors were written since they were taken."""
        now, before = np.frombuffer(_core.samples(self._places) + self._seen, np.uint64).reshape(2, -1, _SAMPLES)
        return [self._of[i] for i in np.flatnonzero((now != before).any(1))]


class Watcher:
    """Notices that a borrowed tensor was written, replaced, or given other storage."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self._where = [(slot.where, slot.key) for slot in slots]
        self._inner = [(i, slot.inner) for i, slot in enumerate(slots) if slot.inner]
        self._makes = [_make(slots[i]) for i, _ in self._inner]
        self.take()

    def take(self) -> None:
        """Remembers the state as it is now. RuntimeError if a tensor made of tensors is of another make."""
        tensors = [slot.tensor() for slot in self.slots]
        for (i, _), make in zip(self._inner, self._makes, strict=True):
            if _make(self.slots[i]) != make:
                raise self.slots[i].another_kind()
        counted = [i for i, t in enumerate(tensors) if not t.is_inference()]
        # what has no memory of its own that can be addressed (sparse, subclasses) is watched by identity and version
        addressed = [i for i, t in enumerate(tensors) if has_memory(t)]
        # first, so that no other thread in changed() goes from pointers of now to samples of memory that is freed
        self._samples = Samples([tensors[i] for i in addressed], [self.slots[i].name for i in addressed])
        self._all_counted = len(counted) == len(tensors) == len(addressed)
        self._counted, self._addressed = counted, addressed
        self._tensors = tensors
        self._versions = [tensors[i]._version for i in counted]
        self._memory = _memory([tensors[i] for i in addressed])

    def changed(self) -> bool:
        """Whether anything differs from what `take` saw. Some 0.3 us a tensor."""
        try:
            tensors = [where[key] for where, key in self._where]
            for i, path in self._inner:
                tensors[i] = functools.reduce(getattr, path, tensors[i])
        except (KeyError, AttributeError):
            return True
        if not all(map(operator.is_, tensors, self._tensors)):
            return True
        if self._all_counted:
            versions, memory = [t._version for t in tensors], _memory(tensors)
        else:
            versions = [tensors[i]._version for i in self._counted]
            memory = _memory([tensors[i] for i in self._addressed])
        return versions != self._versions or memory != self._memory or self._samples.changed()


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    """Where each tensor lies, and how: `w.data = w.data.t()` and `w.data = w.data[:2]` leave the address. The number of
    elements stands for the shape, which takes twice the time."""
    plain = torch.Tensor
    return tuple(list(map(read, tensors)) for read in (plain.data_ptr, plain.stride, plain.numel))


def _make(slot: Slot) -> Any:
    """What is fixed of the tensors that lead to a slot's: classes and attributes that are no tensors."""
    value, makes = slot.where.get(slot.key), []
    for name in slot.inner:
        makes.append((type(value), parts_of(value)))
        value = getattr(value, name, None)
    return makes


_MADE_OF_TENSORS = ("torchao",)  # packages whose tensors made of tensors do nothing but call operators on these


def made_of_tensors(kind: type) -> bool:
    """Whether a class is of tensors that consist of others (quantised weights), and is taken apart."""
    return hasattr(kind, "__tensor_flatten__") and kind.__module__.partition(".")[0] in _MADE_OF_TENSORS


def parts_of(tensor: Any) -> tuple[list[str], Any]:
    """Attributes of a tensor that is made of tensors: the names of those that are tensors, and all the others."""
    names, others = tensor.__tensor_flatten__()
    return list(names), others


_MOODY = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)  # other results in training mode
_mode = operator.itemgetter("training")


class Structure:
    """Notices changes that make the captured graph another model's: other submodules, tied weights that were untied,
    training mode."""

    def __init__(self, model: Any) -> None:
        self._tables: list[dict[str, Any]] = []
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            if module._modules:
                self._tables.append(module._modules)
            for where in (module._parameters, module._buffers):
                for key, value in where.items():
                    if value is not None:
                        places.setdefault(id(value), []).append((where, key))
        self._children = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self._moody = [m.__dict__ for m in [*modules[:1], *(m for m in modules if isinstance(m, _MOODY))]]
        self._modes = list(map(_mode, self._moody))
        self._tied = [group for group in places.values() if len(group) > 1]

    def untied(self) -> bool:
        """Whether places that held one tensor hold several; the graph reads one of them."""
        for group in self._tied:
            first, *others = [where.get(key) for where, key in group]
            for other in others:
                if other is not first and (first is None or other is None or not _same_memory(first, other)):
                    return True
        return False

    def other_mode(self) -> str:
        """The mode, "training" or "evaluation", that the model or a part that has two is in now and was not; or ""."""
        modes = list(map(_mode, self._moody))
        if modes == self._modes:
            return ""
        changed = next(now for now, before in zip(modes, self._modes, strict=True) if now != before)
        return "training" if changed else "evaluation"

    def changed(self) -> bool:
        """Whether a module that had children has others now."""
        now = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        return len(now) != len(self._children) or not all(map(operator.is_, now, self._children))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not (has_memory(a) and has_memory(b)):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are of one type and equal; NaN equals NaN."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _is_cut(tensor: torch.Tensor) -> bool:
    """Whether a tensor reaches past the end of its storage, which was resized."""
    if not tensor.numel() or not tensor.is_cpu:
        return False
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is plain strided memory (or meta), not sparse, quantised or a wrapper subclass."""
    plain = type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and (plain or not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor))
    )
