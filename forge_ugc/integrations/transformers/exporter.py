"""The export format "forge" of transformers.exporters."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.exporters.configs import DynamoConfig, ExportFormat
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.metadata import ExportMetadata

from ...compile import compile
from ...loaded import LoadedModel, load
from .flat import flatten


@dataclass
class ForgeConfig(DynamoConfig):
    """How to export for Forge: the fields of DynamoConfig (`dynamic`, `dynamic_shapes`, torch.export's `strict`, and
    so on), and options of `forge_ugc.compile`.

    device, precision, passes, alpha, autotune: as for compile(). allow_fallbacks: False raises FallbackError where an
    operator would run through torch.
    """

    export_format: str = "forge"  # type: ignore[assignment]  # the enumeration names transformers' own

    device: str = "auto"
    precision: str = "auto"
    passes: str = "default"
    alpha: float = 1.0
    autotune: bool = False
    allow_fallbacks: bool = True


class ForgeExporter(DynamoExporter):
    """Exports a PreTrainedModel to a program of Forge: `exported.program` is a `CompiledModel` that takes and returns
    flat tensors, after loading a `LoadedModel`; `exported(**inputs)` calls it as the model is called.

    A cache of fixed size (`generation_config` with `cache_implementation="static"`) is written in place. One that
    grows is a new set of shapes, so a new program, at each step: use it for tests only. With `dynamic=True` further
    shapes are specialised when they come, without exporting again; `save_pretrained` keeps those that were called
    until then.
    """

    export_format = "forge"
    config_class = ForgeConfig
    program_suffix = ".forge"
    requires_trust_remote_code = False  # an artefact holds no code, and nothing pickled
    tested_versions = {"torch": "2.13.0"}

    # Any in place of the types that differ from DynamoExporter's: ForgeConfig, CompiledModel, LoadedModel

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any
    ) -> tuple[Any, ExportMetadata]:
        """A CompiledModel for the forward keyword arguments `sample_inputs`, and what there is to know to call it.
        CompileError where the model cannot be captured, ValueError for a quantizer of another format."""
        if config.quantizer is not None and not config.quantizer.quantizes_fx_graph:
            raise ValueError(f"{type(config.quantizer).__name__} works on another format's models; use PT2EQuantizer")
        # what is quantised is torch.export's graph: quantizers know it by that format's name
        as_dynamo = replace(config, export_format=ExportFormat.DYNAMO)
        program, metadata = super().export_program(model, sample_inputs, config=as_dynamo)
        flat = flatten(program, sample_inputs, type(model).__name__)
        metadata.out_constants = flat.known
        compiled = compile(
            flat.captured,
            tuple(flat.example),
            device=config.device,
            precision=config.precision,
            passes=config.passes,
            alpha=config.alpha,
            autotune=config.autotune,
            strict=not config.allow_fallbacks,
        )
        return compiled, metadata

    @classmethod
    def save_program(cls, program: Any, path: str | Path) -> None:
        """As CompiledModel.save: ArtefactError names what cannot be kept."""
        if isinstance(program, LoadedModel):
            Path(path).write_bytes(program._artefact.whole())
        else:
            program.save(path)

    @classmethod
    def load_program(cls, path: str | Path) -> Any:
        return load(path)
