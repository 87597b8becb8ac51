"""A float32 model whose inner values leave the float16 range, and a finfo(float32).min mask over a whole row.

The answer is small and finite. Half precision inside makes inf in x*x (x about 600) and in q@k (about 1e5), and turns
finfo(float32).min into -inf, so that row 0 (all masked) is NaN where eager gives a plain average. (openvino#34704,
#33491, #32893; onnxruntime#31626)
"""

import torch
import torch.nn.functional as F


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(16, 16)
        self.k = torch.nn.Linear(16, 16)

    def forward(self, x, keep):
        r = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        bias = torch.where(keep, 0.0, torch.finfo(torch.float32).min).to(x.dtype)
        p = (self.q(x) @ self.k(x).transpose(-1, -2) * 1e-3 + bias).softmax(-1)
        return r, p, (p @ x) / x.abs().max(), torch.log1p(torch.exp(r * 20)), F.softplus(x)


def case():
    torch.manual_seed(23)
    keep = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    keep[0, 0] = False
    return Large().eval(), (600 * torch.randn(1, 4, 16), keep), {}
