"""Folded programs on the software NPU: small members of the six families, models that host calls cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc.testing import software_npu
from tests import ze_client
from tests.models.families import attention_blocks, build, input_ids

EXACT = {"types": "f32", "border": "f32"}  # the software NPU computes in f32: nothing is rounded then
MAX_GRAPHS = 4

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4},
    "granite": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "llama1b": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "llama8b": {"num_attention_heads": 4, "num_key_value_heads": 1},
}


def small(name: str, layers: int) -> nn.Module:
    width = {} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 9000}  # two tiles of the head
    return build(name, layers, **width, **tokens, **SMALL[name])


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    ze_client.require_software_npu()


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_families(name: str) -> None:
    layers = 6 if name == "lfm2" else 4
    model = small(name, layers)
    ids = input_ids(model, seq=24)
    other = (ids + 7) % 9000
    with software_npu():
        forge = forge_ugc.compile(model, (ids,), device="npu", fold="auto", npu_options=EXACT)
        for x in (ids, other):  # the first tier or the second one, as it comes
            torch.testing.assert_close(forge(x), model(x), atol=1e-4, rtol=1e-4)
        assert forge.wait(120)
        assert forge.report["tier"] == 1 and forge.report["npu"]["blocks"] == 1
        torch.testing.assert_close(forge(other), model(other), atol=1e-4, rtol=1e-4)

        forge = forge_ugc.compile(model, (ids,), device="npu", fold=True, npu_options=EXACT)
        folded = forge.report["npu"]
        for x in (ids, other):
            torch.testing.assert_close(forge(x), model(x), atol=1e-4, rtol=1e-4)
        assert forge.report["tier"] == 0 and folded["segments"] == 1
        assert folded["blocks"] <= MAX_GRAPHS and folded["calls"] >= layers + 2, folded
        assert attention_blocks(name, layers) < folded["calls"]
        half = forge_ugc.compile(model, (ids,), device="npu", fold=True)
        expected = model(ids)
        assert (half(ids) - expected).abs().max() <= 5e-3 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["w8a16", "w4a16"])
@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_quantised_families(name: str, precision: str) -> None:
    """Weights as arguments are those that lie in the graph else."""
    model = small(name, 6 if name == "lfm2" else 3)
    ids = input_ids(model, seq=24)
    with software_npu():
        folded, whole = (
            forge_ugc.compile(model, (ids,), device="npu", fold=fold, precision=precision, npu_options=EXACT)
            for fold in (True, False)
        )
        assert folded.report["tier"] == 0 and folded.report["npu"]["blocks"] <= MAX_GRAPHS
        assert folded.report["precision"] == whole.report["precision"] == precision
        got, expected = folded(ids), whole(ids)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        exact = model(ids)
        assert 1e-3 < (got - exact).abs().max() / exact.abs().max() < (0.1 if precision == "w8a16" else 1.5)


class Layer(nn.Module):
    """An operator that no NPU has, in the middle of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        return x + self.down(torch.lgamma(y.abs() + 1))


@torch.no_grad()
def test_a_host_call_in_each_layer() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(256) for _ in range(6))).eval(), torch.randn(4, 128, 256)
    with software_npu(), pytest.warns(forge_ugc.FallbackWarning, match="lgamma"):
        forge = forge_ugc.compile(model, (x,), device="npu", fold=True, npu_options=EXACT)
        report = forge.report
        assert report["npu"]["segments"] == 7 and report["transitions"]["after"] == 14
        assert report["npu"]["blocks"] <= 3, report["npu"]
        for given in (x, x.flip(0), x * 0.5):
            torch.testing.assert_close(forge(given), model(given), atol=1e-4, rtol=1e-4)


class Wide(nn.Module):
    """More weights than a block may have to be part of a larger graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 5 * width), nn.Linear(5 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@torch.no_grad()
def test_large_blocks_keep_graphs_of_their_own() -> None:
    torch.manual_seed(0)
    blocks = [Wide(2560) for _ in range(2)]
    model = nn.Sequential(*(4 * blocks), nn.LayerNorm(2560), nn.Linear(2560, 9000)).eval()
    x = torch.randn(1, 8, 2560)
    with software_npu():
        forge = forge_ugc.compile(model, (x,), device="npu", fold="auto", precision="w8a16", npu_options=EXACT)
        assert forge.wait(300)
        assert forge.report["tier"] == 1
        small = forge.report["npu"]
        forge = forge_ugc.compile(model, (x,), device="npu", fold="auto", npu_options=EXACT)
        for given in (x, -x):
            torch.testing.assert_close(forge(given), model(given), atol=1e-4, rtol=1e-4)
        assert forge.wait(300)
        report = forge.report["npu"]
        assert forge.report["tier"] == 1 and report["weight_bytes"] == 0
        for given in (x, -x):
            torch.testing.assert_close(forge(given), model(given), atol=1e-4, rtol=1e-4)
    assert small["blocks"] == small["calls"] == 1  # as int8 they are not that large
    # Two layers four times, and a head.
    assert report["calls"] == report["blocks"] + 6 and report["blocks"] >= 5, report
