"""The software NPU by itself, through the distribution's loader and a ctypes client."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ugc import softnpu
from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client
from tests.ze_client import U32, Client, Failed, P, descriptor

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = (4, 5, 7, 8, 12, 15, 16)
DEVICE_LOST, NO_HOST_MEMORY, NO_MEMORY = 0x70000001, 0x70000002, 0x70000003
UNINITIALIZED, UNSUPPORTED_VERSION, UNSUPPORTED, INVALID = 0x78000001, 0x78000002, 0x78000003, 0x78000004
INVALID_BINARY, UNKNOWN, NOT_READY = 0x7800000F, 0x7FFFFFFE, 1


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    ze_client.require_software_npu()


def port(number: int, name: str = "") -> str:
    names = f' names="{name}"' if name else ""
    return f'<port id="{number}" precision="FP32"{names}><dim>2</dim><dim>3</dim></port>'


def model(operator: str = "Add") -> bytes:
    """out0 = in0 (operator) constant, both f32 [2, 3]"""
    data = "" if operator != "Add" else '<data auto_broadcast="numpy"/>'
    return f"""<?xml version="1.0"?><net name="model" version="11"><layers>
<layer id="0" name="parameter" type="Parameter" version="opset1"><data shape="2,3" element_type="f32"/>
 <output>{port(0, "in0")}</output></layer>
<layer id="1" name="constant" type="Const" version="opset1"><data element_type="f32" shape="2,3" offset="0" size="24"/>
 <output>{port(0)}</output></layer>
<layer id="2" name="Add: model.py:7" type="{operator}" version="opset1">{data}
 <input>{port(0)}{port(1)}</input><output>{port(2, "out0")}</output></layer>
