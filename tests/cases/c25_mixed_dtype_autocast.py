"""bf16 weights, a float32 norm, a float16 tail, int ids, an autocast block inside forward.

Output dtypes equal eager's (bf16, fp32, fp16, bf16); a 0-d float32 scale times bf16 stays bf16. (pytorch#158658,
#138128, #123830; executorch#3460)
"""

import torch


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(20, 8, dtype=torch.bfloat16)
        self.lin = torch.nn.Linear(8, 8).to(torch.bfloat16)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 4)
        self.s = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, ids):
        h = self.lin(self.emb(ids)) * self.s
        n = self.norm(h.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.head(n)
        return h, n, n.half() @ n.half().transpose(-1, -2), y


def case():
    torch.manual_seed(25)
    return Mixed().eval(), (torch.randint(0, 20, (2, 3)),), {}
