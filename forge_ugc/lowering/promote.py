"""Dtype promotion as ATen does it, on table values and Python numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..table import Value

_INT = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_integral(dtype: Any) -> bool:
    """Integer or bool."""
    return dtype is torch.bool or dtype in _INT


def _combine(higher: Any, lower: Any) -> Any:
    if higher is None:
        return lower
    if lower is None or higher.is_complex:
        return higher
    if higher.is_floating_point:
        if lower.is_complex:
            return torch.complex128 if higher is torch.float64 else torch.complex64
        return higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def result_type(*operands: Any) -> Any:
    """Dtype of elementwise computation: tensors with dimensions count most, then 0-d ones, then numbers."""
    dims = zero = number = None
    for x in operands:
        if isinstance(x, Value):
            if x.shape:
                dims = x.dtype if dims is None else torch.promote_types(dims, x.dtype)
            else:
                zero = x.dtype if zero is None else torch.promote_types(zero, x.dtype)
        elif x is not None:
            dtype = number_type(x)
            number = dtype if number is None else torch.promote_types(number, dtype)
    return _combine(dims, _combine(zero, number))


def number_type(x: Any) -> torch.dtype:
    """Dtype of a Python number in promotion."""
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int64
    if isinstance(x, float):
        return torch.get_default_dtype()
    return torch.complex64


def float_type(dtype: Any) -> Any:
    """The float type that integers turn into for division, exp and the like."""
    return torch.get_default_dtype() if is_integral(dtype) else dtype
