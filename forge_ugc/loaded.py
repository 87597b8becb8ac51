"""`load`: an artefact as a callable, with torch or without it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np

from . import _core, npu
from .arrays import Buffer, allocate, as_numpy, buffer_of, overlap
from .artefact import DTYPES, Artefact
from .blobs import Kept, circumstances
from .errors import ArtefactError
from .memory import OutputMemory
from .profile import Profile
from .report import Report
from .structures import (
    ARGUMENTS,
    RESULTS,
    Outputs,
    count_containers,
    follow,
    leaf_numbers,
    number_below,
    spelled,
    text,
    unflatten,
    visit,
)

REQUIRED = object()  # of a leaf that is no constant


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    precision: str = "auto",
    fold: str | bool = "auto",
    npu_options: dict[str, Any] | None = None,
    num_threads: int | None = None,
    verify: bool = False,
    npu_blobs: bool = True,
) -> LoadedModel:
    """A model that `CompiledModel.save` wrote. Torch need not be installed.

    The weights are mapped, not read: what a call does not touch stays on disk.

    Args:
        path: the file.
        device, precision, fold, npu_options: as for `compile`. On an NPU, precision "auto" is that of the saved model.
        num_threads: default torch.get_num_threads() where torch is imported, else the CPUs this process may use.
        verify: also compare all checksums, which reads the whole file.
        npu_blobs: use the file's compiled graphs where this NPU's driver would compile the same; `report["npu"]` says
            how many are the file's ("artefact_hits"), and why others are not ("artefact"). False: compile all graphs.
            What compiled graphs do on the NPU cannot be checked: False is for files of people who are not trusted.

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
    elif precision == "auto" and device != "cpu":
        precision = _npu_precision(artefact)
    choice = npu.choose(device, precision, fold, npu_options, kept=precision == kept)
    return LoadedModel(artefact, choice, _threads() if num_threads is None else npu.threads(num_threads), npu_blobs)


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


def _npu_precision(artefact: Artefact) -> str:
    kept = artefact.manifest.get("npu_precision", "auto")
    if kept not in ("auto", *npu.NPU_PRECISIONS):
        raise ArtefactError(f"{artefact.path}: an NPU precision that this version does not know: {kept!r:.50}")
    return str(kept)


