"""The machine that the figures were measured on: what it is called and what it can do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROBE = Path(__file__).with_name("probe.c")
# (name, flags that the CPU must have, bytes of a vector, compiler options): the widest that it has is its peak
WIDTHS = (
    ("avx512", ("avx512f",), 64, ("-mavx512f", "-mfma", "-mprefer-vector-width=512")),
    ("avx2", ("avx2", "fma"), 32, ("-mavx2", "-mfma")),
    ("native", (), 16, ()),
)
SHOWN_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
PACKAGES = ("torch", "transformers", "openvino", "onnxruntime", "onnx", "onnxscript", "numpy")


def cpuinfo(text: str | None = None) -> tuple[str, set[str]]:
    """(model name, flags) of the first processor."""
    if text is None:
        path = Path("/proc/cpuinfo")
        text = path.read_text() if path.exists() else ""
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, set(fields.get("flags", "").split())


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot() -> str:
    """Names this boot of this machine: what was measured on another is not taken for it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node() or "unknown"


def describe(seconds: float = 0.15) -> dict[str, Any]:
    name, flags = cpuinfo()
    memory = _meminfo()
    return {
        "cpu": name,
        "cores": cores(),
        "isa": [flag for flag in SHOWN_FLAGS if flag in flags],
        "memory_gb": round(memory.get("MemTotal", 0) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {p: v for p in PACKAGES if (v := _version(p))},
        "date": time.strftime("%Y-%m-%d"),
        "peak": peaks(seconds),
        "load": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _meminfo() -> dict[str, int]:
    path = Path("/proc/meminfo")
    rows = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def available_gb() -> float:
    """Memory that a new process may take."""
    return _meminfo().get("MemAvailable", 8 * 2**20) / 2**20


# --- the probe -------------------------------------------------------------------------------------------------------


def peaks(seconds: float = 0.15) -> dict[str, Any]:
    """Measured: GFLOP/s of fused multiply-adds on one core and on all at once, for each vector width that the CPU has,
    and GB/s of reading memory. Without a C compiler a matrix product stands in for the peak, and `how` says so."""
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return _numpy_peaks()
    _, flags = cpuinfo()
    found: dict[str, Any] = {"how": "probe.c", "gflops": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, needs, width, options in WIDTHS:
            if not set(needs) <= flags or (name == "native" and found["gflops"]):
                continue
            library = Path(folder) / f"{name}.so"
            command = [compiler, "-O3", "-ffp-contract=fast", f"-DBYTES={width}", *options]
            done = subprocess.run(
                [*command, "-shared", "-fPIC", str(PROBE), "-o", str(library)], capture_output=True, text=True
            )
            if done.returncode != 0:
                continue
            probe = ctypes.CDLL(str(library))
            probe.fma_rate.argtypes, probe.fma_rate.restype = [ctypes.c_long], ctypes.c_double
            probe.read_rate.argtypes, probe.read_rate.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_double
            found["gflops"][name] = _fma_rates(probe, width, seconds)
            if "gbytes" not in found:
                found["gbytes"] = _read_rates(probe)
    return found if found["gflops"] else _numpy_peaks()


def _together(measure: Callable[[], float], repeats: int = 3) -> float:
    """The sum of the rates of all cores at once; the best of several."""
    with ThreadPoolExecutor(cores()) as pool:
        return max(sum(pool.map(lambda _: measure(), range(cores()))) for _ in range(repeats))


def _fma_rates(probe: Any, width: int, seconds: float) -> dict[str, float]:
    rounds = int(seconds * probe.fma_rate(100_000) * 1e9 / (2 * 12 * width / 4))
    alone = max(probe.fma_rate(rounds) for _ in range(5))
    return {"core": round(alone, 1), "all": round(_together(lambda: probe.fma_rate(rounds)), 1)}


def _read_rates(probe: Any, floats: int = 64 * 2**20) -> dict[str, float]:
    import numpy as np

    data = np.ones(floats, dtype=np.float32)
    address = data.ctypes.data
    alone = max(probe.read_rate(address, floats) for _ in range(3))
    return {"core": round(alone, 1), "all": round(_together(lambda: probe.read_rate(address, floats)), 1)}


def _numpy_peaks() -> dict[str, Any]:
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        took.append(time.perf_counter() - start)
    rate = 2 * 1024**3 / min(took) * 1e-9
    data = np.ones(64 * 2**20, dtype=np.float32)
    start = time.perf_counter()
    data.sum()
    read = data.nbytes / (time.perf_counter() - start) * 1e-9
    return {
        "how": "numpy's matrix product on its threads: no C compiler, so the peak is a lower bound",
        "gflops": {"numpy": {"core": round(rate / cores(), 1), "all": round(rate, 1)}},
        "gbytes": {"core": round(read, 1), "all": round(read, 1)},
    }


def peak_gflops(peak: dict[str, Any], threads: int) -> float:
    """The widest vectors' rate on `threads` cores."""
    best = max(peak["gflops"].values(), key=lambda rate: rate["core"])
    return best["core"] * threads if threads < cores() else best["all"]
