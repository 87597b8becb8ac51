"""An ExportedProgram as a flat capture: tensors in, tensors out, none of Python's containers between.

So a KV cache is as many inputs as it has tensors. An output that is one of the inputs, as it came or after forward()
has written it, is no output of the flat program: the caller has that tensor already.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.exporters.utils import get_leaf_tensors

from ...capture import Captured, Kind, Output, Ref, TensorMeta, capture_export
from ...errors import CompileError
from ...signature import Signature


@dataclass
class Flat:
    """`example`: the program's inputs. `known`: leaves of forward()'s result that the program does not compute, by
    their number: a Python value, or {"input": n} for input n."""

    captured: Captured
    example: list[torch.Tensor]
    known: list[list[Any]]


def flatten(program: torch.export.ExportedProgram, inputs: Mapping[str, Any], name: str) -> Flat:
    """`program`, exported with the keyword arguments `inputs`, as a capture that takes the tensors among these.

    name: of the model, for reports. CompileError where forward() returns what depends on sizes and is no tensor.
    """
    captured = capture_export(program, (), dict(inputs))
    leaves = pytree.tree_leaves(captured.signature.values((), dict(inputs)))
    position: dict[int, int] = {}  # leaf of `inputs` -> number among the tensors
    for leaf, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            position[leaf] = len(position)
    example = [leaves[leaf] for leaf in position]
    nodes = []
    for node in captured.nodes:
        if node.kind is Kind.INPUT and isinstance(node.meta, TensorMeta):
            node = replace(node, target=position[node.target])
        elif node.kind is Kind.INPUT:
            node = replace(node, kind=Kind.OBJECT, target=_constant(node.meta, "input " + node.name))
        nodes.append(node)
    given = {i: n.target for i, n in enumerate(nodes) if n.kind is Kind.INPUT}
    given |= {w.value.index: given[w.writes] for w in captured.writes if isinstance(w.value, Ref) and w.writes in given}
    outputs, known = [], []
    for number, output in enumerate(captured.outputs):
        if not isinstance(output.value, Ref):
            known.append([number, _constant(output.value, f"result {number}")])
        elif output.value.index in given:
            known.append([number, {"input": given[output.value.index]}])
        else:
            outputs.append(Output(output.value))
    flat = replace(
        captured,
        nodes=nodes,
        outputs=outputs,
        out_spec=pytree.tree_structure((0,) * len(outputs)),
        signature=_signature(inputs, example),
        # torch.export takes 2 or more for granted of every size that it keeps open, whoever asked for it
        guards=[(symbol, 0 if least == 2 else least, most) for symbol, least, most in captured.guards],
    )
    flat.__dict__["__name__"] = name
    return Flat(flat, example, known)


def _constant(value: Any, what: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CompileError(f"{what} is a number that depends on sizes ({value}); export with fixed shapes")
    raise CompileError(f"{what} is {value!r}: only tensors and plain values can be exported")


def _signature(inputs: Mapping[str, Any], example: list[torch.Tensor]) -> Signature:
    """Parameters named like the leaves: `cache.layers.0.keys` is `cache_layers_0_keys`."""
    paths = {id(tensor): path for path, tensor in get_leaf_tensors(dict(inputs)).items()}
    names: list[str] = []
    for number, tensor in enumerate(example):
        name = re.sub(r"\W", "_", paths.get(id(tensor), f"input_{number}"))
        names.append(name if name.isidentifier() and name not in names else f"input_{number}")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return Signature(inspect.Signature([inspect.Parameter(n, kind) for n in names]), tuple(example), {})
