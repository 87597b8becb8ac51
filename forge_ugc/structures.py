"""The containers that arguments and results lie in, as an artefact's manifest has them: `{kind: what is below}`."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any


class Outputs(OrderedDict[str, Any]):
    """Named outputs, as those of Hugging Face models: `out.logits`, `out["logits"]`, `out[0]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def text(value: Any) -> str:
    """The value, if it is text; else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def number_below(value: Any, below: int) -> int:
    """The value, if it is an index below `below`; else IndexError."""
    if type(value) is not int or not 0 <= value < below:
        raise IndexError(f"{value!r} is no index below {below}")
    return value


ARGUMENTS = ("tuple", "list", "dict", "object", "leaf")
RESULTS = ("tuple", "list", "dict", "named", "namedtuple", "leaf", "argument", "given", "value")
_PAIRS = ("dict", "named", "namedtuple", "object")  # kinds whose children have keys
_NUMBERED = ("leaf", "argument", "given")  # kinds that say which: of the results, the arguments, the containers


def _children(kind: str, below: Any) -> list[Any]:
    if kind in ("tuple", "list"):
        return list(below)
    return [child for _, child in below] if kind in _PAIRS else []


def visit(
    structure: Any, kinds: tuple[str, ...], limits: dict[str, int], see: Callable[[str, int], Any] | None = None
) -> None:
    """Checks that `structure` is one of these kinds all through, with numbers below `limits`."""
    ((kind, below),) = structure.items()
    if kind not in kinds:
        raise TypeError(f"a structure {kind!r}")
    if kind in _NUMBERED:
        number = number_below(below, limits[kind])
        if see is not None:
            see(kind, number)
    if kind == "namedtuple":
        _namedtuple(*(text(key) for key, _ in below))
    for key in [key for key, _ in below] if kind in _PAIRS else ():
        if kind == "object":
            _check_steps(key)
        elif not isinstance(key, (str, int)):
            raise TypeError(f"a key {key!r}")
    for child in _children(kind, below):
        visit(child, kinds, limits, see)


@functools.lru_cache(maxsize=256)
def _namedtuple(*fields: str) -> Any:
    """A class of named tuples; ValueError if these are no names."""
    return namedtuple("Outputs", fields)


def leaf_numbers(structure: Any) -> list[int]:
    """Of an argument's leaves, in order."""
    ((kind, below),) = structure.items()
    return [below] if kind == "leaf" else [i for child in _children(kind, below) for i in leaf_numbers(child)]


def count_containers(structure: Any) -> int:
    """Of an argument: itself and those below."""
    ((kind, below),) = structure.items()
    return 0 if kind == "leaf" else 1 + sum(map(count_containers, _children(kind, below)))


def _check_steps(steps: Any) -> None:
    """The way from an object to an array: names of attributes, and positions in lists."""
    for step in steps:
        if type(step) is not int and not (isinstance(step, str) and step.isidentifier() and step[0] != "_"):
            raise TypeError(f"a step {step!r}")


def spelled(steps: list[str | int]) -> str:
    """As Python spells them: `.layers[0].keys`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def follow(value: Any, steps: list[str | int], path: str) -> Any:
    """What the steps lead to from `value`, which is spelled `path`; else TypeError."""
    for done, step in enumerate(steps):
        try:
            value = value[step] if isinstance(step, int) else getattr(value, step)
        except (AttributeError, LookupError, TypeError):
            raise TypeError(f"input {path}: there is no {path}{spelled(steps[: done + 1])}") from None
    return value


def unflatten(structure: Any, results: list[Any], leaves: list[Any], containers: list[Any]) -> Any:
    """The structure's value from the program's results, and the call's arguments and containers."""
    ((kind, below),) = structure.items()
    if kind == "leaf":
        return results[below]
    if kind == "argument":
        return leaves[below]
    if kind == "given":
        return containers[below]
    if kind == "value":
        return below
    made = [unflatten(child, results, leaves, containers) for child in _children(kind, below)]
    if kind == "dict":
        return {key: value for (key, _), value in zip(below, made, strict=True)}
    if kind == "named":
        return Outputs((key, value) for (key, _), value in zip(below, made, strict=True))
    if kind == "namedtuple":
        return _namedtuple(*(key for key, _ in below))(*made)
    return tuple(made) if kind == "tuple" else made
