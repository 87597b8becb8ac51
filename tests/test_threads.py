"""One compiled model from many threads and processes, and for a long time."""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from tests.compare import assert_same


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.Softmax(-1)).eval()


def in_threads(count: int, work: Any) -> None:
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_four_threads_equal_serial(num_threads: int) -> None:
    net = model()
    forge = forge_ugc.compile(net, torch.randn(8, 32), num_threads=num_threads)
    inputs = [torch.randn(8, 32) for _ in range(200)]
    serial = [forge(x) for x in inputs]

    def work(i: int) -> None:
        for k in range(200):
            j = (k * 7 + i * 50) % 200
            assert torch.equal(forge(inputs[j]), serial[j])

    in_threads(4, work)


@pytest.mark.parametrize("capture", ["export", "auto"])
def test_threads_that_compile(capture: str) -> None:
    """torch.export keeps its state in globals, and patches nn.Module."""

    def work(i: int) -> None:
        net, x = model(), torch.randn(4 + i, 32)
        for way in (capture, "export"):
            with torch.no_grad():
                assert_same(net(x), forge_ugc.compile(net, x, device="cpu", capture=way)(x))

    in_threads(4, work)
    assert logging.getLogger("torch.export").level != logging.CRITICAL


def test_threads_with_host_calls_and_other_shapes() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.lgamma(x * x + 1).sum(-1) + x[:, 0], x[x > 0]

    dim = torch.export.Dim("n", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forge = forge_ugc.compile(function, torch.randn(4, 3), dynamic_shapes={"x": {0: dim}})

    def work(i: int) -> None:
        for k in range(40):
            x = torch.randn(2 + (k * 3 + i) % 30, 3)
            assert_same(function(x), forge(x))

    in_threads(4, work)


def test_weights_change_while_threads_call() -> None:
    net = model()
    forge = forge_ugc.compile(net, torch.randn(8, 32))
    x = torch.randn(8, 32)
    stop = threading.Event()

    def work(i: int) -> None:
        if i == 0:
            for _ in range(20):
                with torch.no_grad():
                    net[0].bias.add_(0.01)
            stop.set()
        while not stop.is_set():
            assert torch.isfinite(forge(x)).all()

    in_threads(3, work)
    with torch.no_grad():
        assert_same(net(x), forge(x))


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_ten_thousand_calls_do_not_grow() -> None:
    def function(x: torch.Tensor) -> Any:
        return {"y": nn.functional.gelu(x @ x.t()), "l": torch.lgamma(x), "big": x.repeat(64, 64)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forge = forge_ugc.compile(function, torch.randn(8, 8))
    x = torch.randn(8, 8)
    for _ in range(500):
        forge(x)
    gc.collect()
    before = rss()
    for _ in range(10_000):
        forge(x)
    gc.collect()
    assert rss() - before < 8 << 20


def test_programs_are_freed() -> None:
    net = model()
    x = torch.randn(8, 32)
    for _ in range(3):
        forge_ugc.compile(net, x)
    gc.collect()
    before = rss()
    forge = forge_ugc.compile(net, x)
    for _ in range(300):
        forge.refresh()
    gc.collect()
    assert rss() - before < 16 << 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork() -> None:
    net = model()
    forge = forge_ugc.compile(net, torch.randn(8, 32), num_threads=2)
    x = torch.randn(8, 32)
    expected = forge(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if torch.equal(forge(x), expected) else 2
        finally:
            os._exit(status)
    deadline = threading.Timer(60, lambda: os.kill(child, 9))
    deadline.start()
    _, code = os.waitpid(child, 0)
    deadline.cancel()
    assert code == 0
    assert torch.equal(forge(x), expected)
