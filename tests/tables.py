"""Node tables made by hand, and the programs they compile to, on numpy arrays: the core without torch."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from forge_ugc import _core

RNG = np.random.default_rng(0)
OPS = {op["name"]: op for op in _core.ops()}
DTYPES = {name: number for number, (name, _, _) in enumerate(_core.dtypes())}
NUMPY = {
    "bool": np.bool_, "u8": np.uint8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64, "c64": np.complex64,
    "c128": np.complex128,
}  # fmt: skip
NAME_OF = {np.dtype(t): name for name, t in NUMPY.items() if name != "bf16"}


def float_bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]


def attr_words(kind: str, value: Any) -> list[int]:
    if kind == "SCALAR":
        if value is None:
            return [0, 0]
        return [2, float_bits(value)] if isinstance(value, float) else [1, int(value)]
    if kind == "INTS":
        return [len(value), *map(int, value)] if value is not None else [0]
    if kind == "FLOAT":
        return [float_bits(value or 0.0)]
    return [int(value or 0)]


class Builder:
    """`v = b.input("f32", (2, 3)); b.output(b.node("neg", [v], ("f32", (2, 3))))`"""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, ...]] = []
        self.values: list[tuple[int, ...]] = []
        self.constants: list[tuple[int, ...]] = []
        self.operands: list[int] = []
        self.attrs: list[int] = []
        self.dims: list[int] = []
        self.outputs: list[int] = []
        self.strings: list[str] = [""]
        self.sources: list[str] = ["test.py:1 in forward"]
        self.types: list[tuple[str, tuple[int, ...]]] = []  # of each value
        self.inputs: list[int] = []
        self.arrays: list[np.ndarray] = []

    def node(self, op: str, operands: Any, *results: tuple[str, tuple[int, ...]], **attrs: Any) -> Any:
        words = [w for name, kind in OPS[op]["attrs"] for w in attr_words(kind, attrs.pop(name, None))]
        assert not attrs, attrs
        pools = len(self.operands), len(operands), len(self.attrs), len(words)
        self.nodes.append((OPS[op]["id"], len(results), *pools, 0))
        self.operands += [_core.VALUE_NONE if o is None else o for o in operands]
        self.attrs += words
        first = len(self.values)
        for dtype, shape in results:
            self.values.append((DTYPES[dtype], len(shape), 0, len(self.dims)))
            self.dims += shape
            self.types.append((dtype, tuple(shape)))
        made = list(range(first, first + len(results)))
        return made[0] if len(made) == 1 else made

    def input(self, dtype: str, shape: tuple[int, ...] = ()) -> int:
        self.inputs.append(self.node("input", [], (dtype, shape), index=len(self.inputs)))
        return self.inputs[-1]

    def constant(self, array: np.ndarray, literal: bool = False, data: bool = True) -> int:
        name = NAME_OF[array.dtype]
        strides = [s // array.itemsize for s in array.strides]
        address = array.__array_interface__["data"][0] if data else 0
        self.constants.append((address, DTYPES[name], array.ndim, int(literal), 0, len(self.dims), 0, 0))
        self.dims += [*array.shape, *strides]
        self.arrays.append(array)
        return self.node("constant", [], (name, array.shape), index=len(self.constants) - 1)

    def host(self, callee: int, operands: Any, *results: tuple[str, tuple[int, ...]], effect: bool = False) -> Any:
        return self.node("host", operands, *results, index=callee, name=0, effect=effect)

    def output(self, *values: int) -> None:
        self.outputs += values

    def table(self) -> dict[str, Any]:
        """Arguments of _core.compile."""
        form = {name: np.dtype([tuple(f) for f in fields]) for name, fields in _core.TABLE_DTYPES.items()}
        return {
            "nodes": np.array(self.nodes, form["nodes"]),
            "values": np.array(self.values, form["values"]),
            "constants": np.array(self.constants, form["constants"]),
            "operands": np.array(self.operands, np.uint32),
            "attrs": np.array(self.attrs, np.int64),
            "dims": np.array(self.dims, np.int64),
            "outputs": np.array(self.outputs, np.uint32),
            "strings": self.strings,
            "sources": self.sources,
        }

    def compile(self, **options: Any) -> Compiled:
        program = _core.compile(**self.table(), **{"keepalive": self.arrays, **options})
        return Compiled(program, [self.types[v] for v in self.outputs])


class Compiled:
    def __init__(self, program: Any, results: list[tuple[str, tuple[int, ...]]]) -> None:
        self.program, self.results = program, results

    def __call__(self, *inputs: Any, host: Any = None) -> list[Any]:
        """Arrays in, arrays out; for opaque values the objects."""
        held = [np.ascontiguousarray(i) if isinstance(i, np.ndarray) else i for i in inputs]
        held = [h.reshape(i.shape) if isinstance(i, np.ndarray) else h for h, i in zip(held, inputs, strict=True)]
        outs = [None if d == "object" else np.full(shape, 77, NUMPY[d]) for d, shape in self.results]
        objects = self.program.run(
            [h.ctypes.data if isinstance(h, np.ndarray) else h for h in held],
            [0 if o is None else o.ctypes.data for o in outs],
            host,
        )
        return [objects[i] if o is None else o for i, o in enumerate(outs)]


def f32(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "f32", shape


# --- models that several tests use ------------------------------------------------------------------------------------


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def small_model() -> tuple[Builder, np.ndarray]:
    """y = x @ w.T * 2 + x, z = y.T"""
    b, w = Builder(), array(8, 8)
    x = b.input("f32", (4, 8))
    h = b.node("linear", [x, b.constant(w)], f32(4, 8))
    h = b.node("mul", [h], f32(4, 8), scalar=2.0)
    y = b.node("add", [h, x], f32(4, 8))
    b.output(y, b.node("permute", [y], f32(8, 4), dims=[1, 0]))
    return b, w


def check_small(compiled: Any, w: np.ndarray, x: np.ndarray | None = None) -> None:
    x = array(4, 8) if x is None else x
    y, z = compiled(x)
    np.testing.assert_allclose(y, x @ w.T * 2 + x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(z, y.T)


class Capsule:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def view(capsule: Any) -> np.ndarray:
    return np.from_dlpack(Capsule(capsule))


def give(made: np.ndarray) -> tuple[int, list[int], np.ndarray]:
    return made.ctypes.data, [s // made.itemsize for s in made.strides], made


def host_model() -> tuple[Any, Any]:
    """x -> -x -> host 7 -> t -> t + x; the host doubles."""
    b = Builder()
    x = b.input("f32", (4, 8))
    n = b.node("neg", [x], f32(4, 8))
    t = b.host(7, [n, None], f32(4, 8))
    b.output(b.node("add", [t, x], f32(4, 8)))

    def call(callee: int, args: list[Any]) -> list[Any]:
        assert callee == 7 and args[1] is None
        return [give(view(args[0]) * 2)]

    return b.compile(), call
