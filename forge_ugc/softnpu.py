"""An NPU in software, for machines without one: see `forge_ugc.testing.software_npu`.

The device is a Level Zero driver of ours (its C sources are in csrc/softnpu, or beside this file in an installed
package), built with the system's C compiler at first use and loaded by the distribution's Level Zero loader. Compiled
graphs run on OpenVINO's CPU plugin in f32.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

RESULTS = {
    "device-lost": 0x70000001,
    "out-of-host-memory": 0x70000002,
    "out-of-device-memory": 0x70000003,
    "uninitialized": 0x78000001,
    "unsupported-version": 0x78000002,
    "unsupported-feature": 0x78000003,
    "invalid-argument": 0x78000004,
    "invalid-native-binary": 0x7800000F,
    "unknown": 0x7FFFFFFE,
}
"""Names that `SoftwareNpu.fail` takes for results of Level Zero."""

FOR_EVER = 0xFFFFFFFF

_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]


def _sources() -> list[Path]:
    here = Path(__file__).resolve().parent
    for folder in (here / "_softnpu", here.parent / "csrc" / "softnpu"):
        if folder.is_dir():
            return sorted(f for f in folder.iterdir() if f.suffix in (".c", ".h", ".def"))
    raise RuntimeError(f"the software NPU's sources are missing beside {here}")


def _cache_dir() -> Path:
    chosen = os.environ.get("FORGE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge-ugc"


def find_compiler() -> str:
    """The system's C compiler. RuntimeError: there is none."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if not compiler:
        raise RuntimeError("the software NPU needs a C compiler: apt-get install gcc libc6-dev")
    return compiler


def build_driver() -> Path:
    """The driver's shared library, built unless the cache has it. RuntimeError: no C compiler, or it failed."""
    compiler = find_compiler()
    sources = _sources()
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode() + version)
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = _cache_dir() / "softnpu"
    library = folder / f"libsoftnpu-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as private:
        made = Path(private) / "libsoftnpu.so"
        command = [compiler, *_FLAGS, *[str(s) for s in sources if s.suffix == ".c"], "-o", str(made), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the software NPU did not build: {' '.join(command)}\n{done.stderr}")
        made.replace(library)  # whole, also when several processes build at once
    return library


def find_loader() -> Path:
    """The distribution's Level Zero loader. RuntimeError: it is not installed."""
    chosen = os.environ.get("FORGE_ZE_LOADER")
    if chosen and Path(chosen).exists():
        return Path(chosen).resolve()
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/local/lib"]
    folders += ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
    for folder in folders:
        found = Path(folder or "/nonexistent") / "libze_loader.so.1"
        if found.exists():
            return found.resolve()
    raise RuntimeError(
        "libze_loader.so.1, the Level Zero loader, is not installed; on Debian: apt-get install libze1, on Ubuntu: "
        "apt-get install level-zero (the PyPI package level-zero is something unrelated)"
    )


def find_openvino() -> Path:
    """OpenVINO's C library. RuntimeError: the package is not installed."""
    spec = importlib.util.find_spec("openvino")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("libs/libopenvino_c.so*")):
            return found
    raise RuntimeError("the software NPU runs graphs with OpenVINO's CPU plugin: pip install openvino")


def missing() -> str | None:
    """What this machine lacks for a software NPU, or None."""
    try:
        find_loader()
        find_openvino()
        find_compiler()
    except RuntimeError as error:
        return str(error)
    return None


