"""`load`: an artefact as a callable, with torch or without it."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _core, npu
from .artefact import DTYPES, Artefact
from .errors import ArtefactError
from .profile import Profile

_REQUIRED = object()


class Outputs(OrderedDict[str, Any]):
    """Named outputs, as those of Hugging Face models: `out.logits`, `out["logits"]`, `out[0]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    precision: str = "auto",
    fold: str | bool = "auto",
    npu_options: dict[str, Any] | None = None,
    num_threads: int | None = None,
    verify: bool = False,
) -> LoadedModel:
    """A model that `CompiledModel.save` wrote. Torch need not be installed.

    The weights are mapped, not read: what a call does not touch stays on disk.

    Args:
        path: the file.
        device, precision, fold, npu_options: as for `compile`.
        num_threads: default torch.get_num_threads() where torch is imported, else the CPUs this process may use.
        verify: also compare all checksums, which reads the whole file.

    Raises:
        ArtefactError: (a ValueError) the file is damaged, hostile or newer than this version.
        NpuError: as for `compile`.
    """
    artefact = Artefact(path, verify)
    kept = _precision(artefact)
    if kept != "fp32" and precision != kept:
        if precision != "auto":
            raise ValueError(f"{artefact.path}: its weights are {kept}; precision={precision!r} cannot be made of them")
        precision = kept
    choice = npu.choose(device, precision, fold, npu_options)
    return LoadedModel(artefact, choice, _threads() if num_threads is None else num_threads)


def unpickled(data: bytes, request: dict[str, Any], threads: int) -> LoadedModel:
    """The other end of pickling a CompiledModel or a LoadedModel."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.forge")
        with open(path, "wb") as file:
            file.write(data)
        return load(path, **request, num_threads=threads)  # mapped: the name may go


def _threads() -> int:
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else len(os.sched_getaffinity(0))


def _precision(artefact: Artefact) -> str:
    """What the file's weights are for: "fp32", or one of the host's other precisions."""
    kept = artefact.manifest.get("precision", "fp32")
    if not isinstance(kept, str) or (kept != "fp32" and kept not in npu.HOST_PRECISIONS):
        raise ArtefactError(f"{artefact.path}: weights in a precision that this version does not know: {kept!r}")
    return kept


class LoadedModel:
    """Calls like the model that was saved. Arrays are numpy's, or torch's where a call is given torch tensors; bfloat16
    is numpy's uint16 with the same bits. Thread-safe; state that forward() changes is kept and changed one call at a
    time. `device` is where it runs, `manifest` what the file says of itself."""

    def __init__(self, artefact: Artefact, choice: npu.Choice, threads: int) -> None:
        self.manifest = artefact.manifest
        self._path = artefact.path
        self._artefact, self._choice, self._threads = artefact, choice, threads
        self._lock = threading.Lock()
        try:
            self._read(artefact)
            self._programs = self._build(artefact, choice, threads)
            for program in self._programs:
                self._check(program)
        except ArtefactError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise ArtefactError(f"{self._path}: a damaged manifest: {type(error).__name__} {error}") from None

    # --- building -----------------------------------------------------------------------------------------------------

    def _read(self, artefact: Artefact) -> None:
        manifest = self.manifest
        self._parameters = [(_text(p["name"]), p["structure"]) for p in manifest["parameters"]]
        self._positional = _number(manifest["positional"], len(self._parameters) + 1)
        self._leaves: list[tuple[str, Any]] = []  # path, constant or _REQUIRED
        for leaf in manifest["leaves"]:
            self._leaves.append((_text(leaf["path"]), leaf["value"] if "value" in leaf else _REQUIRED))
        for _, structure in self._parameters:
            _leaf_numbers(structure, len(self._leaves))
        self._state = {}
        for name in manifest["state"]:
            memory = artefact.tensors[f"state:{_text(name)}"]
            self._state[name] = memory.array().copy()
        self._outputs = manifest["outputs"]

    def _build(self, artefact: Artefact, choice: npu.Choice, threads: int) -> list[_Program]:
        programs = [_Program(artefact, entry, choice, threads) for entry in self.manifest["programs"]]
        if not programs:
            raise ArtefactError(f"{self._path}: no program")
        return programs

    def _check(self, program: _Program) -> None:
        """That what the manifest says of a program's inputs and outputs fits the graph."""
        for (kind, which), (dtype, shape) in zip(program.sources, program.inputs, strict=True):
            if kind == "leaf":
                _number(which, len(self._leaves))
                if self._leaves[which][1] is not _REQUIRED:
                    raise ArtefactError(f"{self._path}: input {self._leaves[which][0]} is a constant and a tensor")
            else:
                array = self._state[which]
                if array.shape != shape or array.dtype != np.dtype(DTYPES[dtype][1]):
                    raise ArtefactError(f"{self._path}: state {which!r} is not {dtype}{list(shape)}")
        for kind, which, index in program.writes:
            dtype, shape = program.outputs[_number(index, len(program.outputs))]
            source = program.inputs[program.sources.index((kind, which))]
            if source != (dtype, shape):
                raise ArtefactError(f"{self._path}: output {index} cannot be stored into {which!r}")
        _output_numbers(self._outputs, len(program.outputs))

    # --- calling ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model. TypeError names an input whose structure, dtype or shape was not saved."""
        leaves = self._bind(args, kwargs)
        program, buffers = self._choose(leaves)
        if not program.stateful:
            return self._run(program, leaves, buffers)
        with self._lock:
            return self._run(program, leaves, buffers)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) > self._positional:
            raise TypeError(f"{self._positional} positional arguments at most, given {len(args)}")
        given = dict(zip((name for name, _ in self._parameters), args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise TypeError(f"argument {name!r} is given twice")
            given[name] = value
        leaves: list[Any] = [default for _, default in self._leaves]
        for name, structure in self._parameters:
            if name in given:
                self._flatten(structure, given.pop(name), name, leaves)
            elif any(self._leaves[i][1] is _REQUIRED for i in _leaf_numbers(structure, len(leaves))):
                raise TypeError(f"input {name!r} is missing")
        if given:
            raise TypeError(f"input {next(iter(given))!r} was not part of the saved model's example inputs")
        return leaves

    def _flatten(self, structure: Any, value: Any, path: str, leaves: list[Any]) -> None:
        if "leaf" in structure:
            index = structure["leaf"]
            expected = self._leaves[index][1]
            same = type(value) is type(expected) and (value == expected or (value != value and expected != expected))
            if expected is not _REQUIRED and not same:
                raise TypeError(f"input {path}: saved for {expected!r}, given {value!r}")
            leaves[index] = value
        elif "dict" in structure:
            below = structure["dict"]
            if not isinstance(value, dict) or {k for k, _ in below} != set(value):
                raise TypeError(f"input {path}: expected a dict with the keys {[k for k, _ in below]}")
            for key, child in below:
                self._flatten(child, value[key], f"{path}[{key!r}]", leaves)
        else:
            kind = "tuple" if "tuple" in structure else "list"
            below = structure[kind]
            if type(value).__name__ != kind or len(value) != len(below):
                raise TypeError(f"input {path}: expected a {kind} of {len(below)}, given {type(value).__name__}")
            for i, (child, item) in enumerate(zip(below, value, strict=True)):
                self._flatten(child, item, f"{path}[{i}]", leaves)

    def _choose(self, leaves: list[Any]) -> tuple[_Program, dict[int, _Buffer]]:
        """The program for these shapes, and the leaves as memory."""
        buffers = {
            i: _buffer(leaves[i], path) for i, (path, default) in enumerate(self._leaves) if default is _REQUIRED
        }
        for program in self._programs:
            if all(buffers[i].is_like(dtype, shape) for i, dtype, shape in program.leaves):
                return program, buffers
        wanted = []
        for i, dtype, _ in self._programs[0].leaves:
            shapes = " or ".join(dict.fromkeys(str(list(p.shape_of(i))) for p in self._programs))
            if not any(buffers[i].is_like(dtype, p.shape_of(i)) for p in self._programs):
                wanted.append(f"input {self._leaves[i][0]}: expected {dtype}{shapes}, given {buffers[i].describe()}")
        raise TypeError("; ".join(wanted) or "no program was saved for these shapes together")

    def _run(self, program: _Program, leaves: list[Any], buffers: dict[int, _Buffer]) -> Any:
        torch = next((b.torch for b in buffers.values() if b.torch is not None), None)
        addresses, keep = self._gather(program, buffers)
        self._check_apart(program, keep)
        results = [_allocate(torch, dtype, shape) for dtype, shape in program.outputs]
        program.run(addresses, [address for _, address in results])
        for kind, which, index in program.writes:
            if kind == "leaf":
                buffers[which].store(results[index][0])
            else:
                np.copyto(self._state[which], _numpy(results[index][0]))
        return _unflatten(self._outputs, [result for result, _ in results])

    def _gather(self, program: _Program, buffers: dict[int, _Buffer]) -> tuple[list[int], list[Any]]:
        """Addresses for the program's inputs, and what owns the memory."""
        addresses, keep = [], []
        for kind, which in program.sources:
            if kind == "leaf":
                address, owner = buffers[which].row_major()
            else:
                owner = self._state[which]
                address = owner.ctypes.data
            addresses.append(address)
            keep.append(owner)
        return addresses, keep

    def _check_apart(self, program: _Program, memory: list[Any]) -> None:
        for kind, which, _ in program.writes:
            written = program.sources.index((kind, which))
            for other, owner in enumerate(memory):
                if other != written and np.may_share_memory(_numpy(memory[written]), _numpy(owner)):
                    raise TypeError(f"{which!r} is written and shares memory with another input; pass a copy of one")

    # --- looking inside -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Where the first program runs."""
        return self._programs[0].choice.device

    def ir(self, stage: str = "final") -> str:
        """Text of the first program: "final" (the graph), "npuir" or "schedule"."""
        return str(self._programs[0].program.text(stage))

    @property
    def report(self) -> dict[str, Any]:
        """What loading did: phases in ms, buffers, transitions, instructions; see `_core.Program.report`."""
        return dict(self._programs[0].program.report())

    def profile(self, *args: Any, calls: int = 5, **kwargs: Any) -> Profile:
        """As CompiledModel.profile: the time of each instruction over `calls` calls. State stays as it is."""
        if calls < 1:
            raise ValueError(f"calls must be positive, given {calls}")
        program, buffers = self._choose(self._bind(args, kwargs))
        with self._lock:
            addresses, keep = self._gather(program, buffers)
            results = [_allocate(None, dtype, shape) for dtype, shape in program.outputs]
            outputs = [address for _, address in results]
            program.program.run(addresses, outputs)
            times = [program.program.profile(addresses, outputs) for _ in range(calls)]
            del keep
        return Profile(f"{self.manifest.get('model', '')} on {self.device}", program.program.schedule(), times)

    def _live(self) -> dict[str, Any]:
        """What a Report says of now."""
        choice, first = self._programs[0].choice, self._programs[0]
        found = first.program.npu_report() if choice.npu is not None else None
        return {
            "device": choice.device,
            "device_reason": choice.reason,
            "target": choice.target,
            "precision": choice.precision,
            "npu": found,
            "tier": found.get("tier") if found else None,
        }

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the NPU's graphs with constant weights; True when there is nothing left to wait for."""
        return all(p.upgrade is None or p.upgrade.wait(timeout) for p in self._programs)

    def __reduce__(self) -> Any:
        """Pickles as the file's bytes: state that forward() has changed goes back to what was saved."""
        return unpickled, (self._artefact.data(), self._choice.request(), self._threads)

    def __repr__(self) -> str:
        return f"<forge_ugc.LoadedModel of {self.manifest.get('model', '')} on {self.device}>"


class _Program(npu.Dispatched):
    """One graph of an artefact, ready to run."""

    def __init__(self, artefact: Artefact, entry: dict[str, Any], choice: npu.Choice, threads: int) -> None:
        self._artefact, self._graph, self._threads = artefact, _text(entry["graph"]), threads
        self._constants: list[tuple[int, int] | None] = []
        for key in entry["constants"]:
            memory = artefact.tensors[key] if key is not None else None
            self._constants.append(None if memory is None else (memory.address, memory.nbytes))
        super().__init__(choice)
        self.inputs, self.outputs = self.program.types()
        self.sources = [_source(s) for s in entry["inputs"]]
        self.writes = [(*_source(w["to"]), w["output"]) for w in entry["writes"]]
        if len(self.sources) != len(self.inputs):
            raise ArtefactError(f"{artefact.path}: {len(self.sources)} inputs of a graph with {len(self.inputs)}")
        pairs = zip(self.sources, self.inputs, strict=True)
        self.leaves = [(which, dtype, shape) for (kind, which), (dtype, shape) in pairs if kind == "leaf"]
        self.stateful = any(kind == "state" for kind, _ in self.sources)

    def build(self, choice: npu.Choice, settings: dict[str, Any]) -> Any:
        try:
            return _core.load(
                self._artefact.text(self._graph),
                self._constants,
                target=choice.target,
                threads=self._threads,
                host_precision="fp32" if _precision(self._artefact) != "fp32" else npu.host_precision(choice),
                pack=self.executable(),
                executable=self.executable(),
                keepalive=self._artefact,
                **settings,
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ArtefactError(f"{self._artefact.path}: {self._graph}: {error}") from None

    def shape_of(self, leaf: int) -> tuple[int, ...]:
        return next(shape for which, _, shape in self.leaves if which == leaf)


# --- memory -----------------------------------------------------------------------------------------------------------


class _Buffer:
    """An input array: numpy's or torch's."""

    def __init__(self, value: Any, torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
        self.value, self.torch, self.dtype, self.shape = value, torch, dtype, shape

    def is_like(self, dtype: str, shape: tuple[int, ...]) -> bool:
        numpy_bf16 = self.torch is None and dtype == "bf16" and self.value.dtype == np.uint16
        return self.shape == shape and (self.dtype == dtype or numpy_bf16)

    def describe(self) -> str:
        return f"{self.dtype or self.value.dtype}{list(self.shape)}"

    def row_major(self) -> tuple[int, Any]:
        if self.torch is not None:
            tensor = self.value.detach().resolve_neg().resolve_conj().contiguous()
            return tensor.data_ptr(), tensor
        array = np.ascontiguousarray(self.value)
        return array.ctypes.data, array

    def store(self, result: Any) -> None:
        if self.torch is not None:
            with self.torch.no_grad():
                self.value.copy_(result)
        else:
            np.copyto(self.value, result)


_OF_NUMPY = {np.dtype(spelled): ours for ours, (_, spelled) in DTYPES.items() if ours != "bf16"}
_OF_TORCH = {
    "bool": "bool",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
}
_TO_TORCH = {ours: name for name, ours in _OF_TORCH.items()}


def _buffer(value: Any, path: str) -> _Buffer:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise TypeError(f"input {path}: expected a dense tensor on the cpu, given one on {value.device}")
        return _Buffer(value, torch, _OF_TORCH.get(str(value.dtype).removeprefix("torch."), ""), tuple(value.shape))
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"input {path}: expected an array, given {type(value).__name__}")
        value = np.from_dlpack(value)
    return _Buffer(value, None, _OF_NUMPY.get(value.dtype, ""), value.shape)


def _allocate(torch: Any, dtype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    if torch is not None:
        tensor = torch.empty(shape, dtype=getattr(torch, _TO_TORCH[dtype]), device="cpu")
        return tensor, tensor.data_ptr()
    array = np.empty(shape, DTYPES[dtype][1])
    return array, array.ctypes.data


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    """The same memory as numpy's, with numpy's type of that width."""
    if isinstance(value, np.ndarray):
        return value
    name = _OF_TORCH[str(value.dtype).removeprefix("torch.")]
    if name == "bf16":
        import torch

        return value.detach().view(torch.int16).numpy().view(np.uint16)
    array: np.ndarray[Any, Any] = value.detach().numpy()
    return array


# --- structures -------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise IndexError(f"{value!r} is no index below {below}")
    return value


def _source(entry: dict[str, Any]) -> tuple[str, Any]:
    kind = "leaf" if "leaf" in entry else "state"
    return kind, entry[kind]


def _visit(structure: Any, leaf: Callable[[Any], Any]) -> None:
    kind, *rest = structure
    if rest:
        raise TypeError("a structure of two kinds")
    below = structure[kind]
    if kind in ("tuple", "list"):
        for child in below:
            _visit(child, leaf)
    elif kind in ("dict", "named"):
        for key, child in below:
            if not isinstance(key, (str, int)):
                raise TypeError(f"a key {key!r}")
            _visit(child, leaf)
    elif kind == "leaf":
        leaf(below)
    elif kind != "value":
        raise TypeError(f"a structure {kind!r}")


def _leaf_numbers(structure: Any, count: int) -> list[int]:
    found: list[int] = []
    _visit(structure, lambda index: found.append(_number(index, count)))
    return found


def _output_numbers(structure: Any, count: int) -> None:
    _visit(structure, lambda index: _number(index, count))


def _unflatten(structure: Any, results: list[Any]) -> Any:
    if "leaf" in structure:
        return results[structure["leaf"]]
    if "value" in structure:
        return structure["value"]
    if "dict" in structure:
        return {key: _unflatten(child, results) for key, child in structure["dict"]}
    if "named" in structure:
        return Outputs((key, _unflatten(child, results)) for key, child in structure["named"])
    if "tuple" in structure:
        return tuple(_unflatten(child, results) for child in structure["tuple"])
    return [_unflatten(child, results) for child in structure["list"]]


__all__ = ["LoadedModel", "Outputs", "load", "unpickled"]
