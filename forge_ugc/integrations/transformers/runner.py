"""Calls a program of the export format "forge" as the model is called that it came from."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.exporters.metadata import ExportMetadata, load_treespec
from transformers.exporters.runners.base import ModelRunner

from ...capture import Kind
from ...compile import compile
from ...compiled import CompiledModel
from ...loaded import LoadedModel, load
from ...signature import children, same_constant


class ForgeModelRunner(ModelRunner):
    """`program`: a CompiledModel or LoadedModel over flat tensors; `calls`: how often it ran."""

    def __init__(self, program: CompiledModel | LoadedModel, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.program = program
        self.calls = 0
        keywords = children(load_treespec(str(metadata.in_spec)))[1]
        self._inputs = list(zip(keywords.context, children(keywords), strict=True))

    @property
    def device(self) -> torch.device:
        """Where inputs and outputs live, wherever the program runs (`program.device` says)."""
        return torch.device("cpu")

    @classmethod
    def from_program(
        cls,
        program: CompiledModel | LoadedModel,
        metadata: ExportMetadata,
        device: Any = None,
        precision: str = "auto",
        num_threads: int | None = None,
    ) -> ForgeModelRunner:
        """device: "auto", "cpu", "npu", ... as for `forge_ugc.compile`; None keeps the program as it was compiled or
        loaded. precision, num_threads: likewise, for another device than None."""
        if device is None and precision == "auto" and num_threads is None:
            return cls(program, metadata)
        wanted: dict[str, Any] = {"device": str(device or "auto"), "precision": precision, "num_threads": num_threads}
        if isinstance(program, LoadedModel):
            return cls(load(program._path, **wanted), metadata)
        options = program._options
        again = compile(
            program._captured,
            _example(program),
            passes=options.passes,
            alpha=options.alpha,
            autotune=options.autotune,
            strict=options.strict,
            **wanted,
        )
        return cls(again, metadata)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """What the model returns for the keyword arguments that were traced. A tensor that forward() writes (of a cache
        of fixed size) is written in the caller's memory. `share_inputs` and `share_outputs` change nothing: inputs are
        read where they lie, and outputs are new tensors.

        TypeError for arguments of another structure, dtype or shape than those of the export.
        """
        tensors: list[torch.Tensor] = []
        for name, spec in self._inputs:
            self._flatten(name, spec, kwargs, tensors)
        unknown = [name for name in kwargs if name not in dict(self._inputs)]
        if unknown:
            raise TypeError(f"inputs {unknown} were not traced; the export takes {[name for name, _ in self._inputs]}")
        results = iter(self.program(*tensors))
        self.calls += 1
        leaves = []
        for index in range(self.out_spec.num_leaves):
            known = self.out_constants.get(index, _COMPUTED)
            if known is _COMPUTED:
                leaves.append(next(results))
            else:
                leaves.append(tensors[known["input"]] if isinstance(known, dict) else known)
        return pytree.tree_unflatten(leaves, self.out_spec)

    def _flatten(self, name: str, spec: pytree.TreeSpec, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        constants = self.metadata.in_constants
        if name in constants:
            if not same_constant(kwargs.get(name, constants[name]), constants[name]):
                raise TypeError(f"input {name}: exported for {constants[name]!r}, given {kwargs[name]!r}")
            return
        if name not in kwargs:
            raise TypeError(f"input {name!r} is missing; the export takes {[n for n, _ in self._inputs]}")
        value = kwargs[name]
        if spec.is_leaf():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"input {name}: expected a tensor, given {type(value).__name__}")
            tensors.append(value)
            return
        leaves, given = pytree.tree_flatten(value)
        if not _alike(spec, given):
            raise TypeError(
                f"input {name}: this {type(value).__name__} has not the structure of the one that was exported "
                f"({getattr(spec.type, '__name__', spec.type)} with {spec.num_leaves} tensors, given {len(leaves)})"
            )
        tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_COMPUTED = object()


def _example(program: CompiledModel) -> tuple[torch.Tensor, ...]:
    """Inputs of the shapes that a program was first compiled for."""
    sizes = dict(zip(program._symbolic.dynamic, program._example_shapes or (), strict=True))
    metas = {n.target: n.meta for n in program._captured.nodes if n.kind is Kind.INPUT}
    return tuple(torch.zeros(sizes.get(i, metas[i].shape), dtype=metas[i].dtype) for i in range(len(metas)))


def _alike(a: Any, b: Any) -> bool:
    """Whether two structures agree but for numbers, which caches keep of their sizes (these the program checks)."""
    if isinstance(a, pytree.TreeSpec) and isinstance(b, pytree.TreeSpec):
        below = zip(children(a), children(b), strict=False)
        return (
            a.type is b.type
            and len(children(a)) == len(children(b))
            and _alike(a.context, b.context)
            and all(_alike(x, y) for x, y in below)
        )
    if type(a) is int and type(b) is int:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)
