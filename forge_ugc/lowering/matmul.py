"""Matrix products, convolutions and attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from .emitter import Decline, Emitter, Value, broadcast, need_float, one_type
from .registry import lowers


def _same_type(*values: Value | None, promotes: bool = False) -> None:
    """`promotes`: eager takes operands of several dtypes."""
    if promotes and len({v.dtype for v in values if v is not None}) > 1:
        raise Decline("promotion")
    if one_type(*values) == torch.bool:
        raise Decline("operands of bool")


@lowers("linear")
def _linear(b: Emitter, x: Value, weight: Value, bias: Value | None = None) -> Value:
    _same_type(x, weight, bias)
    if weight.rank == 1:
        product = b.matmul(
            b.reshape(x, [math.prod(x.shape[:-1]), x.shape[-1]]), b.reshape(weight, [weight.shape[0], 1])
        )
        product = b.reshape(product, x.shape[:-1])
        return product if bias is None else b.add(product, bias)
    if not x.rank or x.shape[-1] != weight.shape[1]:
        raise Decline("inner sizes differ")
    extra = bias if bias is not None and bias.shape != (weight.shape[0],) else None
    operands = [x, weight] if bias is None or extra is not None else [x, weight, bias]
    y = b.op("linear", operands, x.dtype, [*x.shape[:-1], weight.shape[0]])
    return y if extra is None else b.add(y, extra)


@lowers("matmul", "linalg_matmul", "mm", "bmm", "mv", "dot", "vdot", "inner")
def _matmul(b: Emitter, x: Value, y: Value, *dtype: Any) -> Value:
    scalar = b.target_name == "inner" and not (x.rank and y.rank)
    _same_type(x, y, promotes=scalar)
    if dtype:
        raise Decline("out_dtype")
    if scalar:
        return b.mul(x, y)
    if b.target_name == "inner":
        flat = b.matmul(
            b.reshape(x, [math.prod(x.shape[:-1]), x.shape[-1]]),
            b.transpose(b.reshape(y, [math.prod(y.shape[:-1]), y.shape[-1]]), 0, 1),
        )
        return b.reshape(flat, b.out[0].shape)
    left = b.reshape(x, [1, *x.shape]) if x.rank == 1 else x
    right = b.reshape(y, [*y.shape, 1]) if y.rank == 1 else y
    if right.rank == 2 and left.rank > 2:
        # one large product instead of a batch of small ones
        left = b.reshape(left, [math.prod(left.shape[:-1]), left.shape[-1]])
    return b.reshape(b.matmul(left, right), b.out[0].shape)


@lowers("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(
    b: Emitter, x: Value, weight: Value, offs: Value | None = None, bias: Value | None = None, out_dtype: Any = None
) -> Value:
    """Experts of a mixture: rows [offs[e - 1], offs[e]) of x [S, K] times weight[e] of [E, K, N]."""
    _same_type(x, weight)
    if bias is not None or out_dtype not in (None, x.dtype):
        raise Decline("bias or out_dtype")
    if offs is None or offs.dtype != torch.int32 or (x.rank, weight.rank) != (2, 3):
        raise Decline("groups of columns or of inner sizes")
    return b.op("grouped_matmul", [x, weight, offs], x.dtype, (x.shape[0], weight.shape[2]))


@lowers("_int_mm")
def _int_mm(b: Emitter, x: Value, y: Value) -> Value:
    return b.matmul(b.cast(x, torch.int32), b.cast(y, torch.int32))


@lowers("addmm", "baddbmm", "addmv")
def _addmm(b: Emitter, x: Value, m1: Value, m2: Value, *, beta: Any = 1, alpha: Any = 1, **other: Any) -> Value:
    if other:
        raise Decline("out_dtype")
    _same_type(x, m1, m2)
    if b.target_name == "addmv":
        product = b.reshape(b.matmul(m1, b.reshape(m2, [*m2.shape, 1])), b.out[0].shape)
    else:
        product = b.matmul(m1, m2)
    return _blend(b, x, product, beta, alpha)


def _blend(b: Emitter, x: Value, product: Value, beta: Any, alpha: Any) -> Value:
    """beta * x + alpha * product in the product's dtype; beta 0 does not read x."""
    dtype = product.dtype
    if alpha != 1:
        product = b.binary("mul", product, alpha, dtype)
    if beta == 0:
        return b.expand(product, b.out[0].shape)
    return b.add(product, x if beta == 1 else b.binary("mul", x, beta, dtype))


