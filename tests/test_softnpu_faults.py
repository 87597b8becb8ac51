"""The software NPU by itself: faults on demand, misuse, and building the driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ugc import softnpu
from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client
from tests.softnpu_client import (  # noqa: F401 (fixtures)
    INVALID,
    NO_HOST_MEMORY,
    ROOT,
    UNKNOWN,
    WEIGHTS,
    client,
    compiled,
    model,
    needed,
    npu,
    recorded,
    refused,
)
from tests.ze_client import U32, Client, Failed, P, descriptor

# --- faults, counters, misuse -----------------------------------------------------------------------------------------


def calls_of_all(npu: SoftwareNpu, client: Client) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    """A harmless call of each entry point by name, and what releases the objects that they need."""
    c, n, size, text = client, U32(1), ctypes.c_size_t(0), ctypes.create_string_buffer(1 << 14)
    graph = compiled(c)
    xml = c.package(model(), WEIGHTS.tobytes())
    commands, memory = recorded(c, graph)
    open_list, fence, pool, event = c.list_create(), c.fence_create(), P(), P()
    c.call("zeEventPoolCreate", c.context, descriptor(0x10, 0, 4), U32(0), None, ctypes.byref(pool))
    c.call("zeEventCreate", pool, descriptor(0x11, 0, 0, 0), ctypes.byref(event))
    held = [ctypes.create_string_buffer(xml, len(xml)), ctypes.create_string_buffer(ze_client.FLAGS)]
    body = [2, len(xml), *(ctypes.addressof(h) for h in held), 0]
    desc = {s: ctypes.create_string_buffer(np.array([s, 0, *body, 0], np.uint64).tobytes()) for s in (0x2, 0xE)}
    global_table = (P * 8)()
    ctypes.CDLL(str(npu.driver)).zeGetGlobalProcAddrTable(U32(1 << 16 | 10), global_table)
    calls: dict[str, Callable[[], None]] = {}

    def core(name: str, *arguments: Any) -> None:
        calls[name] = lambda: c.call(name, *arguments)

    def graph_entry(name: str, *arguments: Any) -> None:
        calls["pfn" + name] = lambda: c.graph_call(name, *arguments)

    def pair(make: str, arguments: list[Any], destroy: str, call: Callable[..., None], prefix: str = "") -> None:
        """A constructor whose object goes at once, and its destructor."""

        def made() -> P:
            handle = P()
            call(make, *arguments, ctypes.byref(handle))
            return handle

        calls[prefix + make] = lambda: call(destroy, made())
        calls[prefix + destroy] = lambda: call(destroy, made())

    def init_drivers() -> None:
        count, driver = U32(1), P()
        function = ctypes.CFUNCTYPE(U32)(global_table[1])
        if result := function(ctypes.byref(count), ctypes.byref(driver), descriptor(0x20021, 2)):
            raise Failed("zeInitDrivers", result)

    def create_3(read: bool = False) -> None:
        made, log, room = P(), P(), U32(1 << 14)
        try:
            c.graph_call("Create3", c.context, c.device, desc[0xE], ctypes.byref(made), ctypes.byref(log))
            if read:
                c.graph_call("BuildLogGetString2", log, ctypes.byref(room), text)
        finally:
            if made:
                c.graph_call("Destroy", made)
            c.graph_call("BuildLogDestroy", log)

    def query() -> None:
        made, room = P(), ctypes.c_size_t(1 << 14)
        c.graph_call("QueryNetworkCreate2", c.context, c.device, desc[0xE], ctypes.byref(made))
        try:
            c.graph_call("QueryNetworkGetSupportedLayers", made, ctypes.byref(room), text)
        finally:
            c.graph_call("QueryNetworkDestroy", made)
        assert b"<Add: model.py:7>" in text.value

    def run() -> None:
        c.execute(commands, fence)
        try:
            c.wait(fence)
        except Failed:
            with contextlib.suppress(Failed):  # told to fail: the execution may not have ended
                c.wait(fence)
            raise
        finally:
            try:
                c.call("zeFenceReset", fence)
            except Failed:
                c.call("zeFenceReset", fence)
                raise

    def alloc(name: str, *arguments: Any) -> None:
        def made() -> None:
            found = P()
            c.call(name, c.context, *arguments, ctypes.byref(found))
            c.free(found)

        calls[name] = made

    def fill_list(name: str, *arguments: Any) -> None:
        core(name, open_list, *arguments)

    host, device_desc = descriptor(0x16, 0), descriptor(0x15, 0, 0)
    sizes = (ctypes.c_size_t(64), ctypes.c_size_t(64))
    calls["zeInit"] = lambda: c.call("zeInit", U32(2))
    calls["zeInitDrivers"] = init_drivers
    core("zeDriverGet", ctypes.byref(n), None)
    core("zeDriverGetApiVersion", c.driver, text)
    core("zeDriverGetProperties", c.driver, descriptor(1, *[0] * 8))
    core("zeDriverGetIpcProperties", c.driver, descriptor(2, 0))
    core("zeDriverGetExtensionProperties", c.driver, ctypes.byref(U32(1)), text)
    core("zeDriverGetExtensionFunctionAddress", c.driver, b"ZE_extension_graph", ctypes.byref(P()))
    core("zeDeviceGet", c.driver, ctypes.byref(n), None)
    core("zeDeviceGetProperties", c.device, descriptor(3, *[0] * 100))
    core("zeDeviceGetCommandQueueGroupProperties", c.device, ctypes.byref(n), None)
    core("zeDeviceGetMemoryProperties", c.device, ctypes.byref(n), None)
    core("zeDeviceGetExternalMemoryProperties", c.device, descriptor(0xC, 0, 0, 0, 0))
    core("zeDeviceGetStatus", c.device)
    core("zeDeviceGetGlobalTimestamps", c.device, text, ctypes.byref(ctypes.c_uint64()))
    pair("zeContextCreate", [c.driver, descriptor(0xD, 0)], "zeContextDestroy", c.call)
    core("zeContextGetStatus", c.context)
    alloc("zeMemAllocHost", host, *sizes)
    alloc("zeMemAllocDevice", device_desc, *sizes, c.device)
    alloc("zeMemAllocShared", device_desc, host, *sizes, c.device)
    calls["zeMemFree"] = calls["zeMemAllocHost"]
    core("zeMemGetAllocProperties", c.context, memory[0], descriptor(0x17, *[0] * 6), None)
    core("zeMemGetAddressRange", c.context, memory[0], None, None)
    pair("zeCommandListCreate", [c.context, c.device, descriptor(0xF, 0, 0)], "zeCommandListDestroy", c.call)
    core("zeCommandListClose", commands)
    fill_list("zeCommandListReset")
    fill_list("zeCommandListAppendMemoryCopy", memory[0], memory[1], ctypes.c_size_t(24), None, U32(0), None)
    fill_list("zeCommandListAppendBarrier", None, U32(0), None)
    fill_list("zeCommandListAppendSignalEvent", event)
    fill_list("zeCommandListAppendWaitOnEvents", U32(1), ctypes.byref(event))
    fill_list("zeCommandListAppendEventReset", event)
    queue = descriptor(0xE, 0, 0, 0, 0, 0)
    pair("zeCommandQueueCreate", [c.context, c.device, queue], "zeCommandQueueDestroy", c.call)
    for name in ("zeCommandQueueExecuteCommandLists", "zeFenceHostSynchronize", "zeFenceReset", "execution"):
        calls[name] = run
    core("zeCommandQueueSynchronize", c.queue, ctypes.c_uint64(ze_client.FOR_EVER))
    pair("zeFenceCreate", [c.queue, descriptor(0x12, 0)], "zeFenceDestroy", c.call)
    signaled = P()
    c.call("zeFenceCreate", c.queue, descriptor(0x12, 1), ctypes.byref(signaled))
    core("zeFenceQueryStatus", signaled)
    pair("zeEventPoolCreate", [c.context, descriptor(0x10, 0, 4), U32(0), None], "zeEventPoolDestroy", c.call)
    pair("zeEventCreate", [pool, descriptor(0x11, 1, 0, 0)], "zeEventDestroy", c.call)
    for name in ("zeEventHostReset", "zeEventHostSignal", "zeEventQueryStatus"):
        core(name, event)
    core("zeEventHostSynchronize", event, ctypes.c_uint64(0))
    pair("Create", [c.context, c.device, desc[0x2]], "Destroy", c.graph_call, "pfn")
    pair("Create2", [c.context, c.device, desc[0xE]], "Destroy", c.graph_call, "pfn")
    calls["pfnCreate3"] = calls["pfnBuildLogDestroy"] = create_3
    graph_entry("GetProperties", graph, descriptor(3, 0))
    graph_entry("GetProperties2", graph, descriptor(0x10, 0, 0))
    graph_entry("GetProperties3", graph, descriptor(0x11, 0, 0, 0))
    for suffix, stype in (("", 4), ("2", 0xC), ("3", 0xD)):
        graph_entry("GetArgumentProperties" + suffix, graph, U32(0), descriptor(stype, *[0] * 2300))
    graph_entry("GraphGetArgumentMetadata", graph, U32(1), descriptor(6, *[0] * 2300))
    graph_entry("SetArgumentValue", graph, U32(0), memory[0])
    calls["pfnSetArgumentValue2"] = lambda: c.set_argument(graph, 0, memory[0])
    graph_entry("AppendGraphInitialize", open_list, graph, None, U32(0), None)
    graph_entry("AppendGraphExecute", open_list, graph, None, None, U32(0), None)
    graph_entry("GetNativeBinary", graph, ctypes.byref(size), None)
    graph_entry("GetNativeBinary2", graph, ctypes.byref(size), ctypes.byref(P()))
    graph_entry("DeviceGetGraphProperties", c.device, descriptor(1, *[0] * 4))
    graph_entry("DeviceGetGraphProperties2", c.device, descriptor(0xF, *[0] * 12))
    pair("QueryNetworkCreate", [c.context, c.device, desc[0x2]], "QueryNetworkDestroy", c.graph_call, "pfn")
    calls["pfnQueryNetworkCreate2"] = calls["pfnQueryNetworkGetSupportedLayers"] = query
    graph_entry("BuildLogGetString", None, ctypes.byref(U32(99)), text)
    graph_entry("QueryContextMemory", c.context, U32(1), text)
    graph_entry("GraphInitialize", graph)
    graph_entry("CompilerGetSupportedOptions", c.device, U32(1), ctypes.byref(size), None)
    graph_entry("CompilerIsOptionSupported", c.device, U32(1), b"NPU_TILES", None)
    calls["pfnBuildLogGetString2"] = lambda: create_3(read=True)
    graph_entry("Evict", graph)

    def release() -> None:
        held.clear()  # the descriptors point at it
        c.call("zeEventDestroy", event)
        c.call("zeEventPoolDestroy", pool)
        for handle in (fence, signaled):
            c.call("zeFenceDestroy", handle)
        for handle in (commands, open_list):
            c.call("zeCommandListDestroy", handle)
        for m in memory:
            c.free(m)
        c.graph_call("Destroy", graph)

    return calls, release


def test_each_entry_point_fails_on_demand(npu: SoftwareNpu, client: Client) -> None:
    """At its first and at its third call, once; nothing stays behind."""
    calls, release = calls_of_all(npu, client)
    assert sorted(calls) == sorted(npu.entries)
    for name, call in calls.items():
        call()
        before, counted = npu.live(), npu.counters()[name]
        for nth in (1, 3):
            npu.fail(name, nth, result="unknown")
            for _ in range(nth - 1):
                call()
            assert refused(call).result == UNKNOWN, name
            call()
            assert npu.live() == before, name
        assert npu.counters()[name] > counted
    release()


def test_fault_control(npu: SoftwareNpu, client: Client) -> None:
    npu.fail("pfnCreate3", result="invalid-argument", log="no such thing", times=2)
    for _ in range(2):
        error = refused(lambda: compiled(client))
        assert (error.result, error.log) == (INVALID, "no such thing")
    client.graph_call("Destroy", compiled(client))
    npu.fail("zeMemAllocHost", times=softnpu.FOR_EVER, result=NO_HOST_MEMORY)
    for _ in range(5):
        assert refused(lambda: client.allocate(8)).result == NO_HOST_MEMORY
    npu.heal()
    client.free(client.allocate(8))
    with pytest.raises(ValueError, match="no entry point"):
        npu.fail("zeMakeCoffee")
    with pytest.raises(ValueError, match="none of device-lost"):
        npu.fail("zeInit", result="coffee")
    with pytest.raises(ValueError, match="no setting"):
        npu.set("device", "npu9000")


def test_misuse_is_told() -> None:
    with software_npu() as npu:
        client = Client(npu.loader, 16)
        graph = compiled(client)
        commands, memory = recorded(client, graph)
        fence = client.fence_create()
        npu.set("latency_us", 50_000)
        client.execute(commands, fence)
        client.execute(commands, fence)  # twice at once, and the fence is pending
        client.free(memory[0])  # while it is read, or before
        client.call("zeFenceDestroy", fence)
        client.call("zeCommandListDestroy", commands)
        client.graph_call("Destroy", graph)
        assert refused(lambda: client.graph_call("Destroy", graph)).result == 0x78000005
        assert refused(lambda: client.free(memory[0])).result == INVALID
        told = "\n".join(npu.misuses())
        for what in (
            "the list is already being executed",
            "the fence was not reset",
            "memory was freed",
            "has yet to signal the fence",
            "not a live graph",
            "not an allocation of this context",
        ):
            assert what in told
        with pytest.raises(AssertionError, match=r"still live.*'allocation': 1"):
            npu.assert_no_leaks()
        client.free(memory[1])
        client.close()
        with pytest.raises(AssertionError, match="misuse of Level Zero"):
            npu.assert_no_leaks()


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FORGE_ZE_LOADER", "ZE_ENABLE_ALT_DRIVERS", "FORGE_SOFTNPU", "FORGE_CACHE_DIR")
    monkeypatch.delenv(names[0], raising=False)
    monkeypatch.setenv(names[1], "mine")
    before = [os.environ.get(name) for name in names]
    with pytest.raises(ZeroDivisionError), software_npu() as npu:
        assert os.environ["ZE_ENABLE_ALT_DRIVERS"] == str(npu.driver)
        raise ZeroDivisionError
    assert [os.environ.get(name) for name in names] == before
    with pytest.raises(ValueError, match="no setting extension=new"):
        with software_npu(extension="new", imports=True):
            pass
    assert [os.environ.get(name) for name in names] == before


# --- building ---------------------------------------------------------------------------------------------------------


def test_package_carries_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel holds what build_py collects: the driver builds from there."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("installed_softnpu", tmp_path / "forge_ugc" / "softnpu.py")
    assert spec and spec.loader
    installed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installed)
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "cache"))
    library = installed.build_driver()
    assert library.is_relative_to(tmp_path) and library == installed.build_driver()
    assert hasattr(ctypes.CDLL(str(library)), "zeGetGlobalProcAddrTable")
    (tmp_path / "forge_ugc" / "_softnpu" / "event.c").open("a").write("\n#error broken\n")
    with pytest.raises(RuntimeError, match="did not build"):
        installed.build_driver()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_ZE_LOADER", raising=False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(RuntimeError, match=r"apt-get install libze1.*apt-get install level-zero"):
        softnpu.find_loader()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install openvino"):
        softnpu.find_openvino()


def test_strict_warnings(tmp_path: Path) -> None:
    """The driver builds with the warnings of the other rooms; each file stays readable."""
    sources = sorted((ROOT / "csrc" / "softnpu").glob("*.c"))
    for source in sources:
        assert len(source.read_text().splitlines()) < 600, source
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run(["gcc", *flags, *map(str, sources)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
