"""Position ids and masks made with cumsum over bool and uint8.

Integral and bool cumsum accumulates in int64: bool would saturate at 1, uint8 wrap at 256 (here are 300 ones).
Left-pad positions are 1,1,1,0,1,2,..; cumsum, then a look-up, is the OPT and RoBERTa pattern. (tvm#20374,
pytorch#125318)
"""

import torch


class Positions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(320, 4)

    def forward(self, mask, u8):
        pos = mask.cumsum(-1) - 1
        pos = pos.masked_fill(~mask, 1)
        seg = u8.cumsum(-1) == u8.cumsum(-1).transpose(0, 1)
        return pos, self.table(pos.clamp(max=319)), u8.cumsum(-1), u8.sum(), u8.cumprod(-1)[:, -1], seg.sum()


def case():
    torch.manual_seed(18)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :3] = False
    return Positions().eval(), (mask, torch.ones(1, 300, dtype=torch.uint8)), {}
