"""PyTorch's own operator database through the compiler: every operator that exports must give eager's result.

Forward samples of `op_db` in float32, int64 and bool. Each sample is exported and compiled; it runs natively in C, or
by fallback (a `host` node calls torch), and equals eager either way. The native share has a floor that only rises.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import forge_ugc
from tests.compare import assert_same

pytest.importorskip("expecttest")
op_db_module = pytest.importorskip("torch.testing._internal.common_methods_invocations")

DTYPES = (torch.float32, torch.int64, torch.bool)
NATIVE_FLOOR = 0.70  # of the (operator, dtype) pairs that export; raise it with every operator that becomes native
SEED = 42  # the database seeds random operators inside the call with this, which no exported graph can hold
SAMPLES = {torch.float32: 2}  # a pair in the quick form, else one; the slow form takes 12

# Uninitialised memory, or results that differ between two eager runs.
NO_REFERENCE = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip
# Eager's own result is any of several (signs or order of vectors, ties), so equality says nothing.
AMBIGUOUS = ("linalg.", "svd", "eig", "qr", "geqrf", "ormqr", "lobpcg", "pca_lowrank", "svd_lowrank", "sparse.")


class Call(torch.nn.Module):
    """An operator on the sample's tensors; everything else of the sample is fixed."""

    def __init__(self, op: Callable[..., Any], spec: Any, leaves: list[Any]):
        super().__init__()
        self.op, self.spec = op, spec
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def pairs() -> list[tuple[Any, torch.dtype]]:
    found = []
    for op in op_db_module.op_db:
        if (
            op.name in NO_REFERENCE
            or op.name.startswith(AMBIGUOUS)
            or any(part in op.name for part in ("_refs", "_masked"))
        ):
            continue
        found += [(op, dtype) for dtype in DTYPES if dtype in op.dtypes]
    return found


def samples(op: Any, dtype: torch.dtype, most: int) -> Iterator[tuple[Call, tuple[torch.Tensor, ...]]]:
    for count, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
        if count == most:
            return
        leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if tensors and all(t.layout is torch.strided for t in tensors):
            yield Call(op.op, spec, leaves).eval(), tensors


def outcome(call: Call, tensors: tuple[torch.Tensor, ...]) -> str:
    """native, fallback or why it does not count; raises if the compiled result is not eager's."""
    torch.manual_seed(SEED)
    try:
        expected = call(*pytree.tree_map(torch.Tensor.clone, tensors))
    except Exception:
        return "eager refuses"
    if not all(isinstance(leaf, (torch.Tensor, int, float, bool, type(None))) for leaf in pytree.tree_leaves(expected)):
        return "no tensor result"
    try:
        program = torch.export.export(call, tensors, strict=False)
    except Exception:
        return "not exportable"
    compiled = forge_ugc.compile(program, tensors)
    torch.manual_seed(SEED)
    actual = compiled(*pytree.tree_map(torch.Tensor.clone, tensors))
    assert_same(expected, actual, atol=2e-5, rtol=2e-5)
    return "fallback" if compiled.report.to_dict()["fallbacks"] else "native"


def run(most: Callable[[torch.dtype], int]) -> tuple[Counter[str], list[str], Counter[str]]:
    counts: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    failures = []
    for op, dtype in pairs():
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        seen = set()
        try:
            for call, tensors in samples(op, dtype, most(dtype)):
                seen.add(outcome(call, tensors))
        except Exception as error:
            failures.append(f"{name} {dtype}: {type(error).__name__}: {str(error)[:300]}")
            continue
        kind = next((k for k in ("fallback", "native", "not exportable") if k in seen), "no sample")
        counts[kind] += 1
        if kind == "fallback":
            fallbacks[name] += 1
    return counts, failures, fallbacks


def check(most: Callable[[torch.dtype], int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, failures, fallbacks = run(most)
    ran = counts["native"] + counts["fallback"]
    share = counts["native"] / max(ran, 1)
    print(f"\n(operator, dtype) pairs: {dict(counts)}; native {share:.1%} of {ran}")
    print("by fallback:", ", ".join(sorted(fallbacks)))
    assert not failures, f"{len(failures)} differ from eager:\n" + "\n".join(failures)
    assert ran > 500, counts
    assert share >= NATIVE_FLOOR, counts


@pytest.mark.timeout(1500)
def test_operator_database() -> None:
    check(lambda dtype: SAMPLES.get(dtype, 1))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_operator_database_many_samples() -> None:
    check(lambda dtype: 12)
