"""A Python `if` on the value of a tensor: no single graph exists.

compile() raises an error that names the user's file and line and the ways out (torch.where, torch.cond). It never
keeps, silently, the branch that the example took; more() takes the other. (torchdynamo#1767, pytorch#93579, #173915;
transformers#48345)
"""

import torch


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x, mask):
        h = self.lin(x)
        if mask.all():
            return h.relu()
        return h * mask


def case():
    torch.manual_seed(10)
    return Branches().eval(), (torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)), {}


def more():
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 1] = False
    return [((torch.ones(2, 4), mask), {})]
