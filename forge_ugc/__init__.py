"""Forge-UGC: compiles PyTorch models for an Intel AI PC, the NPU and the host CPU beside it.

forge = forge_ugc.compile(model, example_inputs)
outputs = forge(*inputs)
print(forge.report)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import VERSION as __version__
from ._core import NpuError
from .compile import compile
from .compiled import CompiledModel
from .errors import CompileError, FallbackError, FallbackWarning, NpuWarning
from .report import Report

if TYPE_CHECKING:
    from . import testing
    from .bisect import Bisection, bisect_passes
    from .dynamo import last_reports

__all__ = [
    "Bisection",
    "CompileError",
    "CompiledModel",
    "FallbackError",
    "FallbackWarning",
    "NpuError",
    "NpuWarning",
    "Report",
    "__version__",
    "bisect_passes",
    "compile",
    "last_reports",
    "testing",
]


def __getattr__(name: str) -> Any:
    """`testing`, `bisect_passes` and `last_reports` are loaded when they are asked for."""
    import importlib

    if name == "testing":
        return importlib.import_module(".testing", __name__)
    if name in ("bisect_passes", "Bisection"):
        return getattr(importlib.import_module(".bisect", __name__), name)
    if name == "last_reports":
        return importlib.import_module(".dynamo", __name__).last_reports
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
