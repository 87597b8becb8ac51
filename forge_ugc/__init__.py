"""Forge-UGC: compiles PyTorch models for an Intel AI PC, the NPU and the host CPU beside it.

forge = forge_ugc.compile(model, example_inputs)
outputs = forge(*inputs)
print(forge.report)
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from ._core import VERSION as __version__
from ._core import NpuError
from .errors import ArtefactError, CompileError, FallbackError, FallbackWarning, NpuWarning
from .loaded import LoadedModel, load
from .profile import Profile

if TYPE_CHECKING or _find_spec("torch") is not None:  # artefacts run without it
    from .compile import compile
    from .compiled import CompiledModel
    from .report import Report

if TYPE_CHECKING:
    from . import testing
    from .bisect import Bisection, bisect_passes
    from .dynamo import last_reports

__all__ = [
    "ArtefactError",
    "Bisection",
    "CompileError",
    "CompiledModel",
    "FallbackError",
    "FallbackWarning",
    "LoadedModel",
    "NpuError",
    "NpuWarning",
    "Profile",
    "Report",
    "__version__",
    "bisect_passes",
    "compile",
    "last_reports",
    "load",
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
    if name in ("compile", "CompiledModel", "Report"):
        raise ImportError(f"forge_ugc.{name} needs torch, which is not installed; forge_ugc.load() does without")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
