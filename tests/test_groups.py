"""Products over the same activations run together: which do, that nothing of the results changes, and what may not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forge_ugc
from forge_ugc import npu

from .models import families


def groups(compiled):
    """Sizes of the groups, in the order of the schedule."""
    numbers = [int(n) for n in re.findall(r" group (\d+)", compiled.ir("schedule"))]
    assert numbers == sorted(numbers)  # members are neighbours
    sizes = [numbers.count(n) for n in dict.fromkeys(numbers)]
    assert compiled.report.to_dict()["groups"] == {"groups": len(sizes), "instructions": len(numbers)}
    return sizes


def bits(t):
    return t.contiguous().view(torch.uint8)


class Block(nn.Module):
    """q, k, v with biases, of unequal widths; gate and up."""

    def __init__(self, width=96, inner=200, bias=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n, bias) for n in (width, 33, 32))
        self.gate, self.up = nn.Linear(width, inner, False), nn.Linear(width, inner, False)
        self.down = nn.Linear(inner, width, False)

    def forward(self, x):
        h = self.q(x).softmax(-1) + torch.cat([self.k(x), self.v(x)], -1).sum(-1, keepdim=True)
        return h + self.down(F.silu(self.gate(h)) * self.up(h))


class Apart(nn.Module):
    """The same products; each waits for the one before, so that none are together."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        b, results = self.block, []
        for product in (b.q, b.k, b.v):
            results.append(product(x))
            x = torch.where(results[-1].sum(-1, keepdim=True) != 1e30, x, x + 1)
        h = results[0].softmax(-1) + torch.cat(results[1:], -1).sum(-1, keepdim=True)
        up = b.up(h)
        h_too = torch.where(up.sum(-1, keepdim=True) != 1e30, h, h + 1)
        return h + b.down(F.silu(b.gate(h_too)) * up)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8", "w4", "a model of bf16"])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_together_and_apart_give_the_same_bits(rows, precision, threads, monkeypatch):
    monkeypatch.setattr(npu, "has_bf16", lambda: True)
    torch.manual_seed(rows)
    dtype = torch.bfloat16 if "model" in precision else torch.float32
    block, x = Block(256, 520).eval().to(dtype), torch.randn(rows, 256, dtype=dtype)
    settings = dict(device="cpu", precision="fp32" if "model" in precision else precision, num_threads=threads)
    together, apart = (forge_ugc.compile(m, (x,), **settings) for m in (block, Apart(block).eval()))
    assert groups(together) == [3, 2] and groups(apart) == []
    for _ in range(3):
        y = torch.randn(rows, 256, dtype=dtype)
        assert torch.equal(bits(together(y)), bits(apart(y)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    torch.manual_seed(0)
    block, x = Block().to(dtype).eval(), torch.randn(2, 96, dtype=dtype)
    together, apart = (forge_ugc.compile(m, (x,), device="cpu") for m in (block, Apart(block).eval()))
    assert 3 in groups(together) and groups(apart) == []
    assert torch.equal(bits(together(x)), bits(apart(x)))


def test_many_rows_run_one_after_the_other():
    block, x = Block().eval(), torch.randn(7, 96)
    compiled = forge_ugc.compile(block, (x,), device="cpu")
    assert groups(compiled) == []
    torch.testing.assert_close(compiled(x), block(x))


def test_at_most_eight_together():
    layers = nn.ModuleList(nn.Linear(64, 40 + i) for i in range(19)).eval()
    x = torch.randn(1, 64)

    def forward(x):
        return torch.cat([layer(x) for layer in layers], -1)

    compiled = forge_ugc.compile(forward, (x,), device="cpu")
    assert groups(compiled) == [8, 8, 3]
    torch.testing.assert_close(compiled(x), forward(x))


class Moved(nn.Module):
    """A norm between the products, as Qwen3 has it: the later ones are moved up, past what they do not need."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        q = self.norm(self.q(x))
        return q * 2 + self.norm(self.k(x))


def test_members_are_moved_up():
    model, x = Moved().eval(), torch.randn(1, 64)
    compiled = forge_ugc.compile(model, (x,), device="cpu")
    assert groups(compiled) == [2]
    torch.testing.assert_close(compiled(x), model(x))


class Chained(nn.Module):
    """Products over x whose epilogues read others' results: all of a row, or what comes of two."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 48) for _ in range(3))
        self.how = how

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        if self.how == "chain":  # c follows b, which follows a
            b = b * a
            return a, self.c(x) + b
        if self.how == "two":  # c needs two that do not follow each other
            return a, b, self.c(x) * a + b
        if self.how == "row":  # c needs all of a row of b
            return a, self.c(x) + b.flip(-1)
        return a, b, self.c(x) * b[:1]  # one row for all


@pytest.mark.parametrize("how", ["chain", "two", "row", "first"])
@pytest.mark.parametrize("threads", [1, 4])
def test_members_that_need_each_other(how, threads):
    torch.manual_seed(1)
    model, x = Chained(how).eval(), torch.randn(3, 64)
    compiled = forge_ugc.compile(model, (x,), device="cpu", num_threads=threads)
    for _ in range(20):
        y = torch.randn(3, 64)
        for got, expected in zip(compiled(y), model(y), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("seed", range(6))
def test_random_products(seed):
    """Sums, products and activations of products over two inputs, on more threads than there are cores."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n, (1,), generator=g))

    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Linear(48, 56, bias=bool(draw(2))) for _ in range(10)).eval()
    plan = [(draw(2), draw(4), draw(i + 1)) for i in range(10)]

    def forward(x, y):
        made = []
        for layer, (which, what, other) in zip(layers, plan, strict=True):
            z = layer((x, y)[which])
            if what and made:
                z = (z + made[other % len(made)], F.silu(z) * made[other % len(made)], F.gelu(z))[what - 1]
            made.append(z)
        return torch.stack(made).sum(0), made[3].sum(-1)

    x, y = torch.randn(2, 48), torch.randn(2, 48)
    compiled = forge_ugc.compile(forward, (x, y), device="cpu", num_threads=3)
    assert groups(compiled)
    for _ in range(5):
        x, y = torch.randn(2, 48), torch.randn(2, 48)
        for got, expected in zip(compiled(x, y), forward(x, y), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["granite", "qwen2"])
def test_families(name):
    """Decoder layers: q, k and v; gate and up."""
    model = families.build(name, 2, vocab_size=99).m
    ids = torch.zeros(1, 1, dtype=torch.int64)

    def forward(ids):
        return model(ids, use_cache=False).logits

    compiled = forge_ugc.compile(forward, (ids,), device="cpu")
    assert groups(compiled) == [3, 2] * 2


def test_profile_lists_members_alone():
    block, x = Block().eval(), torch.randn(1, 96)
    compiled = forge_ugc.compile(block, (x,), device="cpu")
    rows = compiled.profile(x).rows
    assert sum(row.operator == "linear" for row in rows) == 6 and all(row.count == 1 for row in rows)
