"""Host calls as data, for artefacts: operators by their registered names, arguments as JSON; no code.

What a file names is looked up, never run: an ATen overload that torch's dispatcher has, that writes none of its
operands and is among those that models come to (`_refusal` has the rules), or one of a few functions on sizes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from .errors import ArtefactError
from .host import Arg, HostCall
from .table import DTYPES_BY_NAME, OBJECT

_NAME = re.compile(r"aten\.(\w+)\.(\w+)")
# Constructors that believe their arguments, files, and formats of other devices.
_REFUSED = re.compile(r"from_file|(sparse|nested|quantized|fbgemm|mkldnn|cudnn|miopen|mps|fused|fake_quant)_\w+")
# Operators with a leading underscore that captures of models hold; core ATen has more of them.
_PRIVATE = re.compile(
    r"_assert_(async|scalar)|_functional_assert_(async|scalar)|_functional_sym_constrain_range\w*|_fft_\w+"
    r"|_linalg_\w+|_unique2?|_weight_norm(_interface)?|_int_mm|_grouped_mm|_trilinear|_upsample_\w+_aa|_conj(_physical)?"
    r"|_native_multi_head_attention|_transformer_encoder_layer_fwd|_transform_bias_rescale_qkv|_safe_softmax"
    r"|_scaled_dot_product_(attention_math|flash_attention_for_cpu)|_thnn_fused_(gru|lstm)_cell|_ctc_loss|_logcumsumexp"
    r"|_shape_as_tensor|_sample_dirichlet|_standard_gamma|_native_batch_norm_legit_functional|_histogramdd_\w+|_aminmax"
    r"|_masked_softmax|_euclidean_dist|_weight_int[48]pack_mm(_for_cpu)?|_is_(all|any)_true|_adaptive_avg_pool[23]d"
    r"|_cdist_forward|_pdist_forward|_embedding_bag(_forward_only)?|__\w+__|_unsafe_(view|index)|_foreach_\w+"
)


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        for value in operands:
            if type(value) not in (bool, int, float):
                raise TypeError(f"{function.__name__}: expected numbers, given a {type(value).__name__}")
        return function(*operands)

    call.__name__ = function.__name__
    return call


def _item(values: Any, index: Any) -> Any:
    if type(values) not in (tuple, list) or type(index) is not int:
        raise TypeError(f"getitem of a {type(values).__name__}")
    return values[index]


_OPERATORS = "add sub mul truediv floordiv mod neg eq ne lt le gt ge and_ or_ not_"
_FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int")},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "operator.getitem": operator.getitem,
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_ENUMS: dict[str, dict[str, Any]] = {
    "dtype": {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)},
    "layout": {"strided": torch.strided},
    "memory_format": {
        str(f).removeprefix("torch."): f for f in vars(torch).values() if isinstance(f, torch.memory_format)
    },
    "device": {"cpu": torch.device("cpu")},
}


def kept(call: HostCall) -> dict[str, Any]:
    """`call` as JSON. ArtefactError where it cannot be kept."""
    try:
        return {
            "target": _name_of(call.target),
            "args": [_kept(value) for value in call.args],
            "kwargs": {name: _kept(value) for name, value in call.kwargs.items()},
            "several": call.several,
            "autocast": None if call.autocast is None else _autocast(call.autocast),
            "source": call.source,
        }
    except ArtefactError as error:
        raise ArtefactError(
            f"{call.name} ({call.source or 'unknown line'}) cannot be kept in a file: {error}"
        ) from None


def host_call(data: dict[str, Any], operands: int, results: list[tuple[str, tuple[int, ...]]]) -> HostCall:
    """The call that `data` describes, in a graph that gives it `operands` and takes `results`. ArtefactError,
    LookupError, TypeError or ValueError where it is no such thing."""
    name, source, autocast = data["target"], data["source"], data["autocast"]
    if type(name) is not str or type(source) is not str or type(data["several"]) is not bool:
        raise TypeError("a host call's name")
    carried: list[Any] = [None if dtype == OBJECT else (DTYPES_BY_NAME[dtype], shape) for dtype, shape in results]
    if not data["several"] and len(carried) > 1:
        raise ArtefactError(f"{name[:100]}: one result where the graph wants {len(carried)}")
    return HostCall(
        target=_function(name),
        args=[_value(v, operands, 0) for v in data["args"]],
        kwargs={str(key): _value(v, operands, 0) for key, v in data["kwargs"].items()},
        carried=carried,
        several=data["several"],
        autocast=None if autocast is None else ("cpu", _ENUMS["dtype"][autocast]),
        source=source,
    )


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        why = _refusal(name)
        if why is not None:
            raise ArtefactError(why)
        return name
    try:
        return _NAMES[target]
    except (KeyError, TypeError):
        raise ArtefactError("it is no ATen operator") from None


def _function(name: str) -> Any:
    if name == "operator.getitem":
        return _item
    if name in _FUNCTIONS:
        return _on_numbers(_FUNCTIONS[name])
    why = _refusal(name)
    if why is not None:
        raise ArtefactError(f"host call {name[:100]!r}: {why}")
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _refusal(name: str) -> str | None:
    """Why a file may not hold a call of the operator."""
    match = _NAME.fullmatch(name)
    if match is None:
        return "it is no ATen operator"
    packet, overload = match.groups()
    try:
        known = torch._C._dispatch_has_kernel(f"aten::{packet}" + (f".{overload}" if overload != "default" else ""))
        found = getattr(getattr(torch.ops.aten, packet), overload) if known else None
    except (RuntimeError, AttributeError):  # no legal name
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        return f"torch {torch.__version__} has no such operator"
    if any(a.alias_info is not None and a.alias_info.is_write for a in found._schema.arguments):
        return "it writes its operands"
    private = packet.startswith("_") and torch.Tag.core not in found.tags and not _PRIVATE.fullmatch(packet)
    if private or _REFUSED.fullmatch(packet):
        return "it is not one of the operators that files may hold"
    return None


def _autocast(given: tuple[str, torch.dtype]) -> str:
    if given[0] != "cpu":
        raise ArtefactError(f"autocast on {given[0]}")
    return str(given[1]).removeprefix("torch.")


def _kept(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Arg):
        return {"operand": value.index}
    if isinstance(value, (list, tuple)):
        return [_kept(item) for item in value]
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    for kind, members in _ENUMS.items():
        for name, member in members.items():
            if type(value) is type(member) and value == member:
                return {kind: name}
    raise ArtefactError(f"its argument {str(value)[:100]!r} is a {type(value).__name__}")


def _value(data: Any, operands: int, depth: int) -> Any:
    if data is None or type(data) in (bool, int, float, str):
        return data
    if depth > 8:
        raise TypeError("arguments within arguments")
    if isinstance(data, list):
        return [_value(item, operands, depth + 1) for item in data]
    ((kind, given),) = data.items()
    if kind == "operand":
        if type(given) is not int or not 0 <= given < operands:
            raise IndexError(f"operand {given!r} of {operands}")
        return Arg(given)
    if kind == "complex":
        real, imaginary = given
        return complex(float(real), float(imaginary))
    return _ENUMS[kind][given]
