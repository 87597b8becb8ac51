"""Attention by hand in the forms that models use: fused, or declined for a reason, and equal to eager in every case -
rows whose keys are all hidden included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import forge_ugc

B, H, S, D = 2, 4, 5, 8
LEAST = torch.finfo(torch.float32).min
INF = float("inf")
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2)) * D**-0.5


def tril() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def plain(q, k, v, seen, bias):
    return scores(q, k).softmax(-1) @ v


def causal_where(q, k, v, seen, bias):
    return torch.where(tril(), scores(q, k), LEAST).softmax(-1) @ v


def causal_added(q, k, v, seen, bias):
    mask = torch.full((S, S), LEAST).triu(1)
    return (scores(q, k) + mask).softmax(-1) @ v


def filled_least(q, k, v, seen, bias):
    return scores(q, k).masked_fill(~seen, LEAST).softmax(-1) @ v


def filled_inf(q, k, v, seen, bias):
    return scores(q, k).masked_fill(~seen, -INF).softmax(-1) @ v


def filled_little(q, k, v, seen, bias):
    return scores(q, k).masked_fill(~seen, -3.0).softmax(-1) @ v


def added_from_bool(q, k, v, seen, bias):
    return (scores(q, k) + torch.where(seen, 0.0, LEAST)).softmax(-1) @ v


def causal_then_bias(q, k, v, seen, bias):
    return (torch.where(tril(), scores(q, k), LEAST) + bias).softmax(-1) @ v


def causal_then_hidden(q, k, v, seen, bias):
    return (torch.where(tril(), scores(q, k), LEAST) + torch.where(seen, 0.0, LEAST)).softmax(-1) @ v


def bias_then_filled(q, k, v, seen, bias):
    return (scores(q, k) + bias).masked_fill(~seen, -INF).softmax(-1) @ v


def bias_and_hard(q, k, v, seen, bias):
    return (bias + scores(q, k) + torch.where(seen, 0.0, LEAST)).softmax(-1) @ v


def two_conditions(q, k, v, seen, bias):
    return scores(q, k).masked_fill(~tril(), LEAST).masked_fill(~seen, LEAST).softmax(-1) @ v


def two_biases(q, k, v, seen, bias):
    return (scores(q, k) + bias + bias).softmax(-1) @ v


def scaled_late(q, k, v, seen, bias):
    return ((q @ k.transpose(-1, -2) + bias) / D**0.5).softmax(-1) @ v


def repeated_heads(q, k, v, seen, bias):
    def repeat(x):
        return x[:, :2, None].expand(B, 2, 2, S, D).reshape(B, H, S, D)

    return (scores(q, repeat(k)) + torch.where(seen, 0.0, LEAST)).softmax(-1) @ repeat(v)


def flat_heads(q, k, v, seen, bias):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    weights = torch.bmm(q * D**-0.5, k.transpose(1, 2)).view(B, H, S, S) + bias
    return torch.bmm(weights.view(B * H, S, S).softmax(-1), v).view(B, H, S, D)


def flat_alibi(q, k, v, seen, bias):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    slopes = bias.expand(B, H, S, S).reshape(B * H, S, S)
    weights = torch.baddbmm(slopes, q, k.transpose(1, 2), beta=1.0, alpha=0.25)
    return torch.bmm(weights.softmax(-1), v)


def weights_too(q, k, v, seen, bias):
    weights = scores(q, k).softmax(-1)
    return torch.cat([weights @ v, weights], -1)


FUSED: list[Form] = [
    plain,
    causal_where,
    causal_added,
    filled_least,
    filled_inf,
    added_from_bool,
    causal_then_bias,
    causal_then_hidden,
    bias_then_filled,
    bias_and_hard,
    two_conditions,
    repeated_heads,
    flat_heads,
    flat_alibi,
]
DECLINED: list[Form] = [filled_little, two_biases, scaled_late, weights_too]


class Module(torch.nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.form(*inputs)


@pytest.mark.parametrize("form", FUSED + DECLINED, ids=lambda form: form.__name__)
def test_form(form: Form) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, H, S, D, generator=generator) for _ in range(3))
    seen = torch.rand(B, 1, S, S, generator=generator) > 0.4
    seen[0, 0, 1] = False  # a query that sees no key
    seen[1, 0, 2, :3] = False  # and one that sees none of those before it
    bias = torch.randn(B, 1, S, S, generator=generator)
    model = Module(form).eval()
    compiled = forge_ugc.compile(model, (q, k, v, seen, bias))
    torch.testing.assert_close(
        compiled(q, k, v, seen, bias), model(q, k, v, seen, bias), rtol=2e-6, atol=2e-6, equal_nan=True
    )
    final = compiled.ir("final")
    assert ("= attention " in final) == (form in FUSED), final
    assert ("= softmax " in final) == (form not in FUSED), final
