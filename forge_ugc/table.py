"""The flat node table: numpy arrays in the layout that C gives (`_core.TABLE_DTYPES`), one crossing a compile."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import _core, progress
from .errors import CompileError

OBJECT = "object"  # dtype of a value that only the host knows
DType = Any  # torch.dtype or OBJECT

DTYPES_BY_NAME = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "object": OBJECT,
}
DTYPE_NUMBERS: dict[DType, int] = {DTYPES_BY_NAME[name]: i for i, (name, _, _) in enumerate(_core.dtypes())}
_DTYPES = [DTYPES_BY_NAME[name] for name, _, _ in _core.dtypes()]
MAX_RANK: int = _core.MAX_RANK
VALUE_NONE: int = _core.VALUE_NONE  # an operand that is absent
_OPS: dict[str, tuple[int, list[tuple[str, str]]]] = {  # name -> its number; its attributes' names and kinds
    info["name"]: (info["id"], [(name, kind.lower()) for name, kind in info["attrs"]]) for info in _core.ops()
}
_NAMES = {number: name for name, (number, _) in _OPS.items()}
_ROWS = {name: np.dtype(fields) for name, fields in _core.TABLE_DTYPES.items()}
STATE, LITERAL = 0, 1


@dataclass(slots=True, unsafe_hash=True)  # never written; frozen ones take three times as long to make
class Value:
    """A value of the table. `shape` is () for objects."""

    id: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass
class Table:
    """Arrays for `_core.compile`, with what keeps the constants' memory alive."""

    arrays: dict[str, Any]
    keepalive: list[torch.Tensor]
    borrowed_bytes: int

    def compile(self, **options: Any) -> Any:
        """Compiles into a `_core.Program`."""
        return _core.compile(**self.arrays, keepalive=self.keepalive, progress=progress.counters(), **options)

    def count_operators(self) -> dict[str, int]:
        """How many nodes of each operator; inputs and constants are not counted."""
        numbers, counts = np.unique(self.arrays["nodes"]["op"], return_counts=True)
        named = {_NAMES[number]: count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)}
        return {name: count for name, count in named.items() if name not in ("input", "constant")}


@dataclass
class Mark:
    """A point to which `TableBuilder.rollback` can return."""

    sizes: tuple[int, ...]


