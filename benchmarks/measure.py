"""Clocks, memory and the statistics of calls."""

from __future__ import annotations

import ctypes
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
PR_SET_PDEATHSIG = 1
RESET_PEAK = "5"  # to clear_refs: VmHWM starts again from the present size


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation, as numpy's."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Latency:
    """Of calls, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ms = [s * 1e3 for s in seconds]
        p50, p90, p99 = (percentile(ms, share) for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ms), p50, p90, p99, len(ms))

    @property
    def tail(self) -> float:
        return self.p99 / self.p50


@dataclass(frozen=True)
class Ratio:
    """Of two systems that ran in turn: the median over the turns, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio:
        each = [statistics.median(a) / statistics.median(b) for a, b in zip(above, below, strict=True)]
        return cls(*(percentile(each, share) for share in (0.5, 0.25, 0.75)))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@contextmanager
def phase(phases: dict[str, float], name: str) -> Any:
    """Adds the milliseconds of its block to `phases[name]`."""
    start = time.perf_counter()
    yield
    phases[name] = phases.get(name, 0.0) + (time.perf_counter() - start) * 1e3


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def end_with_parent() -> None:
    """The benchmark may be stopped while this process works for minutes: then it is not to go on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def resident_bytes() -> int:
    return _status("VmRSS")


class PeakMemory:
    """The most resident memory since `start()`, above what there was then."""

    def start(self) -> None:
        self.exact = True
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            self.exact = False  # an earlier, higher peak may hide this one's
        self.before = resident_bytes()

    def above(self) -> int:
        return max(0, _status("VmHWM") - self.before)


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