<layer id="3" name="result" type="Result" version="opset1"><input>{port(0)}</input></layer></layers><edges>
<edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
<edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
<edge from-layer="2" from-port="2" to-layer="3" to-port="0"/></edges>
<rt_info><is_new_api value="true"/><use_indices_for_io_metadata value="true"/></rt_info></net>""".encode()


WEIGHTS = np.arange(6, dtype=np.float32)
ONES = np.ones(6, dtype=np.float32).tobytes()
SUM = (WEIGHTS + 1).tolist()


def infer(client: Client, graph: P, value: bytes = ONES) -> list[float]:
    return np.frombuffer(client.infer(graph, [value], 24), np.float32).tolist()


def compiled(client: Client, weights: np.ndarray = WEIGHTS) -> P:
    graph = client.create(client.package(model(), weights.tobytes()))
    client.initialize(graph)
    return graph


@pytest.fixture
def npu() -> Iterator[SoftwareNpu]:
    with software_npu(check=True) as device:
        yield device


@pytest.fixture
def client(npu: SoftwareNpu) -> Iterator[Client]:
    made = Client(npu.loader, 16)
    yield made
    made.close()


def refused(function: Callable[[], Any]) -> Failed:
    with pytest.raises(Failed) as caught:
        function()
    return caught.value


# --- versions and devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", VERSIONS)
@pytest.mark.parametrize("intercept", [False, True], ids=["direct", "wrapped"])
def test_versions(minor: int, intercept: bool) -> None:
    """Enumerates, compiles, runs, and runs again from the native blob."""
    with software_npu(extension=f"1.{minor}", intercept=intercept, check=True) as npu:
        client = Client(npu.loader, minor)
        assert client.device_graph_properties() == (1 << 16 | minor, 7 << 16 | 30, 2, 13)
        assert ("ZE_extension_graph" in client.names) == (minor >= 6)
        assert client.names[f"ZE_extension_graph_1_{min(minor, 8)}"] == 1 << 16 | min(minor, 8)
        assert ("ZE_extension_external_memmap_sysmem" in client.names) == (minor >= 13)
        graph = compiled(client)
        assert client.arguments(graph) == [
            ("parameter", "in0", 0, (2, 3), 1),
            ("Add: model.py:7", "out0", 1, (2, 3), 1),  # an output's name is its producer's
        ]
        assert infer(client, graph) == SUM
        again = client.create(client.binary(graph), native=True)
        client.initialize(again)
        assert infer(client, again) == SUM
        for g in (graph, again):
            client.graph_call("Destroy", g)
        client.close()
        assert npu.counters()["execution"] == 2


def test_no_extension() -> None:
    with software_npu(extension="0.0", imports=False, check=True) as npu, pytest.raises(Failed) as caught:
        Client(npu.loader, 8)
    assert caught.value.what == "zeDriverGetExtensionFunctionAddress"


def test_table_ends_with_its_version() -> None:
    """A client that reads a slot which the version lacks dies, as it might with a real driver."""
    script = (
        "from tests.ze_client import *; import os, sys\n"
        "c = Client(os.environ['FORGE_ZE_LOADER'], 8)\n"
        "past = P.from_address(ctypes.addressof(c.table) + 8 * (len(c.table) - 1 + int(sys.argv[1])))\n"
        "print(bool(past.value))"
    )
    with software_npu(extension="1.8"):
        last, past = (
            subprocess.run([sys.executable, "-c", script, n], cwd=ROOT, capture_output=True, text=True)
            for n in ("0", "1")
        )
    assert last.stdout == "True\n", last.stderr
    assert past.returncode == -11 and not past.stdout


@pytest.mark.parametrize(("device", "pci"), [("npu3720", 0x7D1D), ("npu4000", 0x643E), ("npu5010", 0xB03E)])
def test_devices(device: str, pci: int) -> None:
    with software_npu(device=device, memory=1 << 20, check=True) as npu:
        client = Client(npu.loader, 16)
        p = ctypes.create_string_buffer(bytes([3]) + bytes(367))
        client.call("zeDeviceGetProperties", client.device, p)
        kind, _, pci_id = np.frombuffer(p.raw, np.uint32, 3, 16)
        assert (kind, pci_id) == (5, pci) and device.encode() in p.raw[112:]
        assert np.frombuffer(p.raw, np.uint64, 1, 40) == 1 << 20
        client.close()


def test_tables_by_api_version(npu: SoftwareNpu) -> None:
    """The driver writes no slot that the loader's version of a table doesn't have: it would overwrite its stack."""
    library = ctypes.CDLL(str(npu.driver))

    def slots(name: str, minor: int) -> list[int]:
        table = (P * 64)()
        assert library[name](U32(1 << 16 | minor), table) == 0
        return [i for i, entry in enumerate(table) if entry]

    of_1_0 = {"Global": 1, "Driver": 5, "Device": 14, "Mem": 9, "CommandQueue": 4, "CommandList": 26, "Fence": 5}
    for name, size in of_1_0.items():
        assert max(slots(f"ze{'Get'}{name}ProcAddrTable", 0)) < size
    assert slots("zeGetGlobalProcAddrTable", 9) == [0]
    assert slots("zeGetGlobalProcAddrTable", 10) == [0, 1]
    assert 5 in slots("zeGetDriverProcAddrTable", 1)
    table = (P * 64)()
    assert library.zeGetDriverProcAddrTable(U32(2 << 16), table) == UNSUPPORTED_VERSION


def test_newer_loader() -> None:
    """Set FORGE_TEST_ZE_LOADER to the path of a Level Zero loader that is newer than the distribution's."""
    path = os.environ.get("FORGE_TEST_ZE_LOADER")
    if not path:
        pytest.skip("FORGE_TEST_ZE_LOADER names no other loader")
    for intercept in (False, True):
        with software_npu(loader=path, intercept=intercept, check=True) as npu:
            client = Client(npu.loader, 16)
            graph = compiled(client)
            assert infer(client, graph) == SUM
            client.graph_call("Destroy", graph)
            client.close()
            assert "zeInitDrivers" in npu.counters()


# --- what the compiler refuses ----------------------------------------------------------------------------------------


