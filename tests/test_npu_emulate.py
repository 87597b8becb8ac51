"""device="npu:emulate": the NPU's numbers on the host, and how far they are from eager's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forge_ugc
from tests.compare import assert_same, fidelity, max_abs
from tests.models.families import FAMILIES, build, input_ids, spread

ROOT = Path(__file__).resolve().parent.parent
KL = {"fp16": 1e-4, "w8a16": 1e-2}


def emulate(model: Any, *example: Any, **options: Any) -> forge_ugc.CompiledModel:
    return forge_ugc.compile(model, example, **{"device": "npu:emulate", **options})


def half(t: torch.Tensor) -> torch.Tensor:
    return t.half().float()


def quantised(w: torch.Tensor, largest: int) -> torch.Tensor:
    scale = (w.abs().amax(1, keepdim=True) / largest).half().float()
    return (w / scale).round().clamp(-largest - 1, largest) * scale


class Mlp(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().eval()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["auto", "fp16", "w8a16", "w4a16"])
def test_every_instruction_rounds_as_the_npu(precision: str) -> None:
    model, x = mlp(), torch.randn(5, 96)
    weight = {"w8a16": lambda w: quantised(w, 127), "w4a16": lambda w: quantised(w, 7)}.get(precision, half)
    up, down = model.up, model.down
    hidden = half(F.gelu(F.linear(half(x), weight(up.weight), half(up.bias))))
    expected = half(F.linear(hidden, weight(down.weight), half(down.bias)))
    forge = emulate(model, x, precision=precision)
    got = forge(x)
    assert torch.equal(got, half(got)) and not torch.equal(got, model(x))
    torch.testing.assert_close(got, expected, rtol=2**-10, atol=2e-4)  # another order of summation: an ulp of f16
    assert forge.device == "npu:emulate:npu4000" and forge.report["placement"] == {"cpu": 0, "npu": 2}
    assert forge.report["precision"] == ("fp16" if precision == "auto" else precision)
    assert forge.report["tier"] is None and forge.report["npu"]["segments"] == 1


@torch.no_grad()
def test_precisions_differ_by_as_much_as_their_bits() -> None:
    model, x = mlp(), torch.randn(5, 96)
    gaps = [max_abs(model(x), emulate(model, x, precision=p)(x)) for p in ("fp16", "w8a16", "w4a16")]
    assert 0 < gaps[0] < gaps[1] / 4 < gaps[2] / 16


@torch.no_grad()
def test_what_stays_on_the_host_is_not_rounded() -> None:
    w = torch.randn(64, 64)

    def function(x: torch.Tensor, ids: torch.Tensor) -> Any:
        y = x @ w
        return y, y > 0, x.cumsum(0), ids + 70000, (y.cumsum(0), x.argmax(-1))

    x, ids = torch.randn(64, 64) + 0.1, torch.arange(5)
    forge = emulate(function, x, ids)
    y, positive, summed, numbers, (again, largest) = forge(x, ids)
    expected = half(half(x) @ half(w))
    torch.testing.assert_close(y, expected, rtol=2**-10, atol=1e-3)
    assert torch.equal(y, half(y)) and torch.equal(positive, y > 0)
    assert_same((x.cumsum(0), ids + 70000), (summed, numbers))
    assert_same((y.cumsum(0), x.argmax(-1)), (again, largest))
    assert forge.report["placement"]["cpu"] >= 3


@torch.no_grad()
def test_overflow() -> None:
    w = torch.eye(64)

    def function(x: torch.Tensor) -> Any:
        y = x @ w
        return y, y * 1000, y.clamp(max=1e9), y * 1e-7, y + 6e4, (y + 6e4).clamp(max=1e5), y * 218 < 1e5

    x = torch.full((64, 64), 300.0)
    x[0] = 1e9
    got = emulate(function, x)(x)
    assert (got[0][0] == 57344).all() and (got[0][1:] == 300).all()  # what enters stays finite
    assert got[1].isinf().all() and (got[2][1:] == 300).all()  # what is computed does not
    assert (got[3][1:] > 0).all()  # a subnormal of f16
    assert (got[4] == got[5])[1:].all() and got[6][1:].all()  # limits and bounds beyond f16 change nothing


class Masked(nn.Module):
    """Attention by hand, with a mask as transformers make it: finfo.min where a key is hidden."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.constant = nn.Linear(64, 192), nn.Linear(64, 64), constant

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        least = torch.finfo(torch.float32).min
        q, k, v = self.qkv(x).view(1, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = torch.full((x.shape[1], x.shape[1]), least).triu(1)
        scores = q @ k.mT * 0.25 + mask
        if not self.constant:
            scores = scores.masked_fill(~keep[:, None, None, :], least)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("constant", [True, False])
def test_masks_of_the_least_float_stay_finite(constant: bool) -> None:
    torch.manual_seed(0)
    model, x = Masked(constant).eval(), torch.randn(1, 16, 64)
    keep = torch.arange(16)[None] > 2  # the first queries see no key at all
    got = emulate(model, x, keep)(x, keep)
    expected = model(x, keep)
    assert got.isfinite().all() and max_abs(expected[:, 3:], got[:, 3:]) < 3e-3


# --- the families -----------------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {  # the wide ones by a quarter or an eighth, vocabularies of 8,000
    "gpt2": {},
    "granite": {},
    "qwen2": {},
    "llama1b": dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2048),
    "lfm2": dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2048),
    "llama8b": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=1, intermediate_size=1792),
}


