"""`CompiledModel.save`: from a compiled model to an artefact (artefact.py)."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import _core, blobs, npu
from ._core import NpuError
from .artefact import FORMAT, Memory, write
from .capture import TensorMeta
from .containers import SameContainer
from .errors import ArtefactError, FallbackWarning
from .hostdata import kept
from .loaded import unpickled
from .lowering import Lowered, lower
from .lowering.outputs import Alias, Fresh, Known
from .signature import brief, children, leaf_paths
from .specialise import Symbols
from .state import Slot
from .table import DTYPE_NUMBERS

if TYPE_CHECKING:
    from .compiled import CompiledModel
    from .plan import Plan

_NAMES = {number: name for number, (name, _, _) in enumerate(_core.dtypes())}
_CONSTANTS = (type(None), bool, int, float, str)
_PLAIN = "None, bool, int, float and str"


def save(model: CompiledModel, path: str | os.PathLike[str], npu_blobs: bool = True) -> None:
    """Writes `model` as it is now, with a program for each set of shapes that it has been called with. `npu_blobs`:
    with the graphs that an NPU's driver has compiled for them.

    ArtefactError where something of it cannot be kept: arguments or results of types that need Python code, weights
    without values, calls of torch that are no ATen operators. FallbackWarning where some run through torch: they are
    kept by their names, and the file loads only where torch is.
    """
    captured = model._captured
    if captured.containers is not None and captured.containers.changes:
        raise ArtefactError("forward() changes a list, dict or cache of the caller's: that cannot be kept in a file")
    symbolic = model._symbolic
    with model._lock:
        plans = dict(model._plans)
    shapes = list(plans) if symbolic.dynamic else [None]
    tensors: dict[str, Memory] = {}
    texts: dict[str, str] = {}
    programs: list[dict[str, Any]] = []
    made: list[tuple[Lowered, Any]] = []
    state: dict[str, torch.Tensor] = {}
    keys: dict[tuple[Any, ...], str] = {}
    outputs: Any = None
    fallbacks: dict[str, str] = {}
    if model._watcher.changed():
        plans = {}  # of other weights
    share = next((plan.program for plan in plans.values()), None)  # weights are quantised once for all shapes
    for number, key in enumerate(shapes):
        symbols = symbolic.solve(_stand_ins(model, key)) if key is not None else Symbols()
        lowered = lower(captured, symbols, aliases=False)
        fallbacks |= {f"{f.op} ({f.where or 'unknown line'})": f.op for f in lowered.fallbacks}
        program = lowered.table.compile(
            target=model._options.choice.target,
            passes=model._options.passes,
            alpha=model._options.alpha,
            autotune=model._options.autotune,
            executable=False,
            pack=False,
            threads=model._options.threads,
            host_precision=npu.host_precision(model._options.choice),
            share=share,
        )
        share = share or program
        made.append((lowered, program))
        try:
            text, constants = program.portable()
        except ValueError as error:
            raise ArtefactError(str(error)) from None
        texts[f"program{number}.graph"] = text
        texts[f"program{number}.npuir"] = program.text("schedule")
        calls = {callee for callee, _, _ in program.hosts()}
        if any(opaque for _, opaque in lowered.inputs):
            raise ArtefactError(
                "an argument or buffer is no plain tensor (sparse, quantised) or of a dtype that only torch takes "
                "(uint16, uint32, uint64, float8), which cannot be kept"
            )
        programs.append(
            {
                "graph": f"program{number}.graph",
                "constants": [None if c is None else _keep(c, tensors, keys, (lowered, program)) for c in constants],
                "inputs": [_place(source, state) for source, _ in lowered.inputs],
                "writes": [{"to": _place(where, state), "output": index} for where, index in lowered.plan.writes],
                "hosts": [kept(c) if i in calls else None for i, c in enumerate(lowered.hosts)] if calls else [],
            }
        )
        items = zip(lowered.plan.user, leaf_paths(captured.out_spec, "output"), strict=True)
        this = _structure(captured.out_spec, iter([_output(item, path) for item, path in items]), "output")
        if outputs is not None and outputs != this:
            raise ArtefactError("the results of forward() differ in structure from one shape to another")
        outputs = this
    for name, tensor in state.items():
        whole = tensor.detach().resolve_neg().resolve_conj().contiguous()
        tensors[f"state:{name}"] = _memory(whole)
    manifest = {
        "format": FORMAT,
        "forge_ugc": _core.VERSION,
        "torch": torch.__version__,
        "precision": npu.host_precision(model._options.choice),
        "model": getattr(model._model, "__name__", type(model._model).__name__),
        **({"npu_precision": model._options.choice.precision} if model._options.choice.npu is not None else {}),
        **_signature(model),
        "outputs": outputs,
        "state": list(state),
        "programs": programs,
    }

    def compiled_graphs(put: Callable[[str, memoryview], None]) -> None:
        for key, entry, (lowered, program) in zip(shapes, programs, made, strict=True):
            if key in plans and (graphs := _graphs(plans[key], lowered, program, put)) is not None:
                entry["npu"] = graphs

    write(path, manifest, texts, tensors, compiled_graphs if npu_blobs else None)
    if fallbacks:
        warnings.warn(
            f"{os.fspath(path)} holds operators that run through torch, and loads only where torch is: "
            f"{', '.join(fallbacks)}",
            FallbackWarning,
            stacklevel=3,
        )


def _graphs(plan: Plan, lowered: Lowered, saved: Any, put: Callable[[str, memoryview], None]) -> dict[str, Any] | None:
    """The compiled graphs of a saved program: those of its plan, where the two are the same. They are not where results
    are views of others, which a file cannot say: then those of the saved program are compiled, as the plan's are."""
    program, settings, device = plan.program, plan.choice.npu, plan.device_in_use
    if settings is None or device is None or "tier" not in (report := program.npu_report()):
        return None
    if any(program.text(stage) != saved.text(stage) for stage in ("final", "schedule")):
        try:
            program = plan.compile(
                replace(plan.options, choice=plan.choice, pack=False, schedule=True),
                lowered,
                **{**settings.arguments(), "fold": report["tier"] == 0},
            )
        except NpuError:  # it is lost, or takes no more: the file goes without
            return None
    return blobs.keep(program, blobs.circumstances(device.facts, settings), put)