def test_refused_operator_with_log() -> None:
    for minor in (4, 5, 12):
        with software_npu(extension=f"1.{minor}", refuse=["Mul", "Add"], check=True) as npu:
            client = Client(npu.loader, minor)
            error = refused(lambda client=client: compiled(client))
            assert error.result == INVALID
            assert "Unsupported operation Add: model.py:7 with type Add" in error.log
            npu.set("refuse", "")
            client.graph_call("Destroy", compiled(client))
            client.close()


def test_what_the_compiler_checks(client: Client) -> None:
    good = client.package(model(), WEIGHTS.tobytes())

    def result(data: bytes, flags: bytes = ze_client.FLAGS, native: bool = False) -> tuple[int, str]:
        error = refused(lambda: client.create(data, native, flags))
        return error.result, error.log

    option = ze_client.FLAGS + b' --config NPU_TILES="2" PERFORMANCE_HINT="LATENCY"'
    client.graph_call("Destroy", client.create(good, flags=option))
    assert result(good, ze_client.FLAGS + b' --config NPU_TILE="2"')[1].endswith("NPU_TILE\n")
    assert "Missing build flag: --inputs_layouts" in result(good, b'--inputs_precisions=""')[1]
    assert "is_new_api" in result(good.replace(b"<is_new_api", b"<is_old_api"))[1]
    assert result(bytes([6, *good[1:]])) == (UNSUPPORTED, "[NPU_VCL] Unsupported IR API version!\n")
    wrong = client.package(model("Frobnicate"), WEIGHTS.tobytes())
    assert result(wrong)[0] == INVALID and "Frobnicate" in result(wrong)[1]
    assert result(good, native=True)[0] == INVALID_BINARY
    for end in (0, 3, 15, 23, 24, 200, len(good) - 1):
        assert refused(lambda end=end: client.create(good[:end])).result in (UNSUPPORTED, 0x78000008)


def test_blobs(npu: SoftwareNpu, client: Client) -> None:
    graph = compiled(client)
    blob = client.binary(graph)
    client.graph_call("Destroy", graph)
    for position in (0, 30, 45, len(blob) - 1):
        bad = bytearray(blob)
        bad[position] ^= 1
        assert refused(lambda bad=bad: client.create(bytes(bad), native=True)).result in (
            INVALID_BINARY, UNSUPPORTED, UNSUPPORTED_VERSION,
        )  # fmt: skip
    assert refused(lambda: client.create(blob[:-8], native=True)).result == INVALID_BINARY
    npu.set("device", "npu5010")
    error = refused(lambda: client.create(blob, native=True))
    assert error.result == UNSUPPORTED_VERSION and "npu4000" in error.log
    npu.set("device", "npu4000")
    npu.set("firmware_mismatch", 1)
    assert refused(lambda: client.create(blob, native=True)).result == UNSUPPORTED_VERSION


def test_no_compiler() -> None:
    with software_npu(check=True) as npu:
        client = Client(npu.loader, 16)
        graph = compiled(client)
        blob = client.binary(graph)
        npu.set("compiler", "0.0")
        assert client.device_graph_properties()[1:] == (0, 1, 0)
        error = refused(lambda: client.create(b"x" * 40))
        assert (error.result, error.log) == (UNSUPPORTED, "")
        npu.set("compiler", "7.30")
        other = client.create(blob, native=True)
        for g in (graph, other):
            client.graph_call("Destroy", g)
        client.close()


