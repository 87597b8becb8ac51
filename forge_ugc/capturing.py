"""What holds while a model is captured: no other capture runs, and torch does not print what an error says already."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")
_own_lock = threading.RLock()


@contextlib.contextmanager
def capturing(exporting: bool = False) -> Iterator[None]:
    """Threads take turns: tracing patches nn.Module and keeps its state in globals of torch's.

    The lock is dynamo's, under which torch.compile calls its backend: with a second one threads could wait for each
    other.
    """
    lock = getattr(importlib.import_module("torch._dynamo.convert_frame"), "compile_lock", _own_lock)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with lock:
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # on data-dependent control flow it prints the whole graph so far to stderr
        trace = vars(importlib.import_module("torch.export._trace")) if exporting else {}
        silenced = trace.setdefault("print", _nothing) is _nothing
        try:
            yield
        finally:
            if silenced:
                trace.pop("print", None)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _nothing(*_: object, **__: object) -> None:
    pass