class LoadedModel:
    """Calls like the model that was saved. Arrays are numpy's, or torch's where a call is given torch tensors; bfloat16
    is numpy's uint16 with the same bits. Thread-safe; state that forward() changes is kept and changed one call at a
    time. `device` is where it runs, `manifest` what the file says of itself."""

    def __init__(self, artefact: Artefact, choice: npu.Choice, threads: int, npu_blobs: bool = True) -> None:
        self.manifest = artefact.manifest
        self._path = artefact.path
        self._artefact, self._choice, self._threads = artefact, choice, threads
        self._npu_blobs = npu_blobs
        self._lock = threading.Lock()
        self._memory = OutputMemory()
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
        self._parameters = [(text(p["name"]), p["structure"]) for p in manifest["parameters"]]
        self._positional = number_below(manifest["positional"], len(self._parameters) + 1)
        self._leaves: list[tuple[str, Any]] = []  # path, constant or REQUIRED
        for leaf in manifest["leaves"]:
            self._leaves.append((text(leaf["path"]), leaf["value"] if "value" in leaf else REQUIRED))
        for _, structure in self._parameters:
            visit(structure, ARGUMENTS, {"leaf": len(self._leaves)})
        self._containers = sum(count_containers(structure) for _, structure in self._parameters)
        self._state = {}
        for name in manifest["state"]:
            memory = artefact.tensors[f"state:{text(name)}"]
            self._state[name] = memory.array().copy()
        self._outputs = manifest["outputs"]

    def _build(self, artefact: Artefact, choice: npu.Choice, threads: int) -> list[_Program]:
        programs: list[_Program] = []
        for entry in self.manifest["programs"]:
            share = programs[0].program if programs else None
            programs.append(_Program(artefact, entry, choice, threads, share, self._npu_blobs))
        if not programs:
            raise ArtefactError(f"{self._path}: no program")
        return programs

    def _check(self, program: _Program) -> None:
        """That what the manifest says of a program's inputs and outputs fits the graph."""
        for (kind, which), (dtype, shape) in zip(program.sources, program.inputs, strict=True):
            if kind == "leaf":
                number_below(which, len(self._leaves))
                if self._leaves[which][1] is not REQUIRED:
                    raise ArtefactError(f"{self._path}: input {self._leaves[which][0]} is a constant and a tensor")
            else:
                array = self._state[which]
                if array.shape != shape or array.dtype != np.dtype(DTYPES[dtype][1]):
                    raise ArtefactError(f"{self._path}: state {which!r} is not {dtype}{list(shape)}")
        for kind, which, index in program.writes:
            written = program.outputs[number_below(index, len(program.outputs))]
            if program.inputs[program.sources.index((kind, which))] != written:
                raise ArtefactError(f"{self._path}: output {index} cannot be stored into {which!r}")
        found: dict[str, list[int]] = {"leaf": [], "argument": []}
        below = {"leaf": len(program.outputs), "argument": len(self._leaves), "given": self._containers}
        visit(self._outputs, RESULTS, below, lambda kind, number: found.setdefault(kind, []).append(number))
        if any(self._leaves[i][1] is not REQUIRED for i in found["argument"]):
            raise ArtefactError(f"{self._path}: a result is an argument that is a constant")
        program.write_in_place(found["leaf"])

    # --- calling ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model. TypeError names an input whose structure, dtype or shape was not saved."""
        leaves, containers = self._bind(args, kwargs)
        program, buffers = self._choose(leaves)
        if not program.stateful:
            return self._run(program, leaves, containers, buffers)
        with self._lock:
            return self._run(program, leaves, containers, buffers)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Leaves of the arguments, and the containers that hold them, each before what it holds."""
        if len(args) > self._positional:
            raise TypeError(f"{self._positional} positional arguments at most, given {len(args)}")
        given = dict(zip((name for name, _ in self._parameters), args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise TypeError(f"argument {name!r} is given twice")
            given[name] = value
        known = [name for name, _ in self._parameters]
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise TypeError(
                f"input {unknown!r} was not part of the saved model's example inputs; those are {', '.join(known)}"
            )
        leaves: list[Any] = [default for _, default in self._leaves]
        containers: list[Any] = []
        for name, structure in self._parameters:
            if name in given:
                self._flatten(structure, given.pop(name), name, leaves, containers)
            elif any(self._leaves[i][1] is REQUIRED for i in leaf_numbers(structure)):
                raise TypeError(f"input {name!r} is missing")
            else:
                containers += [None] * count_containers(structure)
        return leaves, containers

    def _flatten(self, structure: Any, value: Any, path: str, leaves: list[Any], containers: list[Any]) -> None:
        if "leaf" in structure:
            index = structure["leaf"]
            expected = self._leaves[index][1]
            same = type(value) is type(expected) and (value == expected or (value != value and expected != expected))
            if expected is not REQUIRED and not same:
                raise TypeError(f"input {path}: saved for {expected!r}, given {value!r}")
            leaves[index] = value
            return
        containers.append(value)
        if "dict" in structure:
            below = structure["dict"]
            if not isinstance(value, dict) or {k for k, _ in below} != set(value):
                raise TypeError(f"input {path}: expected a dict with the keys {[k for k, _ in below]}")
            for key, child in below:
                self._flatten(child, value[key], f"{path}[{key!r}]", leaves, containers)
        elif "object" in structure:
            for steps, child in structure["object"]:
                self._flatten(child, follow(value, steps, path), path + spelled(steps), leaves, containers)
        else:
            kind = "tuple" if "tuple" in structure else "list"
            below = structure[kind]
            if type(value).__name__ != kind or len(value) != len(below):
                raise TypeError(f"input {path}: expected a {kind} of {len(below)}, given {type(value).__name__}")
            for i, (child, item) in enumerate(zip(below, value, strict=True)):
                self._flatten(child, item, f"{path}[{i}]", leaves, containers)

    def _choose(self, leaves: list[Any]) -> tuple[_Program, dict[int, Buffer]]:
        """The program for these shapes, and the leaves as memory."""
        buffers = {
            i: buffer_of(leaves[i], path) for i, (path, default) in enumerate(self._leaves) if default is REQUIRED
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

    def _run(self, program: _Program, leaves: list[Any], containers: list[Any], buffers: dict[int, Buffer]) -> Any:
        if program.written:
            pair = overlap(buffers, program.written)
            if pair is not None:
                one, other = (self._leaves[i][0] for i in pair)
                raise TypeError(f"input {one} is written and shares memory with input {other}; pass a copy of one")
        torch = next((b.torch for b in buffers.values() if b.torch is not None), None)
        inputs, keep = self._gather(program, buffers)
        results, outputs, written = self._results(program, buffers, inputs, torch)
        try:
            objects = program.run(inputs, outputs, program.host)
        finally:
            if written and torch is not None:  # autograd and compiled models have to know
                torch.autograd.graph.increment_version(written)
        for index in program.opaque:
            results[index] = _handed_out(objects[index], torch)
        for kind, which, index in program.writes:
            if kind == "leaf" and results[index] is not buffers[which].value:  # else the program has written it
                buffers[which].store(results[index])
            elif kind == "state" and results[index] is not self._state[which]:
                np.copyto(self._state[which], as_numpy(results[index]))
        del keep
        return unflatten(self._outputs, results, leaves, containers)

    def _gather(self, program: _Program, buffers: dict[int, Buffer]) -> tuple[list[int], list[Any]]:
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

    def _results(
        self, program: _Program, buffers: dict[int, Buffer], inputs: list[int], torch: Any
    ) -> tuple[list[Any], list[int], list[Any]]:
        """What the program writes, new arrays or the caller's own; their addresses; torch's among the caller's own."""
        results: list[Any] = [None] * len(program.outputs)
        outputs, written = [0] * len(results), []
        for number, index, kind, which in program.in_place:
            if kind == "state":
                results[index] = self._state[which]
            else:
                buffer = buffers[which]
                if inputs[number] != buffer.span()[0] or not buffer.may_write():
                    continue  # a copy that is row major, or memory that is not to be written: store() says so
                results[index] = buffer.value
                if buffer.torch is not None:
                    written.append(buffer.value)
            outputs[index] = inputs[number]
        for index, (dtype, shape) in enumerate(program.outputs):
            if results[index] is None and dtype != "object":
                results[index], outputs[index] = allocate(torch, dtype, shape, self._memory)
        return results, outputs, written

    # --- looking inside -----------------------------------------------------------------------------------------------

    def result_types(self) -> Any:
        """The dtypes of the first program's results ("f32", "bf16"), in their structure; None for what is no array of
        its own making."""
        program = self._programs[0]
        made: list[Any] = [dtype for dtype, _ in program.outputs]
        given: list[Any] = [None] * len(self._leaves)
        for leaf, dtype, _ in program.leaves:
            given[leaf] = dtype
        return unflatten(self._outputs, made, given, [None] * self._containers)

    @property
    def device(self) -> str:
        """Where the first program runs."""
        return self._programs[0].choice.device

    def ir(self, stage: str = "final") -> str:
        """Text of the first program: "final" (the graph), "npuir" or "schedule"."""
        return str(self._programs[0].program.text(stage))

    @functools.cached_property
    def report(self) -> Report:
        """What loading did, as a Report of the first program. `report["npu"]["artefact"]` says why graphs of an NPU
        are not the file's (None: they all are, or it has none)."""
        first, manifest = self._programs[0], self.manifest
        core, name = first.program.report(), str(manifest.get("model", ""))
        phases = ("table", "passes", "lower", "alloc", "schedule", "npu", "pack")
        return Report(
            core,
            capture_ms=0.0,
            table_ms=0.0,
            total_ms=sum(core[f"{phase}_ms"] for phase in phases),
            capture="artefact",
            capture_declined=f"{name}, written by forge-ugc {manifest.get('forge_ugc', '')}",
            nodes_captured=core["nodes_table"],
            fallbacks=first.fallbacks(),
            borrowed_bytes=sum(memory.nbytes for memory in self._artefact.tensors.values()),
            live=weakref.WeakMethod(self._live),
            sources=[],
            operators=core["instructions"],
            schedule=first.program.schedule(),
            title=name,
        )

    def profile(self, *args: Any, calls: int = 5, **kwargs: Any) -> Profile:
        """As CompiledModel.profile: the time of each instruction over `calls` calls. State stays as it is."""
        if calls < 1:
            raise ValueError(f"calls must be positive, given {calls}")
        program, buffers = self._choose(self._bind(args, kwargs)[0])
        with self._lock, _rewound(program.host):
            addresses, keep = self._gather(program, buffers)
            results = [
                allocate(None, d, shape, self._memory) if d != "object" else (None, 0) for d, shape in program.outputs
            ]
            outputs = [address for _, address in results]
            program.program.run(addresses, outputs, program.host)
            times = [program.program.profile(addresses, outputs, program.host) for _ in range(calls)]
            del keep
        return Profile(f"{self.manifest.get('model', '')} on {self.device}", program.program.schedule(), times)

    def _live(self) -> dict[str, Any]:
        """What a Report says of now."""
        choice, first = self._programs[0].choice, self._programs[0]
        found = first.npu_report() if choice.npu is not None else None
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
        request = {**self._choice.request(), **({} if self._npu_blobs else {"npu_blobs": False})}
        return unpickled, (self._artefact.data(), request, self._threads)

    def __repr__(self) -> str:
        return f"<forge_ugc.LoadedModel of {self.manifest.get('model', '')} on {self.device}>"