class SoftwareNpu:
    """The running device: faults, counters, live objects. Methods may be called from any thread.

    `driver` and `loader` are the paths of this device's own copies of the two libraries."""

    def __init__(self, driver: Path, loader: Path) -> None:
        self.driver = driver
        self.loader = loader
        library = ctypes.CDLL(str(driver))
        library.softnpu_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        text = ctypes.c_char_p
        library.softnpu_fail.argtypes = [text, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, text]
        library.softnpu_entry.restype = library.softnpu_kind.restype = text
        library.softnpu_calls.restype = library.softnpu_live.restype = ctypes.c_uint64
        library.softnpu_live.argtypes = [ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)]
        library.softnpu_misuses.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.softnpu_misuses.restype = ctypes.c_size_t
        self._library = library
        self._misuses: list[str] = []
        self.entries: tuple[str, ...] = self._names(library.softnpu_entry)
        """Names of all entry points: functions of the core API, of the graph extension's table ("pfnCreate2"), and
        "execution", which stands for the failure of a graph on the device."""
        self._kinds = self._names(library.softnpu_kind)

    @staticmethod
    def _names(function: ctypes._NamedFuncPointer) -> tuple[str, ...]:
        found: list[str] = []
        while (name := function(len(found))) is not None:
            found.append(name.decode())
        return tuple(found)

    def set(self, key: str, value: object) -> None:
        """Changes a setting of csrc/softnpu/control.c while the device runs: "latency_us", "memory", "lose_after",
        "refuse", "command", "firmware_mismatch", ... ValueError: there is none, or it cannot have that value."""
        if self._library.softnpu_set(key.encode(), str(value).encode()):
            raise ValueError(f"the software NPU has no setting {key}={value}")

    def fail(self, entry: str, nth: int = 1, *, times: int = 1, result: int | str = "unknown", log: str = "") -> None:
        """Tells an entry point to fail: at its `nth` call from now on, and the `times - 1` calls after that
        (`FOR_EVER`: all). `result`: a name of `RESULTS` or a number; `log`: the build log that comes with a failing
        `pfnCreate...`. Destroying functions do their work all the same. ValueError: no such entry point or name."""
        code = RESULTS.get(result) if isinstance(result, str) else result
        if code is None:
            raise ValueError(f"result {result!r} is none of {', '.join(RESULTS)}")
        if self._library.softnpu_fail(entry.encode(), nth, times, code, log.encode()):
            raise ValueError(f"{entry!r} is no entry point; `entries` has them")

    def heal(self) -> None:
        """Takes back what `fail` arranged."""
        self._library.softnpu_heal()

    def lose(self) -> None:
        """Loses the device for every context there is, as a reset by the kernel does."""
        self._library.softnpu_lose()

    def counters(self) -> dict[str, int]:
        """Calls so far of each entry point that was called."""
        calls = {name: int(self._library.softnpu_calls(i)) for i, name in enumerate(self.entries)}
        return {name: n for name, n in calls.items() if n}

    def live(self) -> dict[str, int]:
        """Objects that exist now, by kind ("context", "queue", "list", "fence", "graph", "allocation", "import", ...);
        kinds without any are left out."""
        found = {kind: int(self._library.softnpu_live(i, None)) for i, kind in enumerate(self._kinds)}
        return {kind: n for kind, n in found.items() if n}

    def live_bytes(self) -> dict[str, int]:
        """Bytes of the live allocations, imports and graphs."""
        found: dict[str, int] = {}
        for i, kind in enumerate(self._kinds):
            size = ctypes.c_uint64()
            self._library.softnpu_live(i, ctypes.byref(size))
            if size.value:
                found[kind] = size.value
        return found

    def misuses(self) -> list[str]:
        """What the caller did that Level Zero leaves undefined, such as using a handle after its destruction."""
        buffer = ctypes.create_string_buffer(1 << 15)
        self._library.softnpu_misuses(buffer, len(buffer))
        self._misuses += buffer.value.decode(errors="replace").splitlines()
        return list(self._misuses)

    def assert_no_leaks(self) -> None:
        """AssertionError if an object of the driver still lives, or a misuse was seen. What is compiled in the
        background ends first, and the device that Forge keeps open for later programs is let go; compiled models are
        the caller's to drop."""
        _settle()
        if self.live():
            gc.collect()  # takes a while where much is loaded
        assert not self.live(), f"objects of the software NPU still live: {self.live()}"
        assert not self.misuses(), "misuse of Level Zero:\n" + "\n".join(self.misuses())


def _settle() -> None:
    """What is compiled in the background ends, and the device that Forge keeps open for later programs is let go."""
    from . import npu  # here: the rest of this file needs no package around it

    npu.settle(60)
    npu.forget()


