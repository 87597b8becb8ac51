"""Recording: forward() runs once on tensors without memory, and what it asks of them is written down.

Three kinds of tensor meet while recording:
- a `Symbol` stands for an input, a parameter, a buffer, or what follows from one. It has a type and no memory.
- a tensor that forward() makes from Python values (arange, masks, tables) is real; torch computes with it as ever, and
  it becomes a constant where it meets a Symbol. So Python may branch on it.
- any other real tensor was there before: the model's state is mapped to its Symbol, the rest to constants.

Two modes, both local to the thread, see every call: `Functions` what Python asks of a tensor, `Recorder` each ATen
operator. Nothing of the model is replaced. Below autograd composite operators (linear, layer_norm, ...) arrive
whole, as in torch.export's graph. Result types and aliasing come from fake tensors, once for each operator and types.

What is not certainly right raises Unsupported; the capture is then lost even if forward() catches it.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import sys
import weakref
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .capture import Kind, Node, Ref, TensorMeta
from .errors import _OWN_DIR, _TORCH_DIR, known_source
from .record_rules import LIFT, Outcome, Rule, Type, Unsupported, outcome_of, rule_of
from .record_values import Fixed
from .record_views import VIEWS, Memory, Step, can_store, follow, store
from .state import Slot, made_of_tensors, parts_of

aten = torch.ops.aten
_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MAX_CONSTANTS = 64 << 20  # bytes; more would be copied than is worth it


class Symbol(torch.Tensor):
    """A tensor of `type_`. `node`: its value when `memory` was at `version`.

    `path`: how it is a view of the tensor that owns the memory (not at all: empty); None: it may as well be a copy.
    """

    node: int
    type_: Type
    memory: Memory
    path: tuple[Step, ...] | None
    version: int
    recorder: Recorder

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(recorder: Recorder, node: int, type_: Type, memory: Memory, path: tuple[Step, ...] | None = ()) -> Symbol:
        self: Symbol = torch.Tensor._make_wrapper_subclass(
            Symbol, type_[0], strides=type_[1], dtype=type_[2], device=_CPU, requires_grad=False
        )
        self.recorder, self.node, self.type_, self.memory = recorder, node, type_, memory
        self.path, self.version = path, memory.version
        memory.add(self)
        recorder.symbols.append(weakref.ref(self))
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if type(value) is Symbol:
                value.recorder.fail(f"{func} outside the recording")
        raise Unsupported(f"{func} outside the recording")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Symbol(%{self.node})"


# --- the recorder ---------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Sees every ATen call. `state`: id of each parameter, buffer or plain attribute of the model -> its place.

    fix: take the values of state that Python reads as they are, and note them in `fixed`.
    """

    def __init__(self, state: dict[int, tuple[Kind, Slot]], fix: bool = False) -> None:
        super().__init__()
        self.state = state
        self.fixed = Fixed(self) if fix else None
        self.nodes: list[Node] = []
        self.slots: dict[int, Slot] = {}
        self.symbols: list[weakref.ref[Symbol]] = []
        self.leaves: dict[int, tuple[int, Symbol, torch.Tensor]] = {}  # id of a leaf Symbol -> node, itself, original
        self.known: dict[int, Symbol] = {}  # id of a real tensor that was there before -> its Symbol
        self.made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.written: dict[int, int] = {}  # placeholder -> node of its last value
        self.foreign: list[tuple[torch.Tensor, torch.Tensor]] = []  # found lying around, and as it was then
        self.failure: Unsupported | None = None
        self.grad_enabled = False  # at some call so far
        self._constants: dict[Any, int] = {}
        self._returned: dict[int, Any] = {}  # memory of constants that forward() returns -> which part of it
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import dynamo, for a second, to wrap __torch_dispatch__

    def fail(self, reason: str) -> Unsupported:
        """Notes why the recording is lost."""
        error = Unsupported(reason)
        if self.failure is None:
            self.failure = error
        return error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with torch._C.DisableTorchFunction():  # not every call comes through Functions
                for kind in types:
                    if kind is not Symbol and made_of_tensors(kind):
                        return self._by_parts(kind, func, types, args, kwargs or {})
                return self.call(func, args, kwargs or {})
        except Unsupported as error:
            if self.failure is None:
                self.failure = error
            raise

    def _by_parts(self, kind: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on a tensor made of tensors: its class says which calls on these it is."""
        given = [self._mapped(a) for a in args]
        named = {k: self._mapped(a) for k, a in kwargs.items()}
        if func is aten.detach.default and len(given) == 1:
            return given[0]
        with self:
            return kind.__torch_dispatch__(func, types, tuple(given), named)

    # --- leaves -----------------------------------------------------------------------------------------------------

    def leaf(self, tensor: torch.Tensor, kind: Kind, target: Any, slot: Slot | None = None) -> Symbol:
        """A Symbol, and its placeholder, for a tensor that exists before the call."""
        if type(tensor) not in _PLAIN:
            raise Unsupported(f"tensor subclass {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise Unsupported(f"layout of {target}")
        if tensor.is_conj() or tensor.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise Unsupported(f"lazy or wrapped tensor {target}")
        shape, dtype = tuple(tensor.shape), tensor.dtype
        index = len(self.nodes)
        self.nodes.append(Node(f"{kind.value}_{target}", kind, target, meta=TensorMeta(dtype, shape, True)))
        if slot is not None:
            self.slots[index] = slot
        memory = Memory(index, leaf=index, frozen=kind is Kind.CONSTANT)
        symbol = Symbol.make(self, index, (shape, tuple(tensor.stride()), dtype), memory)
        if isinstance(tensor, torch.nn.Parameter):
            symbol._is_param = True  # isinstance(symbol, Parameter)
        self.leaves[id(symbol)] = (index, symbol, tensor)
        return symbol

    def symbol(self, tensor: torch.Tensor) -> torch.Tensor:
        """The Symbol of a real tensor that was there before; a tensor made while recording is returned as it is."""
        key = id(tensor)
        found = self.known.get(key)
        if found is not None:
            return found
        if self.made.get(key) is tensor:
            return tensor
        place = self.state.get(key)
        if place is not None and made_of_tensors(type(tensor)):
            made = self._assembled(tensor)
        elif place is not None:
            made = self.leaf(tensor, place[0], place[1].name, place[1])
        else:
            if made_of_tensors(type(tensor)):
                return tensor  # made while recording, of tensors that are looked at one by one
            if isinstance(tensor, torch._subclasses.FakeTensor):
                return tensor
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                inner = tensor
                while torch._C._functorch.is_functorch_wrapped_tensor(inner):
                    inner = torch._C._functorch.get_unwrapped(inner)
                if type(inner) is Symbol or self.made.get(id(inner)) is not inner:
                    raise Unsupported("functorch transform")
                return tensor
            self._count(tensor)
            name = f"lifted_{len(self.foreign)}"
            made = self.leaf(tensor, Kind.CONSTANT, name, Slot(name, {name: tensor}, name, constant=True))
            with _disable_current_modes(), torch.no_grad():
                self.foreign.append((tensor, tensor.detach().clone()))
        self.known[key] = made
        return made

    def _assembled(self, tensor: Any) -> Any:
        """The same tensor made of Symbols."""
        names, others = parts_of(tensor)
        parts = {name: self.symbol(getattr(tensor, name)) for name in names}
        made = type(tensor).__tensor_unflatten__(parts, others, tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made._is_param = True
        return made

    def constant(self, tensor: torch.Tensor, returned: bool = False) -> int:
        """The node of a tensor that was made while recording, as it is now.

        returned: by forward(). Whoever gets it may write into it, so it is the same as no other of equal value.
        """
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            raise Unsupported(f"constant of type {type(tensor).__name__}")
        shape, dtype = tuple(tensor.shape), tensor.dtype
        with torch.no_grad():
            copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            raw = copy.reshape(-1).view(torch.uint8).numpy().tobytes() if copy.numel() else b""
        key: tuple[Any, ...] = (shape, dtype, raw if len(raw) < 64 else hashlib.blake2b(raw).digest())
        if returned:
            memory, place = tensor.untyped_storage()._cdata, (tensor.storage_offset(), shape, tensor.stride(), dtype)
            if self._returned.setdefault(memory, place) != place:
                raise Unsupported("forward() returns several views of a tensor that it made from nothing")
            key = (*key, memory)
        index = self._constants.get(key)
        if index is not None:
            return index
        index = self._constants[key] = len(self.nodes)
        meta = TensorMeta(dtype, shape, True)
        size = copy.element_size()
        if copy.numel() > 1 and not dtype.is_complex and raw[size:] == raw[:-size]:  # one value throughout: no memory
            value = copy.reshape(-1)[0].item()
            call = {"dtype": dtype, "device": _CPU}
            self.nodes.append(Node(f"full_{index}", Kind.CALL, aten.full.default, (list(shape), value), call, meta))
            return index
        self._count(copy)
        name = f"constant_{index}"
        self.nodes.append(Node(name, Kind.CONSTANT, name, meta=meta))
        self.slots[index] = Slot(name, {name: copy}, name, constant=True)
        return index

    def _count(self, tensor: torch.Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _MAX_CONSTANTS:
            raise Unsupported("large constants")

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = rule_of(func)
        if func in LIFT and type(args[0]) is torch.Tensor and id(args[0]) not in self.known:
            self.made.setdefault(id(args[0]), args[0])  # torch.tensor(...), just made
        given = [self._mapped(a) for a in args]
        named = {k: self._mapped(a) for k, a in kwargs.items()} if kwargs else kwargs
        if not _any_symbol(given) and not (named and _any_symbol(named.values())):
            return self._native(func, rule, args, kwargs)
        if rule.inactive is not None and rule.inactive(args, kwargs):
            return given[0]
        if rule.value and self.fixed is not None:
            return self.fixed.call(func, *self._references((given, named)))
        reason = rule.refuse or (rule.special(args, kwargs) if rule.special is not None else "")
        if reason:
            raise Unsupported(f"{reason}: {func}")
        if rule.functional is not None:
            return self._write(func, rule.functional, given, named)
        return self._record(func, rule, given, named)

    def _mapped(self, value: Any) -> Any:
        if type(value) is Symbol:
            if value.recorder is not self:
                raise Unsupported("a tensor of another recording")
            return value
        if isinstance(value, torch.Tensor):
            return self.symbol(value)
        if type(value) is list or type(value) is tuple:
            return [self._mapped(v) for v in value]
        return value

    def _references(self, value: Any) -> Any:
        """Arguments with Refs in the place of Symbols."""
        if type(value) is Symbol:
            return Ref(self.current(value))
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._references, value))
        return {k: self._references(v) for k, v in value.items()} if type(value) is dict else value

    def _native(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on tensors made while recording: torch computes it now."""
        if rule.random and not (rule.inactive is not None and rule.inactive(args, kwargs)):
            raise Unsupported(f"{rule.refuse}: {func}")
        reason = rule.special(args, kwargs) if rule.special is not None else ""
        if reason:
            raise Unsupported(f"{reason}: {func}")
        out = func(*args, **kwargs)
        for value in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(value, torch.Tensor):
                self.made[id(value)] = value
        return out

    def _argument(self, value: Any) -> tuple[Any, Any]:
        """A recorded argument, and what of it decides the result's type."""
        kind = type(value)
        if kind is Symbol:
            return Ref(self.current(value)), value.type_
        if kind is int or kind is float or kind is bool or kind is str or kind is complex or value is None:
            return value, (kind, value)
        if isinstance(value, torch.Tensor):
            return Ref(self.constant(value)), (tuple(value.shape), value.stride(), value.dtype)
        if kind is list:
            pairs = [self._argument(v) for v in value]
            return [p[0] for p in pairs], tuple(p[1] for p in pairs)
        if kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
            return value, value
        raise Unsupported(f"argument of type {kind.__name__}")

    def _record(self, func: Any, rule: Rule, args: list[Any], kwargs: dict[str, Any]) -> Any:
        pairs = [self._argument(a) for a in args]
        named = [(k, *self._argument(a)) for k, a in kwargs.items()]
        key = (func, *(p[1] for p in pairs), *((k, t) for k, _, t in named))
        outcome = outcome_of(key, func, tuple(args), kwargs)
        if outcome.kind == "same":
            return args[outcome.types]
        if outcome.kind == "value":
            return outcome.types
        index = len(self.nodes)
        name = f"{func._schema.name.partition('::')[2]}_{index}"
        refs, source = tuple(p[0] for p in pairs), _source()
        call = Node(name, Kind.CALL, func, refs, {k: ref for k, ref, _ in named}, None, source)
        self.nodes.append(call)
        if outcome.kind == "tensor":
            call.meta = _meta(outcome.types)
            return Symbol.make(self, index, outcome.types, *self._memory(call, rule, outcome, args, kwargs, None))
        call.meta = tuple(map(_meta, outcome.types))
        results: list[Symbol | None] = []
        for i, type_ in enumerate(outcome.types):
            if type_ is None:
                results.append(None)
                continue
            item = self._append(operator.getitem, (Ref(index), i), {}, _meta(type_))
            results.append(Symbol.make(self, item, type_, *self._memory(call, rule, outcome, args, kwargs, i)))
        return results if outcome.kind == "list" else tuple(results)

    def _append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any) -> int:
        index = len(self.nodes)
        name = f"{func._schema.name.partition('::')[2] if func is not operator.getitem else 'getitem'}_{index}"
        self.nodes.append(Node(name, Kind.CALL, func, args, kwargs, meta, _source()))
        return index

    # --- memory -------------------------------------------------------------------------------------------------------

    def _memory(
        self, call: Node, rule: Rule, outcome: Outcome, args: list[Any], kwargs: dict[str, Any], item: int | None
    ) -> tuple[Memory, tuple[Step, ...] | None]:
        """The memory of a result (or `item` of several), and how it is a view of the tensor that owns it."""
        sources = set(outcome.shares) | ({rule.alias} if rule.alias is not None else set())
        if not sources:
            return Memory(len(self.nodes) - 1), ()
        (first, *more) = sources
        if not more and 0 <= first < len(args) and type(args[first]) is Symbol:
            given: Symbol = args[first]
            free = not given.memory.frozen and given.memory.leaf is None
            if given.path is None and free and not given.memory.others(given):
                self._own(given)
            known = given.path is not None and first == 0 and outcome.shares == (0,) and call.target in VIEWS
            if not known:
                return given.memory, None
            before = _meta(given.type_)
            assert given.path is not None and before is not None
            return given.memory, (*given.path, Step(call.target, call.args[1:], call.kwargs, before, call.meta, item))
        for symbol in _all_symbols((args, list(kwargs.values()))):
            symbol.memory.frozen = True
        return Memory(len(self.nodes) - 1, frozen=True), ()

    def _own(self, symbol: Symbol) -> None:
        """Nobody else can see what is written to it: it need not be known of what it was a view."""
        symbol.memory, symbol.path, symbol.version = Memory(symbol.node), (), 0
        symbol.memory.add(symbol)

    def current(self, symbol: Symbol) -> int:
        """The node of its value as of now."""
        if symbol.version != symbol.memory.version:
            assert symbol.path is not None  # else no one may write
            symbol.node = follow(self._append, symbol.memory.node, symbol.path)
            symbol.version = symbol.memory.version
        return symbol.node

    def returned(self, symbol: Symbol) -> int:
        """The node of what forward() returns: a view of what was written is one of its present value."""
        if symbol.memory.version and symbol.path:
            return follow(self._append, symbol.memory.node, symbol.path)
        return self.current(symbol)

    def _write(self, func: Any, functional: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """An in-place call in its out-of-place form; `target` and its views stand for the new value from here on."""
        target = args[0]
        if type(target) is not Symbol:
            raise Unsupported(f"a constant is written: {func}")
        memory = target.memory
        if memory.frozen:
            raise Unsupported(f"memory is written that is a constant's or several tensors': {func}")
        others = memory.others(target)
        if not others and memory.leaf is None:
            self.current(target)
            self._own(target)
        elif target.path is None or any(other.path is None for other in others):
            raise Unsupported(f"memory is written that a view may share: {func}")
        elif not can_store(target.path):
            raise Unsupported(f"a view is written through {target.path[-1].func}: {func}")
        shape, _, dtype = target.type_
        result = self._record(functional, rule_of(functional), args, kwargs)
        if type(result) is not Symbol or result.type_[0] != shape:
            raise Unsupported(f"shape after {func}")
        if result.type_[2] != dtype:
            to = aten.to.dtype
            result = self._record(to, rule_of(to), [result, dtype], {})
        if result is not target:
            memory = target.memory
            memory.node = store(self._append, memory.node, target.path or (), result.node)
            memory.version += 1
            target.node, target.version = result.node, memory.version
            if memory.leaf is not None:
                self.written[memory.leaf] = memory.node
        return target


def _any_symbol(values: Any) -> bool:
    return any(type(v) is Symbol or (type(v) is list and _any_symbol(v)) for v in values)


def _all_symbols(value: Any) -> list[Symbol]:
    if type(value) is Symbol:
        return [value]
    return [s for v in value for s in _all_symbols(v)] if isinstance(value, (list, tuple)) else []


def _meta(type_: Type | None) -> TensorMeta | None:
    return TensorMeta(type_[2], type_[0], True) if type_ is not None else None


# --- what Python asks -----------------------------------------------------------------------------------------------

# They look at memory, or hand it out, past the operators.
_REFUSED = {
    getattr(torch.Tensor, name)
    for name in (
        "data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_offset", "_is_view", "numpy", "tolist",
        "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "share_memory_", "is_shared", "register_hook",
        "is_set_to", "is_conj", "is_neg", "__repr__", "__format__", "apply_", "map_",
    )
    if hasattr(torch.Tensor, name)
} | {
    getter
    for name in ("_base", "_version", "grad", "__cuda_array_interface__")
    if (getter := getattr(getattr(torch.Tensor, name, None), "__get__", None)) is not None
}  # fmt: skip
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
# True of what follows from leaves while gradients are off, as they are while recording.
_AUTOGRAD = {
    getter
    for name in ("requires_grad", "is_leaf", "grad_fn")
    if (getter := getattr(getattr(torch.Tensor, name, None), "__get__", None)) is not None
}
_SETTERS = {
    setter
    for name in ("data", "grad", "real", "imag", "requires_grad")
    if (setter := getattr(getattr(torch.Tensor, name, None), "__set__", None)) is not None
}


class Functions(TorchFunctionMode):
    """Sees what Python asks of tensors, and puts Symbols in the place of those that were there before."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        try:
            given = tuple(a if type(a) is Symbol else self._map(a) for a in args)
            named = {k: self._map(v) for k, v in kwargs.items()} if kwargs else {}
            symbols = given and (type(given[0]) is Symbol or _has_symbol((given, named)))
            if symbols:
                if func is torch.Tensor.tolist and recorder.fixed is not None and type(given[0]) is Symbol:
                    return recorder.fixed.call(func, (Ref(recorder.current(given[0])),), {})
                if func in _REFUSED or func in _SETTERS:
                    raise Unsupported(f"Tensor.{getattr(func, '__name__', func)} past the operators")
                if torch.is_autocast_enabled("cpu"):
                    raise Unsupported("autocast region")
                if torch._C._functorch.maybe_current_level() is not None:
                    raise Unsupported("functorch transform")
            recorder.grad_enabled |= torch.is_grad_enabled()
            if symbols and func in _AUTOGRAD:
                leaf = recorder.leaves.get(id(given[0]))
                if leaf is not None:
                    return func(leaf[2])
                if recorder.grad_enabled:
                    raise Unsupported("autograd's view of a tensor")
            if func is _GET_DATA:
                return recorder.__torch_dispatch__(aten.detach.default, (), given)
            out = func(*given, **named)
            # the caller's own object again: `module.count += 1` assigns it
            return args[0] if given and out is given[0] else out
        except Unsupported as error:
            if recorder.failure is None:
                recorder.failure = error
            raise
        except Exception as error:  # forward() may handle it: then eager, on real tensors, may go another way
            recorder.fail(f"{type(error).__name__} in {getattr(func, '__name__', func)}: {str(error)[:200]}")
            raise

    def _map(self, value: Any) -> Any:
        kind = type(value)
        if kind is Symbol:
            return value
        if isinstance(value, torch.Tensor):
            return self.recorder.symbol(value)
        if kind is list or kind is tuple:
            return kind(self._map(v) for v in value)
        return value


_SIMPLE = (torch.Tensor, int, float, bool, str, type(None))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(type(v) is Symbol or (type(v) not in _SIMPLE and _has_symbol(v)) for v in value)
    if isinstance(value, dict):
        return _has_symbol(list(value.values()))
    return type(value) is Symbol or made_of_tensors(type(value))


# --- source lines -----------------------------------------------------------------------------------------------------


_MODULES_DIR = os.path.join(_TORCH_DIR, "nn", "modules") + os.sep
_ENTRY = os.path.join(_OWN_DIR, "fastcapture.py")  # calls forward()


@functools.lru_cache(maxsize=65536)
def _whose(code: CodeType) -> str:
    file = os.path.abspath(code.co_filename)
    if not file.startswith((_TORCH_DIR, _OWN_DIR)):
        return "user"
    return "module" if file.startswith(_MODULES_DIR) else "entry" if file == _ENTRY else ""


def _source() -> str:
    """The innermost frame outside torch, as "file.py:12 in forward"; of torch's modules if they are the model."""
    known = known_source.get()
    if known is not None:
        return known
    module = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        whose = _whose(frame.f_code)
        if whose == "user":
            break
        if whose == "entry":  # who called compile() is not who computes
            frame = module
            break
        if whose == "module" and module is None:
            module = frame
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""
