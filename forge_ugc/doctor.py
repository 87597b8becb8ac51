"""`forge-ugc doctor`: what there is of an NPU, and what to do if it is not usable."""

from __future__ import annotations

import glob
import os
import platform
import stat
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import _core, npu
from ._core import NpuError

_NODES = "/dev/accel/accel*"
_DOCUMENTS = "https://github.com/intel/linux-npu-driver/releases"

# What to do, by NpuError.reason.
_ADVICE = {
    "no-loader": "install the Level Zero loader of your distribution: `apt install libze1` (Debian), `level-zero` "
    "(Ubuntu); the PyPI package level-zero is something else",
    "no-driver": "install the NPU driver (intel-driver-compiler-npu, intel-level-zero-npu, intel-fw-npu) from "
    f"{_DOCUMENTS}, and see that the kernel module is loaded: `sudo modprobe intel_vpu`",
    "no-permission": "let your user open the device node: `sudo usermod -aG render $USER`, then log in again",
    "no-device": f"see that the driver of {_DOCUMENTS} fits this machine's NPU, and `sudo dmesg | grep vpu`",
    "no-compiler": f"install intel-driver-compiler-npu from {_DOCUMENTS}: the driver here has no graph compiler",
    "old-extension": f"update the NPU driver from {_DOCUMENTS}",
    "version-mismatch": f"install firmware and driver of one release from {_DOCUMENTS}, and clear the cache",
    "device-lost": "reload the kernel module: `sudo rmmod intel_vpu && sudo modprobe intel_vpu`; see also `sudo dmesg`",
    "out-of-memory": "close what uses the NPU or much memory",
}


def examine() -> dict[str, Any]:
    """What doctor shows: versions, CPU, device nodes, loader, driver, device, cache, what device="auto" would do."""
    facts, error = _open()
    choice = npu.choose("auto", "auto", "auto", None)
    return {
        "versions": {
            "forge_ugc": _core.VERSION,
            "torch": _torch(),
            "python": platform.python_version(),
            "system": _system(),
            "kernel": platform.release(),
        },
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "features": _core.cpu_features()},
        "nodes": [_node(path) for path in sorted(glob.glob(_NODES))],
        "npu": facts,
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "cache": _cache(),
        "usable": error is None,
        "reason": error.reason if error is not None else None,
        "error": str(error) if error is not None else None,
        "advice": _ADVICE.get(error.reason, "read the text above") if error is not None else None,
        "auto": {"device": choice.device, "precision": choice.precision, "why": choice.reason},
    }


_SETTINGS = ("FORGE_ZE_LOADER", "FORGE_CACHE_DIR", "FORGE_CACHE_BYTES", "FORGE_NPU_TIMEOUT_S", "ZE_ENABLE_ALT_DRIVERS",
             "ZE_INTEL_NPU_CACHE_DIR")  # fmt: skip


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:  # artefacts run without it
        return "none"


def _open() -> tuple[dict[str, Any], NpuError | None]:
    try:
        return npu.device().facts, None
    except NpuError as error:
        return error.facts, error


def _node(path: str) -> dict[str, Any]:
    import grp
    import pwd

    status = os.stat(path)
    try:
        owner = f"{pwd.getpwuid(status.st_uid).pw_name}:{grp.getgrgid(status.st_gid).gr_name}"
    except KeyError:  # a container without the host's names
        owner = f"{status.st_uid}:{status.st_gid}"
    return {
        "path": path,
        "mode": stat.filemode(status.st_mode),
        "owner": owner,
        "usable": os.access(path, os.R_OK | os.W_OK),
    }


def _cache() -> dict[str, Any]:
    directory = npu.cache_dir()
    files = [p for p in directory.rglob("*") if p.is_file()] if directory.is_dir() else []
    above = next(p for p in (directory, *directory.parents) if p.exists())
    return {
        "directory": str(directory),
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "writable": os.access(above, os.W_OK),
    }


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def cpu_model() -> str:
    """The name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


# --- for people -------------------------------------------------------------------------------------------------------


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    versions, cpu, facts, cache = found["versions"], found["cpu"], found["npu"], found["cache"]
    loader = facts.get("loader") or "not found"
    if facts.get("loader_version"):
        loader += f", version {facts['loader_version']}"
    rows = [
        ("forge_ugc", f"{versions['forge_ugc']}, torch {versions['torch']}, Python {versions['python']}"),
        ("system", f"{versions['system']}, Linux {versions['kernel']}"),
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['features']) or 'no vector extensions used'}"),
    ]
    for node in found["nodes"]:
        usable = "may be opened" if node["usable"] else "may NOT be opened by this user"
        rows.append(("device node", f"{node['path']} {node['mode']} {node['owner']}, {usable}"))
    if not found["nodes"]:
        rows.append(("device node", f"none ({_NODES})"))
    rows.append(("loader", loader))
    if facts.get("drivers"):
        rows.append(("drivers", f"{facts['drivers']}; the NPU's has version {facts['driver_version'] or 'unknown'}"))
    if facts.get("device_name"):
        memory = f", {facts['memory'] / 2**30:.1f} GiB" if facts["memory"] else ""
        rows.append(("device", f"{facts['device_name']} (id {facts['device_id']:#06x}, {facts['target']}){memory}"))
    if facts.get("extension"):
        compiler = facts["compiler"] or "none"
        rows.append(("graphs", f"extension {facts['extension']}, compiler {compiler}, opset {facts['opset']}"))
    kept = f"{cache['files']} file{'' if cache['files'] == 1 else 's'}, {cache['bytes'] / 2**20:.1f} MiB"
    rows.append(("cache", f"{cache['directory']}, {kept}" + ("" if cache["writable"] else ", NOT writable")))
    rows += [("setting", f"{name}={value}") for name, value in found["settings"].items()]
    auto = found["auto"]
    rows.append(('device="auto"', f"{auto['device']} in {auto['precision']}: {auto['why']}"))
    return rows


def show(found: dict[str, Any]) -> None:
    """Prints what `examine` found."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(found):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    console.print()
    if found["usable"]:
        console.print(Text("The NPU is usable.", style="bold green"))
        return
    console.print(Text(f"No usable NPU ({found['reason']}): {found['error']}", style="bold yellow"))
    console.print(Text(f"What to do: {found['advice']}."))
