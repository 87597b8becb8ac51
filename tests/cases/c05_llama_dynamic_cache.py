"""One decode step: a DynamicCache goes in, a longer one comes out.

The cache is flattened as input and rebuilt as output, its keys 6 long; the caller's own cache grows as in eager. Calls
with separate caches do not leak into each other. (pytorch#136582, #155862, #152465; transformers#37880, #47900)
"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def config():
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )


def inputs(token, draw, past=5):
    cache = DynamicCache(config=config())
    for layer in range(2):
        keys, values = (torch.randn(1, 2, past, 8, generator=draw) for _ in range(2))
        cache.update(keys, values, layer)
    return {
        "input_ids": torch.tensor([[token]]),
        "past_key_values": cache,
        "attention_mask": torch.ones(1, past + 1, dtype=torch.long),
        "use_cache": True,
    }


def case():
    torch.manual_seed(5)
    model = LlamaForCausalLM(config()).eval()
    return model, (), inputs(9, torch.Generator().manual_seed(55))


def more():
    return [((), inputs(token, torch.Generator().manual_seed(seed))) for token, seed in ((9, 56), (33, 57), (9, 55))]
