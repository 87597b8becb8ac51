"""The artefact file: a zip of stored (not compressed) members, read by mapping it into memory.

    manifest.json         format, versions, signature, and for each program the key of each constant
    program0.graph        the final graph as text, one a set of shapes
    program0.npuir        its instructions in order, for reading only
    weights.safetensors   constants and state, row major; its data begins at a multiple of 64 bytes
    npu/<key>.blob        graphs as a driver has compiled them for its NPU (blobs.py), if there were any; at pages

No code for this processor and nothing pickled. What is read is believed only as far as it is checked: here the
container, in loaded.py the manifest, in C (`_core.load`) graphs and the sizes of constants. What compiled graphs do on
the NPU cannot be checked, only that they are for this program and device. This file does without torch.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ArtefactError

FORMAT = 1
ALIGNMENT, PAGE = 64, 4096
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
_BLOB = re.compile(r"npu/([0-9a-f]{32})\.blob")
_MAX_TEXT = 1 << 30  # bytes of a manifest or graph
_CHUNK = 1 << 24
# what zipfile, json and mmap raise on files that are none (OSError: a place before the file's beginning)
_DAMAGE = (zipfile.BadZipFile, OSError, ValueError, KeyError, struct.error, NotImplementedError, RuntimeError, EOFError)

# our name -> (name in safetensors, numpy type of the same width)
DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("BOOL", "?"),
    "u8": ("U8", "u1"),
    "i8": ("I8", "i1"),
    "i16": ("I16", "<i2"),
    "i32": ("I32", "<i4"),
    "i64": ("I64", "<i8"),
    "f16": ("F16", "<f2"),
    "bf16": ("BF16", "<u2"),
    "f32": ("F32", "<f4"),
    "f64": ("F64", "<f8"),
    "c64": ("C64", "<c8"),
    "c128": ("F64", "<c16"),  # safetensors has no name for it: pairs of f64
}


@dataclass(frozen=True)
class Memory:
    """A tensor of `dtype` in memory: strides count elements. `owner` keeps it alive."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...]
    owner: Any = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def chunks(self) -> Iterator[bytes]:
        """Its elements in row-major order, copied piece by piece."""
        if self.nbytes == 0:
            return
        array = self.array()
        rows = array.reshape(1) if array.ndim == 0 else array
        step = max(1, _CHUNK // max(1, rows[0:1].nbytes))
        for first in range(0, len(rows), step):
            yield np.ascontiguousarray(rows[first : first + step]).tobytes()

    def array(self) -> np.ndarray[Any, Any]:
        """A view of the memory, which must outlive it."""
        size = itemsize(self.dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        interface = {"data": (self.address, True), "shape": (span * size,), "typestr": "|u1", "version": 3}
        flat = np.asarray(_Interface(interface)).view(DTYPES[self.dtype][1])
        return np.lib.stride_tricks.as_strided(flat, self.shape, [s * size for s in self.strides], writeable=False)


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def itemsize(dtype: str) -> int:
    return np.dtype(DTYPES[dtype][1]).itemsize


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str],
    manifest: dict[str, Any],
    texts: dict[str, str],
    tensors: dict[str, Memory],
    blobs: Callable[[Callable[[str, memoryview], None]], None] | None = None,
) -> None:
    """Writes an artefact; a file that is there is replaced when the new one is complete. OSError as from open().

    `blobs(put)` calls put(key, bytes) for each compiled graph, and may change the manifest, which is written after.
    """
    target = Path(path)
    if target.is_symlink():  # what it leads to is replaced, as open() would write that
        target = target.resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder to save into", str(target.parent))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file to save into", str(target))
    if target.exists() and not target.is_file():  # /dev/null would be gone
        raise OSError(errno.EINVAL, "no plain file, which saving would replace", str(target))
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, text in texts.items():
                archive.writestr(_entry(name), text)
            _write_weights(archive, file, tensors)
            if blobs is not None:
                blobs(lambda key, data: _write_blob(archive, file, key, data))
            archive.writestr(_entry(MANIFEST), json.dumps(manifest, indent=1))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same content gives the same file


def _aligned(file: Any, name: str, alignment: int) -> zipfile.ZipInfo:
    """A member whose data begins after its local header, whose extra field pads it to the alignment."""
    entry = _entry(name)
    start = file.tell() + 30 + len(name) + 20  # 20: the zip64 field that zipfile adds
    padding = -(start + 4) % alignment
    entry.extra = struct.pack("<HH", 0xFF01, padding) + b"\0" * padding
    return entry


def _write_blob(archive: zipfile.ZipFile, file: Any, key: str, data: memoryview) -> None:
    name = f"npu/{key}.blob"
    if name not in archive.NameToInfo:  # several programs may have one graph
        with archive.open(_aligned(file, name, PAGE), "w", force_zip64=True) as out:
            out.write(data)


