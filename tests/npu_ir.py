"""A torch function as OpenVINO IR by the C core, and that IR run by openvino on the CPU.

The whole program becomes one block, wherever placement would have put its instructions; see tests/c/tools/emit_ir.c."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import forge_ugc
from forge_ugc.lowering.outputs import Alias, Fresh
from forge_ugc.plan import Plan
from forge_ugc.table import Table
from tests import cbuild

DTYPES = {
    "f16": np.float16, "f32": np.float32, "bool": np.bool_, "i8": np.int8, "u8": np.uint8, "i32": np.int32,
    "i64": np.int64,
}  # fmt: skip
PRECISIONS = ("fp16", "w8a16", "w4a16")


class Refused(Exception):
    """The NPU does not take an operator; the text names each with its reason."""


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _array(data: bytes, count: int) -> bytes:
    return count.to_bytes(8, "little") + _padded(data)


def _constant(row: Any, dims: Any) -> bytes:
    first, rank = int(row["first_dim"]), int(row["rank"])
    shape, strides = dims[first : first + rank].tolist(), dims[first + rank : first + 2 * rank].tolist()
    size = [1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 8][int(row["dtype"])]
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return ctypes.string_at(int(row["data"]), extent * size)


def table_bytes(arrays: dict[str, Any]) -> bytes:
    names = ("nodes", "values", "constants", "operands", "attrs", "dims", "outputs")
    parts = [_array(arrays[name].tobytes(), len(arrays[name])) for name in names]
    for name in ("strings", "sources"):
        texts = [text.encode() + b"\0" for text in arrays[name]]
        parts += [len(texts).to_bytes(8, "little"), *(_array(t, len(t)) for t in texts)]
    for row in arrays["constants"]:
        data = _constant(row, arrays["dims"])
        parts.append(_array(data, len(data)))
    return b"".join(parts)


@functools.cache
def tool() -> Path:
    return cbuild.program(cbuild.ROOT / "tests" / "c" / "tools" / "emit_ir.c")


def reasons() -> dict[str, str]:
    """Each operator's name, and why the emitter does not take it; "" if it does."""
    done = subprocess.run([tool(), "--table"], capture_output=True, text=True, check=True)
    return dict(line.split("\t") for line in done.stdout.splitlines())


class Model:
    """IR in files: `xml`, and its weights beside it. `ports`: lines of emit_ir, split."""

    def __init__(self, folder: Path, lines: list[str]) -> None:
        self.folder, self.xml = folder, folder / "model.xml"
        self.ports = [line.split() for line in lines]

    def run(self, inputs: Sequence[np.ndarray], precision: str = "f32") -> list[np.ndarray]:
        """The outputs of the graph for its inputs, by openvino on the CPU."""
        ov = pytest.importorskip("openvino")
        core = ov.Core()
        model = core.read_model(self.xml)
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}
        request = core.compile_model(model, "CPU", options).create_infer_request()
        ports = [p for p in self.ports if p[0] == "in"]
        for k, (_, index, dtype, *shape) in enumerate(ports):
            array = np.ascontiguousarray(inputs[int(index)])
            if dtype == "f16" and array.dtype == np.float32:  # as the session gives them to the device
                beyond = np.isfinite(array) & (np.abs(array) >= 65520)
                array = np.where(beyond, np.copysign(np.float32(57344), array), array)
            array = array.astype(DTYPES[dtype])
            assert list(model.inputs[k].shape) == [int(n) for n in shape]
            assert f"in{k}" in model.inputs[k].names
            request.set_input_tensor(k, ov.Tensor(array.reshape([int(n) for n in shape])))
        data, at = (self.folder / "model.args").read_bytes(), 0
        for k, (_, size) in enumerate(p for p in self.ports if p[0] == "arg"):
            port = model.inputs[len(ports) + k]
            tensor = ov.Tensor(port.get_element_type(), port.get_shape())
            assert tensor.byte_size == int(size) and f"w{k}" in port.names
            ctypes.memmove(tensor.data.ctypes.data, data[at : at + int(size)], int(size))
            at += int(size)
            request.set_input_tensor(len(ports) + k, tensor)
        request.infer()
        made = []
        for k, (_, _, dtype, *shape) in enumerate(p for p in self.ports if p[0] == "out"):
            array = request.get_output_tensor(k).data
            assert array.dtype == DTYPES[dtype] and list(array.shape) == [int(n) for n in shape]
            assert f"out{k}" in model.outputs[k].names
            made.append(array.copy())
        return made


