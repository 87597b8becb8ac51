"""Builds C programs against the rooms of csrc/ below python/ and tool/. The flags are those of setup.py."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SANITIZE = os.environ.get("FORGE_SANITIZE") == "1"
BUILD = ROOT / "build" / ("c-tests-sanitize" if SANITIZE else "c-tests")
CC = os.environ.get("CC", "gcc")

FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-pthread", f"-I{CSRC}"]
if SANITIZE:
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
else:
    FLAGS += ["-O2", "-g"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-ffp-contract=fast"]
ISA = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=fast"],
    "_avx512": AVX512,
    "_avx512bf16": [*AVX512, "-mavx512bf16"],
}


def rooms_sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*.c") if p.relative_to(CSRC).parts[0] not in ("python", "tool", "softnpu"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _stale(target: Path, *sources: Path) -> bool:
    if not target.exists():
        return True
    made = target.stat().st_mtime
    return any(not s.exists() or s.stat().st_mtime >= made for s in sources)


def _included(target: Path) -> list[Path]:
    """What the compiler read to make `target`, from the list that it left beside it."""
    listed = target.with_suffix(".d")
    if not listed.exists():
        return []
    return [Path(p) for p in listed.read_text().replace("\\\n", " ").split(":", 1)[1].split()]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Tests may run in several processes: one of them builds."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_object(source: Path, target: Path, *more: str) -> None:
    isa = next((f for suffix, f in ISA.items() if source.stem.endswith(suffix)), ["-ffp-contract=off"])
    _run([CC, *FLAGS, *isa, *more, "-c", str(source), "-o", str(target)])


def _compile_rooms() -> dict[Path, Path]:
    made = {s: BUILD / s.relative_to(CSRC).with_suffix(".o") for s in rooms_sources()}

    def compile_one(item: tuple[Path, Path]) -> None:
        source, target = item
        if _stale(target, source, Path(__file__), *_included(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            compile_object(source, target, "-MMD")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, made.items()))
    return made


def _archive() -> Path:
    made = list(_compile_rooms().values())
    library, listing = BUILD / "libforge.a", BUILD / "libforge.list"
    names = "\n".join(map(str, made))
    if _stale(library, *made) or not listing.exists() or listing.read_text() != names:
        library.unlink(missing_ok=True)
        _run(["ar", "qcs", str(library), *map(str, made)])  # q: rooms may have files of the same name
        listing.write_text(names)
    return library


def objects() -> dict[Path, Path]:
    """Compiles what is stale; source -> object."""
    with _alone():
        return _compile_rooms()


def program(source: Path) -> Path:
    """Builds one C file with a main() against the rooms."""
    target = BUILD / source.stem
    with _alone():
        library = _archive()
        if _stale(target, source, library, *source.parent.glob("*.h")):
            fresh = target.with_suffix(".new")  # the old one may be running
            libraries = ["-lm", "-lpthread", "-ldl"]
            _run([CC, *FLAGS, "-ffp-contract=off", str(source), str(library), "-o", str(fresh), *libraries])
            fresh.replace(target)
    return target
