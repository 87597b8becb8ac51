"""Views while recording, and writes through them: `y[:, 0] = 1` makes a new value of y, and of each view of it.

A tensor that shares another's memory is known by the way to it: the calls (`Step`) that lead there from the tensor that
owns the memory. A write goes back along that way, each step undone by a scatter or a reshape; whoever else shares the
memory is then out of date, and is led along its own way again when it is read next.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .capture import Ref, TensorMeta

aten = torch.ops.aten
Emit = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]  # (operator, arguments, keywords, meta) -> node


class Step(NamedTuple):
    """A view: `func(tensor, *args, **kwargs)`, or `item` of the several that it gives."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: TensorMeta
    meta: Any  # of the result, or a tuple of such
    item: int | None

    def argument(self, name: str) -> Any:
        for i, formal in enumerate(self.func._schema.arguments):
            if formal.name == name:
                return self.args[i - 1] if i <= len(self.args) else self.kwargs.get(name, formal.default_value)
        return None


class Memory:
    """What views of one another share. `node`: the value of the tensor that owns it, `version` counts its writes.

    `leaf`: the placeholder that it is the memory of, or None. `frozen`: never written, as it is shared in another way.
    """

    __slots__ = ("_views", "frozen", "leaf", "node", "version")

    def __init__(self, node: int, leaf: int | None = None, frozen: bool = False) -> None:
        self.node, self.leaf, self.frozen, self.version = node, leaf, frozen, 0
        self._views: list[weakref.ref[Any]] = []

    def add(self, symbol: Any) -> None:
        self._views.append(weakref.ref(symbol))

    def others(self, symbol: Any) -> list[Any]:
        """The tensors alive that share it with `symbol`."""
        alive = [(ref, value) for ref in self._views if (value := ref()) is not None]
        self._views = [ref for ref, _ in alive]
        return [value for _, value in alive if value is not symbol]


def follow(emit: Emit, node: int, path: tuple[Step, ...]) -> int:
    """The node of a view of `node`."""
    for step in path:
        node = emit(step.func, (Ref(node), *step.args), step.kwargs, step.meta)
        if step.item is not None:
            node = emit(operator.getitem, (Ref(node), step.item), {}, step.meta[step.item])
    return node


def store(emit: Emit, node: int, path: tuple[Step, ...], value: int) -> int:
    """`node` once the view of it that `path` leads to has another value."""
    if not path:
        return value
    step, *rest = path
    if rest:
        value = store(emit, follow(emit, node, (step,)), tuple(rest), value)
    func, args = _UNDO[step.func](step, node, value)
    return emit(func, args, {}, step.given)


def can_store(path: tuple[Step, ...]) -> bool:
    return all(step.func in _UNDO for step in path)


# --- how each view is undone ------------------------------------------------------------------------------------------

# (step, node of the whole, node of the view's new value) -> the call that gives the whole's new value
Undo = Callable[[Step, int, int], tuple[Any, tuple[Any, ...]]]


def _reshaped(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    return aten.view.default, (Ref(value), list(step.given.shape))


def _scattered(scatter: Any, *names: str) -> Undo:
    def undo(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
        return scatter, (Ref(whole), Ref(value), *map(step.argument, names))

    return undo


def _ranged(step: Step, whole: int, value: int, dim: int, start: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    start += step.given.shape[dim] if start < 0 else 0
    return aten.slice_scatter.default, (Ref(whole), Ref(value), dim, start, start + length, 1)


def _narrowed(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    dim, start, length = map(step.argument, ("dim", "start", "length"))
    return _ranged(step, whole, value, dim, start, length)


def _split(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    dim, sizes = step.argument("dim"), [meta.shape for meta in step.meta]
    assert step.item is not None
    return _ranged(step, whole, value, dim, sum(s[dim] for s in sizes[: step.item]), sizes[step.item][dim])


def _unbound(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    return aten.select_scatter.default, (Ref(whole), Ref(value), step.argument("dim"), step.item)


def _swapped(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    return step.func, (Ref(value), *step.args)


def _permuted(step: Step, whole: int, value: int) -> tuple[Any, tuple[Any, ...]]:
    dims = [d % len(step.given.shape) for d in step.argument("dims")]
    return aten.permute.default, (Ref(value), sorted(range(len(dims)), key=dims.__getitem__))


_UNDO: dict[Any, Undo] = {
    aten.slice.Tensor: _scattered(aten.slice_scatter.default, "dim", "start", "end", "step"),
    aten.select.int: _scattered(aten.select_scatter.default, "dim", "index"),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
    aten.narrow.default: _narrowed,
    aten.unbind.int: _unbound,
    aten.permute.default: _permuted,
} | dict.fromkeys(
    (
        aten.view.default, aten.view_as.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.unflatten.int, aten.detach.default, aten.alias.default,
    ),
    _reshaped,
) | dict.fromkeys(
    (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default), _split
) | dict.fromkeys(
    (aten.t.default, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.numpy_T.default), _swapped
)  # fmt: skip
# Views for every order of memory, unlike reshape() or contiguous(), which copy for some.
VIEWS = {*_UNDO, aten.expand.default, aten.expand_as.default, aten.movedim.int, aten.movedim.intlist, aten.mT.default}
