"""What the tests compare with: pytrees of eager and of Forge, deep copies of arguments, the distance of two logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# (atol, rtol) by dtype, for results whose order of summation may differ from eager's. Integers and bools must be equal.
TOLERANCE = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1.6e-2),
    torch.complex64: (1e-5, 1e-5),
    torch.complex128: (1e-12, 1e-10),
}


def is_cache(value: Any) -> bool:
    """A transformers Cache: no pytree of its own, its tensors lie in its layers."""
    return hasattr(value, "layers") and hasattr(value, "get_seq_length")


def is_pair(value: Any) -> bool:
    """A transformers EncoderDecoderCache: two caches."""
    return hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache")


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def children(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container (ModelOutput is an OrderedDict), None for a leaf."""
    if is_pair(value):
        names = ("self_attention_cache", "cross_attention_cache", "is_updated")
        return [(f".{name}", getattr(value, name)) for name in names]
    if is_cache(value):
        return [
            (f".layers[{i}].{part}", getattr(layer, part))
            for i, layer in enumerate(value.layers)
            for part in ("keys", "values")
        ]
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if is_namedtuple(value):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    return None


def leaves(value: Any, path: str = "out") -> Iterator[tuple[str, Any]]:
    parts = children(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from leaves(part, path + name)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(
    eager: Any, forge: Any, atol: float | None = None, rtol: float | None = None, path: str = "out"
) -> None:
    """The same types, keys in order, dtypes, shapes, device and values; NaN equals NaN. Bounds default to TOLERANCE."""
    assert type(forge) is type(eager), f"{path}: {type(forge).__name__} where eager has {type(eager).__name__}"
    ours, theirs = children(forge), children(eager)
    if theirs is not None and ours is not None:
        assert [name for name, _ in ours] == [name for name, _ in theirs], f"{path}: other parts than eager's"
        for (name, a), (_, b) in zip(theirs, ours, strict=True):
            assert_same(a, b, atol, rtol, path + name)
        return
    if not isinstance(eager, torch.Tensor):
        assert forge == eager, f"{path}: {forge!r} where eager has {eager!r}"
        return
    assert forge.dtype == eager.dtype, f"{path}: {forge.dtype} where eager has {eager.dtype}"
    assert forge.shape == eager.shape, f"{path}: {tuple(forge.shape)} where eager has {tuple(eager.shape)}"
    assert forge.device == eager.device, f"{path}: on {forge.device} where eager is on {eager.device}"
    default = TOLERANCE.get(eager.dtype, (0.0, 0.0))
    torch.testing.assert_close(
        forge,
        eager,
        atol=default[0] if atol is None else atol,
        rtol=default[1] if rtol is None else rtol,
        equal_nan=True,
        msg=lambda text: f"{path}: {text}",
    )


def clone_tensor(t: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the same strides, offset and overlap (expand keeps its stride 0)."""
    if isinstance(t, torch.nn.Parameter) or t.layout != torch.strided:
        return copy.deepcopy(t)
    storage = t.detach().untyped_storage().clone()
    out = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.size(), t.stride())
    return out.requires_grad_(t.requires_grad)


def clone_args(value: Any) -> Any:
    """A deep copy of a pytree of arguments, caches included."""
    if isinstance(value, torch.Tensor):
        return clone_tensor(value)
    if is_cache(value) or is_pair(value):
        return copy.deepcopy(value)
    if is_namedtuple(value):
        return type(value)(*(clone_args(item) for item in value))
    if isinstance(value, dict):
        return type(value)((key, clone_args(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(clone_args(item) for item in value)
    return value


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def fidelity(eager: torch.Tensor, forge: torch.Tensor) -> tuple[float, float]:
    """(largest logit difference, KL(eager || forge) as mean over positions), both in float64."""
    vocabulary = eager.shape[-1]
    worst, divergence, rows = 0.0, 0.0, 0
    # A slice of the positions at a time: the logits of a 150,000-word vocabulary in float64 are large.
    for a, b in zip(eager.reshape(-1, vocabulary).split(32), forge.reshape(-1, vocabulary).split(32), strict=True):
        worst = max(worst, max_abs(a, b))
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
        rows += len(a)
    return worst, divergence / rows


class Float64(TorchFunctionMode):
    """Runs a float32 model in float64: every float32 tensor or dtype that a function is given becomes float64.

    Norms, rotary embeddings and softmax of transformers' models cast to float32 by name; without this a model.double()
    run would be no better than float32 there. Weights are widened where they are used, so that a model whose float64
    copy would not fit in memory has a reference, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(self.widen, (args, kwargs or {}))
        return func(*args, **kwargs)

    @staticmethod
    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return value.double()
        return torch.float64 if value is torch.float32 else value


def float64_run(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the float32 model gives in float64; the model stays as it is."""
    with torch.no_grad(), Float64():
        return model(*args, **kwargs)
