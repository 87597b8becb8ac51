"""A short run through the whole package, for a build with sanitizers (`make sanitize`); also a quick check by hand.

python tests/smoke.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import forge_ugc


class Block(torch.nn.Module):
    """Attention, norm, gated MLP, an embedding: the kernels that a transformer needs, at awkward sizes."""

    def __init__(self, vocabulary: int = 37, width: int = 20, heads: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.table = torch.nn.Embedding(vocabulary, width)
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.gate = torch.nn.Linear(width, 51, bias=False)
        self.up = torch.nn.Linear(width, 51, bias=False)
        self.down = torch.nn.Linear(51, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.table(ids)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x)) + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.gelu(x) @ self.table.weight.T


class Odds(torch.nn.Module):
    """Integers, reductions, indexing, an input that is written, data-dependent sizes."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        x.mul_(2)
        picked = x[index].cumsum(0)
        values, order = picked.topk(3, dim=-1)
        return {
            "values": values,
            "order": order,
            "positive": x[x > 0],
            "any": (index == 2).any(),
            "cat": torch.cat([x, picked], 0).amax(1, keepdim=True),
            "half": (x.half() + 1).float().std(0),
        }


def check(model: torch.nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        for passes in ("none", "default"):
            compiled = forge_ugc.compile(model, tuple(t.clone() for t in inputs), passes=passes, num_threads=2)
            for _ in range(3):
                expected = model(*(t.clone() for t in inputs))
                got = compiled(*(t.clone() for t in inputs))
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            assert str(compiled.report) and compiled.ir("npuir")
            assert compiled.profile(*(t.clone() for t in inputs), calls=2).rows and compiled.report.to_html()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    check(Block().eval(), torch.randint(0, 37, (2, 13)))
    check(Odds().eval(), torch.randn(7, 5), torch.tensor([0, 2, 2, 6]))
    print("smoke: passed")


if __name__ == "__main__":
    main()
