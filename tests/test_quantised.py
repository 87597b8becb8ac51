"""Quantised models: torchao's weights keep their bits, and what is computed with them is what eager computes."""

from __future__ import annotations

import contextlib
import copy
import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import forge_ugc

with contextlib.redirect_stderr(open(os.devnull, "w")):  # it tells of libraries for GPUs
    ao = pytest.importorskip("torchao.quantization")

pytestmark = pytest.mark.filterwarnings("error::forge_ugc.FallbackWarning")

CONFIGS = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "int8_groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
    "intx8": lambda: ao.IntxWeightOnlyConfig(torch.int8),
    "intx4": lambda: ao.IntxWeightOnlyConfig(torch.int4),
    "intx4_groups": lambda: ao.IntxWeightOnlyConfig(torch.int4, granularity=ao.PerGroup(32)),
    "intx4_asymmetric": lambda: ao.IntxWeightOnlyConfig(
        torch.int4, granularity=ao.PerGroup(64), mapping_type=ao.MappingType.ASYMMETRIC
    ),
    "intx2_groups": lambda: ao.IntxWeightOnlyConfig(torch.int2, granularity=ao.PerGroup(32)),
    "int8_activations": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    "intx4_activations": lambda: ao.Int8DynamicActivationIntxWeightConfig(torch.int4),
}
WEIGHT_ONLY = [name for name in CONFIGS if "activations" not in name]


