"""Random graphs through random subsets and orders of the passes: always eager's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import forge_ugc
from forge_ugc import _core
from forge_ugc.compile import _capture, _options
from forge_ugc.compiled import CompiledModel
from forge_ugc.npu import HOST
from tests.compare import assert_same

ROWS, COLUMNS = 4, 6  # every value is a [ROWS, COLUMNS] float, so that any may meet any

Step = Callable[["Random", list[torch.Tensor], int, int, int], torch.Tensor]


def _attention(m: Random, v: list[torch.Tensor], i: int, j: int, k: int) -> torch.Tensor:
    q, key, value = (v[n].view(1, ROWS, 2, COLUMNS // 2).transpose(1, 2) for n in (i, j, k))
    scores = (q @ key.transpose(-1, -2)) / 1.7
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
    return out.transpose(1, 2).reshape(ROWS, COLUMNS)


STEPS: list[Step] = [
    lambda m, v, i, j, k: v[i] + v[j],
    lambda m, v, i, j, k: v[i] * v[j].sigmoid(),
    lambda m, v, i, j, k: v[i] - 0.5 * v[j],
    lambda m, v, i, j, k: v[i].clone(),
    lambda m, v, i, j, k: nn.functional.gelu(v[i]),
    lambda m, v, i, j, k: nn.functional.silu(v[i]) * v[j],
    lambda m, v, i, j, k: m.lin[k % 2](v[i]),
    lambda m, v, i, j, k: m.lin[k % 2](v[i]).relu() + v[j],
    lambda m, v, i, j, k: v[i] @ m.w + m.b,
    lambda m, v, i, j, k: m.norm(v[i] + v[j]),
    lambda m, v, i, j, k: v[i] * torch.rsqrt(v[i].pow(2).mean(-1, keepdim=True) + 1e-6) * m.b,
    lambda m, v, i, j, k: v[i].softmax(-1),
    lambda m, v, i, j, k: v[i].t().reshape(ROWS, COLUMNS),
    lambda m, v, i, j, k: torch.cat([v[i][:, 2:], v[j][:, :2]], 1),
    lambda m, v, i, j, k: torch.where(v[i] > v[j], v[i], v[k]),
    lambda m, v, i, j, k: v[i].amax(-1, keepdim=True).expand(ROWS, COLUMNS) - v[j],
    lambda m, v, i, j, k: torch.stack([v[i], v[j]]).mean(0),
    lambda m, v, i, j, k: v[i].flip(0).cumsum(0) * 0.1,
    lambda m, v, i, j, k: v[i].view(2, 2, COLUMNS).transpose(0, 1).reshape(ROWS, COLUMNS),
    lambda m, v, i, j, k: v[i] * (torch.arange(COLUMNS) / 7).cos() + torch.cat([-v[i][:, 3:], v[i][:, :3]], 1) * 0.5,
    lambda m, v, i, j, k: m.table[(v[i] > 0).sum(1).clamp(max=5)],
    lambda m, v, i, j, k: (v[i] > 0).to(torch.int64).float() + v[j].clamp(-1, 1),
    lambda m, v, i, j, k: v[i].index_copy(0, torch.tensor([1]), v[j][2:3]),
    _attention,
]


class Random(nn.Module):
    """The steps [(kind, i, j, k)] on two inputs; the last values are returned."""

    def __init__(self, steps: list[tuple[int, int, int, int]], outputs: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.steps, self.outputs = steps, outputs
        self.lin = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in range(2))
        self.norm = nn.LayerNorm(COLUMNS)
        self.w, self.b = nn.Parameter(torch.randn(COLUMNS, COLUMNS) * 0.3), nn.Parameter(torch.randn(COLUMNS))
        self.table = nn.Parameter(torch.randn(6, COLUMNS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        values = [x, y]
        for kind, i, j, k in self.steps:
            i, j, k = (n % len(values) for n in (i, j, k))
            values.append(STEPS[kind](self, values, i, j, k))
        return tuple(values[-self.outputs :])


NAMES = [name for name, _ in _core.passes()]
step = st.tuples(st.integers(0, len(STEPS) - 1), *[st.integers(0, 30)] * 3)
pipelines = st.lists(st.sampled_from(NAMES), max_size=9).map(lambda names: ",".join(names) or "none")


def check(steps: list[tuple[int, int, int, int]], outputs: int, passes: list[str], alpha: float, seed: int) -> None:
    model = Random(steps, outputs).eval()
    generator = torch.Generator().manual_seed(seed)
    args = tuple(torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
    with torch.no_grad():
        expected = model(*args)
        captured, example, _ = _capture(model, args, {}, None)
        for names in (*passes, "default"):
            forge = CompiledModel(model, captured, _options(HOST, names, alpha, False, True, 1), example)
            for _ in range(2):
                assert_same(expected, forge(*args), atol=3e-5, rtol=1e-4)


EXAMPLES = st.tuples(
    st.lists(step, min_size=1, max_size=14), st.integers(1, 3), st.lists(pipelines, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(0, 999),
)  # fmt: skip
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(EXAMPLES)
def test_random_graphs(example: Any) -> None:
    check(*example)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=QUIET)
@given(EXAMPLES)
def test_random_graphs_long(example: Any) -> None:
    check(*example)


def test_every_step_alone_and_twice() -> None:
    for kind in range(len(STEPS)):
        pipelines = ["none", "operator_fusion,attention_fusion", "layout,fold"]
        check([(kind, 0, 1, 0), (kind, 2, 0, 1)], 2, pipelines, 1.0, 3)


def test_unknown_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        forge_ugc.compile(lambda x: x + 1, torch.ones(2), passes="dce,nonsense")
