"""peft's adapters: switched, merged, disabled, added and given other weights between calls of one compiled model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import forge_ugc

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("error::forge_ugc.FallbackWarning")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def config(rank: int) -> object:
    return peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["up", "down"], init_lora_weights=False)


def adapted() -> nn.Module:
    torch.manual_seed(1)
    model = peft.get_peft_model(MLP(), config(4))
    model.add_adapter("other", config(2))
    return model.eval()


def check(fast, model, x):
    with torch.no_grad():
        expected, result = model(x), fast(x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    return expected


def test_states_of_adapters():
    model, x = adapted(), torch.randn(3, 24)
    fast = forge_ugc.compile(model, (x,), strict=True)
    assert fast.report["capture"] == "fast"
    seen = [check(fast, model, x)]
    model.set_adapter("other")
    seen.append(check(fast, model, x))
    with model.disable_adapter():
        seen.append(check(fast, model, x))
    model.merge_adapter()
    check(fast, model, x)
    model.unmerge_adapter()
    check(fast, model, x)
    model.set_adapter("default")
    assert torch.allclose(check(fast, model, x), seen[0], atol=1e-5)
    assert not any(torch.allclose(a, b, atol=1e-3) for a in seen for b in seen if a is not b)
    assert len(fast._adapters._known) == 4  # each was captured once
    model.base_model.model.up.set_scale("default", 3.0)
    check(fast, model, x)


def test_weights_of_adapters():
    model, x = adapted(), torch.randn(3, 24)
    fast = forge_ugc.compile(model, (x,), strict=True)
    first = check(fast, model, x)
    weights = {k: v + 0.1 for k, v in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, weights)
    assert not torch.allclose(check(fast, model, x), first, atol=1e-3)
    with torch.no_grad():
        model.base_model.model.up.lora_A["default"].weight.zero_()
    check(fast, model, x)
    assert len(fast._adapters._known) == 1  # nothing was captured again
    model.merge_adapter()
    check(fast, model, x)
    model.unmerge_adapter()
    with torch.no_grad():
        model.base_model.model.down.lora_B["default"].weight.add_(1)
    model.merge_adapter()
    check(fast, model, x)


def test_added_and_deleted_adapters(tmp_path):
    model, x = adapted(), torch.randn(3, 24)
    fast = forge_ugc.compile(model, (x,), strict=True)
    check(fast, model, x)
    model.add_adapter("third", config(3))
    model.eval()
    check(fast, model, x)
    model.set_adapter("third")
    check(fast, model, x)
    model.delete_adapter("other")
    expected = check(fast, model, x)
    twin = copy.deepcopy(fast)
    fast.save(tmp_path / "m.forge")
    model.set_adapter("default")
    with pytest.raises(RuntimeError, match="call the model first"):
        fast.save(tmp_path / "m.forge")
    assert not torch.allclose(check(fast, model, x), expected, atol=1e-3)
    torch.testing.assert_close(twin(x), expected, rtol=1e-5, atol=1e-5)
    loaded = torch.as_tensor(forge_ugc.load(tmp_path / "m.forge")(x))
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-5)


def test_torch_compile():
    torch._dynamo.reset()
    model, x = adapted(), torch.randn(3, 24)
    fast = torch.compile(model, backend="forge", options={"strict": True})
    check(fast, model, x)
    model.set_adapter("other")
    check(fast, model, x)
    model.merge_adapter()
    check(fast, model, x)
    graphs = forge_ugc.last_reports()
    assert sum(g.calls for g in graphs) >= 3 and not any(g.fallback or g.eager_calls for g in graphs)
