"""The software NPU by itself, through the distribution's loader and a ctypes client."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client
from tests.softnpu_client import (  # noqa: F401 (fixtures)
    DEVICE_LOST,
    INVALID,
    INVALID_BINARY,
    NO_MEMORY,
    NOT_READY,
    ONES,
    ROOT,
    SUM,
    UNINITIALIZED,
    UNSUPPORTED,
    UNSUPPORTED_VERSION,
    VERSIONS,
    WEIGHTS,
    client,
    compiled,
    infer,
    model,
    needed,
    npu,
    recorded,
    refused,
)
from tests.ze_client import U32, Client, Failed, P

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
