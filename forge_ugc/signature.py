"""How a call's arguments become the flat list of leaves that the program takes, whatever way they are spelled.

Arguments are bound to forward()'s parameters once per way of calling (number of positional arguments, keyword names);
after that a call is a few list look-ups. Pytrees are walked along the example's structure, so that a difference can be
named by its path.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_DICTS = (dict, OrderedDict, defaultdict)
_ABSENT = object()


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Child specs, on every torch version."""
    return list(spec.children()) if hasattr(spec, "children") else list(spec.children_specs)


class Signature:
    """The example's arguments in canonical order: `args` by position, then `kwargs` by name."""

    def __init__(self, parameters: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.parameters = parameters
        args, kwargs = self.canonical(args, kwargs)
        self.keys: list[int | str] = [*range(len(args)), *kwargs]
        names = self._names(len(args))
        labels = [*names, *kwargs]
        values = [*args, *kwargs.values()]
        self.labels = labels
        self.specs = [pytree.tree_structure(value) for value in values]
        self.is_leaf = [spec.is_leaf() for spec in self.specs]
        self.flat = all(self.is_leaf)
        pairs = zip(labels, self.specs, strict=True)
        self.paths: list[str] = [path for label, spec in pairs for path in leaf_paths(spec, label)]
        self._forms: dict[tuple[int, tuple[str, ...]], Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]] = {}

    @classmethod
    def of_callable(cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Signature of a module's forward() or of a function. TypeError if the arguments do not fit it."""
        function = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            parameters = inspect.signature(function)
        except (TypeError, ValueError):
            return cls(None, args, kwargs)
        return cls(parameters, args, kwargs)

    @classmethod
    def of_exported(
        cls, program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        """Signature of an ExportedProgram: the arguments must have the structure that it was exported with."""
        expected = program.call_spec.in_spec
        names = list(children(expected)[1].context or []) if expected is not None else []
        if set(names) != set(kwargs):
            raise TypeError(f"the exported program takes the keyword arguments {names}, given {list(kwargs)}")
        self = cls(None, args, {name: kwargs[name] for name in names})
        if expected is not None and pytree.tree_structure((args, {name: kwargs[name] for name in names})) != expected:
            raise TypeError("example_inputs do not have the structure that the program was exported with")
        return self

    def canonical(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as far as possible by position, the rest by name in forward()'s order."""
        if self.parameters is None:
            return tuple(args), dict(kwargs)
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            known = self.parameters.parameters.values()
            names = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            unknown = [name for name in kwargs if name not in names]
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in known):  # before what is missing for that reason
                raise TypeError(
                    f"the model's arguments: there is no {unknown[0]!r}; there are {', '.join(names) or 'none by name'}"
                ) from None
            raise TypeError(f"the model's arguments: {error}") from None
        return bound.args, bound.kwargs

    def dynamic_shapes(self, shapes: Any) -> Any:
        """`dynamic_shapes` as torch.export wants it: by parameter name, a parameter that is not named being static."""
        if not isinstance(shapes, dict) or self.parameters is None:
            return shapes
        given = set(shapes)
        wanted = [label for label in self.labels if label.isidentifier()]
        if not given <= set(wanted) or len(wanted) != len(self.labels):
            return shapes
        return {label: shapes.get(label) for label in wanted}

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A call's arguments in the example's order. TypeError if one is missing or unknown."""
        form = self._forms.get((len(args), tuple(kwargs)))
        if form is None:
            form = self._forms.setdefault((len(args), tuple(kwargs)), self._make_form(len(args), tuple(kwargs)))
        return form(args, kwargs)

    def flatten(self, values: list[Any], found: list[Any] | None = None) -> list[Any]:
        """Leaves of `values`. TypeError naming the place where the structure differs from the example's.

        `found` collects the container objects in pre-order.
        """
        if self.flat:
            return values
        leaves: list[Any] = []
        for value, spec, leaf, label in zip(values, self.specs, self.is_leaf, self.labels, strict=True):
            if leaf:
                leaves.append(value)
            else:
                flatten_like(spec, value, label, leaves, found)
        return leaves

    def _names(self, count: int) -> list[str]:
        names: list[str] = []
        for p in self.parameters.parameters.values() if self.parameters is not None else ():
            if p.kind is p.VAR_POSITIONAL:
                names += [f"{p.name}[{i}]" for i in range(count - len(names))]
            elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and len(names) < count:
                names.append(p.name)
        return names + [f"args[{i}]" for i in range(len(names), count)]

    def _make_form(self, count: int, names: tuple[str, ...]) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
        args, kwargs = self.canonical(tuple(range(count)), {name: name for name in names})
        given: dict[str, Any] = dict(zip([*self._names(len(args)), *kwargs], [*args, *kwargs.values()], strict=True))
        defaults = {}
        if self.parameters is not None:
            defaults = {p.name: p.default for p in self.parameters.parameters.values() if p.default is not p.empty}
        getters: list[tuple[Any, Any]] = []
        for label in self.labels:
            if label in given:
                getters.append((given.pop(label), _ABSENT))
            elif label in defaults:
                getters.append((None, defaults[label]))
            else:
                raise TypeError(f"input {label!r} is missing (the example had it)")
        extra = []
        for label, getter in given.items():
            if label not in defaults:
                raise TypeError(f"input {label!r} was not part of the example inputs; compile again with it")
            extra.append((getter, label, defaults[label]))
        if not extra and [g for g, d in getters if d is _ABSENT] == list(range(count)) and len(getters) == count:
            return lambda args, kwargs: list(args)

        def form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            for getter, label, default in extra:
                value = args[getter] if type(getter) is int else kwargs[getter]
                if not same_constant(value, default):
                    raise TypeError(
                        f"input {label!r} was left at its default {default!r} in the example, given {brief(value)}; "
                        "compile again with it"
                    )
            return [d if d is not _ABSENT else args[g] if type(g) is int else kwargs[g] for g, d in getters]

        return form


def same_constant(value: Any, expected: Any) -> bool:
    """Whether a Python value equals the one that the program was specialised on."""
    if value is expected:
        return True
    if isinstance(value, torch.Tensor) or isinstance(expected, torch.Tensor):
        return False
    try:
        return type(value) is type(expected) and bool(value == expected or (value != value and expected != expected))
    except Exception:  # an __eq__ of the caller's that does not compare
        return False


def flatten_like(
    spec: pytree.TreeSpec, value: Any, path: str, leaves: list[Any], found: list[Any] | None = None
) -> None:
    """Appends the leaves of `value`, which must have the structure `spec` (dicts: in any key order).

    `found` collects the container objects in pre-order.
    """
    if spec.is_leaf():
        leaves.append(value)
        return
    kind = spec.type
    if found is not None:
        found.append(value)
    below = children(spec)
    if kind in _DICTS:
        if type(value) not in _DICTS:
            raise TypeError(f"input {path}: expected a {kind.__name__}, given {brief(value)}")
        keys = spec.context[1] if kind is defaultdict else spec.context
        if set(keys) != set(value):
            raise TypeError(f"input {path}: expected the keys {list(keys)}, given {list(value)}")
        for key, child in zip(keys, below, strict=True):
            flatten_like(child, value[key], f"{path}[{key!r}]", leaves, found)
        return
    node = pytree.SUPPORTED_NODES.get(kind) if type(value) is kind else None
    if node is not None:  # the same in one step
        parts, context = node.flatten_fn(value)
        if len(parts) == len(below) and (kind in (list, tuple) or context == spec.context):
            for i, (part, child) in enumerate(zip(parts, below, strict=True)):
                if child.is_leaf():
                    leaves.append(part)
                else:
                    flatten_like(child, part, f"{path}[{i}]", leaves, found)
            return
    given = pytree.tree_structure(value, is_leaf=lambda v: v is not value)
    if given.type is not kind or (kind not in (list, tuple) and given.context != spec.context):
        raise TypeError(f"input {path}: expected {_structure(spec)}, given {brief(value)}")
    parts, _ = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if len(parts) != len(below):
        raise TypeError(f"input {path}: expected {len(below)} items, given {len(parts)}")
    for i, (part, child) in enumerate(zip(parts, below, strict=True)):
        flatten_like(child, part, f"{path}[{i}]", leaves, found)


def leaf_paths(spec: pytree.TreeSpec, path: str) -> list[str]:
    """How each leaf of a structure is spelled, `path` being the whole."""
    if spec.is_leaf():
        return [path]
    below = children(spec)
    keys: Any = range(len(below))
    if spec.type in _DICTS:
        keys = spec.context[1] if spec.type is defaultdict else spec.context
    return [leaf for key, child in zip(keys, below, strict=True) for leaf in leaf_paths(child, f"{path}[{key!r}]")]


def _structure(spec: pytree.TreeSpec) -> str:
    return f"a {getattr(spec.type, '__name__', spec.type)} with {len(children(spec))} items"


def brief(value: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def packer(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """Leaves -> output structure; the common flat forms without pytree."""
    if spec.is_leaf():
        return lambda leaves: leaves[0]
    below = children(spec)
    if all(child.is_leaf() for child in below):
        if spec.type is tuple:
            return tuple
        if spec.type is list:
            return list
        if spec.type is dict:
            keys = list(spec.context)
            return lambda leaves: dict(zip(keys, leaves, strict=True))
    if has_kind(spec, lambda kind: kind is torch.Size):
        return lambda leaves: _unflatten(spec, iter(leaves))
    return lambda leaves: pytree.tree_unflatten(leaves, spec)


def has_kind(spec: pytree.TreeSpec, wanted: Callable[[Any], bool]) -> bool:
    """Whether a container in it is of a wanted class."""
    return not spec.is_leaf() and (wanted(spec.type) or any(has_kind(child, wanted) for child in children(spec)))


def _unflatten(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """pytree's, but that a torch.Size, which that makes a tuple, stays one."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_unflatten(child, leaves) for child in children(spec)]
    if spec.type is torch.Size:
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)
