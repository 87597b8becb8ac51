"""Compiled graphs of an NPU in artefacts. A program's entry in the manifest says of them:

    "npu": {"tier": 1, "graphs": 2, "for": {"driver": "17", ...}, "blobs": [{"key", "checksum", "bytes"}, ...]}

and the member npu/<key>.blob has the bytes. The key is the cache's: a hash of all that decides what a compiler makes,
so that a graph is used where this machine would compile the same, and nowhere else. "for" tells people why not, and
which tier to begin with. This file does without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _core
from .artefact import Artefact
from .errors import ArtefactError

_HASH = re.compile("[0-9a-f]{32}")
_TIERS = ("folded graphs", "graphs with constant weights")


def circumstances(facts: dict[str, Any], settings: Any) -> dict[str, str]:
    """What graphs are compiled for, in words. `facts`: of the device; `settings`: npu.NpuSettings."""
    return {
        "driver": facts["driver_version"],
        "device": f"{facts['device_name']} (0x{facts['device_id']:x})",
        "compiler": str(facts["compiler"]),
        "graph extension": str(facts["extension"]),
        "opset": str(facts["opset"]),
        "precision": settings.precision,
        "types": "f32" if settings.f32_types else "f16",
        "border": "f32" if settings.f32_border else "f16",
        "config": settings.config,
        "forge-ugc": _core.VERSION,
    }


def keep(program: Any, made_for: dict[str, str], put: Callable[[str, memoryview], None]) -> dict[str, Any] | None:
    """The manifest's entry for a program's compiled graphs, whose bytes `put(key, bytes)` gets. None: it has none.
    `made_for`: the circumstances that they were compiled in."""
    found: dict[str, dict[str, Any]] = {}

    def write(key: str, checksum: str, data: memoryview) -> None:
        put(key, data)
        found[key] = {"key": key, "checksum": checksum, "bytes": data.nbytes}

    said = program.npu_blobs(write)
    if not said["graphs"]:
        return None
    return {"tier": said["tier"], "graphs": said["graphs"], "for": made_for, "blobs": list(found.values())}


@dataclass(frozen=True)
class Kept:
    """A program's compiled graphs in a file. `blobs`: (key, checksum, address, bytes), as `_core.load` takes them."""

    tier: int
    graphs: int
    made_for: dict[str, str]
    blobs: list[tuple[str, str, int, int]]

    @classmethod
    def read(cls, entry: Any, artefact: Artefact) -> Kept | None:
        """Of a program's entry; None: it has none. ArtefactError, or what a wrong type raises, if it is damaged."""
        kept = entry.get("npu")
        if kept is None:
            return None
        tier, graphs = kept["tier"], kept["graphs"]
        if type(tier) is not int or tier not in (0, 1) or type(graphs) is not int:
            raise ArtefactError(f"{artefact.path}: a damaged manifest: compiled graphs of tier {tier!r}")
        made_for = {str(name)[:40]: str(value)[:200] for name, value in kept["for"].items()}
        blobs = []
        for blob in kept["blobs"]:
            key, checksum, size = blob["key"], blob["checksum"], blob["bytes"]
            if not _HASH.fullmatch(key) or not _HASH.fullmatch(checksum):
                raise ArtefactError(f"{artefact.path}: a damaged manifest: {key!r:.50} is no key of a compiled graph")
            address, there = artefact.blobs.get(key, (0, 0))
            if type(size) is not int or size <= 0 or there != size:
                raise ArtefactError(f"{artefact.path}: the compiled graph {key} has {there} bytes, not {size!r:.50}")
            blobs.append((key, checksum, address, size))
        return cls(tier, graphs, made_for, blobs)

    def final(self, here: dict[str, str]) -> bool:
        """Whether all graphs with constant weights seem to be there, so that no others need to serve before them."""
        return self.tier == 1 and len(self.blobs) >= self.graphs and not self.differences(here)

    def differences(self, here: dict[str, str]) -> list[str]:
        names = [*self.made_for, *(name for name in here if name not in self.made_for)]
        return [
            f"{name} {self.made_for.get(name) or 'unknown'} there, {here.get(name) or 'unknown'} here"
            for name in names
            if self.made_for.get(name) != here.get(name)
        ]

    def note(self, here: dict[str, str], report: dict[str, Any]) -> str | None:
        """Why graphs were not taken from the file; None: all were. `report`: the program's npu_report()."""
        missing = report["blocks"] - report["artefact_hits"]
        if not missing:
            return None
        refused, reasons = report["artefact_refused"], self.differences(here)
        if refused:
            reasons.append(f"{refused} were refused ({report['refused_reason']})")
        if self.tier != report["tier"]:
            reasons.append(f"the file has {_TIERS[self.tier]}, these are {_TIERS[report['tier']]}")
        elif len(self.blobs) < self.graphs:
            reasons.append(f"the file has {len(self.blobs)} of {self.graphs}")
        why = "; ".join(reasons) or "the file has others"
        return (
            f"{missing} of {report['blocks']} graphs are not the file's ({report['cache_hits']} from the cache, "
            f"{report['compiled']} compiled): {why}"
        )
