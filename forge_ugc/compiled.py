"""The compiled model: checks a call's inputs, runs the program, and gives back what the model would have given."""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from . import npu
from .adapters import Adapters
from .capture import Captured, Kind, TensorMeta
from .containers import SameContainer, check_cache, packer_of
from .errors import CompileError, NpuWarning
from .lowering import lower
from .lowering.outputs import Fresh, Known
from .memory import OutputMemory
from .overlap import Overlap, written_overlap
from .plan import Options, Plan
from .profile import Profile
from .repeat import Repeat, picker, repeat_of
from .report import Report
from .signature import same_constant
from .specialise import SymbolicInputs, Symbols
from .state import Slot, Structure, Watcher, has_memory, same_values
from .table import OBJECT

_CACHE = 16  # programs for different shapes that are kept


class CompiledModel:
    """Calls like the model it was compiled from and returns what that returns: same structure, dtypes, shapes.

    `report` is the compilation's Report, `device` where it runs. Weights changed in place, by load_state_dict or by
    assignment are noticed before each call; so are writes that torch does not count (through `.data`, by fused
    optimizers, of a norm's statistics) where they change one of eight elements of a tensor that are looked at. After a
    write to single elements that torch does not count, call `refresh()`.
    Thread-safe; the GIL is released while the program runs.
    """

    report: Report

    def __init__(self, model: Any, captured: Captured, options: Options, example: list[Any]) -> None:
        self._model = model
        self._captured = captured
        self._options = options
        self._signature = captured.signature
        self._lock = threading.RLock()
        self._warned_grad = self._warned_mode = False
        self._adapters: Adapters | None = None
        self._read_inputs(captured)
        written = {w.writes for w in captured.writes}
        slots = {s.place: s for i, s in captured.slots.items() if i not in written}
        slots |= {s.place: s for s, _ in captured.fixed}
        self._watcher = Watcher(list(slots.values()))
        self._structure = Structure(model)
        nodes = [captured.nodes[i] for i in written if i is not None]
        self._written_leaves = [node.target for node in nodes if node.kind is Kind.INPUT]
        self._written_slots = [captured.slots[i] for i in written if i in captured.slots]
        self._check_apart(example, list(captured.slots.values()), CompileError)
        self._example_shapes = self._key(example)
        self._example_symbols = self._symbolic.solve(example) if self._symbolic.dynamic else Symbols()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._plans[self._example_shapes] = self._make_plan(self._example_symbols)
        self._repeat: Repeat | None = None
        self._memory = OutputMemory()
        self._pack = packer_of(captured.out_spec, captured.counters)

    def _read_inputs(self, captured: Captured) -> None:
        paths = captured.signature.paths
        self._tensors: list[tuple[int, torch.dtype, tuple[int, ...] | None]] = []
        self._constants: list[tuple[int, Any]] = []
        symbolic: list[tuple[int, str, Any]] = []
        for node in captured.nodes:
            if node.kind is not Kind.INPUT:
                continue
            leaf, meta = node.target, node.meta
            if isinstance(meta, TensorMeta):
                static = all(type(s) is int for s in meta.shape)
                self._tensors.append((leaf, meta.dtype, tuple(meta.shape) if static else None))
                symbolic.append((leaf, paths[leaf], meta))
            elif isinstance(meta, torch.SymInt):
                symbolic.append((leaf, paths[leaf], meta))
            else:
                self._constants.append((leaf, meta))
        self._symbolic = SymbolicInputs(symbolic, captured.guards)
        self._pick = picker([leaf for leaf, _, _ in self._tensors])

    # --- calling ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. TypeError names an input whose structure, dtype or shape is not the example's."""
        if self._adapters is not None:
            current = self._adapters.current(args, kwargs)
            if current is not self:
                return current(*args, **kwargs)
        found, leaves, repeat = self._admit(args, kwargs)
        plan = self._plan(leaves)
        if repeat is not None and repeat[0].plan is plan:
            known, tensors, at = repeat
            results: list[Any] = known.run(tensors, at)
            return self._pack(known.user(results)) if known.user else self._finish(plan, leaves, results, found)

        inputs, keep = plan.gather(leaves)
        results, own = self._results(plan, leaves, inputs)
        written = [results[i] for i in own]
        if not (plan.any_opaque or self._symbolic.dynamic or self._written_slots):
            self._repeat = (
                repeat_of(plan, [leaf for leaf, _, _ in self._tensors], leaves, inputs, own, self._memory)
                or self._repeat
            )
        try:
            objects = plan.run(inputs, [0 if type(t) is int else t.data_ptr() for t in results], plan.host)
        finally:
            if written:  # autograd and other compiled models have to know
                torch.autograd.graph.increment_version(written)
        if plan.any_opaque:
            results = [
                o if d == OBJECT else r for r, o, (_, d) in zip(results, objects or (), plan.out_types, strict=True)
            ]
        del keep
        if plan.plain and not found:
            return self._pack(results)
        return self._finish(plan, leaves, results, found)

    def _admit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any], tuple[Repeat, tuple[torch.Tensor, ...], list[int]] | None]:
        """A call's containers (in the numbering of `Watch`) and its leaves, after everything that must hold before the
        program may see them; and the call that it repeats, its tensors and their addresses."""
        if not self._options.executable:
            raise RuntimeError(self._options.why_not)
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError(
                "a compiled model cannot run inside torch.autocast: its dtypes were fixed when it was compiled. "
                "Put the autocast region into forward(), or convert the model (model.bfloat16()) and compile that."
            )
        values = self._signature.values(args, kwargs)
        found: list[Any] = []
        containers = self._captured.containers
        if containers is not None:
            leaves = self._signature.flatten(values, found)
            for container in found:
                check_cache(container)
        else:
            leaves = self._signature.flatten(values)
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            self._refuse_transforms(leaves)
        known, tensors = self._repeat, self._pick(leaves)
        repeat = None
        if known is not None and known.fits(tensors):
            repeat = known, tensors, [t.data_ptr() for t in tensors]
        else:
            self._check_tensors(leaves)
        self._check_constants(leaves)
        if not self._warned_grad and torch.is_grad_enabled():
            self._warn_grad(leaves)
        if self._structure.changed():
            raise RuntimeError("a submodule was replaced, added or removed after compiling; compile the model again")
        if not self._warned_mode and (mode := self._structure.other_mode()):
            self._warned_mode = True
            warnings.warn(
                f"the model, or a part of it, was put into {mode} mode after compiling: the compiled model goes on as "
                "it was compiled; compile it again",
                UserWarning,
                stacklevel=3,
            )
        if self._structure.untied():
            raise RuntimeError("weights that were tied are not any more; compile the model again")
        if self._watcher.changed():
            self.refresh()
        if (self._written_leaves or self._written_slots) and (repeat is None or repeat[0].apart != repeat[2]):
            self._check_apart(leaves, [], Overlap)
            if repeat is not None:
                repeat[0].apart = repeat[2]
        return found, leaves, repeat

    def _check_tensors(self, leaves: list[Any]) -> None:
        for leaf, dtype, shape in self._tensors:
            t = leaves[leaf]
            if type(t) is not torch.Tensor and not _acceptable(t):
                self._reject(leaf, t, dtype, shape)
            if (
                t.dtype is not dtype
                or (shape is not None and t.shape != shape)
                or not t.is_cpu
                or t.layout is not torch.strided
            ):
                self._reject(leaf, t, dtype, shape)

    def _refuse_transforms(self, leaves: list[Any]) -> None:
        """Raises for tensors that stand for others, which have no memory, and for those that carry a derivative."""
        for leaf, _, _ in self._tensors:
            t = leaves[leaf]
            if not isinstance(t, torch.Tensor):
                continue
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
            if wrapped or forward_ad.unpack_dual(t).tangent is not None:
                what = "belongs to a torch.func transform" if wrapped else "carries a forward-mode derivative"
                raise TypeError(
                    f"input {self._signature.paths[leaf]} {what} (vmap, grad, jvp): a compiled model takes plain "
                    "tensors only. Compile a function that transforms the model, or use the model itself"
                )

    def _check_constants(self, leaves: list[Any]) -> None:
        for leaf, expected in self._constants:
            if not same_constant(leaves[leaf], expected):
                raise TypeError(
                    f"input {self._signature.paths[leaf]}: compiled for {expected!r}, given {leaves[leaf]!r}; "
                    "Python values are fixed when compiling, compile again for another one"
                )

    def check_example(self, example: list[Any]) -> None:
        """Raises what a call with these leaves would: the shapes of an exported program are not the example's."""
        self._check_tensors(example)
        self._check_constants(example)

    def _results(self, plan: Plan, leaves: list[Any], inputs: list[Any]) -> tuple[list[Any], dict[int, int | Slot]]:
        """What the program writes: new tensors (0 for an object), or the caller's own; and which those are."""
        own: dict[int, int | Slot] = {}
        for number, index, where in plan.in_place:
            t = _place(where, leaves)
            # not a tensor that was copied to be row major, nor one that torch will refuse to write
            if t.data_ptr() == inputs[number] and (not t.is_inference() or torch.is_inference_mode_enabled()):
                own[index] = where
        results = [
            _place(own[i], leaves) if i in own else 0 if dtype == OBJECT else self._memory.tensor(shape, dtype)
            for i, (shape, dtype) in enumerate(plan.out_types)
        ]
        return results, own

    def _check_apart(self, leaves: list[Any], state: list[Slot], error: type[Exception]) -> None:
        """Raises `error` where a tensor that forward() writes shares memory with another input or one of `state`."""
        written, paths = self._written_leaves, self._signature.paths
        if not written and not self._written_slots:
            return
        own = {s.place for s in self._written_slots}
        others = [(s.name, s.tensor()) for s in state if s.place not in own]
        pair = written_overlap(
            [(paths[i], leaves[i]) for i in written] + [(s.name, s.tensor()) for s in self._written_slots],
            [(paths[i], leaves[i]) for i, _, _ in self._tensors if i not in written] + others,
        )
        if pair is not None:
            raise error(
                f"{pair[0]} and {pair[1]} share memory, and forward() writes into it: a compiled model reads all "
                "inputs before it writes any. Pass a clone() of one"
            )

    def _finish(self, plan: Plan, leaves: list[Any], results: list[Any], found: list[Any]) -> Any:
        """Stores what forward() writes, then builds outputs that are the caller's own objects or views of them."""
        outputs = plan.lowered.plan

        def place(where: int | Slot | Fresh) -> torch.Tensor:
            return results[where.index] if isinstance(where, Fresh) else _place(where, leaves)

        with torch.no_grad():
            for where, index in outputs.writes:
                written = place(where)
                if written is not results[index]:  # else the program has written it
                    written.copy_(results[index])

        made: dict[int, Any] = {}

        def build(item: Any) -> Any:
            if isinstance(item, Fresh):
                return results[item.index]
            if isinstance(item, Known):
                return item.value
            if isinstance(item, SameContainer):
                return found[item.number]
            if id(item) not in made:
                value: Any = place(item.root)
                for step in item.steps:
                    value = step(value)
                made[id(item)] = value
            return made[id(item)]

        user = [build(item) for item in outputs.user]
        if self._captured.containers is not None:
            self._captured.containers.adopt(found, [[build(i) for i in items] for items in outputs.containers])
        return self._pack(user)

    def _plan(self, leaves: list[Any]) -> Plan:
        if not self._symbolic.dynamic:
            plan = self._plans.get(None)
            if plan is not None:
                return plan
        key = self._key(leaves)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                symbols = self._symbolic.solve(leaves) if self._symbolic.dynamic else Symbols()
                plan = self._plans[key] = self._make_plan(symbols)
                while len(self._plans) > _CACHE:
                    self._plans.popitem(last=False)
            elif len(self._plans) > 1:
                self._plans.move_to_end(key)
            return plan

    def _make_plan(self, symbols: Symbols) -> Plan:
        share = next((plan.program for plan in self._plans.values()), None)
        if share is None and self._captured.lender is not None:
            share = self._captured.lender()
        return Plan(self._options, lower(self._captured, symbols, self._options.strict), share)

    def _key(self, leaves: list[Any]) -> Any:
        if not self._symbolic.dynamic:
            return None
        return tuple(v.shape if isinstance(v := leaves[leaf], torch.Tensor) else v for leaf in self._symbolic.dynamic)

    def _reject(self, leaf: int, value: Any, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
        path = self._signature.paths[leaf]
        wanted = f"{str(dtype).removeprefix('torch.')}{list(shape) if shape is not None else ''}"
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"input {path}: expected a tensor {wanted}, given {type(value).__name__}")
        if not _acceptable(value):
            raise TypeError(f"input {path}: expected a plain tensor {wanted}, given a {type(value).__name__}")
        given = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.layout is not torch.strided:
            given += f" of layout {value.layout}"
        if value.device.type != "cpu":
            given += f" on {value.device}"
        fits = value.dtype is dtype and value.is_cpu and value.layout is torch.strided
        exported = isinstance(self._model, torch.export.ExportedProgram)
        way_out = f"; {'export' if exported else 'compile'} with dynamic_shapes, or again for this shape"
        raise TypeError(f"input {path}: expected {wanted} on cpu, given {given}{way_out if fits else ''}")

    def _warn_grad(self, leaves: list[Any]) -> None:
        if any(leaves[leaf].requires_grad for leaf, _, _ in self._tensors):
            self._warned_grad = True
            warnings.warn(
                "an input requires grad, but a compiled model's outputs carry no autograd graph; use torch.no_grad()",
                UserWarning,
                stacklevel=4,
            )

    # --- state ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes over the weights as they are now: packs and folds again. Automatic where a change is noticed.

        RuntimeError where forward() branches on a buffer that has other values now."""
        with self._lock:
            for slot, value in self._captured.fixed:
                if not same_values(slot.tensor(), value):
                    raise RuntimeError(
                        f"{slot.name!r} has changed since compiling, and forward() reads its values in Python; compile "
                        "the model again"
                    )
            self._watcher.take()
            self._repeat = None
            self._plans = OrderedDict()
            if not self._symbolic.dynamic:
                self._plans[None] = self._make_plan(Symbols())

    # --- the NPU ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Where it runs now: "cpu", "npu", or as it was planned or emulated ("npu:plan:npu4000")."""
        plan = self._kept()
        return (plan or self._options).choice.device

    def _kept(self) -> Plan | None:
        """The program that was used longest ago; None: changed weights have dropped all, and nothing called since."""
        with self._lock:
            return next(iter(self._plans.values()), None)

    def _now(self) -> Plan:
        """The same; there always is one."""
        with self._lock:
            if not self._plans:
                self._plans[self._example_shapes] = self._make_plan(self._example_symbols)
            return next(iter(self._plans.values()))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for graphs that are compiled in the background (`fold="auto"`), at most `timeout` seconds.

        True: nothing is being compiled any more; `report["tier"]` says what runs. A compilation that failed gives an
        NpuWarning, and the graphs that were there go on serving. Wait before you change `os.environ`: drivers read the
        environment while they compile, and with a C library before glibc 2.41 such a change may crash the process.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            upgrades = [plan.upgrade for plan in self._plans.values() if plan.upgrade is not None]
        for upgrade in upgrades:
            if not upgrade.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            if upgrade.error is not None:
                warnings.warn(
                    f"the NPU's graphs with constant weights could not be compiled, the folded ones go on serving: "
                    f"{npu.first_line(upgrade.error)}",
                    NpuWarning,
                    stacklevel=2,
                )
        return True

    def save_openvino_ir(self, folder: str | os.PathLike[str], fold: bool = True) -> dict[str, Any]:
        """Writes what runs on the NPU as OpenVINO models into `folder`, which is made; returns the manifest.

        block_000.xml and .bin, ...: the distinct graphs; weights.bin: weights that are arguments (`fold=True`; with
        False weights lie inside: a graph a segment, or a graph a call where the repeated blocks are large);
        manifest.json: which graph is called with what, in order. Works for device="npu", "npu:plan" and "npu:emulate".
        RuntimeError if nothing is placed on an NPU, ValueError for weights without values (meta tensors).
        """
        from .openvino import save

        return save(self, folder, fold)

    def _live(self) -> dict[str, Any]:
        """What the report says of now."""
        plan = self._kept()
        choice = (plan or self._options).choice
        report = plan.program.npu_report() if plan is not None and choice.npu is not None else None
        if report is not None and plan is not None and plan.upgrade is not None and plan.upgrade.error is not None:
            report["upgrade_error"] = str(plan.upgrade.error)
        return {
            "device": choice.device,
            "device_reason": choice.reason,
            "target": choice.target,
            "precision": choice.precision,
            "npu": report,
            "tier": report.get("tier") if report else None,
        }

    # --- looking inside -----------------------------------------------------------------------------------------------

    def ir(self, stage: str = "final") -> str:
        """Text of a stage, one of:

        "aten": what was captured, as ATen. "capture": the same in Forge's operators. "after:<pass>": after the last
        run of a pass, "after:<pass>#2" after its second. "final": the graph that is lowered. "npuir": its instructions.
        "schedule": these in order and with their memory.
        """
        if stage == "aten":
            return self._captured.text()
        return str(self._texts().text(stage))

    def profile(self, *args: Any, calls: int = 5, **kwargs: Any) -> Profile:
        """Calls the model `calls` times, after once to warm up, and takes the time of each instruction.

        What the NPU runs in one go (a segment) is one row. Nothing of the model or its inputs changes: what forward()
        writes is not kept, random numbers are as if nothing had run. Raises what calling the model would, ValueError
        for calls < 1.
        """
        if calls < 1:
            raise ValueError(f"calls must be positive, given {calls}")
        _, leaves, _ = self._admit(args, kwargs)
        plan = self._plan(leaves)
        program = plan.program
        inputs, keep = plan.gather(leaves)
        results = [None if d == OBJECT else torch.empty(s, dtype=d, device="cpu") for s, d in plan.out_types]
        outputs = [0 if t is None else t.data_ptr() for t in results]
        with torch.random.fork_rng(devices=[]):
            program.run(inputs, outputs, plan.host)
            times = [program.profile(inputs, outputs, plan.host) for _ in range(calls)]
        del keep
        return Profile(f"{self._title()} on {self.device}", program.schedule(), times)

    def _texts(self) -> Any:
        with self._lock:
            program = getattr(self, "_text_program", None)
            if program is None:
                plan = self._now()
                program = self._text_program = plan.compile(
                    replace(self._options, choice=plan.choice),
                    plan.lowered,
                    keep_text=True,
                    executable=False,
                    pack=False,
                )
            return program

    def __repr__(self) -> str:
        return f"<forge_ugc.CompiledModel of {self._title()} on {self.device}>"

    def _repr_html_(self) -> str:
        from .html import fragment

        return fragment(self.report, f"{self._title()} on {self.device}")

    def _title(self) -> str:
        """The name of the model's class or of the function."""
        name = "" if isinstance(self._model, torch.nn.Module) else getattr(self._model, "__name__", "")
        return name or type(self._model).__name__

    # --- copying ------------------------------------------------------------------------------------------------------

    def __copy__(self) -> CompiledModel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """An independent copy: of the model's weights too, where it is a module."""
        if not isinstance(self._model, torch.nn.Module):
            return self
        if self._adapters is not None:
            current = self._adapters.present()
            if current is not self:
                memo[id(self)] = other = copy.deepcopy(current, memo)
            else:
                other = self._copied(memo)
            other._adapters = self._adapters.follow(other._model, other)
            return other
        return self._copied(memo)

    def _copied(self, memo: dict[int, Any]) -> CompiledModel:
        model = copy.deepcopy(self._model, memo)
        moved: dict[int, dict[str, Any]] = {}
        for old, new in zip(self._model.modules(), model.modules(), strict=True):
            for name in ("_parameters", "_buffers", "__dict__"):
                moved[id(getattr(old, name))] = getattr(new, name)
        slots = {i: s._replace(where=moved.get(id(s.where), s.where)) for i, s in self._captured.slots.items()}
        other: CompiledModel = CompiledModel.__new__(CompiledModel)
        memo[id(self)] = other
        with self._lock:
            other.__dict__.update(self.__dict__)
            other._lock = threading.RLock()
            fixed = [(s._replace(where=moved.get(id(s.where), s.where)), value) for s, value in self._captured.fixed]
            other._model, other._captured = model, replace(self._captured, slots=slots, fixed=fixed)
            watched = [s._replace(where=moved.get(id(s.where), s.where)) for s in self._watcher.slots]
            other._watcher = Watcher(watched)
            other._structure = Structure(model)
            other._plans, other._repeat, other._memory = OrderedDict(), None, OutputMemory()
            other.__dict__.pop("_text_program", None)
        other.refresh()
        other.report = self.report.follow(weakref.WeakMethod(other._live))
        return other

    def save(self, path: str | os.PathLike[str], *, npu_blobs: bool = True) -> None:
        """Writes an artefact, which `forge_ugc.load` makes a callable of, without torch and without compiling.

        The weights as they are now, and a program for each set of shapes that was called. Operators that run through
        torch are named in a FallbackWarning; such a file needs torch to load. ArtefactError names what cannot be kept:
        operators that are not ATen's, caches that grow, weights without values.

        `npu_blobs`: of a model on an NPU, also the graphs that its driver has compiled, as they are now; after `wait()`
        those are the final ones, with weights inside. A machine with the same driver and device compiles nothing then.
        """
        from .saving import save

        save(self if self._adapters is None else self._adapters.present(), path, npu_blobs)

    def __reduce__(self) -> Any:
        """Pickles as its artefact: what comes back is a LoadedModel, for the same kind of device."""
        from .saving import pickled

        return pickled(self)


def _place(where: int | Slot, leaves: list[Any]) -> torch.Tensor:
    """What a write goes to: a leaf of the arguments or a state tensor."""
    tensor: torch.Tensor = leaves[where] if type(where) is int else where.tensor()  # type: ignore[union-attr]
    return tensor


def _acceptable(value: Any) -> bool:
    """A tensor whose memory can be read: subclasses that only add methods are fine, wrappers are not."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch._subclasses.FakeTensor) and (
        value.layout is not torch.strided or has_memory(value)
    )  # fmt: skip