class _Program(npu.Dispatched):
    """One graph of an artefact, ready to run."""

    def __init__(
        self, artefact: Artefact, entry: dict[str, Any], choice: npu.Choice, threads: int, share: Any, npu_blobs: bool
    ) -> None:
        self._artefact, self._graph, self._threads = artefact, text(entry["graph"]), threads
        self._share = share
        kept = Kept.read(entry, artefact)
        self._kept = kept if npu_blobs else None
        self._here: dict[str, str] = {}  # what this machine compiles graphs for
        self._constants: list[tuple[int, int] | None] = []
        for key in entry["constants"]:
            memory = artefact.tensors[key] if key is not None else None
            self._constants.append(None if memory is None else (memory.address, memory.nbytes))
        self._calls = entry.get("hosts", [])
        super().__init__(choice)
        self._share = None
        self.host = _hosts(self._calls, self.program.hosts(), artefact.path)
        self.inputs, self.outputs = self.program.types()
        self.opaque = [index for index, (dtype, _) in enumerate(self.outputs) if dtype == "object"]
        self.sources = [_source(s) for s in entry["inputs"]]
        self.writes = [(*_source(w["to"]), w["output"]) for w in entry["writes"]]
        if len(self.sources) != len(self.inputs):
            raise ArtefactError(f"{artefact.path}: {len(self.sources)} inputs of a graph with {len(self.inputs)}")
        pairs = zip(self.sources, self.inputs, strict=True)
        self.leaves = [(which, dtype, shape) for (kind, which), (dtype, shape) in pairs if kind == "leaf"]
        self.stateful = any(kind == "state" for kind, _ in self.sources)
        self.written = {which for kind, which, _ in self.writes if kind == "leaf"}
        self.in_place: list[tuple[int, int, str, Any]] = []

    def write_in_place(self, results: list[int]) -> None:
        """Finds the outputs that are made in the memory of what they are the new value of: (input, output, kind,
        which). `results`: outputs that are handed out as new arrays, which these must not be."""
        taken = Counter([*(index for _, _, index in self.writes), *set(results)])
        for kind, which, index in self.writes:
            number = self.sources.index((kind, which))
            if taken[index] == 1 and self.sources.count((kind, which)) == 1:
                if self.program.may_share(number, index):
                    self.in_place.append((number, index, kind, which))

    def build(self, choice: npu.Choice, settings: dict[str, Any]) -> Any:
        if self._kept is not None and settings.get("npu_mode") == "dispatch":
            assert choice.npu is not None
            self._here = circumstances(settings["device"].facts, choice.npu)
            settings = {**settings, "blobs": self._kept.blobs}
            if choice.npu.fold == "auto" and self._kept.final(self._here):
                settings["fold"] = False
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
                callees=len(self._calls),
                share=self._share,
                **settings,
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ArtefactError(f"{self._artefact.path}: {self._graph}: {error}") from None

    def fallbacks(self) -> list[dict[str, Any]]:
        """Operators that run through torch, as in a Report; the file does not say where they come from."""
        names = Counter(str(self._calls[callee]["target"]) for callee, _, _ in self.program.hosts())
        return [{"op": name, "count": count, "where": ""} for name, count in names.items()]

    def npu_report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.program.npu_report()
        if self._kept is not None and "blocks" in report:
            report["artefact"] = self._kept.note(self._here, report)
        return report

    def shape_of(self, leaf: int) -> tuple[int, ...]:
        return next(shape for which, _, shape in self.leaves if which == leaf)


