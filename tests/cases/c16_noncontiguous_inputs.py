"""Inputs that are transposed, expanded (stride 0), strided with an offset, or channels_last; a parameter stored
transposed.

Code that takes data_ptr() and a shape reads garbage. more() has the same shapes with contiguous data: one compiled
object serves both. (iree-turbine#635, TransformerEngine#1017, FlagGems#5379, executorch#14735)
"""

import torch


class Strided(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(6, 5).t(), requires_grad=False)
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, a, b, c, img):
        return a @ self.w + b, c.cumsum(0), self.conv(img).relu(), a.reshape(-1)


def inputs(contiguous):
    draw = torch.Generator().manual_seed(16)

    def r(*shape):
        return torch.randn(*shape, generator=draw)

    out = (r(5, 7).t(), r(1, 6).expand(7, 6), r(20)[3::2], r(1, 3, 8, 8).to(memory_format=torch.channels_last))
    return tuple(t.contiguous().clone() for t in out) if contiguous else out


def case():
    torch.manual_seed(16)
    return Strided().eval(), inputs(contiguous=False), {}


def more():
    return [(inputs(contiguous=True), {}), (inputs(contiguous=False), {})]