class MLP(nn.Module):
    def __init__(self, width: int = 128, hidden: int = 192, out: int = 64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def quantised(config: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    model = MLP(seed=seed).to(dtype).eval()
    ao.quantize_(model, CONFIGS[config]())
    return model


def dequantised(model: nn.Module) -> nn.Module:
    """The same model in float64, its weights exactly what the quantised ones stand for."""
    plain = MLP().double().eval()
    for name, linear in model.named_children():
        weight = linear.weight
        scale = weight.scale.double().repeat_interleave(weight.shape[1] // weight.scale.shape[1], 1)
        zero = weight.zero_point.double().repeat_interleave(weight.shape[1] // weight.scale.shape[1], 1)
        plain.get_submodule(name).weight.data = (weight.qdata.double() - zero) * scale
        if linear.bias is not None:
            plain.get_submodule(name).bias.data = linear.bias.double()
    return plain


@pytest.mark.parametrize(
    ("config", "capture"),
    [*((name, "auto") for name in CONFIGS), ("int8", "export"), ("intx4_groups", "export")],
)
def test_agrees_with_eager(config, capture):
    model, x = quantised(config), torch.randn(2, 5, 128)
    fast = forge_ugc.compile(model, (x,), capture=capture, strict=True)
    assert fast.report["capture"] == ("fast" if capture == "auto" else "export")
    if config != "int8_activations":
        bits = 8 if config in ("int8", "int8_groups", "intx8") else 4
        assert fast.ir("final").count(f"bits={bits}") == 2
    for _ in range(2):
        y = fast(x)
        with torch.no_grad():
            torch.testing.assert_close(y, model(x), rtol=2e-6, atol=2e-6 * float(model(x).abs().max()))
        x = torch.randn(2, 5, 128)


@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_as_exact_as_eager(config):
    """Against float64 with the very weights: no further off than eager, but for the last digit."""
    model, x = quantised(config), torch.randn(64, 128)
    exact = dequantised(model)(x.double())
    fast = forge_ugc.compile(model, (x,), strict=True)
    with torch.no_grad():
        eager = (model(x).double() - exact).abs()
    ours = (fast(x).double() - exact).abs()
    assert ours.mean() <= 1.25 * eager.mean() and ours.max() <= 2 * eager.max()


@pytest.mark.parametrize("config", ["int8", "intx8", "intx4_groups", "intx4_activations"])
def test_bfloat16(config):
    model, x = quantised(config, torch.bfloat16), torch.randn(3, 128, dtype=torch.bfloat16)
    fast = forge_ugc.compile(model, (x,), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1.6e-2, atol=1e-2 * float(model(x).abs().max()))


def test_changed_weights_are_noticed():
    model, other, x = quantised("int8"), quantised("int8", seed=1), torch.randn(3, 128)
    fast = forge_ugc.compile(model, (x,), strict=True)

    def check():
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=2e-6, atol=2e-6)

    first = fast(x)
    model.load_state_dict(other.state_dict())
    check()
    assert not torch.equal(fast(x), first)
    with torch.no_grad():
        model.up.weight.qdata[:7] = 0
        check()
        model.down.weight.scale.mul_(3)
        check()
        model.up.weight.copy_(quantised("int8", seed=2).up.weight)
        check()
    model.up.weight = other.up.weight
    check()
    model.load_state_dict(quantised("int8", seed=3).state_dict(), assign=True)
    check()


def test_weights_of_another_kind_are_refused():
    model, x = quantised("int8"), torch.randn(3, 128)
    before = model.up.weight
    fast = forge_ugc.compile(model, (x,), strict=True)
    first = fast(x)
    for other in (quantised("intx4"), MLP()):
        model.up.weight = other.up.weight
        with pytest.raises(RuntimeError, match=r"up\.weight\.\w+' is of another kind .*compile the model again"):
            fast(x)
    model.up.weight = before
    assert torch.equal(fast(x), first)


def test_copies_and_artefacts(tmp_path):
    model, x = quantised("int8"), torch.randn(3, 128)
    fast = forge_ugc.compile(model, (x,), strict=True)
    first = fast(x)
    twin = copy.deepcopy(fast)
    fast.save(tmp_path / "m.forge")
    with torch.no_grad():
        model.up.weight.qdata.zero_()
    assert torch.equal(twin(x), first) and not torch.equal(fast(x), first)
    assert torch.equal(torch.as_tensor(forge_ugc.load(tmp_path / "m.forge")(x)), first)
    floats = forge_ugc.compile(MLP().eval(), (x,))
    floats.save(tmp_path / "f.forge")
    assert (tmp_path / "m.forge").stat().st_size < 0.4 * (tmp_path / "f.forge").stat().st_size


def test_exported_program():
    model, x = quantised("intx4_groups"), torch.randn(3, 128)
    with torch.no_grad():
        program, eager = torch.export.export(model, (x,), strict=False), model(x)
    fast = forge_ugc.compile(program, (x,), strict=True)
    torch.testing.assert_close(fast(x), eager, rtol=2e-6, atol=2e-6)


def test_float8_runs_through_torch_and_says_so():
    model = MLP().eval()
    ao.quantize_(model, ao.Float8WeightOnlyConfig())
    x = torch.randn(3, 128)
    with pytest.warns(forge_ugc.FallbackWarning, match=r"aten\.to\.dtype x2"):
        fast = forge_ugc.compile(model, (x,))
    assert {row["op"] for row in fast.report["fallbacks"]} == {"aten.t.default", "aten.to.dtype"}
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("config", ["int8", "intx4_groups"])
def test_torch_compile(config):
    torch._dynamo.reset()
    model, x = quantised(config), torch.randn(3, 128)
    fast = torch.compile(model, backend="forge", options={"strict": True})

    def check():
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=2e-6, atol=2e-6)

    check()
    (graph,) = forge_ugc.last_reports()
    assert graph.calls == 1 and not graph.fallback and not graph.eager_calls
    assert {remark["pass"] for remark in graph.report["remarks"]} == {"dequantise", "operator_fusion"}
    with torch.no_grad():
        model.up.weight.qdata[:9] = 0
    check()
    model.load_state_dict(quantised(config, seed=1).state_dict())
    check()
    assert graph.calls == 3 and not graph.fallback and not graph.eager_calls
    assert len(forge_ugc.last_reports()) == 1  # neither dynamo nor Forge captured again


@pytest.mark.parametrize("dynamic", [False, True])
def test_pt2e(dynamic):
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    x = torch.randn(6, 128)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    with torch.no_grad():
        prepared = pt2e.prepare_pt2e(torch.export.export(MLP().eval(), (x,), strict=False).module(), quantizer)
        prepared(x)
        model = pt2e.convert_pt2e(prepared)
        fast = forge_ugc.compile(model, (x,), strict=True)
        assert fast.ir("final").count("bits=8") == 2 and not fast.report["fallbacks"]
        for scale in (1.0, 0.3, 40.0, 0.0):  # inside the range, and clamped where it is static
            expected = model(x * scale)
            # one activation that rounds the other way differs by a step of its scale times a weight
            atol = 2e-6 * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(fast(x * scale), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("arguments", [[], ["--int4"]])
def test_example(arguments):
    path = Path(__file__).resolve().parent.parent / "examples" / "quantised.py"
    figures = runpy.run_path(str(path))["main"](arguments)
    assert figures["products"] == 8 and figures["difference"] < 1e-6
    assert figures["bytes_after"] < 0.35 * figures["bytes_before"]