@contextlib.contextmanager
def software_npu(
    *,
    extension: str = "1.16",
    device: str = "npu4000",
    compiler_version: str = "7.30",
    driver_version: int = 1,
    no_compiler: bool = False,
    memory: int | None = None,
    latency: float = 0.0,
    lose_after: int = 0,
    recovers: bool = True,
    imports: bool | None = None,
    firmware_mismatch: bool = False,
    refuse: Sequence[str] = (),
    compiler: str | None = None,
    intercept: bool = False,
    loader: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> Iterator[SoftwareNpu]:
    """A machine with an NPU, while the block runs: `forge_ugc.compile(..., device="npu")` finds it as it finds a real
    one. Graphs are computed in f32 by OpenVINO, without regard to an NPU's speed::

        with forge_ugc.testing.software_npu() as npu:
            compiled = forge_ugc.compile(model, inputs, device="npu")
            npu.fail("zeFenceHostSynchronize", nth=2, result="device-lost")

    Each use is a device of its own, with new copies of loader and driver. It is found through the environment
    (FORGE_ZE_LOADER, ZE_ENABLE_ALT_DRIVERS; FORGE_CACHE_DIR names an empty folder unless `cache` does), so it also
    serves programs that are started in the block; one block at a time a process.

    Args:
        extension: version of the graph extension, "1.2" to "1.16"; "0.0": none.
        device: "npu3720", "npu4000" or "npu5010".
        compiler_version: of the driver's compiler.
        driver_version: of the driver.
        no_compiler: it has none.
        memory: bytes that graphs and allocations may take; default: no limit.
        latency: seconds that each execution of a graph takes at least.
        lose_after: the device is lost after so many executions.
        recovers: contexts made afterwards work.
        imports: the driver can address memory of others; default: since extension 1.13.
        firmware_mismatch: the firmware is too old for what the compiler makes.
        refuse: types of OpenVINO operators that the compiler refuses, e.g. ["Gelu"].
        compiler: a shell command that compiles as well, and must accept each graph. It sees $XML, $BLOB, $DEVICE,
            $CONFIG; if it writes $BLOB, that is the size of the native blob, and executions still run on the CPU.
        intercept: the loader wraps all handles, as it does with two drivers.
        loader: path of the Level Zero loader; default: the distribution's.
        check: at the end of the block `assert_no_leaks()`.

    Raises:
        RuntimeError: no loader, no `openvino` package, or no C compiler.
        ValueError: an option that cannot be.
    """
    driver, found_loader, openvino = build_driver(), Path(loader) if loader else find_loader(), find_openvino()
    if imports is None:
        imports = [int(part) for part in extension.split(".")] >= [1, 13]
    folder = Path(tempfile.mkdtemp(prefix="softnpu-"))
    settings = {
        "openvino": openvino,
        "extension": extension,
        "device": device,
        "compiler": "0.0" if no_compiler else compiler_version,
        "driver_version": driver_version,
        "memory": memory or 0,
        "latency_us": round(latency * 1e6),
        "lose_after": lose_after,
        "recovers": int(recovers),
        "import": int(imports),
        "firmware_mismatch": int(firmware_mismatch),
        "refuse": " ".join(refuse),
        "command": (compiler or "").replace("\n", "; "),
        "folder": folder,
    }
    wanted = {
        "FORGE_ZE_LOADER": str(folder / "libze_loader.so.1"),
        "ZE_ENABLE_ALT_DRIVERS": str(folder / "libsoftnpu.so"),
        "FORGE_SOFTNPU": "\n".join(f"{key}={value}" for key, value in settings.items()),
        "FORGE_CACHE_DIR": str(cache or folder / "cache"),
        "ZE_ENABLE_LOADER_INTERCEPT": "1" if intercept else "0",
    }
    before = {key: os.environ.get(key) for key in wanted}
    try:
        shutil.copy(found_loader, wanted["FORGE_ZE_LOADER"])
        shutil.copy(driver, wanted["ZE_ENABLE_ALT_DRIVERS"])
        running = SoftwareNpu(Path(wanted["ZE_ENABLE_ALT_DRIVERS"]), Path(wanted["FORGE_ZE_LOADER"]))
        for key, value in settings.items():
            running.set(key, value)
        _settle()  # a driver reads the environment while it compiles, which crashes if the environment changes then
        os.environ.update(wanted)
        yield running
        if check:
            running.assert_no_leaks()
    finally:
        _settle()
        for key, old in before.items():
            if old is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = old
        shutil.rmtree(folder, ignore_errors=True)
