"""dynamic_shapes: other sizes from the same capture."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import forge_ugc
from tests.compare import assert_same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.norm = nn.Embedding(50, 8), nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> Any:
        b, t = ids.shape
        x = self.embed(ids) + torch.arange(t)[None, :, None] / t
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(b, t, 8), t


@pytest.fixture(scope="module")
def block() -> tuple[Block, forge_ugc.CompiledModel]:
    torch.manual_seed(0)
    model = Block().eval()
    dims = {"ids": {0: Dim("b", min=1, max=16), 1: Dim("t", min=2, max=64)}}
    return model, forge_ugc.compile(model, torch.randint(0, 50, (2, 7)), dynamic_shapes=dims)


@torch.no_grad()
def test_other_sizes_are_specialised(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, forge = block
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: pytest.fail("exported again"))
    for shape in ((2, 7), (3, 5), (16, 64), (1, 2), (3, 5)):
        ids = torch.randint(0, 50, shape)
        assert_same(model(ids), forge(ids))


def test_sizes_outside_the_range_are_refused(block: Any) -> None:
    _, forge = block
    for shape in ((17, 5), (2, 65), (2, 1)):
        with pytest.raises(TypeError, match=r"input ids, size of dimension [01]: \d+ is outside the range"):
            forge(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(TypeError, match="input ids: expected 2 dimensions"):
        forge(torch.zeros(3, dtype=torch.int64))


@torch.no_grad()
def test_cache_is_bounded_and_specialising_is_fast(block: Any) -> None:
    model, forge = block
    start = time.perf_counter()
    for t in range(2, 42):
        forge(torch.zeros(1, t, dtype=torch.int64))
    assert len(forge._plans) <= 16
    assert (time.perf_counter() - start) / 40 < 0.25
    model.qkv.weight.mul_(1.5)
    for t in (3, 41, 3):
        ids = torch.randint(0, 50, (1, t))
        assert_same(model(ids), forge(ids))
    assert forge.ir("npuir")


def test_static_shapes_say_what_to_do() -> None:
    forge = forge_ugc.compile(lambda x: x + 1, torch.ones(3))
    with pytest.raises(TypeError, match=r"input x: expected float32\[3\].*given float32\[4\].*dynamic_shapes"):
        forge(torch.ones(4))


@torch.no_grad()
def test_derived_shared_and_nested_dims() -> None:
    n = Dim("n", min=1, max=20)

    def function(pair: dict[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
        return pair["a"] @ pair["b"] + z.reshape(-1, 2).sum(1, keepdim=True)

    def example(n: int) -> Any:
        return {"a": torch.randn(n, 3), "b": torch.randn(3, 5)}, torch.randn(2 * n)

    shapes = {"pair": {"a": {0: n}, "b": None}, "z": {0: 2 * n}}
    forge = forge_ugc.compile(function, example(4), dynamic_shapes=shapes)
    for size in (4, 9, 2):
        args = example(size)
        assert_same(function(*args), forge(*args))
    bad = example(4)
    with pytest.raises(TypeError):
        forge(bad[0], torch.randn(10))


@torch.no_grad()
def test_sizes_that_depend_on_data() -> None:
    def function(x: torch.Tensor) -> Any:
        kept = x[x > 0]
        return kept * 2, kept.sum(), torch.nonzero(x)

    with pytest.warns(forge_ugc.FallbackWarning):
        forge = forge_ugc.compile(function, torch.randn(5))
    for x in (torch.randn(5), -torch.ones(5), torch.ones(5)):
        assert_same(function(x), forge(x))
