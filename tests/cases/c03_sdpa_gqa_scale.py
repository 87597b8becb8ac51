"""Grouped-query attention: head order, a scale of the user's, values wider than keys.

KV head j serves query heads j*g .. j*g+g-1 (repeat_interleave, not repeat); scale= replaces 1/sqrt(d), 0.0 included;
the additive mask broadcasts over heads. (onnxscript#1802, pytorch#162258, openvino#30835)
"""

import torch
import torch.nn.functional as F


class Grouped(torch.nn.Module):
    def forward(self, q, k, v, bias):
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.37, enable_gqa=True)
        b = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        c = F.scaled_dot_product_attention(q, k, v, scale=0.0, enable_gqa=True)
        return a, b, c


def case():
    torch.manual_seed(3)
    q = torch.randn(2, 6, 5, 8)
    k = torch.randn(2, 2, 5, 8)
    v = torch.randn(2, 2, 5, 12)
    return Grouped().eval(), (q, k, v), {"bias": torch.randn(2, 1, 5, 5)}
