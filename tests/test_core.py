"""The C core through its Python door alone: tables by hand, numpy arrays, no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ugc import _core
from tests.tables import DTYPES, NUMPY, OPS, Builder, f32

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def small_model() -> tuple[Builder, np.ndarray]:
    """y = gelu(x @ w.T) + x, z = y.T"""
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


# --- what the core says of itself -------------------------------------------------------------------------------------


def test_constants() -> None:
    assert _core.VALUE_NONE == 2**32 - 1 and _core.MAX_RANK == 8
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and version[1] == _core.VERSION
    sizes = {name: np.dtype([tuple(f) for f in fields]).itemsize for name, fields in _core.TABLE_DTYPES.items()}
    assert sizes == {"nodes": 24, "values": 8, "constants": 24}


def test_operators_are_those_of_the_definition() -> None:
    text = (ROOT / "csrc/graph/ops.def").read_text()
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"#define.*", "", text), flags=re.DOTALL)
    names = re.findall(r"\b(?:OP|UNARY|UNARY_TEST|BINARY|BINARY_TEST|REDUCE)\((\w+)", text)
    assert [op["name"] for op in _core.ops()] == names
    assert [op["id"] for op in _core.ops()] == list(range(len(names)))
    linear, host = OPS["linear"], OPS["host"]
    assert (linear["min_operands"], linear["max_operands"], linear["results"]) == (2, None, 1)
    assert linear["flags"] == ["CONTRACTION"] and linear["attrs"] == [("program", "INTS")]
    assert host["results"] is None and host["attrs"] == [("index", "INT"), ("name", "INT"), ("effect", "BOOL")]


def test_lists() -> None:
    assert _core.dtypes()[DTYPES["bf16"]] == ("bf16", 2, "f") and _core.dtypes()[-1][0] == "object"
    defined = re.findall(r"^PASS\((\w+), \w+, (\w+)\)", (ROOT / "csrc/passes/passes.def").read_text(), re.MULTILINE)
    assert _core.passes() == [(name, flag == "true") for name, flag in defined]
    assert "cpu" in _core.targets()
    assert all(isinstance(f, str) for f in _core.cpu_features())


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["default", "none", "dce,cse"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pack", [False, True])
def test_small_model(passes: str, threads: int, pack: bool) -> None:
    b, w = small_model()
    compiled = b.compile(passes=passes, threads=threads, pack=pack)
    for _ in range(3):
        check_small(compiled, w)


@pytest.mark.parametrize("name", [n for n in NUMPY if n not in ("bf16", "c64", "c128")])
def test_dtypes(name: str) -> None:
    b = Builder()
    x = b.input(name, (3, 2))
    flat = b.node("permute", [x], (name, (2, 3)), dims=[1, 0])
    b.output(flat, b.node("cast", [x], ("f64", (3, 2))), b.node("eq", [x, x], ("bool", (3, 2))))
    data = np.arange(6).reshape(3, 2).astype(NUMPY[name])
    moved, cast, equal = b.compile()(data)
    np.testing.assert_array_equal(moved, data.T)
    np.testing.assert_array_equal(cast, data.astype(np.float64))
    assert equal.all()


def test_scalars_and_empty_tensors() -> None:
    b = Builder()
    x, e = b.input("f32"), b.input("f32", (0, 3))
    b.output(b.node("neg", [x], f32()), b.node("neg", [e], f32(0, 3)))
    b.output(b.node("sum", [e], f32(3), dims=[0], keepdim=False))
    minus, nothing, zeros = b.compile()(np.array(2.5, np.float32), np.zeros((0, 3), np.float32))
    assert minus == -2.5 and nothing.shape == (0, 3) and (zeros == 0).all()


def test_inputs_constants_and_repeats_as_outputs() -> None:
    b, w = Builder(), array(2, 3)
    x, c = b.input("f32", (2, 3)), b.constant(w)
    b.output(x, c, x, b.node("permute", [c], f32(3, 2), dims=[1, 0]))
    data = array(2, 3)
    first, constant, second, turned = b.compile()(data)
    np.testing.assert_array_equal(first, data)
    np.testing.assert_array_equal(second, data)
    np.testing.assert_array_equal(constant, w)
    np.testing.assert_array_equal(turned, w.T)


def test_strided_constant() -> None:
    b, w = Builder(), array(6, 8)[::2, ::2]
    x = b.input("f32", (3, 4))
    b.output(b.node("add", [x, b.constant(w)], f32(3, 4)))
    data = array(3, 4)
    np.testing.assert_array_equal(b.compile()(data)[0], data + w)


def test_index_error() -> None:
    b, w = Builder(), array(5, 2)
    ids = b.input("i64", (2,))
    b.output(b.node("embedding", [b.constant(w), ids], f32(2, 2)))
    compiled = b.compile()
    np.testing.assert_array_equal(compiled(np.array([4, 0]))[0], w[[4, 0]])
    for bad in (5, -1, 2**40):
        with pytest.raises(IndexError, match=r"test\.py:1 in forward"):
            compiled(np.array([0, bad]))
    np.testing.assert_array_equal(compiled(np.array([1, 2]))[0], w[[1, 2]])


def test_run_arguments() -> None:
    b, w = small_model()
    program = b.compile().program
    x, y, z = array(4, 8), np.empty((4, 8), np.float32), np.empty((8, 4), np.float32)
    good = [x.ctypes.data], [y.ctypes.data, z.ctypes.data]
    assert program.run(*good) is None
    assert program.run(inputs=good[0], outputs=tuple(good[1]), host=None) is None
    np.testing.assert_allclose(y, x @ w.T * 2 + x, rtol=1e-5, atol=1e-5)
    for args, error in [
        ((), TypeError),
        ((good[0],), TypeError),
        ((*good, None, None), TypeError),
        ((1, good[1]), TypeError),
        (([], good[1]), ValueError),
        ((good[0], good[1] * 2), ValueError),
        (([1.5], good[1]), TypeError),
        (([None], good[1]), TypeError),
        (([0], good[1]), ValueError),
        ((good[0], [good[1][0], 0]), ValueError),
        (([2**70], good[1]), OverflowError),
    ]:
        with pytest.raises(error):
            program.run(*args)
    with pytest.raises(TypeError):
        program.run(*good, other=1)
    with pytest.raises(TypeError):
        program.run(*good, inputs=[])
    with pytest.raises(TypeError):
        type(program)()


def test_planned_only() -> None:
    b, w = Builder(), np.zeros((8, 8), np.float32)
    x = b.input("f32", (4, 8))
    b.output(b.node("linear", [x, b.constant(w, data=False)], f32(4, 8)))
    with pytest.raises(NotImplementedError):
        b.compile()
    program = b.compile(executable=False, keep_text=True).program
    assert "linear" in program.text("npuir") and program.report()["packed_bytes"] == 0
    with pytest.raises(NotImplementedError, match="planned"):
        program.run([0], [0])


# --- the table's form -------------------------------------------------------------------------------------------------


def test_form_of_the_table() -> None:
    b, _ = small_model()
    good = b.table()
    misaligned = np.frombuffer(bytearray(8 * len(b.dims) + 1), np.uint8)[1:].view(np.int64)
    for change, error in [
        ({"operands": good["operands"].astype(np.int64)}, ValueError),
        ({"operands": good["operands"].astype(np.int32)}, ValueError),
        ({"operands": good["operands"].astype(">u4")}, ValueError),
        ({"attrs": good["attrs"].astype(np.float64)}, ValueError),
        ({"attrs": np.repeat(good["attrs"], 2)[::2]}, ValueError),
        ({"dims": good["dims"].reshape(-1, 1)}, ValueError),
        ({"dims": misaligned}, ValueError),
        ({"nodes": good["nodes"].view(np.uint8)}, ValueError),
        ({"nodes": good["nodes"].view([("a", "u8"), ("b", "u8"), ("c", "u8")])}, ValueError),
        ({"values": good["nodes"]}, ValueError),
        ({"values": None}, TypeError),
        ({"outputs": [1, 2]}, TypeError),
        ({"strings": [1]}, TypeError),
        ({"strings": 5}, TypeError),
        ({"sources": ["a\0b"]}, ValueError),
        ({"sources": ["\ud800"]}, ValueError),
        ({"target": "npu1"}, ValueError),
        ({"passes": "dce,unknown"}, ValueError),
        ({"alpha": float("nan")}, ValueError),
        ({"threads": 0}, ValueError),
    ]:
        with pytest.raises(error):
            _core.compile(**{**good, **change})
    _core.compile(**good)


def mutate(rng: random.Random, b: Builder, table: dict[str, Any]) -> None:
    """Changes a few words anywhere but in the constants, whose memory nobody can check."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        pools = [n for n in ("nodes", "values", "operands", "attrs", "dims", "outputs") if len(table[n])]
        pool = table[rng.choice(pools)]
        at = rng.randrange(len(pool))
        fixed = {d for c in b.constants for d in range(c[5], c[5] + 2 * c[2])}
        if pool is table["dims"] and at in fixed:
            continue
        field = rng.choice(pool.dtype.names) if pool.dtype.names else None
        words = pool[field] if field else pool
        bits = 8 * words.dtype.itemsize
        old = int(words[at])
        flipped = old ^ (1 << rng.randrange(bits))
        new = rng.choice([0, 1, 2, 3, -1, old + 1, old - 1, old * 2, flipped, rng.getrandbits(bits)])
        words[at] = np.uint64(new % 2**bits).astype(f"u{bits // 8}").view(words.dtype)
    if rng.random() < 0.1:
        name = rng.choice(["nodes", "values", "operands", "attrs", "dims", "outputs"])
        table[name] = table[name][: rng.randrange(len(table[name]) + 1)].copy()


