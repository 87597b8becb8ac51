"""Exceptions and warnings of the package, and where in the user's source something comes from."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n(?:\s+(?P<code>.*))?')
_torch = find_spec("torch")  # not imported: loading an artefact does without
_TORCH_DIR = os.path.dirname(os.path.abspath(_torch.origin)) + os.sep if _torch and _torch.origin else "\0"
_STDLIB_DIR = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_OWN_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep


class CompileError(RuntimeError):
    """The model cannot be compiled as it stands. The text names the source line and the ways out."""


class FallbackError(CompileError):
    """`strict=True` was given and some operators would run through torch. `fallbacks` lists them."""

    def __init__(self, message: str, fallbacks: list[dict[str, object]]) -> None:
        super().__init__(message)
        self.fallbacks = fallbacks


class FallbackWarning(UserWarning):
    """Some operators run through torch (`host.aten`); given once a compile."""


class ArtefactError(ValueError):
    """A model cannot be saved as an artefact, or a file is none that can be loaded; the text says what is wrong."""


class NpuWarning(UserWarning):
    """Something that was meant for the NPU runs on the host, or as it did before; the text names the cause."""


@functools.lru_cache(maxsize=65536)
def source_of(stack_trace: str | None) -> str:
    """The innermost frame of a stack trace that is not torch's own, as "file.py:12 in forward"; "" if unknown."""
    frame = user_frame(stack_trace)
    return f"{frame[0]}:{frame[1]} in {frame[2]}" if frame else ""


known_source: ContextVar[str | None] = ContextVar("forge_source", default=None)


@contextlib.contextmanager
def recorded_at(stack_trace: str | None) -> Iterator[None]:
    """For the node of an FX graph that is run to be recorded: it knows where it comes from, its frames do not."""
    token = known_source.set(source_of(stack_trace))
    try:
        yield
    finally:
        known_source.reset(token)


def user_frame(stack_trace: str | None) -> tuple[str, int, str, str] | None:
    """(file, line, function, code) of the innermost frame of the user (of torch, if all are)."""
    last = None
    for match in _FRAME.finditer(stack_trace or ""):
        frame = (match["file"], int(match["line"]), match["function"], (match["code"] or "").strip())
        standard = frame[0].startswith(_STDLIB_DIR) and "site-packages" not in frame[0]
        if standard or frame[0].startswith((_OWN_DIR, "<string>")):
            continue
        outside = not frame[0].startswith(_TORCH_DIR)
        if outside or last is None or not last[0]:
            last = (outside, frame)
    return last[1] if last else None


def reads_values(error: BaseException) -> bool:
    """Whether torch.export failed because Python read the value of a tensor."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    known = not names.isdisjoint({"GuardOnDataDependentSymNode", "DataDependentOutputException"})
    return known or "data-dependent" in text or "its data is not allocated yet" in text  # torch.tensor([t, ...])


def explain_export_failure(error: BaseException) -> CompileError:
    """torch.export's exception as a text for the user: what happened, in which line, and what can be done."""
    text = str(error)
    frame = user_frame(text) or user_frame("".join(traceback.format_tb(error.__traceback__)))
    where = ""
    if frame is not None and not frame[0].startswith(_TORCH_DIR):
        where = f" at {frame[0]}:{frame[1]} in {frame[2]}" + (f" (`{frame[3]}`)" if frame[3] else "")
    if reads_values(error):
        return CompileError(
            f"data-dependent control flow{where}: which way Python goes depends on the values of a tensor, so no "
            "single graph exists.\nWays out: compute both sides and choose with torch.where; use torch.cond; pass the "
            "decision as a Python argument (it is then fixed when compiling); or compile only the parts around it.\n"
            f"torch.export said: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}"
        )
    first = "\n".join(text.partition("The error above occurred when calling torch.export")[0].strip().splitlines()[:12])
    return CompileError(f"torch.export cannot capture the model: {type(error).__name__}{where}:\n{first}")