class TableBuilder:
    """Appends nodes, values and constants; `finish` makes the arrays."""

    def __init__(self) -> None:
        # operator, results, operands, first attribute word, attribute words; the operands lie in the nodes' order
        self.nodes: list[tuple[int, int, int, int, int]] = []
        self.node_sources: list[int] = []
        self.values: list[tuple[int, int, int]] = []
        self.operands: list[int] = []
        self._attrs: list[int] = []
        self._dims: list[int] = []
        self._constants: list[tuple[int, int, int, int, int, int]] = []
        self._strings: list[str] = []
        self._string_ids: dict[str, int] = {}
        self._sources: list[str] = []
        self._source_ids: dict[str, int] = {}
        self._outputs: list[int] = []
        self._keepalive: list[torch.Tensor] = []
        self._constant_values: dict[Any, Value] = {}
        self._borrowed: set[int] = set()
        self.borrowed_bytes = 0
        self.n_inputs = 0
        self.source = -1

    # --- positions ------------------------------------------------------------------------------------------------

    def set_source(self, source: str) -> None:
        """Source line of the nodes that follow."""
        if not source:
            self.source = -1
            return
        index = self._source_ids.get(source)
        if index is None:
            index = self._source_ids[source] = len(self._sources)
            self._sources.append(source)
        self.source = index

    def _lists(self) -> tuple[list[Any], ...]:
        return (
            self.nodes,
            self.node_sources,
            self.values,
            self.operands,
            self._attrs,
            self._dims,
            self._constants,
            self._keepalive,
        )

    def mark(self) -> Mark:
        return Mark(tuple(map(len, self._lists())))

    def rollback(self, mark: Mark) -> None:
        """Forgets everything since `mark`."""
        for items, size in zip(self._lists(), mark.sizes, strict=True):
            del items[size:]
        self._constant_values = {k: v for k, v in self._constant_values.items() if v.id < len(self.values)}

    def sizes(self) -> tuple[int, ...]:
        """How many nodes, values, operands, constants and strings there are."""
        return len(self.nodes), len(self.values), len(self.operands), len(self._constants), len(self._strings)

    def type_of(self, row: tuple[int, int, int]) -> tuple[DType, tuple[int, ...]]:
        """(dtype, shape) of a row of `values`."""
        number, rank, first = row
        return _DTYPES[number], tuple(self._dims[first : first + rank])

    # --- nodes ----------------------------------------------------------------------------------------------------

    def emit(
        self, op: str, operands: Sequence[Value | None], results: Sequence[tuple[DType, Sequence[int]]], /, **attrs: Any
    ) -> tuple[Value, ...]:
        """Appends a node; attributes that are left out are zero, none or empty."""
        number, attributes = _OPS[op]
        first_attr = len(self._attrs)
        self.operands += [VALUE_NONE if operand is None else operand.id for operand in operands]
        for name, kind in attributes:
            self._attr(kind, attrs.pop(name, None))
        if attrs:
            raise CompileError(f"internal error: operator {op} has no attribute {sorted(attrs)}")
        out = []
        for dtype, shape in results:
            shape = tuple(shape)
            out.append(Value(len(self.values), dtype, shape))
            self.values.append((DTYPE_NUMBERS[dtype], len(shape), len(self._dims)))
            self._dims += shape
        self.nodes.append((number, len(out), len(operands), first_attr, len(self._attrs) - first_attr))
        self.node_sources.append(self.source)
        return tuple(out)

    def op(
        self, op: str, operands: Sequence[Value | None], dtype: DType, shape: Sequence[int], /, **attrs: Any
    ) -> Value:
        """`emit` for one result."""
        return self.emit(op, operands, [(dtype, shape)], **attrs)[0]

    def input(self, dtype: DType, shape: Sequence[int]) -> Value:
        self.n_inputs += 1
        return self.op("input", [], dtype, shape, index=self.n_inputs - 1)

    def constant(self, tensor: torch.Tensor, name: str = "", kind: int = LITERAL) -> Value:
        """A constant that borrows `tensor`'s memory: the same memory seen the same way is one constant."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        meta, dtype, shape, strides = tensor.is_meta, tensor.dtype, tuple(tensor.shape), tensor.stride()
        data = 0 if meta else tensor.data_ptr()
        key = (data if not meta else name, dtype, shape, strides, kind)
        found = self._constant_values.get(key) if 0 not in shape else None
        if found is not None:
            return found
        index = len(self._constants)
        self._constants.append((data, DTYPE_NUMBERS[dtype], len(shape), kind, len(self._dims), self.string(name)))
        self._dims += shape
        self._dims += strides
        self._keepalive.append(tensor)
        if kind == STATE and (meta or data not in self._borrowed):
            self._borrowed.add(data)
            self.borrowed_bytes += tensor.nbytes
        value = self._constant_values[key] = self.op("constant", [], dtype, shape, index=index)
        return value

    def string(self, text: str) -> int:
        index = self._string_ids.get(text)
        if index is None:
            index = self._string_ids[text] = len(self._strings)
            self._strings.append(text)
        return index

    def _attr(self, kind: str, value: Any) -> None:
        if kind in ("int", "bool"):
            self._attrs.append(int(value or 0))
        elif kind == "float":
            self._attrs.append(_double_bits(float(value or 0.0)))
        elif kind == "ints":
            items = [int(v) for v in value or ()]
            self._attrs.append(len(items))
            self._attrs.extend(items)
        elif value is None:
            self._attrs += (0, 0)
        elif isinstance(value, float):
            self._attrs += (2, _double_bits(value))
        else:
            self._attrs += (1, int(value))

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[Value]) -> Table:
        """The arrays; `outputs` are the program's results in order."""
        nodes = _columns(_ROWS["nodes"], self.nodes, ("op", "n_results", "n_operands", "first_attr", "n_attr_words"))
        nodes["first_operand"][1:] = np.cumsum(nodes["n_operands"][:-1])
        nodes["source"] = self.node_sources
        values = _columns(_ROWS["values"], self.values, ("dtype", "rank", "first_dim"))
        constants = _columns(
            _ROWS["constants"], self._constants, ("data", "dtype", "rank", "kind", "first_dim", "name")
        )
        arrays = {
            "nodes": nodes,
            "values": values,
            "constants": constants,
            "operands": np.array(self.operands, np.uint32),
            "attrs": np.array(self._attrs, np.int64),
            "dims": np.array(self._dims, np.int64),
            "outputs": np.array([v.id for v in outputs], np.uint32),
            "strings": self._strings,
            "sources": self._sources,
        }
        return Table(arrays, self._keepalive, self.borrowed_bytes)


def _columns(dtype: np.dtype[Any], rows: Sequence[tuple[int, ...]], names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    array = np.zeros(len(rows), dtype)
    count = len(rows) * len(names)
    numbers = np.fromiter(itertools.chain.from_iterable(rows), np.int64, count).reshape(len(rows), len(names))
    for k, name in enumerate(names):
        array[name] = numbers[:, k]
        if not np.array_equal(array[name], numbers[:, k]):
            raise CompileError(f"a column of the node table, {name}, has no room for {numbers[:, k].max()}")
    return array


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
