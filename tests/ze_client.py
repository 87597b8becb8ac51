"""A small client of Level Zero and its NPU extension in ctypes, independent of csrc/npu: what tests/test_softnpu.py
drives the software NPU with. Structures are flat byte layouts of the 64-bit ABI."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

P = ctypes.c_void_p
U32 = ctypes.c_uint32
FOR_EVER = 0xFFFFFFFFFFFFFFFF

# Slots of the graph extension's table, in order, with the minor version that added each.
SLOTS = (
    "0 Create Destroy GetProperties GetArgumentProperties SetArgumentValue AppendGraphInitialize AppendGraphExecute "
    "GetNativeBinary DeviceGetGraphProperties 1 GraphGetArgumentMetadata GetArgumentProperties2 "
    "2 GetArgumentProperties3 3 QueryNetworkCreate QueryNetworkDestroy QueryNetworkGetSupportedLayers "
    "4 BuildLogGetString 5 Create2 QueryNetworkCreate2 QueryContextMemory 6 DeviceGetGraphProperties2 "
    "7 GetNativeBinary2 8 GetProperties2 GraphInitialize 11 CompilerGetSupportedOptions CompilerIsOptionSupported "
    "12 Create3 GetProperties3 BuildLogGetString2 BuildLogDestroy 15 SetArgumentValue2 16 Evict"
)
FLAGS = b'--inputs_precisions="" --inputs_layouts="" --outputs_precisions="" --outputs_layouts=""'


def require_software_npu() -> None:
    """Skips where something is missing on a developer's machine; CI must have everything."""
    from forge_ugc import softnpu  # imports torch, which the client does without

    reason = softnpu.missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


class Failed(Exception):
    """A call gave this result."""

    def __init__(self, what: str, result: int, log: str = "") -> None:
        super().__init__(f"{what}: 0x{result:x} {log}")
        self.what, self.result, self.log = what, result, log


def descriptor(stype: int, *words: int, pnext: int = 0) -> ctypes.Array[ctypes.c_char]:
    """stype, pNext, then 32-bit words."""
    return ctypes.create_string_buffer(struct.pack(f"<IxxxxQ{len(words)}I", stype, pnext, *words) + bytes(16))


