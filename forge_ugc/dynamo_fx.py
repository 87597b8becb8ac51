"""What a graph of dynamo's says of its inputs, and how capture runs it."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .errors import recorded_at
from .state import made_of_tensors, parts_of

Inputs = Sequence[Any]


def is_open(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a number, or has a size that may differ from call to call."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, torch.SymInt) for s in value.shape)
    return True


def is_static(node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Whether a placeholder is a parameter or buffer of the caller's modules."""
    known = node.meta.get("tensor_dict") or {}
    return isinstance(value, torch.nn.Parameter) or "_dynamo_static_input_type" in known


def readable(node: torch.fx.Node) -> str:
    """Where a placeholder comes from: L['self']._modules['fc']._parameters['weight'] is self.fc.weight."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str) or not name:
        return node.name
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    return re.sub(r"^[LG]\['([^']*)'\]", r"\1", name)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Hides dynamo's own tracing from capture, and what holds around the graph."""
    with torch._guards.tracing(None), torch.autocast("cpu", enabled=False):
        yield


class Runner:
    """Runs the graph node by node, so that what is captured knows each node's source line."""

    def __init__(
        self, gm: torch.fx.GraphModule, args: Inputs, numbers: dict[int, torch.fx.Node], region: torch.dtype | None
    ) -> None:
        self.gm, self.region = gm, region
        self.known = {node: args[i].item() for i, node in numbers.items()}

    def graph(self, *args: Any) -> Any:
        interpreter = _Interpreter(self.gm, self.known)
        depth = len(torch._C._functorch.get_interpreter_stack() or ())
        try:
            if self.region is None:
                return interpreter.run(*args)
            with torch.autocast("cpu", self.region):
                return interpreter.run(*args)
        finally:
            interpreter.leave()
            if len(torch._C._functorch.get_interpreter_stack() or ()) > depth:  # an exception inside vmap
                torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


class _Interpreter(torch.fx.Interpreter):
    """`known`: nodes that are Python numbers."""

    def __init__(self, gm: torch.fx.GraphModule, known: dict[torch.fx.Node, Any]) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.known = known
        self.entered: list[Any] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self.known:
            return self.known[n]
        with recorded_at(n.meta.get("stack_trace")):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # entered in Python, since tracing only writes down the calls
        if target is torch.amp.autocast_mode._enter_autocast:
            mode = torch.amp.autocast_mode.autocast(*args)
            mode.__enter__()
            self.entered.append(mode)
            return mode
        if target is torch.amp.autocast_mode._exit_autocast:
            self.entered.remove(args[0])
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def leave(self) -> None:
        """Leaves the autocast regions that an exception left open."""
        while self.entered:
            self.entered.pop().__exit__(None, None, None)


# --- numbers that only come and go ------------------------------------------------------------------------------------

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.neg)


def set_numbers_apart(
    gm: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule, Callable[[Inputs], list[Any]], Callable[[Inputs, Any], tuple[Any, ...]]] | None:
    """A graph without the numbers that are only counted on (transformers' sliding caches keep their length so) and are
    another one in each call; what makes its inputs of the old graph's; and what makes the old graph's outputs of the
    old inputs and its outputs. None if there are no such numbers."""
    nodes = list(gm.graph.nodes)
    placeholders, output = [n for n in nodes if n.op == "placeholder"], nodes[-1]
    numbers: dict[torch.fx.Node, None] = {}
    for node in nodes:
        if node.op == "placeholder":
            number = isinstance(node.meta.get("example_value"), torch.SymInt)
        else:
            plain = all(type(a) is int or a in numbers for a in node.args) and not node.kwargs
            number = node.op == "call_function" and node.target in _ARITHMETIC and plain
        if number:
            numbers[node] = None
    leaving: set[torch.fx.Node] = set()
    for node in reversed(numbers):
        if all(user is output or user in leaving for user in node.users):
            leaving.add(node)
    gone = [i for i, n in enumerate(placeholders) if n in leaving]
    results = output.args[0]
    if not gone or not isinstance(results, (tuple, list)):
        return None
    counted = {i: n for i, n in enumerate(results) if isinstance(n, torch.fx.Node) and n in leaving}

    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes[:-1]:
        if node not in leaving:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    kept = [None if i in counted else r for i, r in enumerate(results)]
    graph.output(torch.fx.node.map_arg(tuple(kept), copied.__getitem__))
    stay = [i for i in range(len(placeholders)) if i not in gone]
    given = [(i, n) for i, n in enumerate(placeholders) if n in numbers]
    steps = [n for n in numbers if n.op != "placeholder"]

    def finish(args: Inputs, outputs: Any) -> tuple[Any, ...]:
        values: dict[Any, int] = {n: args[i] for i, n in given}
        for n in steps:
            values[n] = n.target(*(values.get(a, a) for a in n.args))  # type: ignore[operator]
        return tuple(values[counted[i]] if i in counted else value for i, value in enumerate(outputs))

    return torch.fx.GraphModule(gm, graph), lambda args: [args[i] for i in stay], finish


# --- tensors made of tensors ------------------------------------------------------------------------------------------


class _Assemble:
    """Makes a tensor that is made of tensors (quantised weights) of its parts, as it was made when it was compiled."""

    def __init__(self, like: Any) -> None:
        self.kind, (self.names, self.others) = type(like), parts_of(like)
        self.size, self.stride = like.size(), like.stride()
        self.__name__ = f"assemble_{self.kind.__name__}"

    def __call__(self, *parts: torch.Tensor) -> Any:
        named = dict(zip(self.names, parts, strict=True))
        return self.kind.__tensor_unflatten__(named, self.others, self.size, self.stride)

    def parts(self, tensor: Any) -> list[torch.Tensor]:
        if type(tensor) is not self.kind:
            was, now = self.kind.__name__, type(tensor).__name__
            raise TypeError(f"a weight was a {was} when it was compiled, and is a {now}")
        return [getattr(tensor, name) for name in self.names]


def take_apart(
    gm: torch.fx.GraphModule, example_inputs: Inputs
) -> tuple[torch.fx.GraphModule, Callable[[Inputs], list[Any]]] | None:
    """A graph that takes the parts of weights made of tensors, and what makes its inputs of the old graph's; None if
    there are no such weights."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    made = {
        i: _Assemble(value)
        for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(value, torch.Tensor) and made_of_tensors(type(value)) and is_static(node, value)
    }
    if not made:
        return None
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    pending: list[tuple[torch.fx.Node, _Assemble, list[torch.fx.Node]]] = []
    for i, node in enumerate(placeholders):
        if i not in made:
            copied[node] = graph.node_copy(node)
            continue
        parts = []
        for name, part in zip(made[i].names, made[i].parts(example_inputs[i]), strict=True):
            new = graph.placeholder(f"{node.name}_{name}")
            new.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            new.meta["example_value"] = torch.empty_like(part, device="meta")
            parts.append(new)
        pending.append((node, made[i], parts))
    for node, assemble, parts in pending:
        copied[node] = graph.call_function(assemble, tuple(parts))
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            new = graph.node_copy(node, copied.__getitem__)
            copied[node] = new

    def spread(args: Inputs) -> list[Any]:
        flat: list[Any] = []
        for i, value in enumerate(args):
            flat.extend(made[i].parts(value)) if i in made else flat.append(value)
        return flat

    return torch.fx.GraphModule(gm, graph), spread