def _write_weights(archive: zipfile.ZipFile, file: Any, tensors: dict[str, Memory]) -> None:
    """Big alignments first, so that each tensor lies at a multiple of its element's size with no holes between."""
    order = sorted(tensors, key=lambda key: (-min(ALIGNMENT, tensors[key].nbytes & -tensors[key].nbytes), key))
    entries: dict[str, Any] = {}
    at = 0
    for key in order:
        t = tensors[key]
        shape = [*t.shape, 2] if t.dtype == "c128" else list(t.shape)
        entries[key] = {"dtype": DTYPES[t.dtype][0], "shape": shape, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    with archive.open(_aligned(file, WEIGHTS, ALIGNMENT), "w", force_zip64=True) as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for key in order:
            for chunk in tensors[key].chunks():
                out.write(chunk)


# --- reading ----------------------------------------------------------------------------------------------------------


class Artefact:
    """A mapped artefact: `manifest`, `text(name)`, and in the file's memory `tensors` and `blobs`, which are (address,
    bytes) of compiled graphs by their keys. ArtefactError if damaged."""

    def __init__(self, path: str | os.PathLike[str], verify: bool = False) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            try:
                self._archive = _Members(file, self.path)
                if verify:
                    self._archive.verify()
                self.manifest = self._read_manifest(file)
                self._texts = {n: self._archive.read(file, n) for n in self._archive.names() if n.endswith(".graph")}
                start, size = self._archive.place(file, WEIGHTS)
                found = {match[1]: match[0] for match in map(_BLOB.fullmatch, self._archive.names()) if match}
                places = {key: self._archive.place(file, name) for key, name in found.items()}
                self._map = mmap.mmap(file.fileno(), 0, access=_access(self.manifest))
            except ArtefactError:
                raise
            except _DAMAGE as error:
                raise ArtefactError(f"{self.path}: not an artefact, or a damaged one: {error}") from None
        self._bytes = np.frombuffer(self._map, np.uint8)
        if start + size > len(self._bytes):
            raise ArtefactError(f"{self.path}: the file is cut off inside of the weights")
        self.tensors = self._read_header(start, size)
        self.blobs: dict[str, tuple[int, int]] = {}
        for key, (first, length) in places.items():
            if first + length > len(self._bytes):
                raise ArtefactError(f"{self.path}: the file is cut off inside of the compiled graph {key}")
            self.blobs[key] = self._bytes.ctypes.data + first, length

    def text(self, name: str) -> str:
        try:
            return self._texts[name].decode()
        except (KeyError, UnicodeDecodeError):
            raise ArtefactError(f"{self.path}: {name!r} is missing or no text") from None

    def data(self) -> bytes:
        """The whole file."""
        return self._map[:]

    def whole(self) -> memoryview:
        """The whole file, not copied."""
        return memoryview(self._map)

    def _read_manifest(self, file: Any) -> dict[str, Any]:
        manifest = json.loads(self._archive.read(file, MANIFEST))
        if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
            raise ArtefactError(f"{self.path}: its manifest has no format number")
        if manifest["format"] != FORMAT:
            newer = "; a newer Forge-UGC wrote it, update this one" if manifest["format"] > FORMAT else ""
            raise ArtefactError(f"{self.path}: format {manifest['format']}, this version reads {FORMAT}{newer}")
        return manifest

    def _read_header(self, start: int, size: int) -> dict[str, Memory]:
        """safetensors: header size, header, data. Each tensor must lie inside, whole and as long as its shape says."""
        what = f"{self.path}: damaged weights"
        length = int.from_bytes(self._bytes[start : start + 8].tobytes(), "little") if size >= 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_TEXT):
            raise ArtefactError(f"{what}: no header")
        try:
            header = json.loads(self._bytes[start + 8 : start + 8 + length].tobytes())
        except (ValueError, RecursionError):
            raise ArtefactError(f"{what}: the header is no JSON") from None
        if not isinstance(header, dict):
            raise ArtefactError(f"{what}: the header is no table")
        base, room = start + 8 + length, size - 8 - length
        names = {name: ours for ours, (name, _) in DTYPES.items() if ours != "c128"}
        tensors = {}
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            try:
                dtype, shape, (first, last) = names[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
                good = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, first, last)) and len(shape) <= 9
                good = good and first <= last <= room and last - first == math.prod(shape) * itemsize(dtype)
            except (KeyError, TypeError, ValueError):
                good = False
            if not good:
                raise ArtefactError(f"{what}: tensor {key[:100]!r} lies outside, or its size is not its shape's")
            address = self._bytes.ctypes.data + base + first
            strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            tensors[key] = Memory(dtype, shape, address, strides, self._bytes)
        return tensors


def _access(manifest: dict[str, Any]) -> int:
    """Operators of torch may write what they are given, whatever they say of themselves: then into a copy."""
    programs = manifest.get("programs")
    hosts = isinstance(programs, list) and any(isinstance(p, dict) and p.get("hosts") for p in programs)
    return mmap.ACCESS_COPY if hosts else mmap.ACCESS_READ


class _Members:
    """Stored members of a zip file, with their places."""

    def __init__(self, file: Any, path: str) -> None:
        self._zip = zipfile.ZipFile(file)
        self._path = path

    def names(self) -> list[str]:
        return self._zip.namelist()

    def _info(self, name: str) -> zipfile.ZipInfo:
        try:
            info = self._zip.getinfo(name)
        except KeyError:
            raise ArtefactError(f"{self._path}: it has no {name}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 0x1:
            raise ArtefactError(f"{self._path}: {name} is compressed or encrypted; artefacts are stored plainly")
        return info

    def read(self, file: Any, name: str) -> bytes:
        info = self._info(name)
        if info.file_size > min(_MAX_TEXT, os.fstat(file.fileno()).st_size):
            raise ArtefactError(f"{self._path}: {name} claims {info.file_size} bytes")
        return self._zip.read(info)

    def place(self, file: Any, name: str) -> tuple[int, int]:
        """Offset and size of a member's data in the file."""
        info = self._info(name)
        file.seek(info.header_offset)
        header = file.read(30)
        if len(header) != 30 or header[:4] != b"PK\3\4":
            raise ArtefactError(f"{self._path}: {name} is not where the directory says")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + name_bytes + extra_bytes, info.file_size

    def verify(self) -> None:
        bad = self._zip.testzip()
        if bad is not None:
            raise ArtefactError(f"{self._path}: the checksum of {bad} is wrong")
