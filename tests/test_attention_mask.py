"""Attention over the keys that a mask lets be seen: what lies behind it is not read, and weighs nothing; where a row
sees nothing, and its mask is a number, all keys weigh alike, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import forge_ugc

KEYS, D = 200, 8
LEAST = torch.finfo(torch.float32).min
HIDDEN = {"bool": False, "inf": -float("inf"), "least": LEAST}
# heads, key heads, queries: a row at a time, a block of heads, a block of queries
SHAPES = [(2, 2, 1), (8, 1, 1), (4, 2, 5)]


def attend(q, k, v, mask):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def draw(heads, groups, queries, batch=2):
    g = torch.Generator().manual_seed(heads)
    return (
        torch.randn(batch, heads, queries, D, generator=g),
        torch.randn(batch, groups, KEYS, D, generator=g),
        torch.randn(batch, groups, KEYS, D, generator=g),
    )


def mask_of(seen, kind):
    if kind == "bool":
        return seen
    return torch.zeros(seen.shape).masked_fill(~seen, HIDDEN[kind])


@pytest.fixture(scope="module")
def compiled():
    made = {}

    def get(*args):
        key = tuple((a.shape, a.dtype) for a in args)
        if key not in made:
            made[key] = forge_ugc.compile(attend, args, device="cpu")
        return made[key](*args)

    return get


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("first, end", [(0, 1), (0, 8), (0, 95), (0, 96), (3, 97), (100, 101), (17, 199), (0, KEYS)])
def test_what_is_hidden_is_not_read(compiled, shape, kind, first, end):
    q, k, v = draw(*shape)
    seen = torch.zeros(2, 1, shape[2], KEYS, dtype=torch.bool)
    seen[:, :, :, first:end] = True
    seen[1, :, -1:, end - 1] = end - 1 == first  # rows of a mask differ
    mask = mask_of(seen, kind)
    expected = attend(q, k, v, mask)
    torch.testing.assert_close(compiled(q, k, v, mask), expected, atol=1e-6, rtol=1e-5)
    start = first // 96 * 96  # whole blocks before the first one are not read either
    for junk in (float("nan"), float("inf")):
        for t in (k, v):
            t[:, :, end:] = junk
            t[:, :, :start] = junk
    torch.testing.assert_close(compiled(q, k, v, mask), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_see_nothing(compiled, shape, kind):
    """Beside rows that see a part: 0 for bool and -inf, as torch has it; the average of all values for a number."""
    q, k, v = draw(*shape)
    seen = torch.zeros(2, 1, shape[2], KEYS, dtype=torch.bool)
    seen[0, :, :, 100:120] = True
    seen[0, :, 1:2] = False
    mask = mask_of(seen, kind)
    got = compiled(q, k, v, mask)
    torch.testing.assert_close(got, attend(q, k, v, mask), atol=1e-6, rtol=1e-5)
    if kind == "least":
        mean = v.mean(2, keepdim=True).repeat_interleave(shape[0] // shape[1], 1)
        torch.testing.assert_close(got[1], mean[1].expand_as(got[1]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_that_hide_little(compiled, shape):
    """-10000, as older models have it, hides by its size alone: large scores come through."""
    q, k, v = draw(*shape)
    k[:, :, 150] = q[:, :1, 0] * 1e6
    mask = torch.zeros(2, 1, shape[2], KEYS)
    mask[..., 50:] = -10000.0
    torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_so_low_that_hidden_keys_win(compiled, shape):
    """What is seen scores less than what is hidden: then nothing is skipped."""
    q, k, v = draw(*shape)
    q.fill_(1e19)
    k[:, :, :20] = -4e18  # scores of -1e38, seen
    mask = torch.zeros(2, 1, shape[2], KEYS)
    mask[..., 20:] = -1.5e38
    k[:, :, 20:] = 3e18
    torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask), atol=1e-6, rtol=1e-5)
