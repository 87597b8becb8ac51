"""Host calls: what they are given, what they may return, and objects that pass through."""

from __future__ import annotations

import ctypes
import signal
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from forge_ugc import _core
from tests.tables import DTYPES, NUMPY, Builder, array, f32, give, host_model, view


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
    # a process that a shell started in the background inherits an ignored SIGINT, and Python then has no handler for it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(x, host=lambda *_: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
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
