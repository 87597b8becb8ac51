"""The NPU: which device runs a program and why, the open device, and graphs that are compiled in the background."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import operator
import os
import queue
import re
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from ._core import NpuError
from .artefact import itemsize
from .errors import NpuWarning

DEFAULT_TARGET = "npu4000"
# What products on the host compute with where it is not the model's own dtypes, in words.
HOST_PRECISIONS = {
    "bf16": "bf16 weights and activations in products, sums in f32",
    "w8": "int8 weights, a scale for each output",
    "w4": "int4 weights in groups of 128",
    "w4g64": "int4 weights in groups of 64",
    "w4g32": "int4 weights in groups of 32",
}
NPU_PRECISIONS = ("fp16", "w8a16", "w4a16")
PRECISIONS = ("auto", "fp32", *HOST_PRECISIONS, *NPU_PRECISIONS)
_OPTIONS = ("types", "border", "config", "cache")


@dataclass(frozen=True)
class NpuSettings:
    """How instructions on the NPU run. `mode`: "none" (a plan only), "emulate" or "dispatch"."""

    mode: str
    precision: str  # "fp16", "w8a16", "w4a16"
    required: bool  # device="npu": an error, where device="auto" goes to the host
    fold: str | bool
    f32_types: bool = False
    f32_border: bool = False
    config: str = ""
    cache_dir: str | None = None

    def arguments(self) -> dict[str, Any]:
        """For `_core.compile`; opens the device if there is something to dispatch."""
        return {
            "npu_mode": self.mode,
            "device": device() if self.mode == "dispatch" else None,
            "precision": self.precision,
            "fold": self.fold is not False,
            "f32_types": self.f32_types,
            "f32_border": self.f32_border,
            "config": self.config,
            "cache_dir": self.cache_dir,
        }

    def options(self) -> dict[str, Any]:
        """As `npu_options` of compile()."""
        return {
            "types": "f32" if self.f32_types else "f16",
            "border": "f32" if self.f32_border else "f16",
            "config": dict(re.findall(r'(\S+?)="([^"]*)"', self.config)),
            "cache": self.cache_dir is not None,
        }


@dataclass(frozen=True)
class Choice:
    """What `device=` and `precision=` come to: `device` as shown, the `target` that is planned for, and why."""

    device: str
    target: str
    precision: str
    reason: str
    npu: NpuSettings | None

    def request(self) -> dict[str, Any]:
        """Arguments of compile() or load() that come to the same."""
        if self.npu is None:
            return {"device": self.device, "precision": self.precision}
        named = self.npu.required or self.npu.mode != "dispatch"
        return {
            "device": self.device if named else "auto",
            "precision": self.precision,
            "fold": self.npu.fold,
            "npu_options": self.npu.options(),
        }


def host_precision(choice: Choice) -> str:
    """As `_core.compile` wants it: what products on the host compute with."""
    return choice.precision if choice.npu is None else "fp32"


def threads(number: Any) -> int:
    """`num_threads` of the host, checked."""
    try:
        count = operator.index(number)
    except TypeError:
        raise TypeError(f"num_threads: expected a whole number, given {number!r}") from None
    if not 1 <= count <= 1024:
        raise ValueError(f"num_threads must be from 1 to 1024, given {count}")
    return count


def has_bf16() -> bool:
    """Whether the processor has a unit for products of bf16."""
    return "avx512bf16" in _core.cpu_features()


def parse_device(text: str) -> tuple[str, str, str]:
    """("auto", "cpu" or "npu"; "plan", "emulate" or ""; a target or ""). ValueError names what there is."""
    found = re.fullmatch(r"(auto|cpu|npu)|(npu):(plan|emulate)(?::(\w+))?", text)
    if found is None:
        raise ValueError(
            f"unknown device {text!r}; there are auto, cpu, npu, npu:plan and npu:emulate (the last two also with a "
            "target, as in npu:plan:npu4000)"
        )
    plain, kind, mode, target = found.groups()
    return plain or kind, mode or "", target or ""


HOST = Choice("cpu", "cpu", "fp32", 'device="cpu" was asked for', None)


def choose(
    wanted: str, precision: str, fold: str | bool, options: Mapping[str, Any] | None, *, kept: bool = False
) -> Choice:
    """Raises ValueError or TypeError for what is no choice, NpuError where device="npu" has no NPU. `kept`: a file's
    weights are in that precision, so that there is no other."""
    if precision == "bf16" and not kept and not has_bf16():
        raise ValueError(
            'precision="bf16": this processor has no AVX512-BF16, the unit that the products would need; use '
            'precision="w8", or compile model.bfloat16(), whose weights are read as bf16 and summed in f32'
        )
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known are {', '.join(PRECISIONS)}")
    if fold not in ("auto", True, False):
        raise ValueError(f'fold: expected "auto", True or False, given {fold!r}')
    settings = _settings(precision, fold, options)
    kind, mode, named = parse_device(wanted)
    if kind == "cpu":
        if precision in HOST_PRECISIONS:
            return _host(precision)
        if precision not in ("auto", "fp32"):
            other = f', or in "{precision[:2]}"' if precision[:2] in HOST_PRECISIONS else ""
            raise ValueError(
                f"precision={precision!r} is the NPU's: device=\"cpu\" computes in the model's own dtypes{other}"
            )
        return HOST
    if kind == "auto":
        return _auto(precision, settings)
    if precision in HOST_PRECISIONS:
        other = "fp16" if precision == "bf16" else f"{precision[:2]}a16"
        raise ValueError(f'precision={precision!r} is the host\'s; the NPU has "{other}" (device={wanted!r} was given)')
    if precision == "fp32":
        raise ValueError(f'precision="fp32" keeps to the host, which device={wanted!r} forbids; use device="cpu"')
    if not mode:
        return _dispatched(device().facts, {**settings, "required": True})
    known = [t for t in _core.targets() if t.startswith("npu")]
    target = named or DEFAULT_TARGET
    if target not in known:
        raise ValueError(f"unknown NPU target {target!r}; known are {', '.join(known)}")
    npu = NpuSettings(**{**settings, "mode": "emulate" if mode == "emulate" else "none", "required": True})
    return Choice(f"npu:{mode}:{target}", target, npu.precision, f'device="npu:{mode}" was asked for', npu)


def _host(precision: str) -> Choice:
    reason = f'precision="{precision}" is the host\'s: {HOST_PRECISIONS[precision]}'
    return Choice("cpu", "cpu", precision, reason, None)


def _auto(precision: str, settings: dict[str, Any]) -> Choice:
    if precision in HOST_PRECISIONS:
        return _host(precision)
    if precision == "fp32":
        return Choice("cpu", "cpu", "fp32", 'precision="fp32" keeps to the host', None)
    if not _core.npu_likely():
        return Choice("cpu", "cpu", "fp32", "there is no NPU (no device node in /dev/accel)", None)
    try:
        return _dispatched(device().facts, settings)
    except NpuError as error:
        return Choice("cpu", "cpu", "fp32", f"no usable NPU ({error.reason}): {first_line(error)}", None)


def _check_environment() -> None:
    """ValueError for what C would not understand, and take its default for."""
    for name, pattern, what in (
        ("FORGE_CACHE_BYTES", r"\d{1,19}", "a number of bytes"),
        ("FORGE_NPU_TIMEOUT_S", r"(?=.*[1-9])(\d+\.?\d*|\.\d+)", "a number of seconds above 0"),
    ):
        given = os.environ.get(name, "")
        if given and not re.fullmatch(pattern, given, re.ASCII):
            raise ValueError(f"the environment's {name} must be {what}, in digits; it is {given!r}")


def _dispatched(facts: dict[str, Any], settings: dict[str, Any]) -> Choice:
    _check_environment()
    npu = NpuSettings(**settings)
    name = facts["device_name"] or "an NPU"
    if facts["target"] not in name:
        name += f" ({facts['target']})"
    driver = f" with driver {facts['driver_version']}" if facts["driver_version"] else ""
    reason = f"{name}{driver}, in {npu.precision}"
    return Choice("npu", facts["target"], npu.precision, reason, npu)


def _settings(precision: str, fold: str | bool, options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"npu_options: expected a dict, given {type(options).__name__}")
    given = dict(options or {})
    unknown = [key for key in given if key not in _OPTIONS]
    if unknown:
        raise ValueError(f"npu_options: unknown key {unknown[0]!r}; known are {', '.join(_OPTIONS)}")
    for key in ("types", "border"):
        if given.get(key, "f16") not in ("f16", "f32"):
            raise ValueError(f'npu_options: {key} is "f16" or "f32", given {given[key]!r}')
    if not isinstance(given.get("cache", True), bool):
        raise TypeError(f"npu_options: cache is True or False, given {given['cache']!r}")
    return {
        "mode": "dispatch",
        "precision": "fp16" if precision in ("auto", "fp32") else precision,
        "required": False,
        "fold": fold,
        "f32_types": given.get("types") == "f32",
        "f32_border": given.get("border") == "f32",
        "config": _config(given.get("config", {})),
        "cache_dir": str(cache_dir()) if given.get("cache", True) else None,
    }


def _config(options: Mapping[str, Any]) -> str:
    if not isinstance(options, Mapping):
        raise TypeError(f"npu_options: config is a dict of the graph compiler's options, given {options!r}")
    for key, value in options.items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z][\w-]*", key):
            raise ValueError(f"npu_options: config: {key!r} is no name of an option")
        if '"' in str(value) or "\n" in str(value):
            raise ValueError(f"npu_options: config: {key} may not hold quotes or line ends, given {value!r}")
    return " ".join(f'{key}="{value}"' for key, value in options.items())


def cache_dir() -> Path:
    """Where compiled graphs are kept: FORGE_CACHE_DIR, else forge-ugc in the user's cache directory."""
    given = os.environ.get("FORGE_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge-ugc"


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# --- the device -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_device: _core.NpuDevice | None = None
_device_of: tuple[str | None, ...] = ()  # the loader's settings that it was opened with
_opened: set[tuple[str | None, ...]] = set()  # the settings that were ever used in this process
_inherited: set[tuple[str | None, ...]] = set()  # those of the processes that it was forked from


def device() -> _core.NpuDevice:
    """The NPU, opened once a process (once a loader). Raises NpuError; the next call then tries again."""
    global _device, _device_of
    wanted = tuple(os.environ.get(name) for name in ("FORGE_ZE_LOADER", "ZE_ENABLE_ALT_DRIVERS"))
    with _lock:
        if wanted in _inherited:
            error = NpuError(
                "the NPU was opened before this process was forked, and its driver does not survive that; start the "
                "process with the `spawn` method, or fork before anything is compiled for the NPU"
            )
            error.reason = "failed"
            raise error
        if _device is None or _device_of != wanted:
            _device, _device_of = None, wanted
            _device = _core.NpuDevice.open()
            _opened.add(wanted)
        return _device


def forget(old: _core.NpuDevice | None = None) -> None:
    """Opens the NPU anew next time, if it still is `old` (None: whichever it is). Programs keep the one they have."""
    global _device
    with _lock:
        if old is None or _device is old:
            _device = None


# --- in the background ------------------------------------------------------------------------------------------------


class Upgrade:
    """A program's second tier: graphs with constant weights, compiled in the background."""

    def __init__(self, owner: Any) -> None:
        """`owner` has the `program`; where it is gone before its turn, nothing is compiled."""
        self.owner = weakref.ref(owner)
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._process = os.getpid()

    def wait(self, timeout: float | None) -> bool:
        """Whether it has ended; in a child of fork(), which has no thread to do it, it always has."""
        return os.getpid() != self._process or self.ended.wait(timeout)

    def run(self, worker: _Worker) -> None:
        owner = self.owner()
        program = owner.program if owner is not None else None
        del owner
        if program is None:
            return
        with worker.compiling(program):
            try:
                program.upgrade()
            except Exception as error:  # the folded graphs go on serving; the report and wait() say why
                self.error = error


class _Worker:
    """One thread for all programs of the process. At exit it finishes the graph that it is compiling, no more: a
    driver that is torn down while it compiles may crash."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Upgrade | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._program: Any = None
        self._stopped = False

    def submit(self, upgrade: Upgrade) -> Upgrade:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="forge-ugc-npu", daemon=True)
                self._thread.start()
                atexit.register(self.stop)
        self._queue.put(upgrade)
        return upgrade

    def idle(self) -> bool:
        """Whether there was never anything to do, or never will be: the process ends."""
        return self._thread is None or self._stopped

    @contextlib.contextmanager
    def compiling(self, program: Any) -> Any:
        with self._lock:
            self._program = program
            if self._stopped:
                program.stop_upgrade()
        try:
            yield
        finally:
            with self._lock:
                self._program = None

    def _work(self) -> None:
        while (upgrade := self._queue.get()) is not None:
            if not self._stopped:
                upgrade.run(self)
            upgrade.ended.set()
            del upgrade

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._program is not None:
                self._program.stop_upgrade()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()


_worker = _Worker()


def _after_fork() -> None:
    """Neither the thread nor the device survives in a child."""
    global _worker, _device, _lock
    _worker, _device, _lock = _Worker(), None, threading.Lock()
    _inherited.update(_opened)


os.register_at_fork(after_in_child=_after_fork)


def settle(timeout: float | None = None) -> bool:
    """Waits until what is compiled in the background now has ended; False: it takes longer than `timeout` seconds."""
    return _worker.idle() or _worker.submit(Upgrade(_Worker())).wait(timeout)  # the owner is gone: nothing to compile


def upgrade_later(owner: Any) -> Upgrade:
    """Compiles the second tier of `owner.program` in the background."""
    return _worker.submit(Upgrade(owner))


# --- programs that may leave the NPU ----------------------------------------------------------------------------------


class Dispatched:
    """A program for `wanted`. A lost NPU is opened again once; other failures send the program to the host, unless the
    NPU is required. `choice` is what it was compiled for at last."""

    program: Any
    choice: Choice
    device_in_use: _core.NpuDevice | None  # that `program` runs on
    _replaced: bool  # `program` is not the first, by which callers know what memory may be shared

    def __init__(self, wanted: Choice) -> None:
        self.upgrade: Upgrade | None = None
        self._wanted = wanted
        self._guard = threading.Lock()
        try:
            self._use(wanted)
        except NpuError as error:
            self._use_host(error)

    def build(self, choice: Choice, settings: dict[str, Any]) -> Any:
        """The core's program. `settings`: those of the NPU."""
        raise NotImplementedError

    def executable(self) -> bool:
        return self._wanted.npu is None or self._wanted.npu.mode != "none"

    def run(self, *arguments: Any) -> Any:
        """`program.run`. Thread-safe."""
        for attempt in range(3):
            program = self.program
            try:
                return self._run(program, *arguments)
            except NpuError as error:
                self._recover(program, error, attempt)
        return self._run(self.program, *arguments)

    def _run(self, program: Any, inputs: Sequence[Any], outputs: Sequence[int], *rest: Any) -> Any:
        """Outputs may be in the memory of inputs as the first program allows it. One that came in its place, with an
        order of its own, may not: then it reads copies."""
        if not self._replaced:
            return program.run(inputs, outputs, *rest)
        given, copies = list(inputs), []
        for number, (address, (dtype, shape)) in enumerate(zip(inputs, program.types()[0], strict=True)):
            shared = [k for k, output in enumerate(outputs) if dtype != "object" and output and output == address]
            if not all(program.may_share(number, k) for k in shared):
                copies.append(np.empty(math.prod(shape) * itemsize(dtype), np.uint8))
                ctypes.memmove(copies[-1].ctypes.data, address, copies[-1].nbytes)
                given[number] = copies[-1].ctypes.data
        return program.run(given, outputs, *rest)

    def _use(self, choice: Choice) -> None:
        """Compiles for `choice`, and sees to the second tier."""
        settings = choice.npu
        dispatched = settings is not None and settings.mode == "dispatch" and self.executable()
        if settings is None:
            arguments: dict[str, Any] = {}
        else:
            arguments = settings.arguments() if self.executable() else {"npu_mode": "none"}
        self.device_in_use = arguments.get("device")
        program = self.build(choice, arguments)
        self._replaced = hasattr(self, "program")
        self.program = program
        self.choice = choice
        if settings is None or not dispatched:
            return
        report = self.program.npu_report()
        if not report["segments"]:
            self.choice = replace(choice, reason=f"{choice.reason}, but nothing of the model is placed on it")
            if settings.required:
                warnings.warn('device="npu": nothing of the model is placed on the NPU', NpuWarning, stacklevel=2)
        elif settings.fold == "auto" and report["tier"] == 0:
            self.upgrade = upgrade_later(self)

    def _use_host(self, error: NpuError) -> None:
        if self._wanted.npu is None or self._wanted.npu.required:
            raise error
        reason = f"the NPU failed ({error.reason}): {first_line(error)}"
        warnings.warn(f"{reason}; the model runs on the host", NpuWarning, stacklevel=2)
        self.upgrade = None
        self._use(replace(HOST, reason=reason))

    def _recover(self, failed: Any, error: NpuError, attempt: int) -> None:
        with self._guard:
            if self.program is not failed:  # another thread has been here
                return
            if error.reason == "device-lost" and attempt == 0:
                forget(self.device_in_use)
                try:
                    return self._use(self._wanted)
                except NpuError as again:
                    error = again
            self._use_host(error)
