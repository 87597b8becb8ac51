"""Rotary embedding through complex numbers (polar, view_as_complex, view_as_real).

Pairs are interleaved, (0,1) (2,3), not halves; a complex64 buffer is a constant. There may be no complex type on a
device: real pairs or the host will do. (pytorch/xla#9215, coremltools#2258, onnx#6480, tt-xla#3060)
"""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, d=8, n=16):
        super().__init__()
        inv = 1.0 / (100.0 ** (torch.arange(0, d, 2).float() / d))
        a = torch.outer(torch.arange(n).float(), inv)
        self.register_buffer("cis", torch.polar(torch.ones_like(a), a))

    def forward(self, x, pos):
        xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        r = torch.view_as_real(xc * self.cis[pos][:, None, :, :]).flatten(3)
        live = torch.polar(xc.abs(), xc.angle() * 0.5)
        return r.type_as(x), live.real, (xc * xc.conj()).real


def case():
    torch.manual_seed(12)
    return Rotary().eval(), (torch.randn(2, 2, 4, 8), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])), {}
