"""Huge pages under weights that are read once a token."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from pathlib import Path

import pytest
import torch

import forge_ugc

HUGE, COLLAPSE = 2 << 20, 25


def available():
    """Whether this kernel moves pages on request."""
    memory = mmap.mmap(-1, 3 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, 3 * HUGE)
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(-(-address // HUGE) * HUGE), ctypes.c_size_t(HUGE), COLLAPSE) == 0


def huge_bytes(tensor):
    """Of the areas of memory that the tensor lies in."""
    begin, end, found, inside = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) < end and int(area[2], 16) > begin
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


class InRows(torch.nn.Module):
    """A weight that lies as transformers' Conv1D keeps it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


def reader(rows=1, megabytes=40, in_rows=False):
    """Its weight lies in memory that is fresh: what was freed before may have huge pages already."""
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh = torch.frombuffer(memory, dtype=torch.float32)
    if in_rows:
        return InRows(fresh.view(1024, -1).normal_(std=0.02)).eval(), torch.randn(rows, 1024)
    layer = torch.nn.Linear(1024, megabytes << 8, bias=False, device="meta").eval()
    layer.weight = torch.nn.Parameter(fresh.view_as(layer.weight).normal_(std=0.02))
    return layer, torch.randn(rows, 1024)


@pytest.mark.skipif(not available(), reason="no huge pages on request here")
@pytest.mark.parametrize(("rows", "in_rows"), [(1, False), (64, True)])
def test_weights_come_to_lie_in_huge_pages(rows, in_rows):
    layer, x = reader(rows, in_rows=in_rows)
    before = huge_bytes(layer.weight)
    compiled = forge_ugc.compile(layer, (x,), device="cpu")
    end = time.monotonic() + 30
    while huge_bytes(layer.weight) < before + (32 << 20) and time.monotonic() < end:
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-4, rtol=1e-4)  # while they are moved
    assert huge_bytes(layer.weight) >= before + (32 << 20)
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not available(), reason="no huge pages on request here")
def test_weights_beside_each_other_share_huge_pages():
    size = 768 * 768  # 2.25 MB: hardly one of them holds a whole huge page
    memory = mmap.mmap(-1, 18 * size * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh = torch.frombuffer(memory, dtype=torch.float32).normal_(std=0.02)
    layers = torch.nn.Sequential(*(InRows(part.view(768, 768)) for part in fresh.split(size))).eval()
    x, before = torch.randn(64, 768), huge_bytes(fresh)
    compiled = forge_ugc.compile(layers, (x,), device="cpu")
    end = time.monotonic() + 30
    while huge_bytes(fresh) < before + (34 << 20) and time.monotonic() < end:
        compiled(x)
    assert huge_bytes(fresh) >= before + (34 << 20)
    torch.testing.assert_close(compiled(x), layers(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "pack", "in_rows"), [(1, False, False), (64, True, False), (1, True, True)])
def test_others_stay_as_they_are(rows, pack, in_rows):
    layer, x = reader(rows, in_rows=in_rows)
    before = huge_bytes(layer.weight)
    compiled = forge_ugc.compile(layer, (x,), device="cpu", pack=pack)
    compiled(x)
    time.sleep(0.2)
    assert huge_bytes(layer.weight) == before


def test_programs_and_weights_go_while_pages_are_moved():
    for _ in range(4):
        layer, x = reader(megabytes=24)
        compiled = forge_ugc.compile(layer, (x,), device="cpu")
        del layer  # the program still owns the weight
        compiled(x)
        del compiled


def test_a_child_of_fork_drops_its_program():
    layer, x = reader(megabytes=24)
    compiled = forge_ugc.compile(layer, (x,), device="cpu")
    child = os.fork()
    if child == 0:
        try:
            del compiled
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
