"""The six model families that every figure is measured on: transformers configs at true width, random weights, no hub.

    model = build("qwen2", layers=2)           # model(int64 [batch, seq]) -> float32 logits [batch, seq, vocab]
    shell = build("llama8b", device="meta")    # shapes only, for the compile phases

Every one-dimensional parameter is moved off its default: biases of 0 and norm gains of 1 hide faults.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as t

LFM2_ATTENTION = frozenset((2, 5, 9, 13, 17, 21, 24, 27))  # the other layers are short convolutions


@dataclass(frozen=True)
class Family:
    model: Any
    config: Any
    layers: int
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "gpt2": Family(t.GPT2LMHeadModel, t.GPT2Config, 12),
    "granite": Family(
        t.GraniteForCausalLM,
        t.GraniteConfig,
        24,
        dict(
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=2048,
            vocab_size=49152,
            tie_word_embeddings=True,
            attention_multiplier=1 / 64,
            embedding_multiplier=12.0,
            residual_multiplier=0.25,
            logits_scaling=4.0,
        ),
    ),
    "qwen2": Family(
        t.Qwen2ForCausalLM,
        t.Qwen2Config,
        24,
        dict(
            hidden_size=896,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
    "llama1b": Family(
        t.LlamaForCausalLM,
        t.LlamaConfig,
        16,
        dict(
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            vocab_size=128256,
            tie_word_embeddings=True,
        ),
    ),
    "lfm2": Family(t.Lfm2ForCausalLM, t.Lfm2Config, 30),
    "llama8b": Family(
        t.LlamaForCausalLM,
        t.LlamaConfig,
        32,
        dict(
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
        ),
    ),
}


class Logits(torch.nn.Module):
    """input_ids in, logits out: one tensor each way, no cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.m = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.m(input_ids=input_ids, use_cache=False).logits


def depth(name: str, layers: int) -> dict[str, Any]:
    if name == "gpt2":
        return {"n_layer": layers}
    settings: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "lfm2":
        kinds = ["full_attention" if i in LFM2_ATTENTION else "conv" for i in range(layers)]
        settings["layer_types"] = ["conv", "full_attention"] if layers == 2 else kinds
    return settings


def attention_blocks(name: str, layers: int | None = None) -> int:
    layers = layers or FAMILIES[name].layers
    kinds = depth(name, layers).get("layer_types", ["full_attention"] * layers)
    return kinds.count("full_attention")


def build(
    name: str, layers: int | None = None, device: str = "cpu", attn_implementation: str = "sdpa", **settings: Any
) -> Logits:
    """`settings` replace the family's own, e.g. vocab_size."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    with torch.device(device):
        config = family.config(
            **{**family.settings, **depth(name, layers or family.layers), **settings},
            attn_implementation=attn_implementation,
        )
        model = family.model(config)
    if device != "meta":
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(torch.randn(p.shape, generator=noise) * 0.1)
    return Logits(model).eval()


def input_ids(model: Logits, batch: int = 1, seq: int = 128, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.m.config.vocab_size, (batch, seq), generator=draw)


def spread(model: Logits, sigma: float = 0.8) -> Logits:
    """Gives the embeddings, tied to the output, rows of unequal length.

    Logits of random weights are all alike: the likeliest of 50,000 words has a probability of 0.0003. With this they
    have long tails as in trained models, and it has 0.3 to 0.7."""
    words = model.m.get_input_embeddings().weight
    lengths = torch.randn(len(words), 1, generator=torch.Generator().manual_seed(5)).mul(sigma).exp()
    with torch.no_grad():
        words.mul_(lengths.to(words.device))
        if model.m.get_output_embeddings().weight is not words:
            model.m.get_output_embeddings().weight.copy_(words)
    return model
