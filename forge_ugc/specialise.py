"""Dynamic shapes: the values of a capture's symbols, found from a call's input shapes."""

from __future__ import annotations

from typing import Any

import torch

from .capture import TensorMeta


class Unbacked(Exception):
    """A size or number that is known at run time only (nonzero and the like)."""


class Symbols:
    """Maps symbolic sizes to ints. `values`: sympy symbol -> int."""

    def __init__(self, values: dict[Any, int] | None = None) -> None:
        self.values = values or {}
        self._memo: dict[Any, Any] = {}

    def size(self, value: Any) -> int:
        """An int for an int or SymInt; Unbacked if it depends on data."""
        return value if type(value) is int else int(self.number(value))

    def number(self, value: Any) -> Any:
        """A plain number for a Sym*; anything else unchanged."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expression = value.node.expr
        if expression in self._memo:
            return self._memo[expression]
        if expression.free_symbols - self.values.keys():
            raise Unbacked(str(expression))
        known = expression.xreplace(self.values)
        if isinstance(value, torch.SymBool):
            result: Any = bool(known)
        elif isinstance(value, torch.SymFloat):
            result = float(known)
        else:
            result = int(known)
        self._memo[expression] = result
        return result


class SymbolicInputs:
    """How the symbols follow from the leaves of a call."""

    def __init__(self, leaves: list[tuple[int, str, Any]], guards: list[tuple[Any, int | None, int | None]]) -> None:
        """`leaves`: (leaf index, path, meta) of each input that a symbol appears in."""
        self.guards = guards
        self.leaves = leaves
        self.dynamic: list[int] = [
            leaf
            for leaf, _, meta in leaves
            if isinstance(meta, torch.SymInt)
            or (isinstance(meta, TensorMeta) and any(type(s) is not int for s in meta.shape))
        ]

    def solve(self, values: list[Any]) -> Symbols:
        """Symbol values for a call. TypeError if its shapes do not fit `dynamic_shapes`."""
        import sympy  # type: ignore[import-untyped]

        found: dict[Any, int] = {}
        places: dict[Any, str] = {}
        later: list[tuple[Any, int, str]] = []

        def bind(size: Any, given: int, where: str) -> None:
            if type(size) is int:
                if size != given:
                    raise TypeError(f"{where}: expected {size}, given {given}")
                return
            expression = size.node.expr
            if expression.is_Symbol and expression not in found:
                found[expression], places[expression] = given, where
            else:
                later.append((expression, given, where))

        for leaf, path, meta in self.leaves:
            value = values[leaf]
            if isinstance(meta, torch.SymInt):
                bind(meta, int(value), f"input {path}")
                continue
            if not isinstance(meta, TensorMeta):
                continue
            if len(meta.shape) != value.dim():
                raise TypeError(f"input {path}: expected {len(meta.shape)} dimensions, given shape {list(value.shape)}")
            for d, (size, given) in enumerate(zip(meta.shape, value.shape, strict=True)):
                bind(size, int(given), f"input {path}, size of dimension {d}")
        for expression, given, where in later:
            unknown = [s for s in expression.free_symbols if s not in found]
            if len(unknown) == 1:
                solutions = [s for s in sympy.solve(expression.xreplace(found) - given, unknown[0]) if s.is_Integer]
                if not solutions:
                    raise TypeError(f"{where}: {given} does not fit {expression}")
                found[unknown[0]] = int(solutions[0])
            elif int(expression.xreplace(found)) != given:
                raise TypeError(f"{where}: expected {expression} = {expression.xreplace(found)}, given {given}")
        for symbol, least, most in self.guards:
            value = found.get(symbol)
            if value is not None and ((least is not None and value < least) or (most is not None and value > most)):
                where = places.get(symbol, f"size {symbol}")
                raise TypeError(f"{where}: {value} is outside the range [{least}, {most}] of dynamic_shapes")
        return Symbols(found)
