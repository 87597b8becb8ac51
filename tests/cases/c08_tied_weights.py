"""One parameter under two names, used as it is, transposed, and as a table.

The weight is stored once; state_dict has both names; packing it for GEMM must not corrupt the table that the embedding
reads. (pytorch#127357, #142035; comfyui_openvino#15: three times the memory)
"""

import torch
import torch.nn.functional as F


class Tied(torch.nn.Module):
    def __init__(self, v=40, d=16):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.head = torch.nn.Linear(d, v, bias=False)
        self.head.weight = self.emb.weight
        self.mix = torch.nn.Linear(d, d, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        h = F.linear(self.mix(h), self.mix.weight.t())
        return self.head(h), h @ self.emb.weight.T


def case(v=40, d=16):
    torch.manual_seed(8)
    return Tied(v, d).eval(), (torch.randint(0, v, (2, 5)),), {}
