"""Left-padded batches on the NPU: masks of numbers that f16 does not have, and rows that see nothing.

With finfo.min in the mask, a row that sees nothing is an even mean in eager. In f16 it may be other weights of the same
values (scores are lost beside so large a number), but it is finite: NaN would come back in the next layer through the
keys and values of all rows. What padding is computed as, nothing reads, so only real positions are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn import functional as F

import forge_ugc
from forge_ugc.testing import software_npu
from tests import npu_ir, ze_client
from tests.opcheck import tensor

LENGTH, WORDS = 12, 300
BUILDERS: dict[str, Any] = {
    "llama": lambda impl: t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=3,
            vocab_size=WORDS,
            attn_implementation=impl,
        )
    ),
    "gpt2": lambda impl: t.GPT2LMHeadModel(
        t.GPT2Config(
            n_embd=64,
            n_head=4,
            n_layer=3,
            vocab_size=WORDS,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation=impl,
        )
    ),
}


def build(name: str, impl: str) -> nn.Module:
    """Queries and keys are large, so that scores are up to a few tens, as trained models have them: added to the
    least number of f16 they would be infinite."""
    torch.manual_seed(0)
    model = BUILDERS[name](impl).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(12)
            if path.endswith("c_attn.weight"):
                weight[:, :128].mul_(12)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    mask[2, :1] = 0
    return ids, mask


def check(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor, tolerance: float) -> None:
    assert got.isfinite().all() and got.shape == want.shape
    real = mask.bool()
    gap = (got - want)[real].abs().max() / want[real].abs().max()
    assert gap <= tolerance, float(gap)


# Three layers of 64: f16 rounds some 40 times on the way, bf16 has an eighth of its digits.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 4e-2}


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("name", BUILDERS)
def test_left_padded_batches(name: str, impl: str, dtype: torch.dtype) -> None:
    ze_client.require_software_npu()
    model, (ids, mask) = build(name, impl).to(dtype), batch()
    call = {"attention_mask": mask, "use_cache": False}
    want = model(ids, **call).logits
    assert want.isfinite().all()
    for passes in ("default", "none"):
        for device in ("npu:emulate", "npu"):
            with software_npu():
                forge = forge_ugc.compile(model, (ids,), call, device=device, passes=passes)
                got = forge(ids, **call).logits
                assert forge.report["placement"]["npu"] >= 15
                check(got, want, mask, TOLERANCE[dtype])


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT) * 0.25 + mask).softmax(-1) @ v


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("attend", [by_hand, by_sdpa])
@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_rows_that_see_nothing(attend: Any, least: float, passes: str) -> None:
    """Of -inf: NaN by hand and zeros by SDPA, as in eager. Of finite numbers: finite."""
    ze_client.require_software_npu()
    q, k, v = tensor(1, 2, 6, 16), tensor(1, 2, 6, 16, seed=1).abs(), tensor(1, 2, 6, 16, seed=2)
    q[:, :, 1:] *= 0.15  # scores of a few units, which f16 holds well
    q[:, :, 0] = -q[:, :, 0].abs()  # all scores of the row that sees nothing are negative
    assert (q[:, :, :1] @ k.mT * 9 * 0.25).max() < -16  # the least number of f16 and these are infinite
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), least)
    mask[..., 0, :] = least
    want = attend(q * 9, k, v, mask)
    sees = torch.arange(6) > 0
    assert want[:, :, sees].isfinite().all()
    for given in (mask, None):

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor = mask) -> torch.Tensor:
            return attend(q * 9, k, v, m)

        args = (q, k, v) if given is None else (q, k, v, mask)
        emitted = npu_ir.emit(function, args, f32=False, passes=passes)
        results = {"f16": emitted.run(args, "f16")[0].float()}
        with software_npu():
            for device in ("npu:emulate", "npu"):
                results[device] = forge_ugc.compile(function, args, device=device, passes=passes)(*args)
        for device, got in results.items():
            torch.testing.assert_close(got[:, :, sees], want[:, :, sees], atol=2e-2, rtol=2e-2)
            blind = got[:, :, ~sees]
            if least == -torch.inf:
                torch.testing.assert_close(blind, want[:, :, ~sees], equal_nan=True)
            else:
                assert blind.isfinite().all() and blind.abs().max() <= v.abs().max() * 1.01, device