def test_compiler_command() -> None:
    """A command compiles as well: what it writes is the size of the blob, what it says is the log."""
    command = (
        'test "$DEVICE" = npu4000 && grep -q Add "$XML" && test -s "${XML%.xml}.bin" && head -c 5000 /dev/zero >$BLOB'
    )
    with software_npu(compiler=command, check=True) as npu:
        client = Client(npu.loader, 16)
        graph = compiled(client)
        blob = client.binary(graph)
        assert len(blob) == 5000
        again = client.create(blob, native=True)
        client.initialize(again)
        assert infer(client, again) == infer(client, graph) == SUM
        npu.set("command", 'echo "too wide: $CONFIG" >&2; exit 3')
        data, flags = client.package(model(), WEIGHTS.tobytes()), ze_client.FLAGS + b' --config NPU_TILES="2"'
        error = refused(lambda: client.create(data, flags=flags))
        assert error.result == INVALID and 'too wide:  NPU_TILES="2"' in error.log
        for g in (graph, again):
            client.graph_call("Destroy", g)
        client.close()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_arguments_lie_in_device_memory(client: Client) -> None:
    graph = compiled(client)
    own = ctypes.create_string_buffer(1 << 16)
    memory, page = client.allocate(24), 4096
    commands = client.list_create()
    client.set_argument(graph, 0, memory)
    assert refused(lambda: client.append(commands, graph)).result == UNINITIALIZED  # the output is not set
    client.set_argument(graph, 1, P(ctypes.addressof(own)))
    assert refused(lambda: client.append(commands, graph)).result == UNINITIALIZED
    client.set_argument(graph, 1, P((memory.value or 0) + page - 20))  # too little room
    assert refused(lambda: client.append(commands, graph)).result == UNINITIALIZED
    client.set_argument(graph, 1, P((memory.value or 0) + page - 24))
    client.append(commands, graph)
    client.call("zeCommandListDestroy", commands)
    client.free(memory)
    client.graph_call("Destroy", graph)


def test_memory_is_not_zeroed(client: Client) -> None:
    memory = client.allocate(100)
    assert set(ctypes.string_at(memory, 4096)) == {0xA5}
    client.free(memory)


def test_memory_limit() -> None:
    with software_npu(memory=1 << 20, check=True) as npu:
        client = Client(npu.loader, 16)
        half = client.allocate(1 << 19)
        assert npu.live_bytes() == {"allocation": 1 << 19}
        assert refused(lambda: client.allocate((1 << 19) + 1)).result == NO_MEMORY
        rest = client.allocate(1 << 19)
        error = refused(lambda: compiled(client))
        assert error.result == NO_MEMORY and "no device memory" in error.log
        query = (ctypes.c_uint64 * 2)()
        client.graph_call("QueryContextMemory", client.context, U32(1), query)
        assert list(query) == [1 << 20, 1 << 20]
        client.free(rest)
        client.graph_call("Destroy", compiled(client))
        client.free(half)
        client.close()


def test_import() -> None:
    with software_npu(extension="1.13", check=True) as npu:
        client = Client(npu.loader, 13)
        own = ctypes.create_string_buffer(3 * 4096)
        aligned = (ctypes.addressof(own) + 4095) // 4096 * 4096

        def imported(address: int, size: int) -> P:
            desc = ctypes.create_string_buffer(np.array([0x20037, 0, address, size], np.uint64).tobytes())
            return client.allocate(size, pnext=ctypes.addressof(desc))

        graph = compiled(client)
        memory = imported(aligned, 8192)
        assert memory.value == aligned and npu.live()["import"] == 1
        assert refused(lambda: imported(aligned, 4096)).result == INVALID  # already
        ctypes.memmove(aligned, ONES, 24)
        client.set_argument(graph, 0, memory)
        client.set_argument(graph, 1, P(aligned + 4096))
        commands = client.list_create()
        client.append(commands, graph)
        client.run(commands)
        assert np.frombuffer(ctypes.string_at(aligned + 4096, 24), np.float32).tolist() == SUM
        client.call("zeCommandListDestroy", commands)
        client.free(memory)
        assert refused(lambda: imported(aligned + 64, 4096)).result == NO_MEMORY
        npu.set("import", 0)
        assert refused(lambda: imported(aligned, 4096)).result == UNSUPPORTED
        client.graph_call("Destroy", graph)
        client.close()


# --- execution --------------------------------------------------------------------------------------------------------