@torch.no_grad()
@pytest.mark.parametrize("name", list(FAMILIES))
def test_families(name: str) -> None:
    model = spread(build(name, layers=2, vocab_size=8000, **SMALL[name]))
    ids = input_ids(model, seq=64)
    eager = model(ids)
    best = eager.topk(2, -1).values
    for precision, bound in KL.items():
        forge = emulate(model, ids, precision=precision)
        got = forge(ids)
        _, divergence = fidelity(eager, got)
        same = eager.argmax(-1) == got.argmax(-1)
        assert divergence <= bound, (precision, divergence)
        assert same.double().mean() >= (0.95 if precision == "fp16" else 0.85)
        if precision == "fp16":  # where it differs, f16 has the same number for both words
            assert (best[..., 0] - best[..., 1])[~same].le(best[..., 0][~same].abs() * 2**-9).all()
        flops = forge.report["npu"]["flops"]
        assert flops["npu"] >= 0.99 * (flops["npu"] + flops["cpu"])


@torch.no_grad()
def test_a_trained_model() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(ROOT / "examples" / "small_gpt2").eval()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (16, 1))
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_length=48, do_sample=True, pad_token_id=0)
    eager = model(ids).logits  # of text of its own; two words in a hundred are as likely as the next, but for 2 %
    for precision, least in (("fp16", 0.99), ("w8a16", 0.98)):
        options = {"device": "npu:emulate", "precision": precision}
        got = forge_ugc.compile(model, (ids,), {"use_cache": False}, **options)(ids, use_cache=False).logits
        _, divergence = fidelity(eager, got)
        agreement = (eager.argmax(-1) == got.argmax(-1)).double().mean()
        assert divergence <= KL[precision] and agreement >= least, (precision, divergence, agreement)


# --- as any compiled model --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_threads_and_passes_change_little() -> None:
    model, x = mlp(), torch.randn(5, 96)
    one = emulate(model, x, num_threads=1)(x)
    assert torch.equal(one, emulate(model, x, num_threads=3)(x))
    for passes in ("none", "dce,cse,fold"):
        torch.testing.assert_close(one, emulate(model, x, passes=passes)(x), rtol=2**-9, atol=1e-3)


@torch.no_grad()
def test_changed_weights_copies_and_other_sizes() -> None:
    model, x = mlp(), torch.randn(5, 96)
    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    forge = forge_ugc.compile(model, x, device="npu:emulate", dynamic_shapes=sizes)
    twin = copy.deepcopy(forge)
    before = forge(x)
    assert torch.equal(forge(torch.cat([x, x]))[:5], before)
    model.up.weight.mul_(2)
    assert max_abs(forge(x), model(x)) < 5e-3 and max_abs(forge(x), before) > 0.1
    assert torch.equal(twin(x), before) and twin.report["device"] == "npu:emulate:npu4000"


@torch.no_grad()
def test_half_models_round_nothing_twice() -> None:
    model, x = mlp().half(), torch.randn(5, 96).half()
    assert_same(model(x), emulate(model, x)(x), atol=2e-3, rtol=2e-3)


def test_wrong_requests() -> None:
    model, x = mlp(), torch.randn(5, 96)
    for options, says in (
        ({"device": "npu:emulate:npu1"}, "unknown NPU target 'npu1'"),
        ({"device": "npu:emulate", "precision": "fp32"}, 'use device="cpu"'),
        ({"device": "npu:emulate", "precision": "w2"}, "unknown precision 'w2'; known are auto, fp32"),
        ({"device": "cpu", "precision": "fp16"}, "dtypes"),
    ):
        with pytest.raises(ValueError, match=says):
            forge_ugc.compile(model, x, **options)


def test_program_order_on_request() -> None:
    class Tops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            tops = []
            for layer in self.layers:
                x = torch.relu(layer(x))
                tops.append(x.topk(5).values)
            return x, tops

    model, x = Tops().eval(), torch.randn(32, 64)
    moves = {}
    for schedule in (False, True):
        fast = forge_ugc.compile(model, x, device="npu:emulate", schedule=schedule)
        moves[schedule] = fast.report["transitions"]
        assert_same(model(x), fast(x), atol=0.02, rtol=0.02)
        assert_same(model(x), forge_ugc.compile(model, x, device="cpu", schedule=schedule)(x))
    assert moves == {False: {"before": 8, "after": 8}, True: {"before": 8, "after": 2}}