class Client:
    """One context and one queue on the first NPU."""

    def __init__(self, loader: Path, extension: int) -> None:
        self.ze = ctypes.CDLL(str(loader))
        self.minor = extension
        count, driver, device = U32(1), P(), P()
        if hasattr(self.ze, "zeInitDrivers"):
            kind = descriptor(0x20021, 2)
            self.call("zeInitDrivers", ctypes.byref(count), ctypes.byref(driver), kind)
        else:
            self.call("zeInit", U32(2))
            self.call("zeDriverGet", ctypes.byref(count), ctypes.byref(driver))
        self.driver = driver
        self.call("zeDeviceGet", driver, ctypes.byref(count), ctypes.byref(device))
        self.device = device
        self.names = self.extensions()
        name = "ZE_extension_graph" if "ZE_extension_graph" in self.names else f"ZE_extension_graph_1_{extension}"
        table = P()
        self.call("zeDriverGetExtensionFunctionAddress", driver, name.encode(), ctypes.byref(table))
        assert table.value
        self.table = (P * self.slots(extension)).from_address(table.value)
        self.order = [w for w in SLOTS.split() if not w.isdigit()]
        self.context, self.queue = P(), P()
        self.call("zeContextCreate", driver, descriptor(0xD, 0), ctypes.byref(self.context))
        queue = descriptor(0xE, 0, 0, 0, 0, 0)
        self.call("zeCommandQueueCreate", self.context, device, queue, ctypes.byref(self.queue))

    @staticmethod
    def slots(minor: int) -> int:
        count, since = 0, 0
        for word in SLOTS.split():
            if word.isdigit():
                since = int(word)
            elif since <= minor:
                count += 1
        return count

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.ze, name)
        function.restype = U32
        result = function(*arguments)
        if result:
            raise Failed(name, result)

    def graph_call(self, name: str, *arguments: Any) -> None:
        address = self.table[self.order.index(name)]
        result = ctypes.CFUNCTYPE(U32)(address)(*arguments)
        if result:
            raise Failed(name, result)

    def extensions(self) -> dict[str, int]:
        count = U32(0)
        self.call("zeDriverGetExtensionProperties", self.driver, ctypes.byref(count), None)
        buffer = ctypes.create_string_buffer(260 * count.value)
        self.call("zeDriverGetExtensionProperties", self.driver, ctypes.byref(count), buffer)
        rows = struct.iter_unpack("256sI", buffer.raw)
        return {name.split(b"\0")[0].decode(): version for name, version in rows}

    def device_graph_properties(self) -> tuple[int, int, int, int]:
        """extension, compiler (major << 16 | minor), formats, opset"""
        p = descriptor(0x1, 0, 0, 0, 0)
        self.graph_call("DeviceGetGraphProperties", self.device, p)
        extension, major, minor, formats, opset = struct.unpack_from("<IHHII", p.raw, 16)
        return extension, major << 16 | minor, formats, opset

    # --- graphs -------------------------------------------------------------------------------------------------------

    def package(self, xml: bytes, weights: bytes) -> bytes:
        version = self.device_graph_properties()[1]
        head = struct.pack("<HHIQ", version >> 16, version & 0xFFFF, 2, len(xml))
        return head + xml + struct.pack("<Q", len(weights)) + weights

    def create(self, data: bytes, native: bool = False, flags: bytes = FLAGS) -> P:
        graph, log = P(), P()
        body = (1 if native else 2, len(data), data, flags, 0)
        held = [ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(flags)]
        stype = 0xE if self.minor >= 5 else 0x2
        addresses = [ctypes.addressof(h) for h in held]
        desc = struct.pack("<IxxxxQIxxxxQQQI", stype, 0, body[0], len(data), *addresses, 0) + bytes(8)
        name = "Create3" if self.minor >= 12 else "Create2" if self.minor >= 5 else "Create"
        arguments: list[Any] = [self.context, self.device, desc, ctypes.byref(graph)]
        if self.minor >= 12:
            arguments.append(ctypes.byref(log))
        try:
            self.graph_call(name, *arguments)
        except Failed as error:
            raise Failed(name, error.result, self.read_log(log)) from None
        finally:
            if log:
                self.graph_call("BuildLogDestroy", log)
        return graph

    def read_log(self, log: P) -> str:
        size, text = U32(4096), ctypes.create_string_buffer(4096)
        name, handle = ("BuildLogGetString2", log) if self.minor >= 12 else ("BuildLogGetString", None)
        self.graph_call(name, handle, ctypes.byref(size), text)
        return text.value.decode()

    def arguments(self, graph: P) -> list[tuple[str, str, int, tuple[int, ...], int]]:
        """(name, tensor name, type, dims, precision) of each"""
        p = descriptor(0x3, 0)
        self.graph_call("GetProperties", graph, p)
        found = []
        for i in range(struct.unpack_from("<I", p.raw, 16)[0]):
            a = ctypes.create_string_buffer(struct.pack("<IxxxxQ", 0xD, 0), 8776)
            self.graph_call("GetArgumentProperties3", graph, U32(i), a)
            kind, *dims = struct.unpack_from("<6I", a.raw, 272)
            rank = struct.unpack_from("<I", a.raw, 320)[0]
            name, tensor = a.raw[16:272].split(b"\0")[0], a.raw[580:836].split(b"\0")[0]
            precision = struct.unpack_from("<I", a.raw, 304)[0]
            found.append((name.decode(), tensor.decode(), kind, tuple(dims[:rank]), precision))
        return found

    def initialize(self, graph: P) -> None:
        if self.minor >= 8:
            p = descriptor(0x10, 0, 0)
            self.graph_call("GetProperties2", graph, p)
            if struct.unpack_from("<I", p.raw, 20)[0] & 2:
                self.graph_call("GraphInitialize", graph)
            return
        once = self.list_create()
        self.graph_call("AppendGraphInitialize", once, graph, None, U32(0), None)
        self.run(once)
        self.call("zeCommandListDestroy", once)

    def set_argument(self, graph: P, index: int, memory: P) -> None:
        if self.minor >= 15:
            assert memory.value
            tensor = ctypes.create_string_buffer(struct.pack("<IxxxxQQ", 0xA, 0, memory.value))
            self.graph_call("SetArgumentValue2", graph, U32(index), tensor)
        else:
            self.graph_call("SetArgumentValue", graph, U32(index), memory)

    def binary(self, graph: P) -> bytes:
        size = ctypes.c_size_t(0)
        if self.minor >= 7:
            view = P()
            self.graph_call("GetNativeBinary2", graph, ctypes.byref(size), ctypes.byref(view))
            return ctypes.string_at(view, size.value)
        self.graph_call("GetNativeBinary", graph, ctypes.byref(size), None)
        buffer = ctypes.create_string_buffer(size.value)
        self.graph_call("GetNativeBinary", graph, ctypes.byref(size), buffer)
        return buffer.raw

    # --- memory and execution -----------------------------------------------------------------------------------------

    def allocate(self, size: int, pnext: int = 0) -> P:
        memory = P()
        desc = descriptor(0x16, 0, pnext=pnext)
        self.call(
            "zeMemAllocHost", self.context, desc, ctypes.c_size_t(size), ctypes.c_size_t(64), ctypes.byref(memory)
        )
        return memory

    def free(self, memory: P) -> None:
        self.call("zeMemFree", self.context, memory)

    def list_create(self) -> P:
        handle = P()
        self.call("zeCommandListCreate", self.context, self.device, descriptor(0xF, 0, 0), ctypes.byref(handle))
        return handle

    def append(self, commands: P, graph: P) -> None:
        self.graph_call("AppendGraphExecute", commands, graph, None, None, U32(0), None)

    def fence_create(self) -> P:
        fence = P()
        self.call("zeFenceCreate", self.queue, descriptor(0x12, 0), ctypes.byref(fence))
        return fence

    def execute(self, commands: P, fence: P | None) -> None:
        self.call("zeCommandQueueExecuteCommandLists", self.queue, U32(1), ctypes.byref(commands), fence)

    def wait(self, fence: P, nanoseconds: int = FOR_EVER) -> None:
        self.call("zeFenceHostSynchronize", fence, ctypes.c_uint64(nanoseconds))

    def run(self, commands: P) -> None:
        """Closes the list, executes it and waits."""
        self.call("zeCommandListClose", commands)
        fence = self.fence_create()
        try:
            self.execute(commands, fence)
            self.wait(fence)
        finally:
            self.call("zeFenceDestroy", fence)

    def infer(self, graph: P, inputs: list[bytes], output: int) -> bytes:
        """Runs a graph with one output of so many bytes."""
        memory, commands = [], self.list_create()
        try:
            for i, data in enumerate([*inputs, bytes(output)]):
                memory.append(self.allocate(len(data)))
                ctypes.memmove(memory[-1], data, len(data) if i < len(inputs) else 0)
                self.set_argument(graph, i, memory[-1])
            self.append(commands, graph)
            self.run(commands)
            return ctypes.string_at(memory[-1], output)
        finally:
            self.call("zeCommandListDestroy", commands)
            for m in memory:
                self.free(m)

    def close(self) -> None:
        self.call("zeCommandQueueDestroy", self.queue)
        self.call("zeContextDestroy", self.context)
