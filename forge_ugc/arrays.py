"""Arrays of a call of a loaded model: numpy's or torch's, with torch or without it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .artefact import DTYPES
from .memory import OutputMemory


class Buffer:
    """An input array: numpy's or torch's."""

    def __init__(self, value: Any, torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
        self.value, self.torch, self.dtype, self.shape = value, torch, dtype, shape

    def is_like(self, dtype: str, shape: tuple[int, ...]) -> bool:
        numpy_bf16 = self.torch is None and dtype == "bf16" and self.value.dtype == np.uint16
        return self.shape == shape and (self.dtype == dtype or numpy_bf16)

    def describe(self) -> str:
        return f"{self.dtype or self.value.dtype}{list(self.shape)}"

    def row_major(self) -> tuple[int, Any]:
        """Address of its elements in row-major order, copied if they do not lie so, and their owner."""
        if self.torch is not None:
            tensor = self.value
            if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                tensor = tensor.detach().resolve_neg().resolve_conj().contiguous()
            return tensor.data_ptr(), tensor
        array = np.ascontiguousarray(self.value)
        return array.ctypes.data, array

    def may_write(self) -> bool:
        """Whether a program may write its memory; where not, store() says why."""
        if self.torch is None:
            return bool(self.value.flags.writeable)
        return not self.value.is_inference() or self.torch.is_inference_mode_enabled()

    def store(self, result: Any) -> None:
        if self.torch is not None:
            with self.torch.no_grad():
                self.value.copy_(result)
        else:
            np.copyto(self.value, result)

    def span(self) -> tuple[int, int]:
        """From its first byte to behind its last one."""
        value = self.value
        if 0 in self.shape:
            return 0, 0
        if self.torch is not None:
            strides, size, address = value.stride(), value.element_size(), value.data_ptr()
            steps = [(n - 1) * s * size for n, s in zip(self.shape, strides, strict=True)]
        else:
            size, address = value.itemsize, value.ctypes.data
            steps = [(n - 1) * s for n, s in zip(self.shape, value.strides, strict=True)]
        return address + sum(s for s in steps if s < 0), address + sum(s for s in steps if s > 0) + size


def overlap(buffers: dict[int, Buffer], written: set[int]) -> tuple[int, int] | None:
    """A pair that shares memory, the first of which is written."""
    spans = sorted((*buffer.span(), which) for which, buffer in buffers.items())
    furthest: tuple[int, int] = (0, -1)  # end, which: of all that began before
    furthest_written = furthest
    for start, end, which in spans:
        if start == end:
            continue
        if start < furthest_written[0]:
            return furthest_written[1], which
        if which in written:
            if start < furthest[0]:
                return which, furthest[1]
            furthest_written = max(furthest_written, (end, which))
        furthest = max(furthest, (end, which))
    return None


_OF_NUMPY = {np.dtype(spelled): ours for ours, (_, spelled) in DTYPES.items() if ours != "bf16"}
_OF_TORCH = {
    "bool": "bool",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
}
_TO_TORCH = {ours: name for name, ours in _OF_TORCH.items()}


def buffer_of(value: Any, path: str) -> Buffer:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            layout = "" if value.layout is torch.strided else f" of layout {value.layout}"
            raise TypeError(f"input {path}: expected a dense tensor on the cpu, given one on {value.device}{layout}")
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise TypeError(f"input {path}: a tensor of a torch.func transform (vmap, grad, jvp) has no memory to read")
        return Buffer(value, torch, _OF_TORCH.get(str(value.dtype).removeprefix("torch."), ""), tuple(value.shape))
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"input {path}: expected an array, given {type(value).__name__}")
        value = np.from_dlpack(value)
    return Buffer(value, None, _OF_NUMPY.get(value.dtype, ""), value.shape)


def allocate(torch: Any, dtype: str, shape: tuple[int, ...], memory: OutputMemory) -> tuple[Any, int]:
    """A new tensor, or without torch an array, and its address."""
    if torch is not None:
        tensor = memory.tensor(shape, getattr(torch, _TO_TORCH[dtype]))
        return tensor, tensor.data_ptr()
    array = memory.array(shape, np.dtype(DTYPES[dtype][1]))
    return array, array.ctypes.data


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """The same memory as numpy's, with numpy's type of that width."""
    if isinstance(value, np.ndarray):
        return value
    name = _OF_TORCH[str(value.dtype).removeprefix("torch.")]
    if name == "bf16":
        import torch

        return value.detach().view(torch.int16).numpy().view(np.uint16)
    array: np.ndarray[Any, Any] = value.detach().numpy()
    return array
