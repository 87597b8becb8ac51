"""Tiny transformers models of many architectures: random weights, no hub."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as t

_WIDTH = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=99, max_position_embeddings=64, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_ENCODER = {k: v for k, v in _WIDTH.items() if k not in ("num_key_value_heads", "head_dim")}
_CAUSAL = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma", "Gemma2", "Granite", "Olmo", "Olmo2", "StableLm",
    "Starcoder2", "Cohere", "Helium", "Ernie4_5", "SmolLM3", "Seed Oss", "Glm",
]  # fmt: skip
_OTHERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99), "causal"),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER, "causal"),
    "GPTJ": (
        "GPTJForCausalLM", "GPTJConfig", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=99), "causal"),
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=99,
             word_embed_proj_dim=32, max_position_embeddings=64), "causal"),
    "Bloom": ("BloomForCausalLM", "BloomConfig", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=99), "causal"),
    "Phi": ("PhiForCausalLM", "PhiConfig", _ENCODER, "causal"),
    "Bert": ("BertModel", "BertConfig", _ENCODER, "encoder"),
    "Roberta": ("RobertaModel", "RobertaConfig", _ENCODER, "encoder"),
    "Electra": ("ElectraModel", "ElectraConfig", _ENCODER, "encoder"),
    "DistilBert": (
        "DistilBertModel", "DistilBertConfig", dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=99),
        "encoder"),
    "Albert": ("AlbertModel", "AlbertConfig", {**_ENCODER, "embedding_size": 16}, "encoder"),
    "ModernBert": ("ModernBertModel", "ModernBertConfig", _ENCODER, "encoder"),
    "MPNet": ("MPNetModel", "MPNetConfig", _ENCODER, "encoder"),
    "ViT": (
        "ViTModel", "ViTConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
             patch_size=8), "image"),
    "DeiT": (
        "DeiTModel", "DeiTConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
             patch_size=8), "image"),
    "Siglip": (
        "SiglipVisionModel", "SiglipVisionConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
             patch_size=8), "image"),
}  # fmt: skip


def _known() -> dict[str, tuple[str, str, dict[str, Any], str]]:
    found = {n: (f"{n}ForCausalLM", f"{n}Config", _WIDTH, "causal") for n in (c.replace(" ", "") for c in _CAUSAL)}
    return {n: v for n, v in {**found, **_OTHERS}.items() if hasattr(t, v[0]) and hasattr(t, v[1])}


ARCHITECTURES = _known()


def tiny(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, and keyword arguments for a call."""
    model_class, config_class, settings, kind = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(t, model_class)(getattr(t, config_class)(**settings)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    if kind == "image":
        return model, {"pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}
    kwargs: dict[str, Any] = {"input_ids": torch.randint(3, 90, (2, 9), generator=draw)}
    if kind == "encoder":
        kwargs["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    else:
        kwargs["use_cache"] = False
    return model, kwargs
