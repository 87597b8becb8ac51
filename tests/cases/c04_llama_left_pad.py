"""A causal LM with left padding, all inputs by keyword and out of order, a ModelOutput as result.

Pad rows may hold any finite number, yet nothing may be NaN, and the real positions must equal eager's, those of the
same prompt without padding included. (transformers#47651, #46773, #29029; unsloth#9848; pytorch#140596)
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PADDING = 3


def case():
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :PADDING] = 0
    ids[0, :PADDING] = 0
    return model, (), {"attention_mask": mask, "input_ids": ids}
