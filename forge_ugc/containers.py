"""Containers of the caller that forward() changes: a KV cache that grows, a list that is appended to.

torch.export hands forward() copies of them, so what happens to them is recorded while tracing (`Watch`) and done to the
caller's own objects after each call (`Containers.adopt`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .errors import CompileError
from .signature import Signature, flatten_like, has_kind, packer


class SameContainer:
    """A leaf of the output structure that is one of the input containers itself."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Change:
    """What a container of the arguments looks like after the call: `count` leaves of structure `spec`."""

    number: int
    spec: pytree.TreeSpec
    outputs: list[Any] = field(default_factory=list)
    lengths: list[int | None] = field(default_factory=list)  # growth of a sliding-window layer's counter


@dataclass
class Containers:
    """`changes` and, through the outputs that are SameContainer, which containers are handed back."""

    changes: list[Change]

    def adopt(self, found: list[Any], results: list[list[Any]]) -> None:
        """Stores the new contents into the caller's objects; `results`: leaves of each change."""
        for change, leaves in zip(self.changes, results, strict=True):
            _assign(found[change.number], _unflatten(change.spec, [], leaves), change.lengths)


class Watch:
    """The module that is exported instead of the caller's, when it is a function or its arguments hold containers."""

    def __init__(self, model: Any, signature: Signature, always: bool = False) -> None:
        self._signature = signature
        self.mutable = any(_has_mutable(spec) for spec in signature.specs)
        self.active = always or self.mutable or not isinstance(model, torch.nn.Module)
        self.module: torch.nn.Module = model
        self.prefix = ""
        if self.active:
            self.module = _watching(model, self)
            self.prefix = "model." if isinstance(model, torch.nn.Module) else ""
        self.counters: list[list[int | None]] = []
        self._spec: pytree.TreeSpec | None = None
        self._leaves: list[Any] = []
        self._changes: list[tuple[Change, int]] = []

    def trace(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Runs forward() under export and returns the leaves of its result, then those of the changed containers."""
        values = [*args, *kwargs.values()]
        found: list[Any] = []
        for value, spec, label in zip(values, self._signature.specs, self._signature.labels, strict=True):
            flatten_like(spec, value, label, [], found)
        before = [pytree.tree_flatten(c) for c in found]
        lengths = [_lengths(c) for c in found]
        result = call(*args, **kwargs)
        register_dataclasses(result)
        self.counters = counters_of(result)
        numbers = {id(c): i for i, c in enumerate(found)}
        leaves, self._spec = pytree.tree_flatten(result, is_leaf=lambda v: id(v) in numbers)
        self._leaves = [SameContainer(numbers[id(v)]) if id(v) in numbers else None for v in leaves]
        flat = [v for v in leaves if id(v) not in numbers]
        self._changes = []
        done: set[int] = set()
        for i, container in enumerate(found):
            after, spec = pytree.tree_flatten(container)
            same = spec == before[i][1] and all(a is b for a, b in zip(after, before[i][0], strict=True))
            if same or i in done or isinstance(container, tuple):
                continue
            nested, _ = pytree.tree_flatten(container, is_leaf=functools.partial(_is_other, numbers, container))
            done |= {numbers[id(v)] for v in nested if id(v) in numbers}
            grown = [
                n - o if n is not None and o is not None else None
                for n, o in zip(_lengths(container), lengths[i], strict=False)
            ]
            self._changes.append((Change(i, spec, lengths=grown), len(after)))
            flat += after
        return flat

    def split(self, outputs: list[Any]) -> tuple[list[Any], pytree.TreeSpec, Containers | None]:
        """Outputs of the traced graph -> (outputs of forward(), their structure, containers to update)."""
        from .capture import Output

        rest = iter(outputs)
        own = [Output(leaf) if leaf is not None else next(rest) for leaf in self._leaves]
        changes = []
        for change, count in self._changes:
            change.outputs = [next(rest) for _ in range(count)]
            changes.append(change)
        assert self._spec is not None
        handed_back = any(leaf is not None for leaf in self._leaves)
        return own, self._spec, Containers(changes) if changes or handed_back else None


def _is_other(numbers: dict[int, int], container: Any, value: Any) -> bool:
    return id(value) in numbers and value is not container


def _has_mutable(spec: pytree.TreeSpec) -> bool:
    from .signature import children

    if spec.is_leaf():
        return False
    frozen = (isinstance(spec.type, type) and issubclass(spec.type, tuple)) or getattr(
        spec.type, "__name__", ""
    ) == "namedtuple"
    return not frozen or any(map(_has_mutable, children(spec)))


def _watching(model: Any, watch: Watch) -> torch.nn.Module:
    target = model.forward if isinstance(model, torch.nn.Module) else model

    class Watching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if isinstance(model, torch.nn.Module):
                self.model = model
                self.training = model.training

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return watch.trace(model, args, kwargs)

    try:
        own = inspect.signature(target)
    except (TypeError, ValueError):
        return Watching()
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    taken = [p.replace(name=p.name + "_") if p.name == "self" else p for p in own.parameters.values()]
    leading = [p.replace(kind=p.POSITIONAL_ONLY) for p in taken if p.kind is p.POSITIONAL_ONLY]
    rest = [p for p in taken if p.kind is not p.POSITIONAL_ONLY]
    Watching.forward.__signature__ = own.replace(parameters=[first, *leading, *rest])  # type: ignore[attr-defined]
    return Watching()


def register_dataclasses(tree: Any) -> None:
    """Makes the dataclasses in `tree` pytrees, as transformers does with its own."""
    while found := {
        type(leaf) for leaf in pytree.tree_leaves(tree) if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    }:
        for kind in found:
            torch.export.register_dataclass(kind)


# --- transformers' caches ---------------------------------------------------------------------------------------------


def register_caches(model: Any, leaves: list[Any]) -> None:
    """Makes transformers' caches pytrees where they may appear, by its own helpers. Never imports it anew."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return
    uses = _is_of_transformers(model)
    pairs = [leaf for leaf in leaves if isinstance(leaf, module.EncoderDecoderCache)]
    if (uses or pairs) and module.EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        _register_pair(module.EncoderDecoderCache)
    leaves = [*leaves, *(c for pair in pairs for c in (pair.self_attention_cache, pair.cross_attention_cache))]
    kinds = {type(leaf) for leaf in leaves if isinstance(leaf, module.Cache)}
    for kind in kinds - {module.DynamicCache, module.EncoderDecoderCache}:
        _register_cache(kind)
    if module.DynamicCache in pytree.SUPPORTED_NODES or not (uses or module.DynamicCache in kinds):
        return
    try:
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:
        return
    register_dynamic_cache_export_support()


def _is_of_transformers(model: Any) -> bool:
    """Whether there is a module of transformers in it, which may make and return caches."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(type(m).__module__.partition(".")[0] == "transformers" for m in modules)


def _register_cache(kind: type) -> None:
    try:
        from transformers.exporters.exporter_dynamo import register_pytree_node
    except ImportError:  # before 5.24: torch.export says what it lacks
        return
    register_pytree_node(kind)


def _register_pair(kind: type) -> None:
    """A decoder's two caches. Which layers have the encoder's keys is Python state that forward() branches on."""

    def flatten(cache: Any) -> tuple[list[Any], Any]:
        return [cache.self_attention_cache, cache.cross_attention_cache], tuple(sorted(cache.is_updated.items()))

    def unflatten(parts: Any, updated: Any) -> Any:
        cache: Any = object.__new__(kind)
        cache.self_attention_cache, cache.cross_attention_cache = parts
        cache.is_updated = dict(updated)
        return cache

    def flatten_with_keys(cache: Any) -> tuple[list[Any], Any]:
        parts, updated = flatten(cache)
        names = ("self_attention_cache", "cross_attention_cache")
        return [(pytree.GetAttrKey(name), part) for name, part in zip(names, parts, strict=True)], updated

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


@functools.cache
def _cache_class() -> Any:
    return getattr(sys.modules["transformers.cache_utils"], "DynamicCache", None)


def _is_cache(value: Any) -> bool:
    return "transformers.cache_utils" in sys.modules and isinstance(value, _cache_class())


def _is_pair(value: Any) -> bool:
    return hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache")


def _lengths(container: Any) -> list[int | None]:
    if _is_pair(container):
        return _lengths(container.self_attention_cache) + _lengths(container.cross_attention_cache)
    if not _is_cache(container):
        return []
    return [getattr(layer, "cumulative_length", None) for layer in container.layers]


def _caches(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_cache) if _is_cache(leaf)]


def _counter(layer: Any) -> int | None:
    """The positions that a layer has seen, where it keeps the keys of fewer (a sliding window); else None."""
    length, keys = getattr(layer, "cumulative_length", None), getattr(layer, "keys", None)
    if type(length) is not int or not isinstance(keys, torch.Tensor) or type(keys.shape[-2]) is not int:
        return None
    return length if length != keys.shape[-2] else None


def counters_of(result: Any) -> list[list[int | None]]:
    """Of each cache in a result the counters of its layers: Python state that pytrees do not carry. Empty: none."""
    counters = [[_counter(layer) for layer in cache.layers] for cache in _caches(result)]
    return counters if any(n is not None for layers in counters for n in layers) else []


def slides(model: Any) -> bool:
    """Whether a model of transformers has layers with sliding windows, so that `counters_of` has to see its results."""
    config = getattr(model, "config", None)
    return getattr(config, "sliding_window", None) is not None and _is_of_transformers(model)


class _Holding(TorchFunctionMode):
    """transformers makes a cache by joining nothing and what it shall hold: here that is held itself, not a copy."""

    def __init__(self) -> None:
        super().__init__()
        self._held: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and args and len(args[0]) == 2:
            nothing, tensor = args[0]
            same = nothing.shape == (0,) and nothing.dtype is tensor.dtype and tensor.dim() > 1
            if same and id(tensor) not in self._held:
                self._held.add(id(tensor))
                return tensor
        return func(*args, **(kwargs or {}))


def _unflatten(spec: pytree.TreeSpec, counters: list[list[int | None]], leaves: Sequence[Any]) -> Any:
    with _Holding():
        made = pytree.tree_unflatten(leaves, spec)
    for cache, counts in zip(_caches(made) if counters else (), counters, strict=True):
        for layer, count in zip(cache.layers, counts, strict=True):
            if count is not None:
                layer.cumulative_length = count
    return made


def packer_of(spec: pytree.TreeSpec, counters: list[list[int | None]]) -> Callable[[Sequence[Any]], Any]:
    """Leaves -> output structure. `counters`: of its caches, or empty."""
    if "transformers.cache_utils" in sys.modules and has_kind(spec, lambda kind: kind is _cache_class()):
        return functools.partial(_unflatten, spec, counters)
    return packer(spec)


def check_cache(container: Any) -> None:
    """A sliding-window layer's position counter is Python state that pytrees do not carry; refuse where it matters."""
    if not _is_cache(container):
        return
    if any(_counter(layer) is not None for layer in container.layers):
        raise CompileError(
            "a sliding-window cache that has already dropped keys cannot be passed: its position is a Python "
            "number that the compiled program would freeze"
        )


def _assign(old: Any, new: Any, lengths: list[int | None]) -> None:
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict):
        old.clear()
        old.update(new)
    elif _is_pair(old):
        split = len(_lengths(old.self_attention_cache))
        _assign(old.self_attention_cache, new.self_attention_cache, lengths[:split])
        _assign(old.cross_attention_cache, new.cross_attention_cache, lengths[split:])
        old.is_updated = new.is_updated
    elif _is_cache(old) and len(old.layers) == len(new.layers):
        for mine, fresh, grown in zip(old.layers, new.layers, lengths, strict=True):
            for name in ("keys", "values", "is_initialized", "dtype", "device"):
                if hasattr(fresh, name):
                    setattr(mine, name, getattr(fresh, name))
            if grown is not None:
                mine.cumulative_length += grown
    elif hasattr(old, "__dict__"):
        old.__dict__.update(new.__dict__)
    else:
        raise CompileError(f"forward() changes a {type(old).__name__}, which cannot be updated from outside")
