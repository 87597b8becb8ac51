"""Memory for the largest outputs, which is used again once nothing refers to it."""

from __future__ import annotations

import math
import mmap
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# The C library keeps smaller pieces for itself (the largest M_MMAP_THRESHOLD); larger ones go back to the kernel with
# every free(), and for the next call their pages have to be found and zeroed anew.
LEAST_BYTES = 32 << 20
_KEPT = 4  # two outputs of two calls: mostly the caller still has the last result while the next one is made


def _references(blocks: list[Any], index: int) -> int:
    return sys.getrefcount(blocks[index])


_IDLE = _references([object()], 0)  # of a block that only the list has


class OutputMemory:
    """Blocks of memory that outlive the tensors and arrays made of them; at most four. Threads may share it."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> mmap.mmap:
        """A block of so many bytes, of any content. It is free again when the last reference to it, or to a buffer of
        it, is gone. MemoryError: there is no memory."""
        with self._lock:
            blocks = self._blocks
            idle = [_references(blocks, i) == _IDLE for i in range(len(blocks))]
            for i, free in enumerate(idle):
                if free and len(blocks[i]) == nbytes:
                    return blocks[i]
            self._blocks = blocks = [blocks[i] for i, free in enumerate(idle) if not free]
            try:
                blocks.append(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except OSError as error:
                raise MemoryError(f"out of memory: {nbytes} bytes for an output") from error
            del blocks[:-_KEPT]
            return blocks[-1]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What torch.empty(shape, dtype=dtype) gives. One of 32 MB or more cannot be made larger in place."""
        import torch

        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        storage = torch.frombuffer(self.take(nbytes), dtype=torch.uint8).untyped_storage()
        # set_() and not a view: in inference mode an inference tensor, and the base of its views
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """What np.empty(shape, dtype) gives."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        return np.frombuffer(self.take(nbytes), dtype).reshape(shape)
