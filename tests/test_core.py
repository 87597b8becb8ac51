"""The C core through its Python door alone: tables by hand, numpy arrays, no torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from forge_ugc import _core
from tests.tables import DTYPES, NUMPY, OPS, Builder, array, check_small, f32, small_model

ROOT = Path(__file__).resolve().parent.parent


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


# --- report and text --------------------------------------------------------------------------------------------------


def test_report() -> None:
    b, _ = small_model()
    program = b.compile(keep_text=True).program
    report = program.report()
    assert set(report) == {
        "passes", "table_ms", "passes_ms", "lower_ms", "alloc_ms", "schedule_ms", "pack_ms", "nodes_table",
        "nodes_final", "alpha", "remarks", "buffers", "transitions", "groups", "placement", "packed_bytes",
        "quantised_bytes", "arena_bytes", "instructions", "npu_ms",
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
