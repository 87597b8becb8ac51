"""Two equal-looking random calls are two draws, and a random call is no constant.

Every output is True in eager; a merged call or a folded draw makes one False. Dropout is in train mode on purpose;
under eval() it vanishes. Two runs differ, the same seed agrees. (onnxruntime#3047, asked of CSE; pytorch#103681,
#84614: mask frozen between calls; #198333)
"""

import torch


class Draws(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("prev", torch.zeros(64))

    def forward(self, x):
        a, b = torch.rand_like(x), torch.rand_like(x)
        d, e = self.drop(x), self.drop(x)
        fresh = (a != self.prev).any()
        self.prev.copy_(a)
        return (a != b).any(), (d != e).any(), fresh, (a >= 0).all() & (a < 1).all(), ((d == 0) | (d == 2 * x)).all()


def case():
    torch.manual_seed(24)
    return Draws().train(), (torch.ones(64),), {}


def more():
    return [((torch.ones(64),), {})]