def emit_table(
    arrays: dict[str, Any], *, f32: bool = True, border: bool | None = None, precision: str = "fp16",
    forms: int | str = "default", arguments: bool = False, passes: str = "default",
) -> Model:  # fmt: skip
    """The whole graph of a node table. f32: constants and arithmetic in f32, else f16. border: ports in f32, default as
    `f32`. arguments: constants of the graph as inputs. Raises Refused."""
    border = f32 if border is None else border
    folder = Path(tempfile.mkdtemp(prefix="forge-ir-"))
    _made.append(folder)
    (folder / "table").write_bytes(table_bytes(arrays))
    flags = [int(border), int(f32), PRECISIONS.index(precision), forms, int(arguments), passes]
    done = subprocess.run(
        [tool(), folder / "table", folder / "model", *map(str, flags)], capture_output=True, text=True
    )
    if done.returncode == 2:
        raise Refused(done.stdout)
    if done.returncode:
        raise RuntimeError(f"emit_ir: status {done.returncode}: {done.stderr}")
    return Model(folder, done.stdout.splitlines())


_made: list[Path] = []


@atexit.register
def _remove() -> None:
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Emitted:
    """A function as IR. `plan` tells which arguments the graph takes, and how the function's results follow from its
    outputs."""

    model: Model
    plan: Plan

    @property
    def folder(self) -> Path:
        return self.model.folder

    @property
    def xml(self) -> Path:
        return self.model.xml

    @property
    def ports(self) -> list[list[str]]:
        return self.model.ports

    def run(self, args: Any, precision: str = "f32") -> list[torch.Tensor]:
        """`args` as for the function; its results in order."""
        leaves = pytree.tree_leaves(args)
        given = [leaves[source].detach() for source, _ in self.plan.sources]
        inputs = [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in given]  # numpy has no bf16
        ports = self.model.run(inputs, precision)  # of rank 5 at most
        made = [torch.from_numpy(a).reshape(shape) for a, (shape, _) in zip(ports, self.plan.out_types, strict=True)]
        return [self._output(user, made, leaves) for user in self.plan.lowered.plan.user]

    def _output(self, user: Any, made: list[torch.Tensor], leaves: list[Any]) -> torch.Tensor:
        if isinstance(user, Fresh):
            return made[user.index]
        assert isinstance(user, Alias)
        view = made[user.root.index] if isinstance(user.root, Fresh) else leaves[user.root]
        for step in user.steps:
            view = step(view)
        return view


def emit(function: Callable[..., Any], args: Any, **how: Any) -> Emitted:
    """A function or module, captured; `how` as for `emit_table`."""
    tables: list[Table] = []

    def compile_table(self: Table, **options: Any) -> Any:
        tables.append(self)
        return original(self, **options)

    original = Table.compile
    with mock.patch.object(Table, "compile", compile_table), torch.no_grad():
        compiled = forge_ugc.compile(function, args, device="npu:plan:npu4000", passes=how.get("passes", "default"))
    plan = next(iter(compiled._plans.values()))
    return Emitted(emit_table(tables[-1].arrays, **how), plan)


def check(
    function: Callable[..., Any], *args: Any, tolerance: float | None = None, f32: bool = True, **how: Any
) -> Emitted:
    """The IR gives eager's result: within 1e-4 in f32, `tolerance` (absolute and relative) in f16."""
    emitted = emit(function, args, f32=f32, **how)
    expected = [t for t in pytree.tree_leaves(function(*args)) if isinstance(t, torch.Tensor)]
    got = emitted.run(args, "f32" if f32 else "f16")
    tolerance = tolerance if tolerance is not None else 1e-4 if f32 else 2e-2
    for want, have in zip(expected, got, strict=True):
        if want.dtype == torch.bool:
            assert torch.equal(want, have), (want, have)
        else:
            torch.testing.assert_close(have.double(), want.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
    return emitted
