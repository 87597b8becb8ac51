"""The core's memory, and what happens around a run: threads, forks, signals."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ugc import _core
from tests.tables import Builder, array, check_small, f32, host_model, small_model

# --- memory -----------------------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
