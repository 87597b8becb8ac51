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
_SEQ2SEQ = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=99,
)  # fmt: skip
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
    "Swin": (
        "SwinModel", "SwinConfig",
        dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2), "image"),
    "ConvNext": ("ConvNextModel", "ConvNextConfig", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), "image"),
    "CLIPText": ("CLIPTextModel", "CLIPTextConfig", {**_ENCODER, "projection_dim": 16}, "text"),
    "DebertaV2": (
        "DebertaV2Model", "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, "encoder"),
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99, decoder_start_token_id=0),
        "seq2seq"),
    "Bart": ("BartForConditionalGeneration", "BartConfig", {**_SEQ2SEQ, "max_position_embeddings": 64}, "seq2seq"),
    "Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**_SEQ2SEQ, "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, "spectrum"),
    "Wav2Vec2": (
        "Wav2Vec2Model", "Wav2Vec2Config",
        {**_ENCODER, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2}, "wave"),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _WIDTH, "causal"),
    "Lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        {**_WIDTH, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "causal"),
    "Mamba": (
        "MambaForCausalLM", "MambaConfig", dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=99),
        "causal"),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {**_ENCODER, "alibi": False}, "causal"),
    "Mpt": (
        "MptForCausalLM", "MptConfig", dict(d_model=32, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=64),
        "causal"),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_WIDTH, "num_local_experts": 4}, "causal"),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**_WIDTH, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 24}, "causal"),
    "GptOss": (
        "GptOssForCausalLM", "GptOssConfig", {**_WIDTH, "num_local_experts": 4, "num_experts_per_tok": 2}, "causal"),
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
    if kind == "wave":
        return model, {"input_values": torch.randn(1, 400, generator=draw)}
    ids = torch.randint(3, 90, (2, 9), generator=draw)
    if kind == "spectrum":
        features = torch.randn(2, 8, 40, generator=draw)
        return model, {"input_features": features, "decoder_input_ids": ids, "use_cache": False}
    kwargs: dict[str, Any] = {"input_ids": ids}
    if kind in ("encoder", "seq2seq"):
        kwargs["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    if kind == "seq2seq":
        kwargs["decoder_input_ids"] = ids[:, :5]
    if kind in ("causal", "seq2seq"):
        kwargs["use_cache"] = False
    return model, kwargs
