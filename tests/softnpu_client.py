"""What the tests of the software NPU share: a model of one operator, and a client that runs it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client
from tests.ze_client import Client, Failed, P

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = (4, 5, 7, 8, 12, 15, 16)
DEVICE_LOST, NO_HOST_MEMORY, NO_MEMORY = 0x70000001, 0x70000002, 0x70000003
UNINITIALIZED, UNSUPPORTED_VERSION, UNSUPPORTED, INVALID = 0x78000001, 0x78000002, 0x78000003, 0x78000004
INVALID_BINARY, UNKNOWN, NOT_READY = 0x7800000F, 0x7FFFFFFE, 1


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


def recorded(client: Client, graph: P) -> tuple[P, list[P]]:
    memory = [client.allocate(24), client.allocate(24)]
    commands = client.list_create()
    ctypes.memmove(memory[0], ONES, 24)
    for i, m in enumerate(memory):
        client.set_argument(graph, i, m)
    client.append(commands, graph)
    client.call("zeCommandListClose", commands)
    return commands, memory


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    ze_client.require_software_npu()