def types_of(b: Builder, table: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """Bytes of each input and output as the table now has them, or None if it cannot be run here."""

    def size(value: int) -> int:
        row = table["values"][value]
        _, width, kind = _core.dtypes()[row["dtype"]]
        if kind == "o":
            raise OverflowError
        count = width
        for d in table["dims"][row["first_dim"] :][: row["rank"]]:
            count *= int(d)
        if count > 1 << 22:
            raise OverflowError
        return count

    inputs, value = {}, 0
    try:
        for node in table["nodes"]:
            if node["op"] == OPS["input"]["id"]:
                inputs[int(table["attrs"][node["first_attr"]])] = size(value)
            if node["op"] == OPS["host"]["id"]:
                return None
            value += int(node["n_results"])
        return [inputs[i] for i in range(len(inputs))], [size(int(v)) for v in table["outputs"]]
    except OverflowError:
        return None


def fuzz_models() -> list[Builder]:
    models = [small_model()[0]]
    b = Builder()  # indexing, reductions, slices, integers
    ids, x = b.input("i64", (3,)), b.input("f32", (2, 3, 4))
    rows = b.node("embedding", [b.constant(array(7, 4)), ids], f32(3, 4))
    y = b.node("add", [x, rows], f32(2, 3, 4))
    y = b.node("slice", [y], f32(2, 2, 4), dim=1, start=1, end=3, step=1)
    y = b.node("reshape", [y], f32(4, 4), shape=[4, 4])
    s = b.node("softmax", [y], f32(4, 4), dim=1)
    m = b.node("mean", [s], f32(4, 1), dims=[1], keepdim=True)
    e = b.node("expand", [m], f32(4, 4), shape=[4, 4])
    c = b.node("cat", [e, y], f32(8, 4), dim=0)
    g = b.node("gather", [c, b.constant(np.array([[1, 2], [0, 3]]), literal=True)], f32(2, 2), dim=1)
    b.output(c, g, b.node("argmax", [c], ("i64", (8,)), dim=1, keepdim=False))
    models.append(b)
    b = Builder()  # attention, norms, creation, casts
    q = b.input("f32", (1, 2, 5, 4))
    k = b.node("permute", [q], f32(1, 2, 4, 5), dims=[0, 1, 3, 2])
    w = b.node("matmul", [q, k], f32(1, 2, 5, 5))
    w = b.node("mul", [w], f32(1, 2, 5, 5), scalar=0.5)
    w = b.node("softmax", [w], f32(1, 2, 5, 5), dim=3)
    o = b.node("matmul", [w, q], f32(1, 2, 5, 4))
    r = b.node("arange", [], ("i64", (4,)), first=0, delta=1)
    o = b.node("add", [o, b.node("cast", [r], f32(4))], f32(1, 2, 5, 4))
    t = b.node("full", [], ("f32", (4,)), value=2.0)
    b.output(b.node("where", [b.node("gt", [o, t], ("bool", (1, 2, 5, 4))), o, t], f32(1, 2, 5, 4)))
    models.append(b)
    b = Builder()  # norms, convolution, attention
    x = b.input("f32", (1, 4, 6, 4))
    g = b.constant(array(4))
    n, _ = b.node("layer_norm", [x, g, g], f32(1, 4, 6, 4), f32(1, 4, 6, 4), axes=1, eps=1e-5)
    n, _ = b.node("rms_norm", [n, g], f32(1, 4, 6, 4), f32(1, 4, 6, 4), axes=1, eps=1e-5)
    n = b.node("group_norm", [n, g], f32(1, 4, 6, 4), groups=2, eps=1e-5)
    w = b.constant(array(4, 2, 3, 1))
    n = b.node("conv", [n, w, g], f32(1, 4, 6, 4), stride=[1, 1], padding=[1, 0], dilation=[1, 1], groups=2)
    kv = b.node("slice", [n], f32(1, 2, 6, 4), dim=1, start=0, end=2, step=1)
    a = b.node("attention", [n, kv, kv], f32(1, 4, 6, 4), causal=True, safe=True, scale=0.5)
    b.output(a, b.node("gelu", [n], f32(1, 4, 6, 4), approximate=True))
    models.append(b)
    b = Builder()  # writes at indices, orders, pads
    x, i = b.input("f32", (5, 6)), b.input("i64", (2,))
    y = b.node("index_put", [x, b.constant(array(2, 6)), i], f32(5, 6), mask=[1, 0], accumulate=True)
    y = b.node("index_add", [y, i, b.constant(array(2, 6))], f32(5, 6), dim=0)
    y = b.node("scatter", [y, b.constant(np.array([[0, 1]]), literal=True), b.constant(array(1, 2))], f32(5, 6), dim=1)
    y = b.node("slice_scatter", [y, b.constant(array(5, 2))], f32(5, 6), dim=1, start=1, end=4, step=2)
    y = b.node("pad", [y], f32(7, 6), padding=[1, 1, 0, 0], value=1.5)
    t, at = b.node("topk", [y], f32(7, 3), ("i64", (7, 3)), dim=1, k=3, largest=True, sorted=True)
    c = b.node("cumsum", [b.node("flip", [t], f32(7, 3), dims=[0])], f32(7, 3), dim=0)
    o, _ = b.node("sort", [c], f32(7, 3), ("i64", (7, 3)), dim=0, descending=True)
    r = b.node("remainder", [at], ("i64", (7, 3)), scalar=2)
    s = b.node("index_select", [o, i], f32(2, 3), dim=0)
    b.output(b.node("tril", [o], f32(7, 3), diagonal=0), r, s, b.node("var", [o], f32(3), dims=[0], correction=1.0))
    models.append(b)
    return models


REFUSALS = (ValueError, TypeError, NotImplementedError, MemoryError, IndexError)


def fuzz(seeds: range) -> tuple[int, int]:
    models, ran, refused = fuzz_models(), 0, 0
    for b in models:
        b.compile()
    for seed in seeds:
        rng = random.Random(seed)
        b = rng.choice(models)
        table = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in b.table().items()}
        mutate(rng, b, table)
        passes = rng.choice(["default", "none"])
        try:
            program = _core.compile(**table, passes=passes, keepalive=b.arrays)
            sizes = types_of(b, table)
            if sizes and program.report()["buffers"]["arena_bytes"] < 1 << 24:
                held = [[np.zeros(max(n, 1), np.uint8) for n in group] for group in sizes]
                program.run(*[[a.ctypes.data for a in group] for group in held])
            ran += 1
        except REFUSALS:
            refused += 1
        except RuntimeError as error:  # torch gives these to integers in that class
            assert re.search("ZeroDivisionError|negative integer powers", str(error)), (seed, error)
    return ran, refused


