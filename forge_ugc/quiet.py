"""What torch logs and prints of what an exception says already, held back while a model is captured."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")
_TRACE = "torch.export._trace"  # on data-dependent control flow it prints the whole graph so far, to stderr
_lock = threading.Lock()
_users = 0
_levels: list[int] = []


@contextlib.contextmanager
def quiet(exporting: bool = False) -> Iterator[None]:
    """Captures of several threads may overlap; the last one to end lets torch speak again."""
    global _users, _levels
    if exporting:
        importlib.import_module(_TRACE)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with _lock:
        if _users == 0:
            _levels = [logger.level for logger in loggers]
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
        if _TRACE in sys.modules:
            vars(sys.modules[_TRACE]).setdefault("print", _nothing)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for logger, level in zip(loggers, _levels, strict=True):
                    logger.setLevel(level)
                if _TRACE in sys.modules and vars(sys.modules[_TRACE]).get("print") is _nothing:
                    del vars(sys.modules[_TRACE])["print"]


def _nothing(*_: object, **__: object) -> None:
    pass
