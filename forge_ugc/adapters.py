"""peft's adapters: what forward() does with them depends on Python values of their layers, which capture fixes."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any

import torch

_KEPT = 8  # compiled models of one model


class Adapters:
    """The compiled models for the states that a model's adapters have been in: which are active, merged, how scaled.

    A state that comes again finds its program; a new one is captured from the call's arguments.
    """

    def __init__(self, model: torch.nn.Module, compiled: Any, settings: dict[str, Any]) -> None:
        """`compiled`: for the state at hand; `settings`: the options that it was compiled with."""
        self._model, self._settings = model, settings
        self._layers = _layers(model)
        self._lock = threading.RLock()
        self._last = self.state()
        self._known: OrderedDict[Any, Any] = OrderedDict({self._last: compiled})

    def follow(self, model: torch.nn.Module, compiled: Any) -> Adapters:
        """The same for a copy of the model."""
        return Adapters(model, compiled, self._settings)

    def present(self) -> Any:
        """What has been compiled for the state at hand. RuntimeError if nothing has."""
        compiled = self._known.get(self.state())
        if compiled is None or compiled._structure.changed():
            raise RuntimeError("the adapters are in a state that nothing was called in yet; call the model first")
        return compiled

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from .compile import compile

        compiled = compile(self._model, args, kwargs, **self._settings)
        compiled._adapters = None  # it is called in this state only
        return compiled

    def state(self) -> Any:
        """What of the adapters decides what forward() does, beside their weights."""
        return tuple(map(_state, self._layers))

    def current(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled model for the state at hand; `args` and `kwargs` are the example if it has to be made."""
        state = self.state()
        compiled = self._known.get(state)
        if compiled is not None and state == self._last and not compiled._structure.changed():
            return compiled
        with self._lock:
            if compiled is not None and compiled._structure.changed():  # adapters were added or deleted
                self._layers = _layers(self._model)
                self._known.clear()
                state, compiled = self.state(), None
            if compiled is None:
                compiled = self._build(args, kwargs)
            elif [layer[2] for layer in state] != [layer[2] for layer in self._last]:
                compiled.refresh()  # merging writes weights past torch's counters
            self._last, self._known[state] = state, compiled
            self._known.move_to_end(state)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return compiled


def find_adapters(model: Any) -> bool:
    """Whether a model has layers of peft's."""
    return isinstance(model, torch.nn.Module) and bool(_layers(model))


def _layers(model: torch.nn.Module) -> list[Any]:
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without it nobody has made such a layer
    return [] if tuners is None else [m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer)]


def _state(layer: Any) -> Any:
    scaling = getattr(layer, "scaling", None)
    return (
        tuple(layer.active_adapters),
        bool(layer.disable_adapters),
        tuple(getattr(layer, "merged_adapters", ())),
        tuple(sorted(scaling.items())) if isinstance(scaling, dict) else (),
        tuple(tuple(getattr(layer, name, ())) for name in layer.adapter_layer_names),
    )