def test_mutated_tables() -> None:
    """A table that is not well formed is refused, one that still is runs; nothing crashes."""
    ran, refused = fuzz(range(4000))
    assert ran > 100 and refused > 1000


@pytest.mark.slow
def test_mutated_tables_long() -> None:
    fuzz(range(4000, 100000))


# --- report and text --------------------------------------------------------------------------------------------------


def test_report() -> None:
    b, _ = small_model()
    program = b.compile(keep_text=True).program
    report = program.report()
    assert set(report) == {
        "passes", "table_ms", "passes_ms", "lower_ms", "alloc_ms", "schedule_ms", "pack_ms", "nodes_table",
        "nodes_final", "alpha", "remarks", "buffers", "transitions", "placement", "packed_bytes",
        "arena_bytes", "instructions",
    }  # fmt: skip
    assert set(report["buffers"]) == {"virtual", "physical", "rho", "arena_bytes", "lower_bound_bytes"}
    assert set(report["transitions"]) == {"before", "after"}
    fields = {"name", "ms", "nodes_before", "nodes_after", "cost_before", "cost_after"}
    assert report["passes"] and all(set(p) == fields for p in report["passes"])
    assert all(set(r) == {"pass", "text", "source", "count"} for r in report["remarks"])
    assert report["nodes_table"] == 4 and report["placement"]["cpu"] == report["nodes_final"]
    assert sum(report["instructions"].values()) == report["nodes_final"]
    assert "Program for cpu" in repr(program)