def pickled(model: CompiledModel) -> tuple[Any, ...]:
    """For pickle: the artefact's bytes, and how to open them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.forge")
        save(model, path)
        with open(path, "rb") as file:
            data = file.read()
    return unpickled, (data, model._options.choice.request(), model._options.threads)


def _stand_ins(model: CompiledModel, key: Any) -> list[Any]:
    """Leaves with the shapes of a cached program."""
    dynamic = dict(zip(model._symbolic.dynamic, key, strict=True))
    leaves: list[Any] = []
    metas = {n.target: n.meta for n in model._captured.nodes if n.kind.value == "input"}
    for leaf in range(len(model._signature.paths)):
        size = dynamic.get(leaf)
        meta = metas.get(leaf)
        if isinstance(size, (torch.Size, tuple)):
            leaves.append(torch.empty(size, device="meta"))
        elif size is not None:
            leaves.append(size)
        elif isinstance(meta, TensorMeta):
            leaves.append(torch.empty([int(s) for s in meta.shape], device="meta"))
        else:
            leaves.append(meta)
    return leaves


def _keep(constant: tuple[Any, ...], tensors: dict[str, Memory], keys: dict[tuple[Any, ...], str], owner: Any) -> str:
    """The key of a constant among the weights; memory that several constants show in the same way is kept once."""
    name, dtype, shape, strides, address, source = constant
    if strides != _row_major(shape):  # elements that share memory: the memory is kept as it is
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        shape, source = (span,), (1,)
    same = (dtype, shape, address, source)
    if same not in keys:
        key = base = name or "constant"
        number = 1
        while key in tensors:
            number += 1
            key = f"{base}#{number}"
        keys[same] = key
        tensors[key] = Memory(dtype, shape, address, source, owner)
    return keys[same]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _memory(tensor: torch.Tensor) -> Memory:
    dtype = _NAMES[DTYPE_NUMBERS[tensor.dtype]]
    return Memory(dtype, tuple(tensor.shape), tensor.data_ptr(), tuple(tensor.stride()), tensor)


def _place(where: int | Slot, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    if not isinstance(where, Slot):
        return {"leaf": where}
    state[where.name] = where.tensor()
    return {"state": where.name}


# --- structures -------------------------------------------------------------------------------------------------------


def _signature(model: CompiledModel) -> dict[str, Any]:
    signature, captured = model._signature, model._captured
    tensors = {leaf for leaf, _, _ in model._tensors}
    constants = dict(model._constants)
    used = {node.target for node in captured.nodes if node.kind.value == "input"}
    leaves: list[dict[str, Any]] = []
    for leaf, path in enumerate(signature.paths):
        if leaf in tensors:
            leaves.append({"path": path})
        elif leaf in constants and type(constants[leaf]) in _CONSTANTS:
            leaves.append({"path": path, "value": constants[leaf]})
        elif leaf in used or leaf in constants:
            given = brief(constants.get(leaf))
            raise ArtefactError(f"input {path} is {given}: of inputs, only tensors and {_PLAIN} can be kept in a file")
        else:
            raise ArtefactError(f"input {path} is not known to the capture")
    numbers = iter([{"leaf": leaf} for leaf in range(len(leaves))])
    parameters = []
    for label, spec in zip(signature.labels, signature.specs, strict=True):
        parameters.append({"name": label, "structure": _structure(spec, numbers, f"input {label}")})
    positional = sum(isinstance(key, int) for key in signature.keys)
    return {"parameters": parameters, "positional": positional, "leaves": leaves}


def _output(item: Any, path: str) -> dict[str, Any]:
    if isinstance(item, Fresh):
        return {"leaf": item.index}
    if isinstance(item, Known) and type(item.value) in _CONSTANTS:
        return {"value": item.value}
    if isinstance(item, Alias) and type(item.root) is int and not item.steps:
        return {"argument": item.root}
    if isinstance(item, SameContainer):
        return {"given": item.number}
    if isinstance(item, Known):
        given = brief(item.value)
        raise ArtefactError(f"{path} is {given}: of results, only tensors and {_PLAIN} can be kept in a file")
    raise ArtefactError(f"{path} is memory of the model's or the caller's own, which cannot be kept in a file")


def _structure(spec: pytree.TreeSpec, leaves: Any, path: str) -> dict[str, Any]:
    """`spec` as JSON, its leaves taken from the iterator."""
    if spec.is_leaf():
        leaf: dict[str, Any] = next(leaves)
        return leaf
    below = [_structure(child, leaves, path) for child in children(spec)]
    if spec.type in (tuple, list, torch.Size):
        return {"list" if spec.type is list else "tuple": below}
    if spec.type in (dict, OrderedDict, defaultdict):
        keys = spec.context[1] if spec.type is defaultdict else spec.context
        odd = next((key for key in keys if type(key) not in (str, int)), None)
        if odd is not None:
            raise ArtefactError(f"{path}: a dict with the key {brief(odd)}: only keys that are str or int can be kept")
        return {"dict": [list(pair) for pair in zip(keys, below, strict=True)]}
    is_input, fields = path != "output", _fields(spec)
    if fields is not None and len(fields) == len(below):
        if is_input:
            return {"object": [[[name], child] for name, child in zip(fields, below, strict=True)]}
        return {"namedtuple": [list(pair) for pair in zip(fields, below, strict=True)]}
    if not is_input and isinstance(spec.type, type) and issubclass(spec.type, OrderedDict):  # Hugging Face outputs
        return {"named": [list(pair) for pair in zip(spec.context, below, strict=True)]}
    if dataclasses.is_dataclass(spec.type) and isinstance(spec.context, list) and len(spec.context) == 2:
        names, empty = spec.context  # torch.export's; `empty`: fields that are None
        if not is_input:
            nothing = [[name, {"value": None}] for name in empty]
            return {"named": [*(list(pair) for pair in zip(names, below, strict=True)), *nothing]}
        if not empty:
            return {"object": [[[name], child] for name, child in zip(names, below, strict=True)]}
    if is_input and isinstance(spec.context, dict) and "_t" in spec.context:
        return {"object": [[steps, below[index]] for steps, index in _places(spec.context)]}
    hint = "; pass use_cache=False" if "Cache" in spec.type.__name__ else ""
    raise ArtefactError(f"{path}: a {spec.type.__name__} cannot be kept in an artefact{hint}")


def _fields(spec: pytree.TreeSpec) -> Sequence[str] | None:
    """Names of the items of a named tuple: a class of the caller's, or torch's of x.max(0), x.sort(), ..."""
    if spec.type is namedtuple:  # torch's pytree keeps the class in the context
        return tuple(spec.context._fields)
    names = getattr(spec.type, "__match_args__", None) if spec.type in vars(torch.return_types).values() else None
    return names if isinstance(names, (list, tuple)) else None


def _places(context: Any) -> list[tuple[list[str | int], int]]:
    """The way to each tensor of a cache, by attributes and positions, from what transformers keeps of its class."""
    if isinstance(context, list):
        return [([i, *steps], index) for i, item in enumerate(context) for steps, index in _places(item)]
    if not isinstance(context, dict):
        return []
    if context.get("_t") == "tensor":
        return [([], context["i"])]
    fields = context["s"] if context.get("_t") == "obj" else {}
    return [([name, *steps], index) for name, item in fields.items() for steps, index in _places(item)]
