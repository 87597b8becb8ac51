"""Builds C programs against the rooms of csrc/ below python/ and tool/. The flags are those of setup.py."""

from __future__ import annotations

import fcntl
import os
import subprocess
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
ISA = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=fast"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-ffp-contract=fast"],
}


def rooms_sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*.c") if p.relative_to(CSRC).parts[0] not in ("python", "tool", "softnpu"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _stale(target: Path, *sources: Path) -> bool:
    return not target.exists() or any(s.stat().st_mtime >= target.stat().st_mtime for s in sources)


def _newest_header() -> Path:
    return max((p for e in ("*.h", "*.def", "*.inc") for p in CSRC.rglob(e)), key=lambda p: p.stat().st_mtime)


def objects() -> dict[Path, Path]:
    """Compiles what is stale; source -> object."""
    header = _newest_header()
    made = {s: BUILD / s.relative_to(CSRC).with_suffix(".o") for s in rooms_sources()}

    def compile_one(item: tuple[Path, Path]) -> None:
        source, target = item
        if _stale(target, source, header, Path(__file__)):
            target.parent.mkdir(parents=True, exist_ok=True)
            isa = next((f for suffix, f in ISA.items() if source.stem.endswith(suffix)), ["-ffp-contract=off"])
            _run([CC, *FLAGS, *isa, "-c", str(source), "-o", str(target)])

    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        list(pool.map(compile_one, made.items()))
    return made


def archive() -> Path:
    made = list(objects().values())
    library = BUILD / "libforge.a"
    if _stale(library, *made):
        library.unlink(missing_ok=True)
        _run(["ar", "rcs", str(library), *map(str, made)])
    return library


def program(source: Path) -> Path:
    """Builds one C file with a main() against the rooms."""
    library, target = archive(), BUILD / source.stem
    if _stale(target, source, library, *source.parent.glob("*.h")):
        libraries = ["-lm", "-lpthread", "-ldl"]
        _run([CC, *FLAGS, "-ffp-contract=off", str(source), str(library), "-o", str(target), *libraries])
    return target