def test_text() -> None:
    b, _ = small_model()
    program = b.compile(keep_text=True).program
    for stage in ("capture", "after:dce", "final", "npuir", "schedule"):
        assert "linear" in program.text(stage)
    with pytest.raises(ValueError):
        program.text("after:nothing")
    with pytest.raises(TypeError):
        program.text(1)
    text = program.text("capture")
    assert _core.optimize_text(text, "none") == text
    assert "linear" in _core.optimize_text(text, emit="npuir")
    with pytest.raises(ValueError):
        _core.optimize_text("graph nonsense")


# --- memory -----------------------------------------------------------------------------------------------------------


class Owner(list):
    """A list that can be watched."""


def test_keepalive() -> None:
    b, w = small_model()
    owner = Owner(b.arrays)
    watch = weakref.ref(owner)
    compiled = b.compile(keepalive=owner)
    del owner
    gc.collect()
    assert watch() is not None
    check_small(compiled, w)
    del compiled
    assert watch() is None


def test_cycle_is_collected() -> None:
    b, _ = small_model()
    owner = Owner(b.arrays)
    watch = weakref.ref(owner)
    owner.append(b.compile(keepalive=owner))
    del owner
    gc.collect()
    assert watch() is None


def test_each_allocation_fails_once() -> None:
    b, w = small_model()
    table = b.table()
    for n in range(1, 100000):
        try:
            _core.compile(**table, keepalive=b.arrays, fail_allocation=n)
            break
        except MemoryError:
            pass
    assert n > 50
    for m in range(1, n, max(1, n // 20)):
        with pytest.raises(MemoryError):
            b.compile(fail_allocation=m)
    check_small(b.compile(), w)


def test_no_leaks() -> None:
    b, _ = small_model()
    compiled, table = b.compile(), b.table()
    x, bad = array(4, 8), {**table, "outputs": table["outputs"] + np.uint32(1)}
    host, call = host_model()

    def round_trip() -> None:
        compiled(x)
        host(x, host=call)
        b.compile(keep_text=True).program.report()
        with pytest.raises(MemoryError):
            b.compile(fail_allocation=40)
        with pytest.raises(ValueError):
            _core.compile(**bad)
        with pytest.raises(KeyError):
            host(x, host=lambda *_: {}[1])

    for _ in range(300):
        round_trip()
    before = rss_bytes()
    for _ in range(1500):
        round_trip()
    assert rss_bytes() - before < 2 << 20


# --- host calls -------------------------------------------------------------------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


def look_into(capsule: Any) -> DLTensor:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return DLTensor.from_address(get(capsule, b"dltensor"))


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


def test_host_call() -> None:
    compiled, call = host_model()
    for _ in range(3):
        x = array(4, 8)
        np.testing.assert_array_equal(compiled(x, host=call)[0], -x * 2 + x)
    with pytest.raises(ValueError, match="host"):
        compiled(x)


def test_host_views_of_results() -> None:
    b = Builder()
    x = b.input("f32", (4, 6))
    t = b.host(0, [x], f32(4, 6), ("i64", (2,)))
    turned = b.node("permute", [t[0]], f32(6, 4), dims=[1, 0])
    part = b.node("slice", [turned], f32(3, 4), dim=0, start=1, end=6, step=2)
    b.output(part, b.node("add", [part, part], f32(3, 4)), t[1])
    compiled = b.compile()
    for _ in range(3):
        data = array(4, 6)

        def call(_: int, args: list[Any]) -> list[Any]:
            return [give(view(args[0]) + 1), give(np.array([3, 4]))]

        out, double, numbers = compiled(data, host=call)
        np.testing.assert_array_equal(out, (data + 1).T[1:6:2])
        np.testing.assert_array_equal(double, 2 * out)
        assert list(numbers) == [3, 4]


@pytest.mark.parametrize("name", list(NUMPY))
def test_dlpack(name: str) -> None:
    b = Builder()
    x = b.input(name, (2, 3))
    b.host(0, [x], ("object", ()), effect=True)
    b.output(b.node("permute", [x], (name, (3, 2)), dims=[1, 0]))
    code = {"b": 6, "u": 1, "i": 0, "f": 2, "c": 5}[_core.dtypes()[DTYPES[name]][2]]
    seen = []

    def call(_: int, args: list[Any]) -> list[Any]:
        t = look_into(args[0])
        seen.append((t.code, t.bits, t.lanes, t.ndim, *t.shape[:2], *t.strides[:2], *t.device, t.offset))
        if name != "bf16":
            np.testing.assert_array_equal(view(args[0]), data)
        return [None]

    data = np.arange(6).reshape(2, 3).astype(NUMPY[name])
    b.compile()(data, host=call)
    width = 8 * NUMPY[name]().itemsize
    assert seen == [(4 if name == "bf16" else code, width, 1, 2, 2, 3, 3, 1, 1, 0, 0)]


def test_host_exception_is_unchanged() -> None:
    compiled, call = host_model()
    error = KeyError("mine")

    def fails(*_: Any) -> Any:
        raise error

    x = array(4, 8)
    with pytest.raises(KeyError) as caught:
        compiled(x, host=fails)
    assert caught.value is error
    with pytest.raises(KeyboardInterrupt):
        compiled(x, host=lambda *_: signal.raise_signal(signal.SIGINT))
    np.testing.assert_array_equal(compiled(x, host=call)[0], -x * 2 + x)


def test_host_results_are_checked() -> None:
    compiled, _ = host_model()
    x, made = array(4, 8), array(8, 4)
    for result, error in [
        (None, TypeError),
        ([], ValueError),
        ([give(made), give(made)], ValueError),
        ([made], TypeError),
        ([[made.ctypes.data, [8, 1], made]], TypeError),
        ([("address", [8, 1], made)], TypeError),
        ([(made.ctypes.data, [8], made)], ValueError),
        ([(made.ctypes.data, 8, made)], TypeError),
        ([(made.ctypes.data, [8, "1"], made)], TypeError),
        ([(0, [8, 1], made)], RuntimeError),
        ([give(made.T)], RuntimeError),
    ]:
        with pytest.raises(error):
            compiled(x, host=lambda *_, r=result: r)
    with pytest.raises(RuntimeError, match="memory of operand 0"):
        compiled(x, host=lambda _, args: [give(view(args[0]))])


class Thing:
    pass


def test_objects() -> None:
    """One passes through, one is made and handed out twice, one is made, used and dropped, one is never used."""
    b = Builder()
    thing = ("object", ())
    given = b.input("object")
    kept, used, _ = b.host(1, [given], thing, thing, thing)
    x = b.host(2, [used, kept], f32(2))
    b.output(kept, given, kept, b.node("neg", [x], f32(2)))
    compiled = b.compile()
    made: list[Any] = []

    def call(callee: int, args: list[Any]) -> list[Any]:
        if callee == 1:
            assert args[0] is mine
            things = [Thing(), Thing(), Thing()]
            made.extend(map(weakref.ref, things))
            return things
        assert args[0] is made[1]() and args[1] is made[0]()
        return [give(np.ones(2, np.float32))]

    mine = Thing()
    for _ in range(3):
        made.clear()
        before = sys.getrefcount(mine)
        a, through, c, x = compiled(mine, host=call)
        assert a is c and a is made[0]() and through is mine and list(x) == [-1, -1]
        assert made[1]() is None and made[2]() is None
        del through
        assert sys.getrefcount(mine) == before
        del a, c
        assert made[0]() is None


def test_objects_that_only_pass_through() -> None:
    b = Builder()
    given = b.input("object")
    b.output(given, given)
    mine = Thing()
    before = sys.getrefcount(mine)
    assert b.compile()(mine) == [mine, mine]
    assert sys.getrefcount(mine) == before


def test_host_memory_goes_after_its_last_use() -> None:
    b = Builder()
    x = b.input("f32", (4,))
    first = b.host(0, [x], f32(4))
    second = b.host(1, [first], f32(4))
    third = b.host(2, [second], f32(4))
    b.output(b.node("neg", [third], f32(4)))
    alive: list[Any] = []
    seen = []

    class Watched(np.ndarray):
        pass

    def call(callee: int, args: list[Any]) -> list[Any]:
        seen.append([ref() is not None for ref in alive])
        made = (view(args[0]) + 1).view(Watched)
        alive.append(weakref.ref(made))
        return [give(made)]

    assert list(b.compile()(np.zeros(4, np.float32), host=call)[0]) == [-3] * 4
    assert seen == [[], [True], [False, True]]
    assert [ref() for ref in alive] == [None] * 3


def test_programs_inside_host_calls() -> None:
    outer, _ = host_model()
    inner, call = host_model()
    x = array(4, 8)

    def nested(_: int, args: list[Any]) -> list[Any]:
        same = outer(x, host=call)[0]  # the same program, inside itself
        return [give(inner(view(args[0]).copy(), host=call)[0] + same - same)]

    np.testing.assert_allclose(outer(x, host=nested)[0], x + x, rtol=1e-5, atol=1e-5)


# --- threads, processes, signals --------------------------------------------------------------------------------------


def test_threads() -> None:
    b, w = small_model()
    compiled, (host, call) = b.compile(threads=2), host_model()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                x = rng.standard_normal((4, 8)).astype(np.float32)
                check_small(compiled, w, x)
                np.testing.assert_array_equal(host(x, host=call)[0], -x * 2 + x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]


def big_model(layers: int, size: int) -> Builder:
    b = Builder()
    x = b.input("f32", (size, size))
    for _ in range(layers):
        x = b.node("exp", [x], f32(size, size))
        x = b.node("neg", [x], f32(size, size))
    b.output(x)
    return b


def test_gil_is_released() -> None:
    compiled = big_model(40, 1000).compile(passes="none")
    x, done, ticks = np.zeros((1000, 1000), np.float32), threading.Event(), 0

    def work() -> None:
        for _ in range(3):
            compiled(x)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 20


def test_fork() -> None:
    b, w = small_model()
    compiled = b.compile(threads=2)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            check_small(compiled, w, x)

    x = array(4, 8)
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                signal.alarm(30)
                try:
                    check_small(compiled, w, x)
                    b.compile(threads=2)(x)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for t in threads:
            t.join()


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm():
    def interrupt(*_: Any) -> None:
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_interrupted_run(alarm: Any) -> None:
    compiled = big_model(1000, 1000).compile(passes="none")
    x = np.zeros((1000, 1000), np.float32)
    start = time.monotonic()
    alarm(0.2)
    with pytest.raises(Interrupted):
        compiled(x)
    assert time.monotonic() - start < 5


def test_interrupted_compile(alarm: Any) -> None:
    b = big_model(100_000, 2)
    table = b.table()
    alarm(0.03)
    with pytest.raises(Interrupted):
        for _ in range(100):
            _core.compile(**table)
    alarm(0)
    check = small_model()
    check_small(check[0].compile(), check[1])