def recorded(client: Client, graph: P) -> tuple[P, list[P]]:
    memory = [client.allocate(24), client.allocate(24)]
    commands = client.list_create()
    ctypes.memmove(memory[0], ONES, 24)
    for i, m in enumerate(memory):
        client.set_argument(graph, i, m)
    client.append(commands, graph)
    client.call("zeCommandListClose", commands)
    return commands, memory


def test_asynchronous(npu: SoftwareNpu, client: Client) -> None:
    graph = compiled(client)
    commands, memory = recorded(client, graph)
    fence = client.fence_create()
    npu.set("latency_us", 200_000)
    began = time.monotonic()
    assert refused(lambda: client.wait(fence, 0)).result == NOT_READY  # nothing was submitted
    client.execute(commands, fence)
    assert time.monotonic() - began < 0.15
    assert refused(lambda: client.wait(fence, 1000)).result == NOT_READY
    client.wait(fence)
    assert time.monotonic() - began >= 0.2
    assert np.frombuffer(ctypes.string_at(memory[1], 24), np.float32).tolist() == SUM
    client.call("zeFenceReset", fence)
    assert refused(lambda: client.wait(fence, 0)).result == NOT_READY
    npu.set("latency_us", 0)
    client.execute(commands, fence)
    client.wait(fence)
    client.call("zeFenceDestroy", fence)
    client.call("zeCommandListDestroy", commands)
    for m in memory:
        client.free(m)
    client.graph_call("Destroy", graph)


def test_threads(client: Client) -> None:
    weights = [WEIGHTS, WEIGHTS * 10]
    graphs = [compiled(client, w) for w in weights]
    lock, wrong = threading.Lock(), []

    def work(number: int) -> None:
        which = number % 2
        for k in range(10):
            value = np.full(6, number * 100 + k, np.float32)
            with lock:  # setting arguments and recording belong together
                commands, memory = recorded(client, graphs[which])
            ctypes.memmove(memory[0], value.tobytes(), 24)
            fence = client.fence_create()
            client.execute(commands, fence)
            client.wait(fence)
            if np.frombuffer(ctypes.string_at(memory[1], 24), np.float32).tolist() != (weights[which] + value).tolist():
                wrong.append((number, k))
            client.call("zeFenceDestroy", fence)
            client.call("zeCommandListDestroy", commands)
            for m in memory:
                client.free(m)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)
    for g in graphs:
        client.graph_call("Destroy", g)


def test_device_lost() -> None:
    with software_npu(lose_after=2, check=True) as npu:
        client = Client(npu.loader, 16)
        graph = compiled(client)
        assert infer(client, graph) == infer(client, graph) == SUM
        error = refused(lambda: infer(client, graph))
        assert (error.what, error.result) == ("zeFenceHostSynchronize", DEVICE_LOST)
        assert refused(lambda: client.allocate(1)).result == DEVICE_LOST
        assert refused(lambda: compiled(client)).result == DEVICE_LOST
        client.graph_call("Destroy", graph)
        client.close()
        client = Client(npu.loader, 16)  # a new context works
        graph = compiled(client)
        assert infer(client, graph) == SUM
        npu.set("recovers", 0)
        npu.lose()
        assert refused(lambda: infer(client, graph)).result == DEVICE_LOST
        assert refused(lambda: Client(npu.loader, 16)).what == "zeContextCreate"
        client.graph_call("Destroy", graph)
        client.close()


def test_lost_while_running(npu: SoftwareNpu, client: Client) -> None:
    """A loss ends what is being executed, however long it would take."""
    graph = compiled(client)
    commands, memory = recorded(client, graph)
    fence = client.fence_create()
    npu.set("latency_us", 60_000_000)
    client.execute(commands, fence)
    npu.lose()
    assert refused(lambda: client.wait(fence)).result == DEVICE_LOST
    client.call("zeFenceDestroy", fence)
    client.call("zeCommandListDestroy", commands)
    for m in memory:
        client.free(m)
    client.graph_call("Destroy", graph)


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
