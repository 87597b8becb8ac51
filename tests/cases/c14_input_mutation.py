"""forward() writes into its inputs and returns a view of one.

After the call the caller's `x` and `c` hold the new values, and the second output shares memory with x. The writes are
no outputs of the user's. (pytorch#112429, #115106)
"""

import torch


class Writes(torch.nn.Module):
    def forward(self, x, c):
        x.mul_(2)
        c[0] += x.sum()
        y = x + 1
        x[:, 0] = 0
        return y, x[:, 1:], c * 1


def case():
    torch.manual_seed(14)
    return Writes().eval(), (torch.randn(3, 4), torch.zeros(2)), {}


def more():
    draw = torch.Generator().manual_seed(141)
    return [((torch.randn(3, 4, generator=draw), torch.randn(2, generator=draw)), {})]
