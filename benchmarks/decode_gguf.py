"""Models of the families' shapes with random weights, as GGUF files for llama.cpp (numpy and `gguf` only)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    bias: bool = False  # of q, k, v

    @property
    def head(self) -> int:
        return self.width // self.heads


SHAPES = {
    "gpt2": Shape("gpt2", 12, 768, 12, 12, 3072, 50257, bias=True),
    "qwen2": Shape("qwen2", 24, 896, 14, 2, 4864, 151936, bias=True),
    "llama1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256),
}


def tensors(shape: Shape, layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes. The head is the embedding again, as in these families."""
    s, kv = shape, shape.kv_heads * shape.head
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (s.vocabulary, s.width), "output_norm.weight": (s.width,)}
    if s.architecture == "gpt2":
        found |= {"position_embd.weight": (1024, s.width), "output_norm.bias": (s.width,)}
        found |= {"output.weight": (s.vocabulary, s.width)}  # llama.cpp reads it in place of the embedding
    for i in range(layers):
        b = f"blk.{i}."
        found |= {b + "attn_norm.weight": (s.width,), b + "ffn_norm.weight": (s.width,)}
        found |= {b + "attn_output.weight": (s.width, s.width)}
        found |= {b + "ffn_up.weight": (s.inner, s.width), b + "ffn_down.weight": (s.width, s.inner)}
        if s.architecture == "gpt2":
            found |= {b + "attn_qkv.weight": (3 * s.width, s.width), b + "attn_qkv.bias": (3 * s.width,)}
            found |= {b + "attn_norm.bias": (s.width,), b + "ffn_norm.bias": (s.width,)}
            found |= {b + "attn_output.bias": (s.width,), b + "ffn_up.bias": (s.inner,)}
            found |= {b + "ffn_down.bias": (s.width,)}
            continue
        found |= {b + "ffn_gate.weight": (s.inner, s.width), b + "attn_q.weight": (s.width, s.width)}
        found |= {b + "attn_k.weight": (kv, s.width), b + "attn_v.weight": (kv, s.width)}
        if s.bias:
            found |= {b + "attn_q.bias": (s.width,), b + "attn_k.bias": (kv,), b + "attn_v.bias": (kv,)}
    return found


def write(path: Path, name: str, layers: int | None, kind: str, length: int) -> None:
    """kind: of the matrices, "F32", "F16", "BF16", "Q8_0" or "Q4_0"; vectors are F32."""
    import gguf

    shape = SHAPES[name]
    layers = layers or shape.layers
    part = path.with_suffix(".part")
    out: Any = gguf.GGUFWriter(part, shape.architecture)
    out.add_context_length(max(length, 1024))
    out.add_embedding_length(shape.width)
    out.add_block_count(layers)
    out.add_feed_forward_length(shape.inner)
    out.add_head_count(shape.heads)
    out.add_vocab_size(shape.vocabulary)
    out.add_tokenizer_model("no_vocab")
    if shape.architecture == "gpt2":
        out.add_layer_norm_eps(1e-5)
    else:
        out.add_head_count_kv(shape.kv_heads)
        out.add_layer_norm_rms_eps(1e-6)
        out.add_rope_dimension_count(shape.head)
        out.add_rope_freq_base(10000.0)
    draw = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    for title, size in tensors(shape, layers).items():
        values = np.resize(draw, size)
        if len(size) == 1:
            values = values + np.float32(title.endswith("norm.weight"))
        if len(size) == 1 or kind == "F32":
            out.add_tensor(title, values)
        else:
            out.add_tensor(title, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    part.rename(path)
