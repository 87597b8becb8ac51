"""forge_ugc.testing.assert_fidelity: its figures against ones worked out here, and what it says of a wrong result."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc.compiled import CompiledModel
from forge_ugc.lowering.registry import RULES
from forge_ugc.testing import Fidelity, assert_fidelity


class Language(nn.Module):
    """Token ids to logits."""

    def __init__(self, words=17, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.fc, self.head = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, ids):
        return {"logits": self.head(torch.tanh(self.fc(self.embed(ids))) * 3)}


IDS = torch.randint(0, 17, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def shifted(monkeypatch):
    """Makes Forge's floating outputs of a call wrong: `shifted(f)` applies f to each."""

    def install(change):
        call = CompiledModel.__call__

        def wrong(self, *args, **kwargs):
            return torch.utils._pytree.tree_map_only(torch.Tensor, change, call(self, *args, **kwargs))

        monkeypatch.setattr(CompiledModel, "__call__", wrong)

    return install


def test_figures(shifted):
    model = Language().eval()
    noise = torch.randn(2, 5, 17, generator=torch.Generator().manual_seed(2))
    shifted(lambda t: t + noise)
    with torch.no_grad():
        a = model(IDS)["logits"].double()
    b = a + noise
    figures = assert_fidelity(model, IDS, atol=10.0)
    assert isinstance(figures, Fidelity) and figures.reference == "eager"
    assert figures.max_abs == pytest.approx(float(noise.abs().max()), rel=1e-5)
    assert figures.relative == pytest.approx(float(noise.abs().max() / a.abs().max()), rel=1e-5)
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    assert figures.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert figures.top1 == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).double().mean())) and figures.top1 < 1
    assert figures.perplexity is None and figures.eager_max_abs is None


def test_the_result_is_the_compiled_model_too():
    model = Language().eval()
    figures = assert_fidelity(model, IDS, passes="dce,cse", kl=1e-9, top1=1.0)
    assert figures.report is figures.compiled.report
    assert [p["name"] for p in figures.report["passes"]] == ["dce", "cse"]
    torch.testing.assert_close(figures(IDS)["logits"], model(IDS)["logits"].detach())
    assert set(figures.to_dict()) == {"reference", "max_abs", "relative", "kl", "top1", "perplexity", "eager_max_abs"}
    with pytest.raises(AttributeError):
        _ = figures.nothing


def test_perplexity_of_token_ids():
    model = Language().eval()
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 17, (23,), generator=draw), torch.randint(0, 17, (3, 5), generator=draw)]
    rows = torch.cat([texts[0][:20].reshape(4, 5), texts[1]])  # 7 rows: the last batch is half full
    with torch.no_grad():
        logits = model(rows)["logits"].double()
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 17), rows[:, 1:].reshape(-1))
    before, after = assert_fidelity(model, (), {"ids": IDS}, dataset=texts).perplexity
    assert before == pytest.approx(math.exp(loss), rel=1e-6)
    assert after == pytest.approx(before, rel=1e-5)
    same, _ = assert_fidelity(model, IDS, dataset=rows, reference="float64").perplexity
    assert same == pytest.approx(before, rel=1e-5)
    with pytest.raises(ValueError, match="fewer token ids"):
        assert_fidelity(model, IDS, dataset=torch.arange(3))
    with pytest.raises(ValueError, match="no integer input"):
        assert_fidelity(nn.Linear(2, 2).eval(), torch.ones(2, 2), dataset=rows)


def test_float64_reference():
    class Sum(nn.Module):
        """Casts by name, and writes a buffer twice: both must happen in float64."""

        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(64))

        def forward(self, x):
            self.total.add_(x.float().cumsum(0)[-1])
            self.total.mul_(0.1)
            return (x.to(torch.float32) * self.total).sum(-1)

    model, x = Sum().eval(), torch.randn(2000, 64)
    figures = assert_fidelity(model, x, reference="float64")
    assert (model.total == 0).all()
    wide = x.double()
    expected = (wide * (wide.cumsum(0)[-1] * 0.1)).sum(-1)
    assert figures.eager_max_abs == pytest.approx(float((model(x) - expected).abs().max()), rel=1e-6)
    assert 0 < figures.max_abs <= 2.1e-5 + 2 * figures.eager_max_abs + 1e-4 * float(expected.abs().max())
    with pytest.raises(ValueError, match="unknown reference"):
        assert_fidelity(model, x, reference="float32")


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({}, "elements differ, by up to 1"),
        ({"atol": 0.5}, "elements differ, by up to 1"),
        ({"top1": 1.0}, "top1: .*, asserted at least 1"),
        ({"kl": 1e-6}, "kl: .*, asserted at most 1e-06"),
        ({"reference": "float64"}, "by up to 1 .eager: "),
    ],
)
def test_each_bound_is_asserted(shifted, bounds, says):
    shifted(lambda t: t + torch.linspace(-1, 1, 17).flip(0))
    with pytest.raises(AssertionError, match=says) as caught:
        assert_fidelity(Language().eval(), IDS, **bounds)
    assert caught.value.figures.max_abs == pytest.approx(1.0, rel=1e-4)


def test_wide_bounds_pass(shifted):
    shifted(lambda t: t + 0.25)
    assert assert_fidelity(Language().eval(), IDS, atol=0.3, kl=1e-9, top1=1.0).max_abs == pytest.approx(0.25, rel=1e-4)
    assert assert_fidelity(Language().eval(), IDS, kl=1e-9).kl < 1e-12  # a shift of all logits changes no probability


def test_other_outputs_must_be_equal_whatever_the_bounds(shifted):
    class Counts(nn.Module):
        def forward(self, x):
            return (x > 0).sum(), x * 2

    assert_fidelity(Counts().eval(), torch.randn(4), atol=1.0)
    shifted(lambda t: t + 1)
    with pytest.raises(AssertionError, match=r"output\[0\]: 1 of 1 elements differ"):
        assert_fidelity(Counts().eval(), torch.randn(4), atol=10.0)


def test_nan_and_infinity(shifted):
    class Edge(nn.Module):
        def forward(self, x):
            return x / 0, x - x

    x = torch.tensor([1.0, 0.0, -1.0, math.inf])
    assert assert_fidelity(Edge().eval(), x).max_abs == 0
    shifted(lambda t: t.nan_to_num())
    with pytest.raises(AssertionError) as caught:
        assert_fidelity(Edge().eval(), x)
    assert caught.value.figures.max_abs == math.inf


def test_the_wrong_pass_is_named(monkeypatch):
    call = CompiledModel.__call__

    def wrong(self, *args, **kwargs):
        passes = self._options.passes
        off = 1.0 if passes == "default" or "cse" in passes else 0.0
        return torch.utils._pytree.tree_map(lambda t: t + off, call(self, *args, **kwargs))

    monkeypatch.setattr(CompiledModel, "__call__", wrong)
    with pytest.raises(AssertionError, match=r"pass 'cse' \(number 2\) makes the outputs differ"):
        assert_fidelity(Language().eval(), IDS)


def test_the_wrong_node_is_named(monkeypatch):
    sine = RULES[torch.ops.aten.sin.default]
    monkeypatch.setitem(RULES, torch.ops.aten.tanh.default, sine)
    with pytest.raises(AssertionError, match=r"before any pass(.|\n)*first wrong value: tanh\S* at .*fidelity.py:\d"):
        assert_fidelity(Language().eval(), IDS)
    found = forge_ugc.bisect_passes(Language().eval(), IDS)
    assert found.position == -1 and found.node.startswith("tanh") and "forward" in found.source
