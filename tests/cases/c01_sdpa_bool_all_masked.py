"""SDPA with query rows that may look at no key.

Row 0 of batch 0 masks every key. Eager gives exact zeros for it, not NaN, for a bool mask and for a -inf float mask; a
softmax built as exp(x - max) / sum gives NaN, which the next layer spreads. A finfo.min float mask is different: eager
gives the plain average of V. (openvino#35959, #31630; transformers#47651)
"""

import torch
import torch.nn.functional as F


class Masked(torch.nn.Module):
    def forward(self, q, k, v, keep):
        by_bool = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        ninf = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, float("-inf"))
        by_ninf = F.scaled_dot_product_attention(q, k, v, attn_mask=ninf)
        lowest = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
        by_lowest = F.scaled_dot_product_attention(q, k, v, attn_mask=lowest)
        return by_bool, by_ninf, by_lowest


def case():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5).clone()
    keep[0, :, :, 0] = False  # left padding: row 0 of batch 0 has nothing left
    return Masked().eval(), (q, k, v, keep), {}
