"""Weights that lie in another order than products read them: packed while compiling, what that holds and takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forge_ugc
from tests.compare import assert_same

ROOT = Path(__file__).parent.parent


class RowMajor(nn.Module):
    """x @ weight, weight [k, n] as transformers' Conv1D keeps it; `spare` columns of the memory are not its own."""

    def __init__(self, k: int, n: int, spare: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(k, n + spare).to(dtype))
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.memory[:, : self.n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "k, n, spare",
    # around panels of 16 columns, strips of 64 panels and 192 rows, and steps of 8 rows
    [(1, 1, 1), (7, 15, 0), (8, 16, 0), (9, 17, 0), (193, 1024, 3), (200, 1039, 0), (385, 1041, 1), (64, 2100, 12)],
)
def test_packed_weights_give_the_same_bits(k: int, n: int, spare: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k * n)
    # with the processor's unit for it: packed as bf16, multiplied in pairs
    pairs = dtype is torch.bfloat16 and "avx512bf16" in forge_ugc._core.cpu_features()
    model = RowMajor(k, n, spare, dtype).eval()
    with torch.no_grad():
        for rows in (1, 5, 13, 150):
            x = (torch.randn(rows, k) / k**0.5).to(dtype)
            unpacked = forge_ugc.compile(model, x, device="cpu", pack=False)
            want = unpacked(x)
            assert unpacked.report["weights"]["packed_bytes"] == 0
            packs = (rows <= 6 or pairs) and n > 1 and k > 1  # few rows: reading the weight is all that takes time
            for threads in (1, 3) if rows < 100 else (3,):
                packed = forge_ugc.compile(model, x, device="cpu", num_threads=threads)
                size = packed.report["weights"]["packed_bytes"]
                assert size >= (2 if pairs else 4) * k * n if packs else size == 0 or n == 1 or k == 1
                if pairs:
                    assert_same(packed(x), want)
                else:
                    assert torch.equal(packed(x), want)
            assert_same(model(x), want)


def test_weights_whose_rows_and_columns_are_apart_are_packed() -> None:
    memory = torch.randn(40, 70)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ memory[:, ::2]

    x = torch.randn(13, 40)
    packed, unpacked = (forge_ugc.compile(product, x, device="cpu", pack=pack) for pack in (True, False))
    assert packed.report["weights"]["packed_bytes"] >= 4 * 40 * 35
    assert torch.equal(packed(x), unpacked(x))
    assert_same(product(x), packed(x))


MEMORY = """
import gc, json, sys
import torch
import forge_ugc
from benchmarks.measure import PeakMemory, resident_bytes
from tests.models import families

torch.set_num_threads(2)
torch.set_grad_enabled(False)
small = families.build("gpt2", 1, n_embd=64, n_head=4, vocab_size=100)
forge_ugc.compile(small, families.input_ids(small, seq=8))(families.input_ids(small, seq=8))
model = families.build("gpt2", 10, n_embd=512, n_head=8, vocab_size=4000)
ids = families.input_ids(model, seq=4)
weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())
gc.collect()
peak, before = PeakMemory(), resident_bytes()
peak.start()
compiled = forge_ugc.compile(model, ids, device="cpu", pack=sys.argv[1] == "True")
out = compiled(ids)
print(json.dumps({
    "weights": weights, "peak": peak.above() - out.nbytes, "stays": resident_bytes() - before - out.nbytes,
    "packed": compiled.report["weights"]["packed_bytes"],
}))
"""


@pytest.mark.parametrize("pack, most", [(True, 1.1), (False, 0.1)])
def test_memory_that_compile_and_first_run_add(pack: bool, most: float) -> None:
    """Resident bytes, at the peak and after the first run, as a share of the weights'; the result does not count."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(pack)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 100e6 and (found["packed"] > 0.5 * found["weights"]) == pack
    assert found["peak"] <= most * found["weights"] and found["stays"] <= most * found["weights"], found