def _hosts(calls: list[Any], wanted: list[tuple[int, int, list[Any]]], path: str) -> Any:
    """host(callee, operands) of a program: what its file says of the calls that its graph makes."""
    if not wanted:
        return None
    names = ", ".join(dict.fromkeys(str(calls[callee]["target"])[:100] for callee, _, _ in wanted))
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ArtefactError(
            f"{path}: these operators of it run through torch, which is not installed: {names}"
        ) from None
    from .hostdata import host_call

    found = {callee: host_call(calls[callee], operands, results) for callee, operands, results in wanted}
    if len(found) != len(wanted):
        raise ArtefactError(f"{path}: two host calls of one number")
    return lambda callee, operands: found[callee](operands)


def _rewound(host: Any) -> Any:
    """Random numbers are as if no host call had run."""
    return sys.modules["torch"].random.fork_rng(devices=[]) if host is not None else contextlib.nullcontext()


def _source(entry: dict[str, Any]) -> tuple[str, Any]:
    kind = "leaf" if "leaf" in entry else "state"
    return kind, entry[kind]


def _handed_out(value: Any, torch: Any) -> Any:
    """An object that a host call has made: where the call was given no tensors of torch, it gets none."""
    made = sys.modules["torch"]
    return as_numpy(value) if torch is None and isinstance(value, made.Tensor) else value


__all__ = ["LoadedModel", "Outputs", "load", "unpickled"]
