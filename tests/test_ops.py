"""Every other operator that the core takes natively, against torch: strides, 0-d and empty tensors, dtypes.

Each row runs without a fallback and equals eager; integers and bools to the bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from tests.compare import assert_same
from tests.opcheck import FLOATS, INTS, TOLERANCE, check, tensor

REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": torch.var,
    "std": torch.std,
    "logsumexp": torch.logsumexp,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    function, x = REDUCTIONS[name], tensor(3, 5, 7, dtype=dtype)
    for dim in (0, 1, -1, (0, 2), (0, 1, 2)):
        for keepdim in (False, True):
            check(
                lambda x, dim=dim, keepdim=keepdim: function(x, dim=dim, keepdim=keepdim),
                x,
                tolerance=2 * TOLERANCE[dtype],
            )
    check(lambda x: function(x, dim=1), tensor(3, 4, 1000, dtype=dtype).transpose(1, 2), tolerance=4 * TOLERANCE[dtype])


def test_reductions_of_other_kinds() -> None:
    i, b, f = tensor(3, 5, dtype=torch.int32), tensor(3, 5, dtype=torch.bool), tensor(3, 5)
    check(lambda i, b: (i.sum(), i.sum(1), b.sum(0), b.any(), b.all(1), i.prod(0), i.amax(1), b.float().mean()), i, b)
    check(
        lambda f: (
            f.argmax(),
            f.argmax(1),
            f.argmin(0, keepdim=True),
            f.max(1),
            f.min(0),
            f.max(),
            f.prod(1),
            f.norm(),
            f.norm(dim=1),
        ),
        f,
    )
    check(lambda e: (e.sum(), e.mean(), e.sum(0), e.prod(), e.any(), e.all()), torch.zeros(0, 3))
    check(lambda s: (s.sum(), s.mean(), s.amax(), s.sum(0), s.argmax(), s.var(correction=0)), torch.tensor(2.5))
    check(
        lambda f: (f.argmax(1), f.amax(1), f.max(1), f.sum(), f.sort(1), f.topk(2)),
        torch.tensor([[1.0, float("nan"), 3.0], [2.0, 2.0, 1.0]]),
    )


def test_scans_and_order() -> None:
    x, i = tensor(4, 9), tensor(4, 9, dtype=torch.int64)
    check(
        lambda x, i: (
            x.cumsum(0),
            x.cumsum(-1),
            i.cumsum(1),
            (i > 0).cumsum(1),
            i.to(torch.uint8).cumsum(1),
            i.cumprod(1),
        ),
        x,
        i,
        tolerance=1e-5,
    )
    check(
        lambda x, i: (
            x.topk(3),
            x.topk(2, largest=False),
            x.topk(2, dim=0),
            x.sort(),
            x.sort(descending=True),
            x.argsort(1),
            i.sort(stable=True),
        ),
        x,
        i,
    )
    check(
        lambda x: (
            x.softmax(-1),
            x.softmax(0),
            x.log_softmax(-1),
            (x * 50).softmax(1),
            x.softmax(-1, dtype=torch.float64),
        ),
        x,
    )
    check(lambda x: (x.softmax(-1), x.log_softmax(0)), torch.full((2, 3), float("-inf")))


def test_views() -> None:
    x = tensor(2, 3, 4, 5)
    check(
        lambda x: (
            x.view(6, 20),
            x.reshape(2, -1),
            x.flatten(1),
            x.permute(3, 1, 0, 2),
            x.transpose(1, 2).reshape(2, 4, 15),
            x.mT,
        ),
        x,
    )
    check(
        lambda x: (
            x[:, 1],
            x[..., ::2],
            x[:, -1:],
            x[:, 1:100],
            x.select(2, -1),
            x.narrow(3, 1, 2),
            x[None, :, 0],
            x.unsqueeze(-1),
        ),
        x,
    )
    check(
        lambda x: (
            *x.split(2, 2),
            *x.chunk(2, -1),
            *x.unbind(1),
            x.expand(2, 2, 3, 4, 5),
            x[:1].expand(3, -1, -1, -1),
            x.squeeze(),
        ),
        x,
    )
    check(
        lambda x: (
            x.permute(3, 0, 1, 2)[1].t() if x.dim() == 3 else x.permute(3, 0, 1, 2)[1].permute(2, 0, 1),
            x.unfold(3, 2, 1),
        ),
        x,
    )
    check(
        lambda x: (
            x.movedim(0, 2),
            x.swapaxes(0, 1),
            x.unflatten(3, (5, 1)),
            x.T if x.dim() == 2 else x.mT,
            x.diagonal(0, 0, 1),
        ),
        x,
    )


def test_moves() -> None:
    x, y = tensor(2, 3, 4), tensor(2, 1, 4, seed=2)
    check(
        lambda x, y: (
            torch.cat([x, y], 1),
            torch.stack([x, x], 0),
            torch.cat([x, x.permute(0, 1, 2)], -1),
            torch.hstack([x, y]),
        ),
        x,
        y,
    )
    check(
        lambda x: (
            x.repeat(2, 1, 3),
            x.repeat_interleave(2, 1),
            x.flip(0, 2),
            x.roll(1, 2),
            torch.tile(x, (2, 1)),
            x.clone(),
            x.contiguous(),
        ),
        x,
    )
    check(
        lambda x: (
            x.tril(),
            x.triu(1),
            x.tril(-1),
            F.pad(x, (1, 2)),
            F.pad(x, (0, 1, -1, 2), value=3.0),
            torch.cat([torch.tensor([]), x], -2),
        ),
        x,
    )
    check(
        lambda x: (
            torch.zeros_like(x),
            torch.ones(2, 3),
            torch.full((2,), 7),
            torch.arange(5),
            torch.arange(1, 2, 0.25),
            x.new_zeros(3),
            torch.eye(3),
        ),
        x,
    )


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("pad", [(1, 2), (-1, 2), (2, -1), (-1, -1), (-2, 1), (-1, 0), (3, 3)])
def test_padding_that_repeats_elements(mode: str, pad: tuple[int, int]) -> None:
    """What a negative amount cuts off is not wrapped around."""
    check(lambda x: F.pad(x, pad, mode), tensor(2, 3, 5))


def test_indexing() -> None:
    table, ids = tensor(11, 6), torch.tensor([[1, 10, 0], [5, 5, 2]])
    check(
        lambda t, i: (
            F.embedding(i, t),
            t[i],
            t.index_select(0, i[0]),
            t.index_select(1, i[1]),
            t[i, i],
            t[:, i],
            t[i[0], 1:3],
        ),
        table,
        ids.clamp(max=5),
    )
    check(
        lambda t, i: (
            t.gather(1, i),
            t.scatter(1, i, 2.0),
            t.scatter(1, i, t),
            t.scatter_add(0, i, t),
            t.index_add(0, i[0], t[:3]),
        ),
        table,
        ids.clamp(max=5),
    )
    check(
        lambda t, i: (
            t.index_copy(0, i[0], t[:3]),
            t.index_put((i[0],), t[0]),
            t.index_put((i,), t[0], accumulate=True),
        ),
        table,
        ids,
    )
    check(
        lambda t, m: (
            t.masked_fill(m, -1.0),
            torch.where(m, t, 0.0),
            torch.where(m, t, t.t().t() * 2),
            t.take_along_dim(m.long(), 1),
        ),
        table,
        table > 0,
    )
    check(lambda t, i: (t[-1], t[[0, -1]], t[i[:, :, None], i[:, None, :]], t[None, i]), table, ids.clamp(max=5))


def test_index_out_of_range_is_an_index_error() -> None:
    compiled = forge_ugc.compile(lambda t, i: F.embedding(i, t), (tensor(4, 3), torch.tensor([1])))
    for bad in (4, -1, 2**40):
        with pytest.raises(IndexError, match=str(bad)):
            compiled(tensor(4, 3), torch.tensor([bad]))
    assert_same(tensor(4, 3)[[3]], compiled(tensor(4, 3), torch.tensor([3])), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_contractions(dtype: torch.dtype) -> None:
    tol = 20 * TOLERANCE[dtype]
    x, w, b = tensor(2, 7, 33, dtype=dtype), tensor(19, 33, dtype=dtype), tensor(19, dtype=dtype)
    check(
        lambda x, w, b: (
            F.linear(x, w),
            F.linear(x, w, b),
            F.linear(x[0, 0], w, b),
            x @ w.t(),
            F.linear(x[:, :0], w, b),
        ),
        x,
        w,
        b,
        tolerance=tol,
    )
    p, q = tensor(3, 2, 5, 8, dtype=dtype), tensor(2, 8, 6, dtype=dtype)
    check(
        lambda p, q: (
            p @ q,
            p @ q[0],
            p[0, 0] @ q,
            p[0, 0, 0] @ q[0],
            p[0, 0] @ q[0, :, 0],
            torch.bmm(p[0], q),
            p.mT.mT @ q,
        ),
        p,
        q,
        tolerance=tol,
    )
    m, n, c = tensor(4, 5, dtype=dtype), tensor(5, 6, dtype=dtype), tensor(6, dtype=dtype)
    check(
        lambda m, n, c: (
            torch.mm(m, n),
            torch.addmm(c, m, n),
            torch.addmm(c, m, n, alpha=0.5, beta=2),
            m[:, :0] @ n[:0],
            torch.mv(m, n[:, 0]),
        ),
        m,
        n,
        c,
        tolerance=tol,
    )


def test_integer_matmul_is_exact() -> None:
    check(
        lambda a, b: (a @ b, torch.bmm(a[None], b[None])),
        tensor(4, 5, dtype=torch.int64),
        tensor(5, 3, dtype=torch.int64),
    )


@pytest.mark.parametrize("k", [1, 3, 64, 383, 385, 2000])
@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 130])
def test_linear_sizes(m: int, k: int) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(k, 37), torch.nn.Linear(37, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.gelu(self.a(x), approximate="tanh")
            return self.b(h) * 0.5 + x[:, :1] + h[:, :16]

    torch.manual_seed(m)
    check(Model().eval(), torch.randn(m, k), tolerance=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms(dtype: torch.dtype) -> None:
    x, w, b = tensor(2, 6, 40, dtype=dtype), tensor(40, dtype=dtype), tensor(40, dtype=dtype, seed=9)
    check(
        lambda x, w, b: (
            F.layer_norm(x, (40,), w, b, 1e-5),
            F.layer_norm(x, (6, 40)),
            F.rms_norm(x, (40,), w, 1e-6),
            F.rms_norm(x, (40,)),
        ),
        x,
        w,
        b,
        tolerance=4 * TOLERANCE[dtype],
    )
    check(lambda x, w, b: F.group_norm(x, 3, w[:6], b[:6]), x, w, b, tolerance=4 * TOLERANCE[dtype])
    check(
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), x, w, tolerance=4 * TOLERANCE[dtype]
    )


def test_norm_of_large_and_constant_rows() -> None:
    x = torch.cat([torch.full((1, 64), 1e4), 1e4 + tensor(1, 64), torch.zeros(1, 64)])
    check(lambda x: (F.layer_norm(x, (64,)), F.rms_norm(x, (64,), eps=1e-6)), x, tolerance=2e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention(dtype: torch.dtype) -> None:
    sdpa, tol = F.scaled_dot_product_attention, 8 * TOLERANCE[dtype]
    q, k, v = tensor(2, 6, 9, 16, dtype=dtype), tensor(2, 6, 11, 16, dtype=dtype), tensor(2, 6, 11, 20, dtype=dtype)
    check(
        lambda q, k, v: (
            sdpa(q, k, v),
            sdpa(q, k, v, is_causal=True),
            sdpa(q, k, v, scale=0.3),
            sdpa(q, k, v, scale=0.0),
        ),
        q,
        k,
        v,
        tolerance=tol,
    )
    check(
        lambda q, k, v: (sdpa(q, k[:, :2], v[:, :2], enable_gqa=True), sdpa(q[0], k[0], v[0])), q, k, v, tolerance=tol
    )
    keep, bias = tensor(9, 11, dtype=torch.bool), tensor(2, 1, 9, 11, dtype=dtype)
    check(
        lambda q, k, v, keep, bias: (sdpa(q, k, v, attn_mask=keep), sdpa(q, k, v, attn_mask=bias)),
        q,
        k,
        v,
        keep,
        bias,
        tolerance=tol,
    )
    check(
        lambda q, k, v: (
            sdpa(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
            sdpa(q[:, :, :1], k, v),
            sdpa(q[:, :, :0], k, v),
        ),
        q,
        k,
        v,
        tolerance=tol,
    )


def test_attention_with_rows_that_see_nothing() -> None:
    q = tensor(1, 2, 4, 8)
    keep = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    for mask in (keep, torch.where(keep, 0.0, float("-inf")), torch.where(keep, 0.0, torch.finfo(torch.float32).min)):
        check(lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), q, mask)
        if mask.dtype != torch.bool:
            check(lambda q, mask: ((q @ q.mT) * 0.3 + mask).softmax(-1) @ q, q, mask)


@pytest.mark.parametrize("length", [1, 31, 64, 65, 200])
def test_attention_lengths(length: int) -> None:
    q, k, v = (tensor(1, 3, length, 32, seed=s) for s in range(3))
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)


def test_convolutions() -> None:
    x1, x2 = tensor(2, 6, 17), tensor(2, 4, 12, 10)
    check(
        lambda x, w, b: (F.conv1d(x, w, b), F.conv1d(x, w, padding=2), F.conv1d(x, w, stride=2, dilation=2)),
        x1,
        tensor(5, 6, 3),
        tensor(5),
        tolerance=1e-5,
    )
    check(lambda x, w: F.conv1d(x, w, padding=2, groups=6)[..., :17], x1, tensor(6, 1, 3), tolerance=1e-5)
    check(
        lambda x, w, b: (F.conv2d(x, w, b, stride=2), F.conv2d(x, w, padding=1), F.conv2d(x, w[:, :2], groups=2)),
        x2,
        tensor(6, 4, 2, 2),
        tensor(6),
        tolerance=1e-5,
    )
    check(
        lambda x, w: F.conv2d(x, w, padding="same"),
        x2.to(memory_format=torch.channels_last),
        tensor(6, 4, 3, 3),
        tolerance=1e-5,
    )


def test_rope_and_swiglu_forms() -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    q, angle = tensor(2, 7, 4, 16), tensor(2, 7, 16, low=-1000, high=1000)
    check(
        lambda q, a: q.transpose(1, 2) * a.cos().unsqueeze(1) + rotate(q.transpose(1, 2)) * a.sin().unsqueeze(1),
        q,
        angle,
    )
    check(
        lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b),
        tensor(3, 16),
        tensor(24, 16),
        tensor(24, 16, seed=4),
        tolerance=1e-4,
    )


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.bool), ids=str)
def test_dtypes_pass_through(dtype: torch.dtype) -> None:
    x = tensor(3, 4, dtype=dtype)
    check(
        lambda x: (
            x.t().contiguous(),
            x[1:].clone(),
            torch.cat([x, x]),
            x.flip(1),
            x.gather(1, torch.zeros(3, 2, dtype=torch.long)),
            x == x.flip(0),
        ),
        x,
    )
    for target in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check(lambda x, target=target: x.to(target), x.abs() if dtype != torch.bool else x)
