"""What a graph of dynamo's says of its inputs, and how capture runs it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .errors import recorded_at

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
