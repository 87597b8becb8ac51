"""Showing how far a compilation is: on a terminal with rich's spinner, in a notebook in an output that is rewritten.

The C core counts in three numbers that the showing thread looks at now and then; nothing waits for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np

DELAY_S = 1.0  # before anything is shown
PERIOD_S = 0.1
_CORE = ("", "checking the graph", "passes", "planning", "compiling the NPU's graphs", "packing weights")
_PACKING = 5


class Progress:
    """What a compilation is at. `counters` are for `_core.compile(progress=)`: int64 phase, done, total."""

    def __init__(self) -> None:
        self.counters = np.zeros(3, np.int64)
        self.start = time.perf_counter()
        self._phase = "starting"

    def phase(self, name: str) -> None:
        """A phase in Python, until C begins with the next."""
        self._phase = name
        self.counters[:] = 0

    def __str__(self) -> str:
        number, done, total = self.counters.tolist()
        if not 0 < number < len(_CORE):
            return self._phase
        if not total:
            return _CORE[number]
        if number == _PACKING:
            return f"{_CORE[number]}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        return f"{_CORE[number]}: {min(done, total)} of {total}"

    def line(self) -> str:
        """As it is shown."""
        return f"forge: {self} ({time.perf_counter() - self.start:.0f} s)"


_current: ContextVar[Progress | None] = ContextVar("forge_ugc_progress", default=None)


def phase(name: str) -> None:
    """Tells whoever is looking what begins now."""
    current = _current.get()
    if current is not None:
        current.phase(name)


def counters() -> Any:
    """Of the compilation that this thread is at, for the C core; None: nobody looks."""
    current = _current.get()
    return None if current is None else current.counters


@contextlib.contextmanager
def shown(wanted: bool | None) -> Iterator[Progress | None]:
    """Shows what happens in the block. True: at once; None: where there is a terminal or a notebook, once DELAY_S have
    gone by; False: never."""
    if wanted is False:
        yield None
        return
    writer = _writer(wanted)
    if writer is None:
        yield None
        return
    progress, done = Progress(), threading.Event()
    token = _current.set(progress)
    # in this context, since a notebook's cell is found through it
    thread = threading.Thread(
        target=copy_context().run, args=(_show, progress, writer, done, 0.0 if wanted else DELAY_S),
        name="forge-progress", daemon=True,
    )  # fmt: skip
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join()
        _current.reset(token)


Writer = Callable[[], "tuple[Callable[[str], None], Callable[[str], None]]"]


def _show(progress: Progress, writer: Writer, done: threading.Event, delay: float) -> None:
    if delay and done.wait(delay):
        return
    with contextlib.suppress(Exception):  # a terminal that goes away must not end a compilation
        write, close = writer()
        try:
            write(progress.line())
            while not done.wait(PERIOD_S):
                write(progress.line())
        finally:
            close(f"forge: compiled in {time.perf_counter() - progress.start:.1f} s")


def _writer(wanted: bool | None) -> Writer | None:
    """What shows lines: it opens a display, and returns functions that rewrite and that close it."""
    notebook = _notebook()
    if notebook is not None:
        return notebook
    if not wanted and not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None

    def terminal() -> tuple[Callable[[str], None], Callable[[str], None]]:
        status = Console(stderr=True).status("")
        status.start()
        return status.update, lambda last: status.stop()

    return terminal


def _notebook() -> Writer | None:
    """A display in the notebook's output, where this is a notebook."""
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(ipython).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    def cell() -> tuple[Callable[[str], None], Callable[[str], None]]:
        handle = display({"text/plain": ""}, raw=True, display_id=True)

        def write(line: str) -> None:
            handle.update({"text/plain": line}, raw=True)

        return write, write

    return cell


__all__ = ["Progress", "counters", "phase", "shown"]
