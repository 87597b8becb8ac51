"""One step of decoding with a KV cache of a fixed size, written in several ways: rows of `benchmarks.npu_forms`.

A block reads one token and a cache [1, kv heads, past, head dim] of keys and one of values. What has to become of the
cache differs: `new row` gives the token's own key and value, which the host writes into the cache (2 * kv heads * head
dim numbers); `whole` gives the cache with the row in it, which then goes back to the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from benchmarks.npu_forms import Builder


class DecodeBuilder(Builder):
    """`shape.seq` is 1, `shape.past` the size of the cache."""

    def step(self, x: Any, cache: Any, position: Any, hot: Any) -> Any:
        """The keys (or values) that the token attends to; `x` is its own, [1, G, 1, D]."""
        past, kind, axis = self.s.past, self.f.cache, op.constant(np.array(2, np.int64))
        if kind == "read":
            return cache
        if kind == "concat":
            return op.concat([cache, x], 2)
        if kind == "select":
            return op.select(hot, x, cache)
        if kind == "blend":
            one = op.convert(hot, np.float16)
            return op.add(op.multiply(cache, op.subtract(self.constant(1.0), one)), op.multiply(x, one))
        if kind == "scatter":
            return op.scatter_update(cache, position, x, axis)
        if kind == "elements":
            where = op.broadcast(
                op.reshape(position, self.constant([1, 1, 1, 1], np.int64), False),
                self.constant([1, self.s.kv_heads, 1, self.s.dim], np.int64),
            )
            return op.scatter_elements_update(cache, where, x, axis)
        if kind == "known":  # the position is a number when the graph is compiled
            at, last, one, axes = (self.constant([v], np.int64) for v in (past // 2, past, 1, 2))
            before = op.slice(cache, self.constant([0], np.int64), at, one, axes)
            after = op.slice(cache, self.constant([past // 2 + 1], np.int64), last, one, axes)
            return op.concat([before, x, after], 2)
        raise ValueError(f"no way {kind!r} to write into a cache")

    def attend(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """q [1, H, 1, D] over k and v [1, G, T, D]; the queries of a group are stacked."""
        h, g, d = self.s.heads, self.s.kv_heads, self.s.dim
        scale = 1 / math.sqrt(d)
        q = op.reshape(q, self.constant([1, g, h // g, d], np.int64), False)
        if self.f.attention == "sdpa":
            return op.scaled_dot_product_attention(q, k, v, mask, self.constant(scale), causal=False)
        scores = op.matmul(op.multiply(q, self.constant(scale)), k, False, True)
        return op.matmul(op.softmax(op.add(scores, mask), 3), v, False, False)

    def attend_joined(self, q: Any, k: Any, v: Any, caches: tuple[Any, Any], mask: Any) -> Any:
        """Without a larger tensor of keys or values: only the scores are joined."""
        h, g, d, past = self.s.heads, self.s.kv_heads, self.s.dim, self.s.past
        q = op.reshape(q, self.constant([1, g, h // g, d], np.int64), False)
        q = op.multiply(q, self.constant(1 / math.sqrt(d)))
        old = op.add(op.matmul(q, caches[0], False, True), mask)
        new = op.matmul(q, k, False, True)
        weights = op.softmax(op.concat([old, new], 3), 3)
        axes, one = self.constant([3], np.int64), self.constant([1], np.int64)
        left = op.slice(weights, self.constant([0], np.int64), self.constant([past], np.int64), one, axes)
        right = op.slice(weights, self.constant([past], np.int64), self.constant([past + 1], np.int64), one, axes)
        # a product of [r, 1] and [1, D]
        return op.add(op.matmul(left, caches[1], False, False), op.multiply(right, v))

    def attention(self, x: Any) -> Any:
        s, f = self.s, self.f
        h, g, d, past = s.heads, s.kv_heads, s.dim, s.past
        q, k, v = (self.linear(x, n * d, s.width, s.bias) for n in (h, g, g))
        q, k, v = self.rope(self.heads(q, h)), self.rope(self.heads(k, g)), self.heads(v, g)
        caches = tuple(self.argument([1, g, past, d], np.float16) for _ in range(2))
        position = hot = None
        if f.cache in ("scatter", "elements"):
            position = self.argument([1], np.int32)
        if f.cache in ("select", "blend"):
            hot = self.argument([1, 1, past, 1], ov.Type.boolean)
        mask = self.argument([1, 1, 1, past + (f.cache == "concat")], np.float16)
        if f.cache == "joined":
            y = self.attend_joined(q, k, v, caches, mask)  # type: ignore[arg-type]
        else:
            keys, values = (self.step(new, old, position, hot) for new, old in zip((k, v), caches, strict=True))
            y = self.attend(q, keys, values, mask)
            if f.whole:
                k, v = keys, values
        self.results = [op.result(k), op.result(v)]
        y = op.reshape(y, self.constant([1, 1, h * d], np.int64), False)
        return self.linear(y, s.width, h * d, s.kind == "gpt2")

    def block(self) -> Any:
        x = op.parameter([1, 1, self.s.width], np.float16, name="x")
        h = op.add(x, self.attention(self.norm(x, self.s.width)))
        y = self.norm(h, self.s.width)
        for _ in range(self.f.ffn_split):
            h = op.add(h, self.ffn(y, self.s.inner // self.f.ffn_split))
        return ov.Model([op.result(h), *self.results], [x, *self.parameters])


# name -> what it changes of the first
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "concat, in parts": dict(attention="parts"),
    "scores joined": dict(cache="joined"),
    "select": dict(cache="select"),
    "select, whole": dict(cache="select", whole=True),
    "blend": dict(cache="blend"),
    "blend, whole": dict(cache="blend", whole=True),
    "known position, whole": dict(cache="known", whole=True),
    "ScatterUpdate, whole": dict(cache="scatter", whole=True),
    "ScatterElements, whole": dict(cache="elements", whole=True),
    "cache only read (none)": dict(cache="read"),
}
