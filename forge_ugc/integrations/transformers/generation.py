"""Generation with transformers.

from forge_ugc.integrations.transformers import compile_config

model.generate(**inputs, cache_implementation="static", compile_config=compile_config())
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import list_backends, register_backend
from transformers import CompileConfig

from ...dynamo import forge

__all__ = ["compile_config"]


def compile_config(*, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> CompileConfig:
    """What `model.generate(..., compile_config=)` needs to run each step after the first through Forge, on the CPU too.

    A cache whose shapes stay (`cache_implementation="static"`) is what transformers compiles for; with another one it
    runs the model eagerly, as it does beam search with any, and `forge_ugc.last_reports()` stays empty:
    `model.compile(backend="forge")` takes these through Forge. The prompt is processed eagerly, in one go; with
    `model.generate(..., prefill_chunk_size=64)` transformers runs it in pieces, through Forge as well. That takes a
    program for each length of a piece and of the mask, so it pays where prompts of like lengths come often.

    Args:
        fullgraph, dynamic: as for `torch.compile`.
        options: as for `forge_ugc.compile`; an unknown one raises TypeError, a wrong value ValueError, when the first
            step is compiled.
    """
    if "forge" not in list_backends(exclude_tags=()):  # the package is imported without being installed
        register_backend(forge, name="forge")
    config = CompileConfig(fullgraph=fullgraph, dynamic=dynamic, backend="forge", options=options or None)
    config.mode = None  # type: ignore[assignment]  # its default is inductor's
    config._compile_all_devices = True  # type: ignore[assignment]  # else only on accelerators
    return config
