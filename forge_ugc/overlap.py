"""Tensors that share memory: a program reads its inputs before it writes any, so what is written must lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Overlap(TypeError):
    """A call's tensors share memory that the program writes."""


Named = tuple[str, torch.Tensor]


def written_overlap(written: Sequence[Named], others: Iterable[Named]) -> tuple[str, str] | None:
    """Names of a tensor of `written` and of another one (of either list) that share an element, or None."""
    tensors = [*written, *others]
    storages = [_storage(t) for _, t in tensors]
    known = [s for s in storages if s]
    if len(set(known)) == len(known):
        return None
    for i, (name, a) in enumerate(written):
        for j, (other, b) in enumerate(tensors):
            if j > i and storages[i] and storages[i] == storages[j] and overlap(a, b):
                return name, other
    return None


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors of one storage have a byte in common."""
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    if high_a <= low_b or high_b <= low_a:
        return False
    if a.element_size() != b.element_size() or (a.is_contiguous() and b.is_contiguous()):
        return True
    size = a.element_size()
    low = min(low_a, low_b)
    mark = torch.zeros((max(high_a, high_b) - low) // size, dtype=torch.bool)
    mark.as_strided(a.shape, a.stride(), (low_a - low) // size).fill_(True)
    return bool(mark.as_strided(b.shape, b.stride(), (low_b - low) // size).any())


def _storage(t: torch.Tensor) -> int:
    """Address of the storage; 0 for what has no memory."""
    if t.layout is not torch.strided or t.is_meta or t.is_quantized or t.numel() == 0:
        return 0
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass without storage


def _range(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
