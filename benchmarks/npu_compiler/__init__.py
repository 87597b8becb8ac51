"""Intel's NPU compiler, offline: is an IR accepted, how long does it compile, what does the compiler expect of it.

    install()                                        # once: wine, mingw and three DLLs; about 50 s
    result = compile_ir("block.xml", "NPU4000", estimate=True)
    result.ok, result.seconds, result.estimate.latency_us

No NPU is needed, and nothing runs on one: an estimate is the compiler's own cost model. Several processes and threads
may compile at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = ("NPU3720", "NPU4000", "NPU5010")
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Estimate:
    """What the compiler's cost model says. Durations of the engines overlap: latency is less than their sum.

    Tasks that the model has no figure for count as 0 ns: `latency_us` is a lower bound then, and two models compare
    only where `zero_cost_tasks` (how many) and `unmodelled_shave_ops` (which) are the same.
    """

    latency_us: float
    dma_us: float
    dpu_us: float
    shave_us: float
    idle_us: float
    zero_cost_tasks: int
    unmodelled_shave_ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """`ok` False: `error` is the compiler's own log. `seconds` is the compiler's wall clock, without starting wine."""

    ok: bool
    target: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    blob_bytes: int = 0
    peak_mb: int = 0
    error: str | None = None
    estimate: Estimate | None = None
    log: str = field(default="", repr=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the log."""
        return {key: value for key, value in asdict(self).items() if key != "log"}


class NotInstalled(RuntimeError):
    """The compiler isn't there; the text says how to get it."""


def home() -> Path:
    """Where the kit is installed: NPUC_HOME, else npuc in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("NPUC_HOME") or cache / "npuc").resolve()


def available() -> bool:
    """Has `install` (setup.sh) been run to its end?"""
    return (home() / "wine.path").is_file()


def install() -> None:
    """Runs setup.sh. RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        ["bash", str(HERE / "setup.sh")],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise RuntimeError(f"setup.sh of Intel's NPU compiler: exit status {done.returncode}\n{done.stdout[-2000:]}")


def compile_ir(
    xml: str | os.PathLike[str],
    target: str = "NPU4000",
    estimate: bool = False,
    config: str = "",
    blob: str | os.PathLike[str] | None = None,
    *,
    mode_params: str = "",
    trace: str | os.PathLike[str] | None = None,
    timeout: float = 1800,
) -> Result:
    """Compiles `xml` with the .bin beside it (a model without weights needs none) for `target`.

    `config`: more options, 'KEY="VALUE" ...'. `mode_params`: words for NPU_COMPILATION_MODE_PARAMS. `blob`: where to
    write the compiled graph. `trace`: where to write the compiler's schedule, a Chrome trace; implies `estimate`.
    A refusal is a Result that isn't `ok`; NotInstalled, RuntimeError (the compiler didn't run) and FileNotFoundError
    are raised.
    """
    if not available():
        raise NotInstalled(f"Intel's NPU compiler isn't installed in {home()}: run {HERE / 'setup.sh'}")
    xml = Path(xml).resolve(strict=True)
    estimate = estimate or trace is not None
    if estimate:
        config = f'LOG_LEVEL="LOG_INFO" {config}'
        mode_params = f"enable-schedule-trace=true {mode_params}"
    if mode_params.strip():
        config = f'{config} NPU_COMPILATION_MODE_PARAMS="{mode_params.strip()}"'
    # The compiler writes the schedule into the current folder, so each run has one. Z: is the root of the file system.
    with tempfile.TemporaryDirectory(prefix="npuc-") as tmp:
        words = [f"platform={target}", f"config={config}", "json=result.json"]
        if not xml.with_suffix(".bin").exists():
            words.append("bin=none")
        if blob is not None:
            words.append(f"out=Z:{Path(blob).resolve()}")
        loader = home() / "dll" / "openvino_intel_npu_compiler_loader.dll"
        wine = (home() / "wine.path").read_text().strip()
        prefix = {"WINEPREFIX": str(home() / "prefix"), "WINEARCH": "win64"}
        with open(f"{tmp}/log.txt", "wb") as log_file:
            try:
                status = subprocess.run(
                    [wine, f"Z:{home() / 'npu_compile.exe'}", f"Z:{loader}", f"Z:{xml}", *words],
                    cwd=tmp,
                    env={"WINEDEBUG": "-all", **os.environ, **prefix},
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                return Result(False, target, seconds=timeout, error=f"no answer within {timeout:.0f} s")
        log = Path(tmp, "log.txt").read_text(errors="replace")
        try:
            found = json.loads(Path(tmp, "result.json").read_text(errors="replace"))
        except (OSError, ValueError):
            raise RuntimeError(f"the NPU compiler did not run: exit status {status}\n{log[-2000:]}") from None
        if trace is not None and found["ok"]:
            shutil.copyfile(f"{tmp}/compileTimeScheduleTrace.json", trace)
    kept = {key: found[key] for key in ("ok", "seconds", "cpu_seconds", "blob_bytes", "peak_mb", "error")}
    return Result(target=target, **kept, estimate=_estimate(log) if estimate and found["ok"] else None, log=log)


def _estimate(log: str) -> Estimate:
    def number(pattern: str) -> float:
        match = re.search(pattern, log)
        if match is None:
            raise RuntimeError(f"no {pattern!r} in the compiler's log; its end:\n{log[-2000:]}")
        return float(match.group(1))

    def us(what: str) -> float:
        return number(rf" - {what} \[ns\]: (\d+)") / 1e3

    free = set(re.findall(r"Task (.*?)(?:/variant_\d+)? has duration 0 ns", log)) - {"start_barrier_sync_dma"}
    unmodelled = re.search(r"SHAVE operations are unsupported by VPUNN.*?: \[(.*?)\]", log)
    return Estimate(
        latency_us=number(r"Estimated inference latency: ([\d.]+) us"),
        dma_us=us("DMA duration"),
        dpu_us=us("DPU duration"),
        shave_us=us("SW duration"),
        idle_us=us("total idle"),
        zero_cost_tasks=len(free),
        unmodelled_shave_ops=tuple(sorted(unmodelled.group(1).split(", "))) if unmodelled else (),
    )
