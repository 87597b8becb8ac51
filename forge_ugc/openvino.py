"""Writing the NPU's part of a program as OpenVINO models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

if TYPE_CHECKING:
    from .compiled import CompiledModel

_ALIGN = 64
_Fold = Literal["never", "always", "cut", "constant"]


class _Writer:
    """Files of one folder; remembers where each weight lies in weights.bin."""

    def __init__(self, folder: Path, weights: BinaryIO) -> None:
        self.folder, self.weights = folder, weights
        self.offsets: list[int] = []

    def __call__(self, kind: str, number: int, data: bytes) -> None:
        if kind != "weight":
            (self.folder / f"block_{number:03}.{kind}").write_bytes(data)
            return
        self.weights.write(b"\0" * (-self.weights.tell() % _ALIGN))
        self.offsets.append(self.weights.tell())
        self.weights.write(data)


def save(compiled: CompiledModel, folder: str | os.PathLike[str], fold: bool | _Fold) -> dict[str, Any]:
    """What `CompiledModel.save_openvino_ir` does; also by names of csrc/npu/plan.c."""
    named: _Fold = fold if isinstance(fold, str) else "always" if fold else "constant"
    plan = compiled._now()
    settings = plan.choice.npu
    if settings is None or not plan.program.npu_report()["segments"]:
        raise RuntimeError(
            f"nothing of the model is placed on an NPU ({plan.choice.device}: {plan.choice.reason}), so there is no "
            'OpenVINO model of it; compile with device="npu:plan"'
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "weights.bin", "wb") as weights:
        write = _Writer(path, weights)
        made = plan.program.openvino_models(
            write,
            fold=named,
            precision=settings.precision,
            f32_types=settings.f32_types,
            f32_border=settings.f32_border,
        )
    for number, block in enumerate(made["blocks"]):
        block["xml"], block["bin"] = f"block_{number:03}.xml", f"block_{number:03}.bin"
    for call in made["calls"]:
        for weight in call["weights"]:
            weight["offset"] = write.offsets[weight.pop("weight")]
    if not write.offsets:
        (path / "weights.bin").unlink()
    manifest = {
        "target": plan.choice.target,
        "precision": settings.precision,
        "fold": fold,
        "inputs": _inputs(compiled),
        "weights": "weights.bin" if write.offsets else None,
        **made,
    }
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _inputs(compiled: CompiledModel) -> list[str]:
    """What "input 0", "input 1", ... are: paths in the model's arguments, or names of buffers."""
    paths = compiled._signature.paths
    sources = compiled._now().sources
    return [paths[source] if isinstance(source, int) else source.name for source, _ in sources]
