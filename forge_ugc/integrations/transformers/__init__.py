"""Forge in transformers.

`compile_config()`: for `model.generate(..., cache_implementation="static", compile_config=compile_config())`.

`ForgeConfig`, `ForgeExporter`, `ForgeModelRunner`: the export format "forge" of transformers.exporters (transformers
5.24 or newer). Importing this module registers it, so that `AutoHfExporter` and `ExportedModel.from_pretrained` find
it; transformers has no entry point that would do so by itself.

    from forge_ugc.integrations.transformers import ForgeConfig, ForgeExporter

    exported = ForgeExporter().export(model, inputs, ForgeConfig())
    exported.save_pretrained("folder")
"""

from __future__ import annotations

import importlib.util
from typing import Any

from .generation import compile_config

_EXPORT = ("ForgeConfig", "ForgeExporter", "ForgeModelRunner")

if importlib.util.find_spec("transformers.exporters.auto") is not None:
    from transformers.exporters.auto import EXPORT_BACKENDS, register_backend

    from .exporter import ForgeConfig, ForgeExporter
    from .runner import ForgeModelRunner

    if "forge" not in EXPORT_BACKENDS:
        register_backend(ForgeExporter, ForgeModelRunner)


def __getattr__(name: str) -> Any:
    if name in _EXPORT:
        import transformers

        raise ImportError(f"{name} needs transformers 5.24 or newer, not {transformers.__version__}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ForgeConfig", "ForgeExporter", "ForgeModelRunner", "compile_config"]