@lowers("addbmm")
def _addbmm(b: Emitter, x: Value, m1: Value, m2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    _same_type(x, m1, m2)
    # the sum over batches is one product along the joined inner dimension
    n, rows, inner = m1.shape
    left = b.reshape(b.permute(m1, [1, 0, 2]), [rows, n * inner])
    return _blend(b, x, b.matmul(left, b.reshape(m2, [n * inner, m2.shape[2]])), beta, alpha)


@lowers("addr")
def _addr(b: Emitter, x: Value, v1: Value, v2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    _same_type(x, v1, v2, promotes=True)
    return _blend(b, x, b.mul(b.reshape(v1, [*v1.shape, 1]), v2), beta, alpha)


# --- convolution ----------------------------------------------------------------------------------------------------


def _conv(
    b: Emitter, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Value:
    need_float(x, w, bias)
    spatial = w.rank - 2
    if spatial not in (1, 2) or 0 in x.shape or 0 in w.shape:
        raise Decline("convolution in more than two dimensions, or of nothing")
    stride, dilation = _spread(stride, spatial), _spread(dilation, spatial)
    unbatched = x.rank == w.rank - 1
    if unbatched:
        x = b.reshape(x, [1, *x.shape])
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, w.shape[2:], strict=True)]
        before = [t // 2 for t in total]
        if any(t % 2 for t in total):
            amounts = [0] * 4 + [n for t in total for n in (t // 2, t - t // 2)]
            shape = [*x.shape[:2], *(s + t for s, t in zip(x.shape[2:], total, strict=True))]
            x = b.op("pad", [x], x.dtype, shape, padding=amounts, value=0)
            before = [0] * spatial
        padding = before
    padding = _spread(padding, spatial)
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, w.shape[2:], stride, strict=True)
    ]
    if any(n <= 0 for n in sizes):
        raise Decline("kernel larger than the input")
    operands = [x, w] if bias is None else [x, w, bias]
    y = b.op(
        "conv",
        operands,
        x.dtype,
        [x.shape[0], w.shape[0], *sizes],
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )
    return b.reshape(y, b.out[0].shape)


def _spread(value: Any, count: int) -> list[int]:
    items = [value] if isinstance(value, int) else list(value)
    return items * count if len(items) == 1 else items


@lowers("conv1d", "conv2d", "conv1d.padding", "conv2d.padding")
def _conv_nd(
    b: Emitter,
    x: Value,
    w: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    return _conv(b, x, w, bias, stride, padding, dilation, groups)


@lowers("convolution")
def _convolution(
    b: Emitter,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    if transposed:
        raise Decline("transposed convolution")
    return _conv(b, x, w, bias, stride, padding, dilation, groups)


# --- attention ----------------------------------------------------------------------------------------------------


@lowers("scaled_dot_product_attention")
def _attention(
    b: Emitter, q: Value, k: Value, v: Value, mask: Value | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    if dropout_p > 0:
        raise Decline("random")
    need_float(q, k, v)
    if mask is not None and mask.dtype != torch.bool and mask.dtype != q.dtype:
        mask = b.cast(mask, q.dtype)
    if min(q.rank, k.rank, v.rank) < 2 or q.shape[-1] == 0 or k.shape[-2] == 0:
        raise Decline("no keys or no features")
    rank = max(q.rank, k.rank, v.rank)
    if mask is not None and mask.rank > rank:
        raise Decline("mask has more dimensions")
    if rank > 4:
        if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2] or (mask is not None and mask.rank > 2):
            raise Decline("rank")
        batch = math.prod(q.shape[:-2])
        q, k, v = (b.reshape(t, [batch, 1, *t.shape[-2:]]) for t in (q, k, v))
    elif rank < 4:
        lead = 4 - rank
        # [S, D] -> [1, 1, S, D]; [B, S, D] -> [B, 1, S, D]
        at = [1] * lead if rank == 2 else []
        q, k, v = (
            b.reshape(t, [*at, *([1] * (rank - t.rank)), *t.shape[:-2], *([1] if rank == 3 else []), *t.shape[-2:]])
            for t in (q, k, v)
        )
        if mask is not None and rank == 3 and mask.rank == 3:
            mask = b.reshape(mask, [mask.shape[0], 1, *mask.shape[-2:]])
    else:
        q, k, v = (b.reshape(t, (1,) * (4 - t.rank) + t.shape) for t in (q, k, v))
    batch = broadcast([q.shape[0]], [k.shape[0]], [v.shape[0]])[0]
    heads = q.shape[1]
    if not enable_gqa or k.shape[1] != v.shape[1]:
        if enable_gqa and k.shape[1] != v.shape[1]:
            raise Decline("key and value heads differ")
        heads = broadcast([q.shape[1]], [k.shape[1]], [v.shape[1]])[0]
        if k.shape[1] != v.shape[1]:
            k, v = (b.expand(t, (t.shape[0], heads, *t.shape[2:])) for t in (k, v))
    q = b.expand(q, (batch, heads, *q.shape[2:]))
    k, v = (b.expand(t, (batch, *t.shape[1:])) for t in (k, v))
    if not k.shape[1] or heads % k.shape[1] or batch == 0:
        raise Decline("heads")
    if mask is not None:
        broadcast(mask.shape, (batch, heads, q.shape[2], k.shape[2]))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    y = b.op(
        "attention", [q, k, v] if mask is None else [q, k, v, mask], q.dtype, (*q.shape[:3], v.shape[3]),
        causal=is_causal, safe=True, scale=factor,
    )  # fmt: skip
    return b.reshape(y, b.out[0].shape)
