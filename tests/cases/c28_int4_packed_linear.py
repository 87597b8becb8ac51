"""Weight-only int4: two nibbles in a uint8, scale and zero point by group, unpacked in forward().

Unpacking is exact (x & 15, x >> 4, minus 8), and constant folding does not blow the 4-bit weight up to float32 in
memory, which would be eight times its size. (nncf#3005, openvino#37215, #29095: out of memory, TensorRT#4590)
"""

import torch


class Int4Linear(torch.nn.Module):
    def __init__(self, i=32, o=16, group=8):
        super().__init__()
        self.o, self.i, self.g = o, i, group
        self.register_buffer("packed", torch.randint(0, 256, (o, i // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(o, i // group, 1) * 0.1)

    def forward(self, x):
        q = torch.stack((self.packed & 15, self.packed >> 4), -1).reshape(self.o, self.i).to(torch.int8) - 8
        w = (q.view(self.o, -1, self.g) * self.scale).view(self.o, self.i)
        return x @ w.t()


def case(i=32, o=16, group=8):
    torch.manual_seed(28)
    return Int4Linear(i, o, group).eval(), (torch.randn(2, i),), {}
