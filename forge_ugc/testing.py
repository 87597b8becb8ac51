"""Comparing a compiled model with eager, and an NPU in software: for users' own tests.

forge_ugc.testing.assert_fidelity(model, inputs)
forge_ugc.testing.software_npu()
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .compile import _arguments, compile
from .compiled import CompiledModel
from .softnpu import SoftwareNpu as SoftwareNpu
from .softnpu import software_npu as software_npu

# (absolute, relative) by dtype; everything else must be equal
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2.1e-5, 1e-4),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.complex64: (2.1e-5, 1e-4),
    torch.complex128: (1e-10, 1e-10),
}


@dataclass(frozen=True)
class Difference:
    """One output that is not eager's. `path`: where in the output structure."""

    path: str
    what: str


def differences(
    eager: Any, forge: Any, tolerance: Mapping[torch.dtype, tuple[float, float]] = TOLERANCE
) -> list[Difference]:
    """Outputs that differ in structure, dtype, shape or by more than `tolerance`. NaN equals NaN."""
    expected, spec = pytree.tree_flatten_with_path(eager)
    got, other = pytree.tree_flatten(forge)
    if spec != other:
        return [Difference("output", f"structure {other} instead of {spec}")]
    found = []
    for (keys, a), b in zip(expected, got, strict=True):
        what = _compare(a, b, tolerance)
        if what:
            found.append(Difference("output" + pytree.keystr(keys), what))
    return found


def _compare(a: Any, b: Any, tolerance: Mapping[torch.dtype, tuple[float, float]]) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if type(a) is type(b) and (a == b or (a != a and b != b)) else f"{b!r} instead of {a!r}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
    if not (a.is_floating_point() or a.is_complex()):
        return None if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} elements differ"
    absolute, relative = tolerance.get(a.dtype, (0.0, 0.0))
    close = torch.isclose(b, a, rtol=relative, atol=absolute, equal_nan=True)
    if bool(close.all()):
        return None
    gap = (a - b).abs()
    gap = gap[~torch.isnan(gap)]
    most = gap.max().item() if gap.numel() else float("nan")
    return f"{int((~close).sum())} of {a.numel()} elements differ, by up to {most:.3g}"


def assert_fidelity(
    model: Any,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: Mapping[torch.dtype, tuple[float, float]] | None = None,
    **options: Any,
) -> CompiledModel:
    """Compiles `model`, runs both on the example, and raises AssertionError where the outputs are not eager's.

    `tolerance`: dtype -> (absolute, relative), on top of TOLERANCE. `options`: as for `forge_ugc.compile`.
    Returns the compiled model. The model's buffers and the example are left as they were.
    """
    args, kwargs = _arguments(example_inputs, example_kwargs)
    reference = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    state = {k: v.clone() for k, v in reference.state_dict().items()} if isinstance(reference, torch.nn.Module) else {}
    compiled = compile(model, args, kwargs, **options)
    rng = torch.get_rng_state()
    runs = []
    for function in (reference, compiled):
        torch.set_rng_state(rng)
        own_args, own_kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            runs.append(function(*own_args, **own_kwargs))
            if state:
                for name, value in reference.state_dict().items():
                    value.copy_(state[name])
    found = differences(runs[0], runs[1], {**TOLERANCE, **(tolerance or {})})
    if found:
        raise AssertionError("outputs differ from eager's:\n" + "\n".join(f"  {d.path}: {d.what}" for d in found))
    return compiled
