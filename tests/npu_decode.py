"""A causal model over a StaticCache as a function of tensors: the cache's tensors are inputs that forward() writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers


class WithCache(torch.nn.Module):
    """forward(ids [B, S], positions [B, S], mask [B, 1, S, size], *state): logits of the last position, [B, 1, V]."""

    def __init__(self, model: Any, batch: int, size: int, started: bool) -> None:
        """`started`: the cache holds something, as in a step of decoding."""
        super().__init__()
        self.model = model
        cache = transformers.StaticCache(config=model.config, max_cache_len=size)
        with torch.no_grad():
            model(torch.zeros(batch, 1, dtype=torch.int64), cache=cache, use_cache=True)
        cache.reset()
        for layer in cache.layers:
            if started and hasattr(layer, "has_previous_state"):
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        self.__dict__["_made"] = cache
        self.eval()

    def state(self) -> list[torch.Tensor]:
        """The tensors of an empty cache."""
        found: list[torch.Tensor] = []
        for layer in self._made.layers:
            if isinstance(layer, transformers.cache_utils.StaticLayer):
                found += [layer.keys, layer.values, layer.cumulative_length]
            else:
                found.append(layer.conv_states[0])
        return [torch.zeros_like(t) for t in found]

    def forward(self, ids: Any, positions: Any, mask: Any, *state: Any) -> Any:
        given, cache = iter(state), copy.copy(self._made)
        cache.layers = [copy.copy(layer) for layer in self._made.layers]
        for layer in cache.layers:
            if isinstance(layer, transformers.cache_utils.StaticLayer):
                layer.keys, layer.values, layer.cumulative_length = next(given), next(given), next(given)
            else:
                layer.conv_states = {0: next(given)}
                layer.has_previous_state = dict(layer.has_previous_state)
        out = self.model(
            ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=1
        )
        return out.logits


def arguments(ids: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, positions and mask for tokens from position `first` on."""
    batch, s = ids.shape
    positions = torch.arange(first, first + s).expand(batch, s)
    mask = torch.arange(size) <= positions[0, :, None]
    return ids, positions.contiguous(), mask.expand(batch, 1, s, size).contiguous()
