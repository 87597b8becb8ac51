"""What the tests of programs on the NPU share: a device in software, and a stack of equal blocks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forge_ugc
from forge_ugc import npu
from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client

ROOT = Path(__file__).resolve().parent.parent
EXACT = {"types": "f32", "border": "f32"}  # the software NPU computes in f32: nothing is rounded then


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    ze_client.require_software_npu()


@pytest.fixture
def device() -> Iterator[SoftwareNpu]:
    with software_npu() as device:
        yield device
        end = time.monotonic() + 20
        while device.live() and time.monotonic() < end:  # a second tier may still be compiled
            npu.forget()
            gc.collect()
            time.sleep(0.02)
        assert not device.live() and not device.misuses()


def compile_npu(model: Any, *example: Any, **options: Any) -> forge_ugc.CompiledModel:
    return forge_ugc.compile(model, example, **{"device": "npu", "npu_options": EXACT, **options})


class Block(nn.Module):
    """Attention and an MLP, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Stack(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int = 4, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(layers).eval()


X = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1))
