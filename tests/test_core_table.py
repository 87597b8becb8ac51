"""Tables that are not well formed: refused, never a crash."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from forge_ugc import CompileError, _core
from forge_ugc.table import _ROWS, _columns
from tests.tables import OPS, Builder, array, f32, small_model


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


def test_a_number_too_large_for_its_column() -> None:
    """numpy would wrap it without a word."""
    names = ("dtype", "rank", "first_dim")
    most = int(np.iinfo(_ROWS["values"]["rank"]).max)
    assert _columns(_ROWS["values"], [(0, most, 0)], names)["rank"][0] == most
    with pytest.raises(CompileError, match=f"rank, has no room for {most + 1}"):
        _columns(_ROWS["values"], [(0, 1, 0), (0, most + 1, 0)], names)
