"""What forward() may leave behind in Python objects while it is recorded, found so that it can be taken back."""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_DEPTH = 4
_WIDE = 1000  # what is in longer containers is data
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_CONTAINERS = (dict, list, set, deque)
_CACHE = type(functools.lru_cache(lambda: None))


def holders(model: Any) -> Iterator[tuple[str, Any]]:
    """(description, container) of all dicts, lists, sets and deques of the model: of its modules, of plain objects and
    containers in their attributes; and, where the model is a function, of what its closure and globals name."""
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if id(value) in seen or depth > _DEPTH:
            return
        if isinstance(value, torch.nn.Module):
            for module in value.modules():
                yield from of_module(module)
        elif isinstance(value, _CONTAINERS) and type(value).__module__ in ("builtins", "collections"):
            seen.add(id(value))
            yield name, value
            items = value.values() if isinstance(value, dict) else value
            for item in list(items) if len(value) < _WIDE else ():
                yield from visit(name, item, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                yield from visit(name, item, depth + 1)
        elif _is_plain(value):
            seen.add(id(value))
            yield from visit(type(value).__name__, value.__dict__, depth + 1)

    def of_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        name = type(module).__name__
        for table in (module.__dict__, module._parameters, module._buffers, module._modules):
            seen.add(id(table))
            yield name, table
        for key, value in list(module.__dict__.items()):
            if key not in _OF_MODULES:
                yield from visit(f"{name}.{key}", value, 0)
            elif key.startswith("_forward") and isinstance(value, dict):  # hooks
                yield f"{name}.{key}", value

    for name, root in _roots(model):
        yield from visit(name, root, 0)


def _roots(model: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(model, torch.nn.Module):
        yield "the model", model
        return
    while isinstance(model, functools.partial):
        yield from (("an argument", value) for value in (*model.args, *model.keywords.values()))
        model = model.func
    owner = getattr(model, "__self__", model)
    yield type(owner).__name__, owner if isinstance(owner, torch.nn.Module) else getattr(owner, "__dict__", None)
    function = getattr(model, "__func__", model)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (torch.nn.Module, *_CONTAINERS)):
            yield name, value


def _is_plain(value: Any) -> bool:
    """An object of some class of the user's: no class, function, tensor, nor anything of the standard library."""
    if isinstance(value, (type, torch.Tensor)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    home = type(value).__module__.partition(".")[0]
    return home not in ("torch", "numpy") and (home == "types" or home not in sys.stdlib_module_names)


def evict(leftover: list[Any]) -> None:
    """Takes tensors of a failed recording out of the caches that hold them, as if they had not been put there."""
    ids = {id(value) for value in leftover}
    for holder in gc.get_referrers(*leftover):
        if holder is leftover:
            continue
        if isinstance(holder, dict):
            for key in [k for k, v in holder.items() if id(v) in ids]:
                if "__builtins__" in holder:  # a global variable
                    holder[key] = None
                else:
                    del holder[key]
        elif isinstance(holder, list):
            holder[:] = [v for v in holder if id(v) not in ids]
        elif isinstance(holder, (set, deque)):
            kept = [v for v in holder if id(v) not in ids]
            holder.clear()
            holder.extend(kept) if isinstance(holder, deque) else holder.update(kept)
        elif isinstance(holder, _CACHE):
            holder.cache_clear()
