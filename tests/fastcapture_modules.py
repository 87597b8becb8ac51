"""Modules that branch, transform, nest or wrap: what a recorder of calls may get wrong. Those that write, keep state or
draw are in fastcapture_state.py; both fill TAKES and DECLINES of fastcapture_registry.py."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from tests import fastcapture_state  # noqa: F401  it enters its own
from tests.fastcapture_registry import DECLINES, TAKES, Call, declines, takes, x

# --- control flow -----------------------------------------------------------------------------------------------------


@declines()
def branch(m, a):
    return a * 2 if a.sum() > 0 else a


@declines()
def branch_caught(m, a):
    try:
        return a * 2 if a.sum() > 0 else a * 3
    except Exception:
        return a


@declines()
def nonzero(m, a):
    return a[a > 0]


@declines()
def loop_to_item(m, a):
    for _ in range(int(a.abs().max())):
        a = a + 1
    return a


@takes()
def branch_on_shape(m, a):
    steps = torch.arange(a.shape[0])
    return a * 2 if (steps.sum() > 2 and a.shape[1] == 4) else a


@takes()
def branch_on_constant(m, a):
    mask = torch.ones(4, 4).tril().bool()
    return a if mask.all() else a.masked_fill(~mask[:3], -math.inf)


@takes()
def vmapped_mask(m, a):
    mask = torch.vmap(lambda i: torch.vmap(lambda j: j <= i)(torch.arange(4)))(torch.arange(3))
    return torch.where(mask, a, torch.zeros(()))


@declines()
def vmapped(m, a):
    return torch.vmap(lambda row: row * row.sum())(a)


@declines()
def gradient(m, a):
    with torch.enable_grad():
        b = a.detach().requires_grad_(True)
        return torch.autograd.grad((b**2).sum(), b)[0]


@declines()
def functional_gradient(m, a):
    return torch.func.grad(lambda t: (t**3).sum())(a)


@declines()
def autocast(m, a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.lin(a)


@declines()
def conditional(m, a):
    return torch.cond(a.sum() > 0, lambda t: t * 2, lambda t: t, (a,))


# --- kinds of tensors -------------------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    pass


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.add else out


DECLINES["subclass_input"] = lambda: (Call(lambda m, a: a + 1).eval(), (x().as_subclass(Tagged),))
DECLINES["subclass_inside"] = lambda: (Call(lambda m, a: torch.ones(4).as_subclass(Doubling).add(a)).eval(), (x(),))
DECLINES["sparse_input"] = lambda: (Call(lambda m, a: torch.mm(a, a.to_dense())).eval(), (torch.eye(4).to_sparse(),))
DECLINES["sparse_buffer"] = lambda: (Call(lambda m, a: m.s @ a, s=torch.eye(4).to_sparse()).eval(), (x(4, 4),))
DECLINES["conjugate_input"] = lambda: (
    Call(lambda m, a: a.real + 1).eval(),
    (torch.complex(x(), x(seed=1)).conj(),),
)


@declines()
def sparse_inside(m, a):
    return a.to_sparse().to_dense()


@takes(lambda: torch.complex(x(), x(seed=1)))
def complex_numbers(m, a):
    return (a * a).real, torch.view_as_real(a).sum(-1)


@declines(lambda: torch.complex(x(), x(seed=1)))
def conjugate(m, a):
    return a * 2 if a.conj().is_conj() else a


@takes(lambda: x(4, 4).t(), lambda: x(1, 4).expand(4, 4))
def strided_inputs(m, a, b):
    return a.contiguous(), a.reshape(-1), b + a, a.to(torch.float32)


@takes(lambda: torch.zeros(0, 4))
def empty(m, a):
    return m.lin(a), a.sum(), torch.cat([a, torch.ones(1, 4)])


@takes()
def several_results(m, a):
    top, order = a.topk(2)
    parts = a.split(2, 1)
    return top, order, parts[1], a.max(0).values, torch.var_mean(a), a.unbind(0)[2]


@takes()
def operators_that_read_values_within(m, a):
    return torch.cov(a), torch.corrcoef(a), torch.combinations(a[0], 3), torch.cov(a, fweights=torch.arange(4))


@takes(lambda: x(9, 2, 5), lambda: torch.tensor([[1, 2, 4], [3, 3, 0]]), lambda: torch.tensor([9, 7]))
def ctc(m, a, targets, lengths):
    a = a.log_softmax(2)
    loss = torch.nn.functional.ctc_loss
    return loss(a, targets, lengths, targets.count_nonzero(1)), loss(a, targets, (9, 8), (3, 2), reduction="none")


@takes()
def promotion(m, a):
    i = torch.arange(4)
    return a * 2, a * torch.tensor(2.0, dtype=torch.float64), i * 2.5, a.half() * torch.tensor(1.5), a.long() + i


def _attributed() -> tuple[Any, tuple[Any, ...]]:
    a = x()
    a.scale = 3.0
    return Call(lambda m, a: a * getattr(a, "scale", 1.0)).eval(), (a,)


DECLINES["input_with_attribute"] = _attributed


@declines()
def tensor_from_elements(m, a):
    return torch.tensor([a[0, 0], a[1, 1]]) * 2


@declines()
def member(m, a):
    return a * 2 if a[0, 0] in [1.0, 2.0] else a


@takes()
def script_function(m, a):
    return _scripted(a) + 1


@takes()
def custom_autograd(m, a):
    return Squares.apply(m.lin(a))


@takes()
def checkpointed(m, a):
    return torch.utils.checkpoint.checkpoint(m.lin, a, use_reentrant=False)


@takes(buf=lambda: torch.zeros(4))
def view_of_written_buffer(m, a):
    m.buf.copy_(a[0])
    m.buf.mul_(2)
    return m.buf[1:], m.buf, a[0]


@takes()
def asks_about_gradients(m, a):
    w = m.lin.weight
    return a * 2 if w.requires_grad and w.is_leaf and isinstance(w, nn.Parameter) and not m.lin(a).requires_grad else a


@declines()
def asks_about_gradients_of_a_result(m, a):
    with torch.enable_grad():
        y = m.lin(a)
    return a * 2 if y.requires_grad else a


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a


@torch.jit.script
def _scripted(a: torch.Tensor) -> torch.Tensor:
    return torch.relu(a) * 2


# --- things around a module -------------------------------------------------------------------------------------------


def _hooked(kind: str) -> tuple[Any, tuple[Any, ...]]:
    m = Call(lambda m, a: m.lin(a)).eval()
    if kind == "pre":
        m.lin.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        m.lin.register_forward_hook(lambda module, args, out: out + 1)
    return m, (x(),)


def _keeping() -> tuple[Any, tuple[Any, ...]]:
    m, kept = Call(lambda m, a: m.lin(a)).eval(), []
    m.lin.register_forward_hook(lambda module, args, out: kept.append(out))
    return m, (x(),)


TAKES["hook"] = lambda: _hooked("post")
TAKES["pre_hook"] = lambda: _hooked("pre")
DECLINES["hook_that_keeps"] = _keeping


def _script() -> tuple[Any, tuple[Any, ...]]:
    class Inner(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    return nn.Sequential(torch.jit.trace(Inner(), x())).eval(), (x(),)


DECLINES["script"] = _script


def _closure() -> tuple[Any, tuple[Any, ...]]:
    weight, lin = torch.ones(4), nn.Linear(4, 4)
    return (lambda a: lin(a) * weight), (x(),)


def _writes_closure() -> tuple[Any, tuple[Any, ...]]:
    total = torch.zeros(4)

    def function(a):
        total.add_(a.sum(0))
        return a + total

    return function, (x(),)


def _caching_function() -> tuple[Any, tuple[Any, ...]]:
    @functools.lru_cache
    def table(n):
        return torch.arange(float(n))

    return Call(lambda m, a: a + table(4)).eval(), (x(),)


TAKES["closure"] = _closure
DECLINES["closure_written"] = _writes_closure
DECLINES["constant_cached_by_function"] = _caching_function


@takes(lambda: {"a": x(), "b": [x(seed=1), 3]}, lambda: None)
def nested_arguments(m, tree, nothing):
    return {"sum": tree["a"] + tree["b"][0] * tree["b"][1], "n": tree["b"][1], "none": nothing}


@takes(lambda: [x()])
def grows_list(m, items):
    items.append(items[0] * 2)
    return items[0] + 1


@declines()
def returns_object(m, a):
    return a, object()
