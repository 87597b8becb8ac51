"""Quantised weights: a model with torchao's int8 or int4 weights, compiled with the bits that it has.

    python examples/quantised.py             # int8, a scale for each output channel
    python examples/quantised.py --int4      # int4, a scale for each 32 inputs

Needs `pip install torchao`. Prints the bytes of the weights, and how far the result is from eager's.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

import forge_ugc


def make_model(width: int = 256, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks).eval()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Compile a model with quantised weights.")
    parser.add_argument("--int4", action="store_true", help="4 bits, a scale for each 32 inputs")
    options = parser.parse_args(arguments)

    model, x = make_model(), torch.randn(8, 256)
    plain = forge_ugc.compile(model, (x,))
    config = IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32)) if options.int4 else Int8WeightOnlyConfig()
    quantize_(model, config)
    fast = forge_ugc.compile(model, (x,), strict=True)  # strict: nothing may run through torch
    with torch.no_grad():
        expected = model(x)
    figures = {
        "bytes_before": plain.report["weights"]["borrowed_bytes"],
        "bytes_after": fast.report["weights"]["borrowed_bytes"],
        "products": fast.ir("final").count("quantised_linear"),
        "difference": float((fast(x) - expected).abs().max() / expected.abs().max()),
    }
    for name, value in figures.items():
        print(f"{name:14} {value:.3g}")
    return figures


if __name__ == "__main__":
    main()
