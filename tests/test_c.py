"""The C tests, and what must hold for all C code: the map of the rooms, and no mutable globals.

FORGE_SANITIZE=1 builds them with ASan and UBSan."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests import cbuild

C_TESTS = sorted((cbuild.ROOT / "tests" / "c").glob("*.c"))

# Room -> rooms that it may include from. "" are the files that join all (forge.c).
BELOW = {
    "base": "",
    "graph": "base",
    "passes": "base graph",
    "npuir": "base graph",
    "alloc": "base graph npuir",
    "schedule": "base graph npuir alloc",
    "exec": "base graph npuir alloc schedule",
    "cpu": "base graph npuir alloc schedule exec",
    "npu": "base graph npuir alloc schedule exec",
    "": "base graph passes npuir alloc schedule exec cpu npu",
    "python": "base graph",
    "tool": "base graph",
}
OWNER = {"Python.h": "python", "ze_api.h": "npu", "dlfcn.h": "npu"}


@pytest.mark.parametrize("source", C_TESTS, ids=lambda p: p.stem)
def test_c(source: Path) -> None:
    done = subprocess.run([cbuild.program(source)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


@pytest.mark.skipif(cbuild.SANITIZE, reason="once is enough")
def test_python_room_has_no_warnings(tmp_path: Path) -> None:
    """The other rooms are built with -Werror for the tests above, tool/ for the goldens."""
    python = f"-isystem{sysconfig.get_paths()['include']}"  # Python's own headers may warn
    for source in sorted((cbuild.CSRC / "python").glob("*.c")):
        cbuild.compile_object(source, tmp_path / "unused.o", python)


def room_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else ""


def test_room_map() -> None:
    wrong = []
    for file in sorted(p for e in ("*.c", "*.h", "*.def") for p in cbuild.CSRC.rglob(e)):
        room = room_of(file.relative_to(cbuild.CSRC).as_posix())
        if room == "softnpu":  # a library of its own
            continue
        assert room in BELOW, f"{file}: a room that the map does not know"
        allowed = {room, *BELOW[room].split()}
        for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', file.read_text(), re.MULTILINE):
            if bracket == "<":
                if OWNER.get(name, room) != room:
                    wrong.append(f"{file}: <{name}> belongs to {OWNER[name]}/")
            elif name == "forge.h":
                if room not in ("", "python", "tool"):
                    wrong.append(f"{file}: includes forge.h from below it")
            elif room_of(name) not in allowed:
                wrong.append(f"{file}: includes {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(cbuild.SANITIZE, reason="the sanitizers add data of their own")
def test_no_mutable_globals() -> None:
    wrong = []
    for source, made in cbuild.objects().items():
        table = subprocess.run(["objdump", "-t", made], capture_output=True, text=True, check=True).stdout
        for line in table.splitlines():
            # value, flags (7 characters), section, size, name
            match = re.match(r"[0-9a-f]+ .{7} (\S+)\s+([0-9a-f]+)\s+(\S+)", line)
            if not match or int(match[2], 16) == 0:
                continue
            section = match[1]
            mutable = section == "*COM*" or re.match(r"\.(data|bss|tdata|tbss)\b", section)
            if mutable and not section.startswith(".data.rel.ro"):
                wrong.append(f"{source.relative_to(cbuild.CSRC)}: {match[3]} in {section}")
    assert not wrong, "\n".join(wrong)


def test_no_prints_or_exits() -> None:
    """Only tool/ prints or exits."""
    unwanted = re.compile(r"(?<![\w>.])(printf|puts|perror|exit|abort|fprintf)\s*\(")
    wrong = []
    for source in cbuild.rooms_sources():
        text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(\\.|[^\"\\])*\"", "", source.read_text(), flags=re.DOTALL)
        wrong += [f"{source.relative_to(cbuild.CSRC)}: {m[1]}" for m in unwanted.finditer(text)]
    assert not wrong, "\n".join(wrong)
