"""Where modules that a recorder of calls may get wrong are entered, for tests/test_fastcapture.py.

TAKES and DECLINES: name -> function that builds (model, example arguments). What is in TAKES must be recorded and equal
eager on other inputs; what is in DECLINES must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = Callable[[], tuple[Any, tuple[Any, ...]]]
TAKES: dict[str, Case] = {}
DECLINES: dict[str, Case] = {}


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


class Call(nn.Module):
    """forward() is `function(self, *args)`; `state` are parameters, buffers or plain attributes."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.startswith("plain"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _register(table: dict[str, Case], inputs: Any, state: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def case() -> tuple[Any, tuple[Any, ...]]:
            torch.manual_seed(0)
            made = {k: v() if callable(v) and not isinstance(v, nn.Module) else v for k, v in state.items()}
            return Call(function, **made).eval(), tuple(v() for v in inputs)

        table[function.__name__] = case
        return function

    return wrap


def takes(*inputs: Any, **state: Any) -> Any:
    return _register(TAKES, inputs or (x,), state)


def declines(*inputs: Any, **state: Any) -> Any:
    return _register(DECLINES, inputs or (x,), state)
