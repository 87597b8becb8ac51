"""Which pass breaks a model: growing prefixes of the pipeline, until the outputs leave eager's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import Captured, Kind, Node, Ref
from .compile import _arguments, _capture, _options
from .compiled import CompiledModel
from .fidelity import TOLERANCE, Difference, differences
from .lowering import Lowered, lower_all
from .npu import HOST
from .plan import Options, Plan
from .specialise import Symbols


@dataclass(frozen=True)
class Bisection:
    """The first pass after which outputs differ from eager's, or None.

    `position`: its place in the pipeline (-1: wrong without any pass). `node`, `source`: the first wrong value, as far
    as it can be told.
    """

    culprit: str | None
    position: int
    differences: tuple[Difference, ...]
    node: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        if self.culprit is None and self.position < 0 and not self.differences:
            return "no pass changes the outputs: all agree with eager"
        what = (
            f"pass {self.culprit!r} (number {self.position + 1})"
            if self.culprit
            else "lowering or a kernel, before any pass,"
        )
        lines = [f"{what} makes the outputs differ from eager's:", *(f"  {d.path}: {d.what}" for d in self.differences)]
        if self.node:
            lines.append(f"first wrong value: {self.node}" + (f" at {self.source}" if self.source else ""))
        return "\n".join(lines)


def bisect_passes(
    model: Any,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    passes: str = "default",
    alpha: float = 1.0,
    tolerance: Mapping[torch.dtype, tuple[float, float]] | None = None,
) -> Bisection:
    """Runs `model` on the example with the first 0, 1, 2, ... passes and compares each with eager.

    Args:
        model, example_inputs, example_kwargs, passes, alpha: as for `compile`.
        tolerance: dtype -> (absolute, relative), within which floats agree; on top of `testing.TOLERANCE`.
    """
    bounds = {**TOLERANCE, **(tolerance or {})}
    wanted = _options(HOST, passes, alpha, False, False, None)
    args, kwargs = _arguments(example_inputs, example_kwargs)
    captured, example, _ = _capture(model, *copy.deepcopy((args, kwargs)), None)
    reference = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    rng = torch.get_rng_state()

    def run(function: Any) -> Any:
        torch.set_rng_state(rng)
        own_args, own_kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            return function(*own_args, **own_kwargs)

    state = {k: v.clone() for k, v in reference.state_dict().items()} if isinstance(reference, torch.nn.Module) else {}

    def restore() -> None:
        with torch.no_grad():
            for name, value in (reference.state_dict() if state else {}).items():
                value.copy_(state[name])

    eager = run(reference)
    previous = _options(HOST, "none", alpha, False, False, None)
    restore()
    whole = CompiledModel(model, captured, wanted, copy.deepcopy(example))
    names = [p["name"] for p in next(iter(whole._plans.values())).program.report()["passes"]]
    for count in range(len(names) + 1):
        prefix = ",".join(names[:count]) or "none"
        options = _options(HOST, prefix, alpha, False, False, None)
        compiled = CompiledModel(model, captured, options, copy.deepcopy(example))
        found = differences(eager, run(compiled), bounds)
        restore()
        if found:
            if not count:
                node = _first_unlike_eager(captured, example, options, rng, bounds)
                restore()
                where = (node.name, node.source) if node else (None, None)
                return Bisection(None, -1, tuple(found), *where)
            node = _first_wrong(captured, example, [previous, options], rng, bounds)
            restore()
            where = (node.name, node.source) if node else (None, None)
            return Bisection(names[count - 1], count - 1, tuple(found), *where)
        previous = options
    return Bisection(None, -1, ())


def _first_wrong(
    captured: Captured, example: list[Any], options: list[Options], rng: torch.Tensor, bounds: Any
) -> Node | None:
    """The first captured node whose value the second pipeline gets wrong, when every node's value is an output."""
    lowered, nodes = lower_all(captured, Symbols())
    runs = [_all_values(lowered, example, option, rng) for option in options]
    for node, a, b in zip(nodes, *runs, strict=True):
        if differences(a, b, bounds):
            return node
    return None


def _first_unlike_eager(
    captured: Captured, example: list[Any], options: Options, rng: torch.Tensor, bounds: Any
) -> Node | None:
    """The first captured node whose value differs from what torch computes, node by node."""
    lowered, nodes = lower_all(captured, Symbols())
    ours: dict[int, list[torch.Tensor]] = {}
    for node, value in zip(nodes, _all_values(lowered, example, options, rng), strict=True):
        ours.setdefault(id(node), []).append(value)
    torch.set_rng_state(rng)
    values: list[Any] = []

    def fill(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.index]
        if isinstance(value, (list, tuple)):
            return type(value)(map(fill, value))
        return {k: fill(v) for k, v in value.items()} if isinstance(value, dict) else value

    with torch.no_grad():
        for index, node in enumerate(captured.nodes):
            if node.kind is not Kind.CALL:
                given = {Kind.INPUT: lambda n: example[n.target], Kind.OBJECT: lambda n: n.target}.get(node.kind)
                values.append(given(node) if given else captured.slots[index].tensor())
                continue
            device, dtype = node.autocast or ("cpu", None)
            with torch.autocast(device, dtype, enabled=node.autocast is not None):
                values.append(node.target(*fill(node.args), **fill(node.kwargs)))
            tensors = [v for v in pytree.tree_leaves(values[-1]) if isinstance(v, torch.Tensor)]
            mine = ours.get(id(node), [])
            if len(mine) == len(tensors) and differences(tensors, mine, bounds):
                return node
    return None


def _all_values(lowered: Lowered, example: list[Any], options: Options, rng: torch.Tensor) -> list[torch.Tensor]:
    """Every output of a table from `lower_all`."""
    plan = Plan(options, lowered)
    outputs = [torch.empty(v.shape, dtype=v.dtype) for v in lowered.values]
    torch.set_rng_state(rng)
    inputs, keep = plan.gather(example)
    plan.program.run(inputs, [t.data_ptr() for t in outputs], plan.host)
    del keep
    return outputs
