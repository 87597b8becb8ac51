"""Artefacts taken apart, put together again, and damaged."""

from __future__ import annotations

import random
import struct
import zipfile
from pathlib import Path
from typing import Any

from forge_ugc.artefact import ALIGNMENT, WEIGHTS


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = compression
            if name == WEIGHTS and archive.fp is not None:  # aligned, as the writer does
                padding = -(archive.fp.tell() + 34 + len(name)) % ALIGNMENT
                entry.extra = struct.pack("<HH", 0xFF01, padding) + b"\0" * padding
            archive.writestr(entry, data)
    return path


def hostile_manifest(manifest: Any, rng: random.Random) -> Any:
    """One place of the manifest replaced by something else."""
    values = [None, -1, 1 << 70, 2.5, "x", [], {}, {"leaf": 99}, {"state": "s"}, [["a", {"leaf": 0}]], True]
    at, key = manifest, rng.choice(list(manifest))
    while isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.8:
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    if rng.random() < 0.2 and isinstance(at, dict):
        del at[key]
    else:
        at[key] = rng.choice(values)
    return manifest


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out))
        kind = rng.random()
        if kind < 0.5:
            out[at] = rng.choice(b'0123456789[],{}=%-"x \xff')
        elif kind < 0.7:
            del out[at : at + rng.randrange(1, 9)]
        elif kind < 0.9:
            out[at:at] = out[rng.randrange(len(out)) :][: rng.randrange(1, 30)]
        else:
            out[at:at] = str(rng.choice((0, 1, 7, 1 << 31, 1 << 40, 1 << 63))).encode()
        if not out:
            return b""
    return bytes(out)
