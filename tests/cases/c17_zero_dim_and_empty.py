"""0-d tensors, empty tensors, int and bool inputs, a cat with an empty 1-d tensor.

0-d stays 0-d; the mean of nothing is NaN, its sum 0, softmax over 0 columns empty; cat([empty 1-d, 4-d]) is legal in
torch; int64 values over 2^31 survive; bool & int follows torch's promotion. (transformers#42053, torch-mlir#2870,
pytorch#193265, #94830)
"""

import torch


class Edges(torch.nn.Module):
    def forward(self, x, s, e, big, flag):
        cat = torch.cat([torch.tensor([]), x], dim=-2)
        return (
            cat,
            s * 2,
            s.cumsum(0),
            x.sum(),
            e.sum(0),
            e.mean(),
            e.softmax(-1),
            torch.cat([e, e], 1),
            big + 1,
            big.max(),
            flag & (s > 0),
            flag.sum(),
            x[..., :0].sum(-1),
            torch.where(flag, s, -1),
        )


def case():
    torch.manual_seed(17)
    big = torch.tensor([2**40 + 1, -(2**35)])
    flag = torch.tensor([True, False])
    return Edges().eval(), (torch.randn(1, 2, 3, 4), torch.tensor(1.5), torch.zeros(0, 4), big, flag), {}
