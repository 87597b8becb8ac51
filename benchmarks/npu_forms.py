"""What each way of writing a transformer block does to the compiler's estimate: the evidence for `emit_default_forms`.

    python -m benchmarks.npu_forms                                     # both blocks, f16; about 10 minutes
    python -m benchmarks.npu_forms --blocks qwen2 --weights f16,i8,arg --only mask,gqa --out out/

Blocks are written with openvino's Python API, so that a form can be tried before the emitter knows it. Each row changes
one thing of the first. Only rows with the same zero-cost tasks compare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from rich.console import Console
from rich.table import Table

from benchmarks.npu_compiler import TARGETS, Result, compile_ir


@dataclass(frozen=True)
class Shape:
    kind: str  # "gpt2": layer norm, biases, gelu; "llama": rms norm, rope, SwiGLU
    width: int
    heads: int
    kv_heads: int
    inner: int
    seq: int = 128
    bias: bool = True  # of q, k, v
    head_dim: int = 0
    past: int = 0  # of a step of decoding: positions of the cache (npu_forms_decode)

    @property
    def dim(self) -> int:
        return self.head_dim or self.width // self.heads


BLOCKS = {
    "gpt2": Shape("gpt2", 768, 12, 12, 3072),
    "granite": Shape("llama", 1024, 16, 16, 2048, bias=False),
    "qwen2": Shape("llama", 896, 14, 2, 4864),
    "llama1b": Shape("llama", 2048, 32, 8, 8192, bias=False),
    "lfm2": Shape("llama", 2560, 32, 8, 10752, bias=False),
    "llama8b": Shape("llama", 4096, 32, 8, 14336, bias=False),
}
BLOCKS |= {f"{name}-decode": replace(shape, seq=1, past=1024) for name, shape in BLOCKS.items()}


@dataclass(frozen=True)
class Form:
    weights: str = "f16"  # f16, i8, i4, arg (f16 arguments), arg8 (int8 arguments)
    border: str = "f16"  # f16, f32
    layout: str = "nk"  # weights [N, K] and transpose_b, or "kn"
    qkv: str = "apart"  # fused, apart
    gate_up: str = "apart"
    attention: str = "sdpa"  # sdpa, parts (MatMul, Add, SoftMax, MatMul)
    mask: str = "constant"  # constant, causal (attribute of SDPA), argument, bool, none
    mask_heads: bool = False  # the mask has a head dimension (broadcast beforehand)
    gqa: str = "broadcast"  # broadcast, tile, gather, concat: repeats K and V; stack: queries of a group in one
    scale: str = "score"  # score, q (multiplies q), none
    v: str = "plain"  # plain; "turned": v is made as [B, H, D, S] and transpose_b used
    norm: str = "op"  # op: MVN, or x / sqrt(..); parts: means, or x * (..)^-1/2
    norm_f32: bool = False
    rope: str = "halves"  # halves, split, scalar, parts, signed, matmul, gather, none
    gelu: str = "op"  # op, erf, parts, none
    swish: str = "op"  # op, parts
    down_split: int = 1  # the down projection in that many pieces of K
    ffn_split: int = 1  # the feed-forward in that many pieces of the inner dimension, added up
    act_split: bool = False  # the activation on the pieces of the down projection
    head_split: int = 1  # attention in that many groups of heads, their projections included
    cache: str = "concat"  # of a step of decoding (npu_forms_decode): concat, joined, select, blend, scatter, ...
    whole: bool = False  # the cache goes out, not the new row


class Builder:
    def __init__(self, shape: Shape, form: Form) -> None:
        self.s, self.f = shape, form
        self.draw = np.random.default_rng(0)
        self.parameters: list[Any] = []

    # --- weights ---

    def constant(self, value: Any, dtype: Any = np.float16) -> Any:
        return op.constant(np.asarray(value, dtype=dtype))

    def vector(self, n: int) -> Any:
        if self.f.weights in ("arg", "arg8"):
            return self.argument([n], np.float16)
        return self.constant(1 + 0.1 * self.draw.standard_normal(n))

    def argument(self, shape: list[int], dtype: Any) -> Any:
        p = op.parameter(shape, dtype, name=f"w{len(self.parameters)}")
        self.parameters.append(p)
        return p

    def weight(self, n: int, k: int) -> Any:
        kind = self.f.weights
        dims = [n, k] if self.f.layout == "nk" else [k, n]
        scale_dims = [n, 1] if self.f.layout == "nk" else [1, n]
        if kind == "arg":
            return self.argument(dims, np.float16)
        if kind == "arg8":
            q, scale = self.argument(dims, np.int8), self.argument(scale_dims, np.float16)
            return op.multiply(op.convert(q, np.float16), scale)
        if kind in ("i8", "i4"):
            top = 127 if kind == "i8" else 7
            q = self.draw.integers(-top, top + 1, dims).astype(np.int8)
            scale = self.constant((0.5 + 0.5 * self.draw.random(scale_dims)) * 0.05 / top)
            made = op.constant(q, ov.Type.i8) if kind == "i8" else op.constant(q, ov.Type.i4)
            return op.multiply(op.convert(made, np.float16), scale)
        return self.constant(self.draw.standard_normal(dims) * 0.02)

    def linear(self, x: Any, n: int, k: int, bias: bool) -> Any:
        y = op.matmul(x, self.weight(n, k), False, self.f.layout == "nk")
        return op.add(y, self.vector(n)) if bias else y

    # --- pieces ---

    def norm(self, x: Any, n: int) -> Any:
        f32 = self.f.norm_f32
        if f32:
            x = op.convert(x, np.float32)
        t = np.float32 if f32 else np.float16
        axes = op.constant(np.array([-1], np.int64))
        eps = op.constant(np.array(1e-5, t))
        if self.s.kind == "gpt2":
            if self.f.norm == "op":
                y = op.mvn(x, axes, True, 1e-5, "INSIDE_SQRT")
            else:
                centred = op.subtract(x, op.reduce_mean(x, axes, True))
                variance = op.reduce_mean(op.multiply(centred, centred), axes, True)
                y = op.divide(centred, op.sqrt(op.add(variance, eps)))
        elif self.f.norm == "op":
            y = op.divide(x, op.sqrt(op.add(op.reduce_mean(op.multiply(x, x), axes, True), eps)))
        else:
            mean = op.reduce_mean(op.power(x, op.constant(np.array(2, t))), axes, True)
            y = op.multiply(x, op.power(op.add(mean, eps), op.constant(np.array(-0.5, t))))
        if f32:
            y = op.convert(y, np.float16)
        y = op.multiply(y, self.vector(n))
        return op.add(y, self.vector(n)) if self.s.kind == "gpt2" else y

    def heads(self, x: Any, h: int) -> Any:
        made = op.reshape(x, self.constant([1, self.s.seq, h, self.s.dim], np.int64), False)
        return op.transpose(made, self.constant([0, 2, 1, 3], np.int64))

    def rotate(self, x: Any) -> Any:
        d = self.s.dim
        kind = self.f.rope
        last = op.constant(np.array(-1, np.int64))
        if kind == "split":
            a, b = op.split(x, op.constant(np.array(3, np.int64)), 2).outputs()
            return op.concat([op.negative(b), a], 3)
        if kind == "matmul":
            turn = np.zeros((d, d))
            for i in range(d // 2):
                turn[i + d // 2, i], turn[i, i + d // 2] = -1, 1
            return op.matmul(x, self.constant(turn), False, False)
        if kind == "gather":  # the signs are in sin then
            order = np.r_[d // 2 : d, 0 : d // 2]
            return op.gather(x, self.constant(order, np.int64), last)
        lo, mid, hi, step = (self.constant([v], np.int64) for v in (0, d // 2, d, 1))
        axis = self.constant([3], np.int64)
        a, b = op.slice(x, lo, mid, step, axis), op.slice(x, mid, hi, step, axis)
        if kind == "scalar":
            b = op.multiply(b, self.constant(-1.0))
        elif kind == "signed":  # the signs are in sin
            return op.concat([b, a], 3)
        else:
            b = op.negative(b)
        return op.concat([b, a], 3)

    def rope(self, x: Any) -> Any:
        if self.f.rope == "none" or self.s.kind == "gpt2":
            return x
        s, d = self.s.seq, self.s.dim
        angle = np.outer(np.arange(s), 1e4 ** (-np.arange(0, d, 2) / d))
        cos, sin = np.cos(angle)[None, None], np.sin(angle)[None, None]
        if self.f.rope == "parts":  # four products of halves
            lo, mid, hi, step = (self.constant([v], np.int64) for v in (0, d // 2, d, 1))
            axis = self.constant([3], np.int64)
            a, b = op.slice(x, lo, mid, step, axis), op.slice(x, mid, hi, step, axis)
            c, si = self.constant(cos), self.constant(sin)
            left = op.subtract(op.multiply(a, c), op.multiply(b, si))
            return op.concat([left, op.add(op.multiply(b, c), op.multiply(a, si))], 3)
        if self.f.rope in ("gather", "signed"):
            sin2 = np.concatenate([-sin, sin], -1)
        else:
            sin2 = np.concatenate([sin, sin], -1)
        cos2 = self.constant(np.concatenate([cos, cos], -1))
        return op.add(op.multiply(x, cos2), op.multiply(self.rotate(x), self.constant(sin2)))

    def mask(self, groups: int = 1) -> Any:
        s = self.s.seq
        value = np.triu(np.full((s, s), -65504.0), 1)[None, None]
        if self.f.mask_heads:
            value = np.repeat(value, self.s.heads, 1)
        if groups > 1:
            value = np.tile(value, (1, 1, groups, 1))
        if self.f.mask == "argument":
            return self.argument(list(value.shape), np.float16)
        if self.f.mask == "bool":
            return op.constant(value == 0)
        return self.constant(value)

    def parts(self, q: Any, k: Any, v: Any, scale: float, groups: int = 1) -> Any:
        if self.f.scale == "q":
            q = op.multiply(q, self.constant(scale))
        scores = op.matmul(q, k, False, True)
        if self.f.scale == "score":
            scores = op.multiply(scores, self.constant(scale))
        if self.f.mask != "none":
            scores = op.add(scores, self.mask(groups))
        return op.matmul(op.softmax(scores, 3), v, False, self.f.v == "turned")

    def repeat(self, x: Any, h: int, g: int) -> Any:
        s, d = self.s.seq, self.s.dim
        if h == g:
            return x
        if self.f.gqa == "gather":
            return op.gather(x, self.constant(np.repeat(np.arange(g), h // g), np.int64), self.constant(1, np.int64))
        if self.f.gqa == "concat":
            pieces = op.split(x, op.constant(np.array(1, np.int64)), g).outputs()
            return op.concat([p for p in pieces for _ in range(h // g)], 1)
        x = op.reshape(x, self.constant([1, g, 1, s, d], np.int64), False)
        if self.f.gqa == "tile":
            x = op.tile(x, self.constant([1, 1, h // g, 1, 1], np.int64))
        else:
            x = op.broadcast(x, self.constant([1, g, h // g, s, d], np.int64))
        return op.reshape(x, self.constant([1, h, s, d], np.int64), False)

    def attention(self, x: Any) -> Any:
        n = self.f.head_split
        total = self.some_heads(x, self.s.heads // n, self.s.kv_heads // n, self.s.kind == "gpt2")
        for _ in range(n - 1):
            total = op.add(total, self.some_heads(x, self.s.heads // n, self.s.kv_heads // n, False))
        return total

    def some_heads(self, x: Any, h: int, g: int, bias: bool) -> Any:
        s, d, width = self.s.seq, self.s.dim, self.s.width
        wide = (h + 2 * g) * d
        if self.f.qkv == "fused":
            made = self.linear(x, wide, width, self.s.bias)
            sizes = self.constant([h * d, g * d, g * d], np.int64)
            q, k, v = op.variadic_split(made, self.constant(2, np.int64), sizes).outputs()
        else:
            q, k, v = (self.linear(x, n * d, width, self.s.bias) for n in (h, g, g))
        q, k, v = self.rope(self.heads(q, h)), self.rope(self.heads(k, g)), self.heads(v, g)
        scale = 1 / math.sqrt(d)
        r = h // g
        if r > 1 and self.f.gqa == "stack":
            q = op.reshape(q, self.constant([1, g, r * s, d], np.int64), False)
            if self.f.attention == "sdpa":
                y = op.scaled_dot_product_attention(q, k, v, self.mask(r), self.constant(scale), causal=False)
            else:
                y = self.parts(q, k, v, scale, r)
            y = op.reshape(y, self.constant([1, h, s, d], np.int64), False)
        else:
            k, v = self.repeat(k, h, g), self.repeat(v, h, g)
            if self.f.v == "turned":
                v = op.transpose(v, self.constant([0, 1, 3, 2], np.int64))
            if self.f.attention == "parts":
                y = self.parts(q, k, v, scale)
            elif self.f.mask == "causal":
                y = op.scaled_dot_product_attention(q, k, v, causal=True)
            else:
                y = op.scaled_dot_product_attention(q, k, v, self.mask(), self.constant(scale), causal=False)
        y = op.transpose(y, self.constant([0, 2, 1, 3], np.int64))
        y = op.reshape(y, self.constant([1, s, h * d], np.int64), False)
        return self.linear(y, width, h * d, bias)

    def act(self, x: Any) -> Any:
        if self.s.kind == "gpt2":
            if self.f.gelu == "op":
                return op.gelu(x, "tanh")
            if self.f.gelu == "erf":
                return op.gelu(x, "erf")
            if self.f.gelu == "none":
                return x
            cube = op.add(x, op.multiply(self.constant(0.044715), op.multiply(x, op.multiply(x, x))))
            t = op.tanh(op.multiply(cube, self.constant(0.7978845608)))
            return op.multiply(op.multiply(x, self.constant(0.5)), op.add(t, self.constant(1.0)))
        return op.swish(x, self.constant(1.0)) if self.f.swish == "op" else op.multiply(x, op.sigmoid(x))

    def ffn(self, x: Any, inner: int) -> Any:
        width, gpt2 = self.s.width, self.s.kind == "gpt2"
        act = (lambda v: v) if self.f.act_split else self.act
        if gpt2:
            y = act(self.linear(x, inner, width, True))
        elif self.f.gate_up == "fused":
            both = self.linear(x, 2 * inner, width, False)
            gate, up = op.split(both, self.constant(2, np.int64), 2).outputs()
            y = op.multiply(self.act(gate), up)
        else:
            y = op.multiply(self.act(self.linear(x, inner, width, False)), self.linear(x, inner, width, False))
        n = self.f.down_split
        if n == 1:
            return self.linear(y, width, inner, gpt2)
        pieces = op.split(y, self.constant(2, np.int64), n).outputs()
        if self.f.act_split:
            pieces = [self.act(piece) for piece in pieces]
        total = self.linear(pieces[0], width, inner // n, gpt2)
        for piece in pieces[1:]:
            total = op.add(total, self.linear(piece, width, inner // n, False))
        return total

    def block(self) -> Any:
        s, width = self.s.seq, self.s.width
        t = np.float16 if self.f.border == "f16" else np.float32
        x = op.parameter([1, s, width], t, name="x")
        h = x if self.f.border == "f16" else op.convert(x, np.float16)
        h = op.add(h, self.attention(self.norm(h, width)))
        y = self.norm(h, width)
        n = self.f.ffn_split
        for _ in range(n):
            h = op.add(h, self.ffn(y, self.s.inner // n))
        if self.f.border == "f32":
            h = op.convert(h, np.float32)
        return ov.Model([op.result(h)], [x, *self.parameters])


# --- rows ------------------------------------------------------------------------------------------------------------

# name -> what it changes. Forms marked none are no way to write a block: they tell what the rest costs.
COMMON: dict[str, dict[str, Any]] = {
    "q, k, v fused": dict(qkv="fused"),
    "attention in parts": dict(attention="parts"),
    "parts, q scaled": dict(attention="parts", scale="q"),
    "parts, no scale (none)": dict(attention="parts", scale="none"),
    "parts, v turned": dict(attention="parts", v="turned"),
    "mask as argument": dict(mask="argument"),
    "mask by SDPA's causal": dict(mask="causal"),
    "mask a bool": dict(mask="bool"),
    "mask for each head": dict(mask_heads=True),
    "no mask (none)": dict(mask="none", attention="parts"),
    "norm in parts": dict(norm="parts"),
    "norm in f32": dict(norm_f32=True),
    "border f32": dict(border="f32"),
    "weights [K, N]": dict(layout="kn"),
    "down in 2 of K": dict(down_split=2),
    "down in 4 of K": dict(down_split=4),
    "feed-forward in 2": dict(ffn_split=2),
    "feed-forward in 4": dict(ffn_split=4),
    "heads in 2": dict(head_split=2),
}
GPT2: dict[str, dict[str, Any]] = {
    "gelu by erf": dict(gelu="erf"),
    "gelu in parts": dict(gelu="parts"),
    "no gelu (none)": dict(gelu="none"),
    "gelu on 4 pieces of K": dict(down_split=4, act_split=True),
    "mask as argument, down in 2": dict(mask="argument", down_split=2),
    "the same, q, k, v fused": dict(mask="argument", down_split=2, qkv="fused"),
    "mask as argument, down in 2, feed-forward in 4": dict(mask="argument", down_split=2, ffn_split=4),
}
LLAMA: dict[str, dict[str, Any]] = {
    "gate and up fused": dict(gate_up="fused"),
    "swish in parts": dict(swish="parts"),
    "rope: split": dict(rope="split"),
    "rope: four products": dict(rope="parts"),
    "rope: sign in sin": dict(rope="signed"),
    "rope: matmul": dict(rope="matmul"),
    "rope: gather": dict(rope="gather"),
    "no rope (none)": dict(rope="none"),
    "norm in parts, down in 2": dict(norm="parts", down_split=2),
}
GROUPED: dict[str, dict[str, Any]] = {
    "K and V by Gather": dict(gqa="gather"),
    "K and V by Tile": dict(gqa="tile"),
    "K and V by Concat": dict(gqa="concat"),
    "queries stacked": dict(gqa="stack"),
    "stacked, norm in parts, down in 2": dict(gqa="stack", norm="parts", down_split=2),
    "the same, gate and up fused": dict(gqa="stack", norm="parts", down_split=2, gate_up="fused"),
    "the same, mask as argument": dict(gqa="stack", norm="parts", down_split=2, gate_up="fused", mask="argument"),
}


def rows_of(shape: Shape) -> dict[str, dict[str, Any]]:
    if shape.past:
        from benchmarks.npu_forms_decode import ROWS

        return ROWS
    own = GPT2 if shape.kind == "gpt2" else {**LLAMA, **(GROUPED if shape.heads != shape.kv_heads else {})}
    return {"base": {}, **COMMON, **own}


def possible(shape: Shape, form: Form) -> bool:
    return shape.inner % (form.ffn_split * form.down_split) == 0 and shape.kv_heads % form.head_split == 0


def measure(shape: Shape, form: Form, target: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="forge-forms-") as folder:
        xml = Path(folder, "block.xml")
        if shape.past:
            from benchmarks.npu_forms_decode import DecodeBuilder

            model = DecodeBuilder(shape, form).block()
        else:
            model = Builder(shape, form).block()
        ov.save_model(model, xml, compress_to_fp16=False)
        return compile_ir(xml, target, estimate=True)


def line(name: str, result: Result, base: Result) -> list[str]:
    e, b = result.estimate, base.estimate
    if e is None or b is None:
        return [name, "refused: " + " ".join((result.error or "").split())[:60], *[""] * 7]
    like = e.zero_cost_tasks == b.zero_cost_tasks
    change = f"{e.latency_us / b.latency_us - 1:+.1%}" if like else "~"
    shown = (e.latency_us, e.dma_us, e.dpu_us, e.shave_us)
    return [name, change, *(f"{v:,.0f}" for v in shown), str(e.zero_cost_tasks), f"{result.seconds:.1f}",
            f"{result.blob_bytes / 1e6:.1f}"]  # fmt: skip


HEADINGS = ("form", "change", "latency us", "DMA", "DPU", "SHAVE", "zero-cost", "compile s", "blob MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="gpt2,llama1b", help=", ".join(BLOCKS))
    parser.add_argument("--weights", default="f16", help="f16, i8, i4, arg (arguments), arg8")
    parser.add_argument("--target", default="NPU4000", choices=TARGETS)
    parser.add_argument("--only", help="rows whose names hold one of these words")
    parser.add_argument("--out", type=Path, help="folder for forms.json and forms.md")
    args = parser.parse_args()
    console, kept, texts = Console(width=160), [], []
    words = [w.strip() for w in args.only.split(",")] if args.only else [""]
    for block in args.blocks.split(","):
        shape = BLOCKS[block]
        for weights in args.weights.split(","):
            base = Form(weights=weights)
            forms = {
                name: replace(base, **changes)
                for name, changes in rows_of(shape).items()
                if name == "base" or any(word in name for word in words)
            }
            forms = {name: form for name, form in forms.items() if possible(shape, form)}
            with ThreadPoolExecutor(os.cpu_count()) as pool, console.status(f"{block} {weights}"):
                results = list(pool.map(lambda form: measure(shape, form, args.target), forms.values()))  # noqa: B023
            title = f"{block}, weights {weights}, {args.target}"
            lines = [line(name, r, results[0]) for name, r in zip(forms, results, strict=True)]
            table = Table(*HEADINGS, title=title, title_justify="left")
            for cells in lines:
                table.add_row(*cells)
            console.print(table)
            texts.append("\n".join([f"## {title}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
                                   + ["| " + " | ".join(cells) + " |" for cells in lines]) + "\n")  # fmt: skip
            kept += [
                {"block": block, "name": name, "form": asdict(form), **r.to_dict()}
                for (name, form), r in zip(forms.items(), results, strict=True)
            ]
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "forms.json").write_text(json.dumps(kept, indent=1) + "\n")
                (args.out / "forms.md").write_text("\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
