"""How far a compiled model is from eager PyTorch, in figures; `forge_ugc.testing` is the public door."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .compile import _arguments, compile
from .compiled import CompiledModel

#: (absolute, relative) by dtype; everything else must be equal
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2.1e-5, 1e-4),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.complex64: (2.1e-5, 1e-4),
    torch.complex128: (1e-10, 1e-10),
}
Bounds = Mapping[torch.dtype, tuple[float, float]]
_POSITIONS = 64  # of logits at a time: in float64, those of a large vocabulary are large


@dataclass(frozen=True)
class Difference:
    """One output that is not eager's. `path`: where in the output structure."""

    path: str
    what: str


def differences(eager: Any, forge: Any, tolerance: Bounds = TOLERANCE) -> list[Difference]:
    """Outputs that differ in structure, dtype, shape or by more than `tolerance`. NaN equals NaN."""
    expected, spec = pytree.tree_flatten_with_path(eager)
    got, other = pytree.tree_flatten(forge)
    if spec != other:
        return [Difference("output", f"structure {other} instead of {spec}")]
    found = []
    for (keys, a), b in zip(expected, got, strict=True):
        what = _compare(a, b, tolerance)
        if what:
            found.append(Difference("output" + pytree.keystr(keys), what))
    return found


def _compare(a: Any, b: Any, tolerance: Bounds) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if type(a) is type(b) and (a == b or (a != a and b != b)) else f"{b!r} instead of {a!r}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
    if not _is_inexact(a):
        return None if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} elements differ"
    absolute, relative = tolerance.get(a.dtype, (0.0, 0.0))
    close = torch.isclose(b, a, rtol=relative, atol=absolute, equal_nan=True)
    if bool(close.all()):
        return None
    return f"{int((~close).sum())} of {a.numel()} elements differ, by up to {_distance(a, b):.3g}"


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest |a - b|; infinite where only one of them is NaN or infinite."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max()) if gap.numel() else 0.0


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fidelity:
    """What `assert_fidelity` measured, over all floating outputs; `reference` is eager or its float64 run.

    Calls and attributes of this object reach the compiled model, too.

    Attributes:
        reference: "eager" or "float64".
        max_abs: the largest difference.
        relative: the same as a share of that output's largest magnitude.
        kl: KL(reference || Forge) in nats, a mean over positions, of the output `logits`, or else of the first floating
            one of two or more dimensions; None if there is none.
        top1: share of positions with the same largest logit, of the same output.
        perplexity: (reference's, Forge's) on the data set; None without one.
        eager_max_abs: with reference="float64" how far eager is from it.
        compiled: the compiled model.
    """

    reference: str
    max_abs: float
    relative: float
    kl: float | None
    top1: float | None
    perplexity: tuple[float, float] | None
    eager_max_abs: float | None
    compiled: CompiledModel = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The figures: numbers, strings, None."""
        names = ("reference", "max_abs", "relative", "kl", "top1", "perplexity", "eager_max_abs")
        return {name: getattr(self, name) for name in names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "compiled":
            raise AttributeError(name)
        return getattr(self.compiled, name)


class _Logits:
    """KL and top-1 agreement, summed over positions."""

    def __init__(self) -> None:
        self.positions, self.divergence, self.same = 0, 0.0, 0

    def add(self, reference: torch.Tensor, forge: torch.Tensor) -> None:
        width = reference.shape[-1]
        rows = (reference.detach().reshape(-1, width), forge.detach().reshape(-1, width))
        for a, b in zip(*(r.split(_POSITIONS) for r in rows), strict=True):
            p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
            terms = torch.where(p == -math.inf, 0.0, p.exp() * (p - q))
            self.divergence += float(terms.sum())
            self.same += int((a.argmax(-1) == b.argmax(-1)).sum())
            self.positions += len(a)

    @property
    def kl(self) -> float | None:
        return max(0.0, self.divergence / self.positions) if self.positions else None

    @property
    def top1(self) -> float | None:
        return self.same / self.positions if self.positions else None


def _logits(result: Any) -> torch.Tensor | None:
    named = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    candidates = [named] if isinstance(named, torch.Tensor) else pytree.tree_leaves(result)
    for value in candidates:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2 and value.numel():
            return value
    return None


def _losses(logits: torch.Tensor, ids: torch.Tensor) -> tuple[float, int]:
    """Sum of the losses of each next token, and how many there are."""
    total = 0.0
    rows, targets = logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)
    for a, b in zip(rows.split(_POSITIONS), targets.split(_POSITIONS), strict=True):
        total += float(torch.nn.functional.cross_entropy(a.double(), b.long(), reduction="sum"))
    return total, targets.numel()


# --- the reference in float64 -----------------------------------------------------------------------------------------

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_TO_DOUBLE = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class _Float64(TorchFunctionMode):
    """Computes in float64 what forward() asks in a narrower type: norms and softmax often name float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in _TO_DOUBLE else func
        args, kwargs = pytree.tree_map(_widen, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in _NARROW else value
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


# --- the assertion ----------------------------------------------------------------------------------------------------


def assert_fidelity(
    model: Any,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    atol: float | None = None,
    kl: float | None = None,
    top1: float | None = None,
    reference: str = "eager",
    dataset: Any = None,
    tolerance: Bounds | None = None,
    **options: Any,
) -> Fidelity:
    """Compiles `model`, compares it with `reference` on the example, and raises AssertionError where it departs.

    Bounds that are given are asserted. If none is (`atol`, `kl`, `top1`, `tolerance`), floating outputs must keep
    within TOLERANCE. Structure, dtypes, shapes and all other outputs must be eager's in any case. The model's buffers
    and the example are left as they were.

    Args:
        model, example_inputs, example_kwargs: as for `forge_ugc.compile`.
        atol: largest difference of floating outputs.
        kl: largest mean divergence of the logits, in nats.
        top1: least share of positions whose largest logit is the same (1.0: all).
        reference: "eager", or "float64": the model's copy in that precision. Then a difference of up to twice eager's
            own is within TOLERANCE, too.
        dataset: token ids, a tensor or a list of tensors of any shape: cut into windows of the example's length and
            given to the model in place of `input_ids` (or its first integer input of two dimensions); perplexity, and
            kl and top1 in addition, are taken of them.
        tolerance: dtype -> (absolute, relative), on top of TOLERANCE.
        options: as for `forge_ugc.compile`.

    Raises:
        AssertionError: with the first pass and node that depart (`forge_ugc.bisect_passes`).
    """
    __tracebackhide__ = _outputs_differ  # pytest then shows the caller's line and the message, not these lines
    if reference not in ("eager", "float64"):
        raise ValueError(f'unknown reference {reference!r}; use "eager" or "float64"')
    args, kwargs = _arguments(example_inputs, example_kwargs)
    eager = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    compiled = compile(model, args, kwargs, **options)
    run = _Runs(eager, compiled, reference)
    expected, own, got = run(args, kwargs)

    bounds = {**TOLERANCE, **(tolerance or {})}
    if tolerance is None and (atol, kl, top1) != (None, None, None):
        bounds = dict.fromkeys(TOLERANCE, (math.inf, 0.0))
    if atol is not None:
        bounds = dict.fromkeys(TOLERANCE, (atol, 0.0))
    found = differences(own, got, bounds if reference == "eager" else dict.fromkeys(TOLERANCE, (math.inf, 0.0)))
    max_abs, relative, eager_max_abs = 0.0, 0.0, None
    if _types(own) == _types(got):
        max_abs, relative = _farthest(expected, got)
    if reference == "float64":
        eager_max_abs, _ = _farthest(expected, own)
        slack = eager_max_abs if atol is None else 0.0
        found = found or _far_from_float64(expected, own, got, bounds, 2 * slack)

    tokens = _Logits()
    pair = (_logits(expected), _logits(got))
    if pair[0] is not None and pair[1] is not None and pair[0].shape == pair[1].shape:
        tokens.add(pair[0], pair[1])
    perplexity = _perplexity(run, args, kwargs, dataset, tokens) if dataset is not None else None
    figures = Fidelity(reference, max_abs, relative, tokens.kl, tokens.top1, perplexity, eager_max_abs, compiled)

    problems = [f"{d.path}: {d.what}" for d in found]
    for name, value, bound, wrong in (
        ("kl", figures.kl, kl, lambda v, b: not v <= b),
        ("top1", figures.top1, top1, lambda v, b: not v >= b),
    ):
        if bound is not None and value is None:
            problems.append(f"{name}: no floating output of two dimensions to take it of")
        elif bound is not None and wrong(value, bound):
            problems.append(f"{name}: {value:.3g}, asserted {'at most' if name == 'kl' else 'at least'} {bound:.3g}")
    if problems:
        source = "eager's" if reference == "eager" else "the float64 run's"
        text = "\n".join([f"outputs differ from {source}:", *(f"  {p}" for p in problems), *_where(model, args, kwargs,
                         bounds if any(a < math.inf for a, _ in bounds.values()) else TOLERANCE, options)])  # fmt: skip
        error = AssertionError(text)
        error.figures = figures  # type: ignore[attr-defined]
        raise error
    return figures


def _outputs_differ(info: Any) -> bool:
    """Of pytest's ExceptionInfo."""
    return isinstance(info.value, AssertionError)


class _Runs:
    """The reference, eager and Forge on the same arguments, each on copies and with the state that the model had."""

    def __init__(self, eager: Any, compiled: CompiledModel, reference: str) -> None:
        self.eager, self.compiled = eager, compiled
        is_module = isinstance(eager, torch.nn.Module)
        self.state = {k: v.clone() for k, v in eager.state_dict().items()} if is_module else {}
        self.wide: Any = None
        if reference == "float64":
            self.wide = copy.deepcopy(eager).double() if is_module else eager
        self.rng = torch.get_rng_state()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """(reference's result, eager's, Forge's)."""
        own = self.one(self.eager, args, kwargs)
        expected = own
        if self.wide is not None:
            wide = copy.deepcopy(self.wide)
            with _Float64():
                expected = self.one(wide, *pytree.tree_map(_widen, (args, kwargs)))
        return expected, own, self.one(self.compiled, args, kwargs)

    def one(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_rng_state(self.rng)
        with torch._C.DisableTorchFunction():
            own_args, own_kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            try:
                return function(*own_args, **own_kwargs)
            finally:
                for name, value in (self.eager.state_dict() if self.state else {}).items():
                    value.copy_(self.state[name])


def _types(result: Any) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    return spec, [(v.dtype, v.shape) if isinstance(v, torch.Tensor) else None for v in leaves]


def _farthest(expected: Any, got: Any) -> tuple[float, float]:
    """The largest difference of floating outputs, and the largest relative to its output's magnitude."""
    most, relative = 0.0, 0.0
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        if _is_inexact(a) and _is_inexact(b) and a.numel():
            gap = _distance(a, b)
            finite = torch.nan_to_num(a.abs().double(), nan=0.0, posinf=0.0)
            size = float(finite.max())
            most = max(most, gap)
            relative = max(relative, gap / size if size else (math.inf if gap else 0.0))
    return most, relative


def _far_from_float64(expected: Any, own: Any, got: Any, bounds: Bounds, slack: float) -> list[Difference]:
    found = []
    wide = pytree.tree_leaves(expected)
    for (keys, a), b, w in zip(pytree.tree_flatten_with_path(own)[0], pytree.tree_leaves(got), wide, strict=True):
        if _is_inexact(a) and a.numel():
            absolute, relative = bounds.get(a.dtype, (0.0, 0.0))
            wider = b.to(w.dtype)
            close = torch.isclose(wider, w, rtol=relative, atol=absolute, equal_nan=True)
            close |= (wider - w).abs() <= slack
            if not bool(close.all()):
                what = f"{int((~close).sum())} of {a.numel()} elements differ, by up to {_distance(w, b):.3g}"
                found.append(Difference("output" + pytree.keystr(keys), f"{what} (eager: {_distance(w, a):.3g})"))
    return found


def _where(model: Any, args: Any, kwargs: Any, bounds: Bounds, options: dict[str, Any]) -> Iterator[str]:
    """What bisecting the passes finds."""
    from .bisect import bisect_passes

    chosen = {name: options[name] for name in ("passes", "alpha") if name in options}
    try:
        found = bisect_passes(model, args, kwargs, tolerance=bounds, **chosen)
    except Exception as error:
        yield f"(bisecting the passes failed: {type(error).__name__}: {error})"
        return
    if found.differences:
        yield str(found)
        return
    given = ", ".join(f"{name}={options[name]!r}" for name in ("precision", "device") if name in options)
    yield (
        "no pass changes the outputs on the host in full precision by so much; the difference comes from elsewhere"
        + (f" ({given})" if given else "")
    )


def _perplexity(
    run: _Runs, args: tuple[Any, ...], kwargs: dict[str, Any], dataset: Any, tokens: _Logits
) -> tuple[float, float]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    ids = kwargs.get("input_ids")
    at = next(
        (i for i, v in enumerate(leaves) if (v is ids if ids is not None else _is_ids(v))),
        None,
    )
    if at is None:
        raise ValueError("dataset: the example has no integer input of two dimensions to put token ids in")
    sums, count = [0.0, 0.0], 0
    for window, rows in _windows(dataset, leaves[at]):
        given = pytree.tree_unflatten([window if i == at else v for i, v in enumerate(leaves)], spec)
        expected, _, got = run(*given)
        for i, result in enumerate((expected, got)):
            logits = _logits(result)
            if logits is None or logits.shape[:2] != window.shape:
                raise ValueError("dataset: the model gives no logits of shape [batch, sequence, vocabulary]")
            loss, number = _losses(logits[:rows], window[:rows])
            sums[i] += loss
        count += number
        a, b = _logits(expected), _logits(got)
        assert a is not None and b is not None
        tokens.add(a[:rows], b[:rows])
    return math.exp(sums[0] / count), math.exp(sums[1] / count)


def _is_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2


def _windows(dataset: Any, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Batches of the shape of `like`, and how many of their rows are new. What does not fill a row is dropped."""
    texts: Iterable[torch.Tensor] = [dataset] if isinstance(dataset, torch.Tensor) else dataset
    batch, length = like.shape
    if length < 2:
        raise ValueError("dataset: the example's sequence is too short for a next token")
    rows = [row for text in texts for row in torch.as_tensor(text).reshape(-1).split(length) if len(row) == length]
    if not rows:
        raise ValueError(f"dataset: fewer token ids than one window of the example's length {length}")
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        full = part + [part[-1]] * (batch - len(part))
        yield torch.stack(full).to(like.dtype), len(part)
