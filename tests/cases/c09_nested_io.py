"""dict, list and NamedTuple in and out, None, a Python number, an unused input, an input handed back.

The same structure comes out: keys in order, None kept, int 7 still an int; `unused` is accepted; feats["b"] is handed
back as it came; the order of keywords does not matter. (pytorch#98251, #147400, #140596; torch-mlir#4244: constant
outputs)
"""

from typing import NamedTuple

import torch


class Out(NamedTuple):
    y: torch.Tensor
    extra: torch.Tensor | None
    n: int


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, feats, *, pair, flag=True, unused=None, scale: float = 2.0):
        a, (b, c) = feats["b"], pair
        y = self.lin(a) * scale + (b if flag else c)
        return {"z": Out(y, None, 7), "a": [a, feats["k"]["deep"] - c], "same": y}


def inputs(draw):
    def t():
        return torch.randn(2, 4, generator=draw)

    return ({"k": {"deep": t()}, "b": t()},), {"scale": 0.5, "pair": (t(), t()), "unused": t()}


def case():
    torch.manual_seed(9)
    return Nested().eval(), *inputs(torch.Generator().manual_seed(99))


def more():
    args, kwargs = inputs(torch.Generator().manual_seed(100))
    return [(args, dict(reversed(list(kwargs.items()))))]
