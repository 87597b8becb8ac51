"""Modules that a recorder of calls may get wrong, for tests/test_fastcapture.py.

TAKES and DECLINES: name -> function that builds (model, example arguments). What is in TAKES must be recorded and equal
eager on other inputs; what is in DECLINES must be refused.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Case = Callable[[], tuple[Any, tuple[Any, ...]]]
TAKES: dict[str, Case] = {}
DECLINES: dict[str, Case] = {}


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


class Call(nn.Module):
    """forward() is `function(self, *args)`; `state` are parameters, buffers or plain attributes."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.startswith("plain"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _register(table: dict[str, Case], inputs: Any, state: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def case() -> tuple[Any, tuple[Any, ...]]:
            torch.manual_seed(0)
            made = {k: v() if callable(v) and not isinstance(v, nn.Module) else v for k, v in state.items()}
            return Call(function, **made).eval(), tuple(v() for v in inputs)

        table[function.__name__] = case
        return function

    return wrap


def takes(*inputs: Any, **state: Any) -> Any:
    return _register(TAKES, inputs or (x,), state)


def declines(*inputs: Any, **state: Any) -> Any:
    return _register(DECLINES, inputs or (x,), state)


# --- writing ----------------------------------------------------------------------------------------------------------


@takes()
def write_own_result(m, a):
    y = m.lin(a)
    y.mul_(2).add_(a)
    return y.relu_()


@takes()
def write_input(m, a):
    a.mul_(2)
    return m.lin(a), a


@takes(buf=lambda: torch.zeros(4))
def write_buffer(m, a):
    m.buf.add_(a.sum(0))
    return a + m.buf


@takes(count=lambda: torch.zeros((), dtype=torch.int64))
def buffer_counter(m, a):
    m.count += 1
    return a * m.count


@takes(lambda: x(2, 1, 4), lambda: torch.tensor([2]), cache=lambda: torch.zeros(2, 5, 4))
def static_cache(m, a, position):
    m.cache.index_copy_(1, position, a)
    return m.cache.sum(1)


@takes()
def write_integer_by_float_comparison(m, a):
    y = a + 1
    y.gt_(0.5)
    return y


@takes()
def write_dead_view(m, a):
    y = m.lin(a)
    z = y.t() * 1
    y.add_(1)
    return y, z


@declines()
def write_through_view(m, a):
    y = m.lin(a)
    y[:, 0] = 1
    return y


@declines()
def write_through_input_view(m, a):
    a[:, 0].zero_()
    return a * 2


@declines()
def write_with_live_view(m, a):
    y = m.lin(a)
    v = y.view(-1)
    y.add_(1)
    return v.sum(), y


@declines()
def write_reshape_that_may_copy(m, a):
    y = m.lin(a)
    v = y.t().reshape(-1)
    v.add_(1)
    return y, v


@declines()
def write_detached(m, a):
    a.detach().add_(1)
    return a * 2


@declines()
def write_dot_data(m, a):
    a.data.add_(1)
    return a * 2


@declines()
def assign_dot_data(m, a):
    y = m.lin(a)
    y.data = a.clone()
    return y * 2


@declines()
def assign_parameter_data(m, a):
    m.lin.weight.data = m.lin.weight.data * 2
    return m.lin(a)


@takes()
def write_parameter(m, a):
    with torch.no_grad():
        m.lin.weight.add_(1)
    return m.lin(a)


@declines()
def write_parameter_row(m, a):
    with torch.no_grad():
        m.lin.weight[0] += 1
    return m.lin(a)


@declines()
def write_broadcast_tensors(m, a):
    y, z = m.lin(a), a * 2
    (v, _) = torch.broadcast_tensors(y, z)
    y.add_(1)
    return v * 1


@declines()
def write_broadcast_result(m, a):
    y, z = m.lin(a), a * 2
    (v, _) = torch.broadcast_tensors(y, z)
    v.add_(1)
    return y * 1


@declines()
def write_constant(m, a):
    buffer = torch.empty(3, 4)
    buffer.copy_(a)
    return buffer * 2


@declines()
def write_out(m, a):
    y = a * 2
    torch.add(a, 1, out=y)
    return y


@declines()
def write_set(m, a):
    y = m.lin(a)
    y.set_(a)
    y.add_(1)
    return a * 1


@declines()
def write_transposed_in_place(m, a):
    y = a @ a.t()
    y.t_()
    return y.add_(1)


@declines()
def write_as_strided(m, a):
    y = m.lin(a)
    return torch.as_strided(y, (2, 2), (1, 2)) * 2


@takes()
def constant_written_later(m, a):
    t = torch.zeros(4)
    y = a + t
    t.add_(5)
    return y, a + t


@takes()
def constant_written_through_its_view(m, a):
    t = torch.arange(4.0)
    y = a + t
    t[1:] = 7
    t.data[0] = -1
    return y, a + t


# --- state ------------------------------------------------------------------------------------------------------------


@declines()
def store_symbol(m, a):
    m.last = m.lin(a)
    return m.last * 2


@declines()
def store_constant(m, a):
    m.table = torch.arange(4.0)
    return a + m.table


@declines(things=list)
def store_in_list(m, a):
    m.things.append(a * 2)
    return a + len(m.things)


@declines(things=dict)
def store_constant_in_dict(m, a):
    if "t" not in m.things:
        m.things["t"] = torch.arange(4.0)
    return a + m.things["t"]


@declines(buf=lambda: torch.zeros(4))
def rebind_buffer(m, a):
    m.buf = m.buf + a.sum(0)
    return a + m.buf


@declines(calls=0)
def count_calls(m, a):
    m.calls += 1
    return a * m.calls


@declines(buf=lambda: torch.ones(()))
def branch_on_buffer(m, a):
    return a * 2 if m.buf > 0 else a


@declines(buf=lambda: torch.arange(4.0))
def buffer_as_list(m, a):
    return a * sum(m.buf.tolist())


@declines(buf=lambda: torch.arange(4.0))
def buffer_as_numpy(m, a):
    return a + torch.from_numpy(m.buf.numpy() * 2)


@declines(buf=lambda: torch.arange(4.0))
def buffer_item(m, a):
    return a * m.buf[1].item()


@declines(buf=lambda: torch.arange(4.0))
def buffer_numpy_caught(m, a):
    try:
        scale = float(np.asarray(m.buf).sum())
    except Exception:
        scale = 1.0
    return a * scale


@declines(buf=lambda: torch.arange(4.0))
def same_memory(m, a):
    return a * 2 if m.buf.data_ptr() == a.data_ptr() else a * 3


@takes(buf=lambda: torch.arange(4.0), plain=lambda: torch.ones(4), plains=lambda: [torch.full((4,), 3.0)])
def kinds_of_state(m, a):
    return m.lin(a) + m.buf + m.plain + m.plains[0] + torch.tensor([1.0, 2.0, 3.0, 4.0])


@takes()
def return_state(m, a):
    return m.lin.weight, m.lin.bias[1:], a, a.view(-1), a.t()


class Shared(nn.Module):
    """A buffer that is a view of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, a):
        self.whole.add_(1)
        return a * 2, self.part + 1


DECLINES["shared_buffers"] = lambda: (Shared().eval(), (x(),))


class Lstm(nn.Module):
    """Holds its parameters in a list of its own besides."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, a):
        return self.rnn(a)[0] * torch.stack([p.sum() for p in self.rnn._flat_weights]).sum()


DECLINES["recurrent"] = lambda: (Lstm().eval(), (x(2, 3, 4),))
TAKES["attention_module"] = lambda: (nn.MultiheadAttention(4, 2, batch_first=True).eval(), (x(2, 3, 4),) * 3)
TAKES["encoder_layer"] = lambda: (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (x(2, 3, 4),))
TAKES["batch_norm"] = lambda: (nn.BatchNorm1d(4).eval(), (x(),))
TAKES["inputs_that_are_one_tensor"] = lambda: (lambda t: (Call(lambda m, a, b: a - b).eval(), (t, t)))(x())

# --- randomness -------------------------------------------------------------------------------------------------------


@declines()
def draw(m, a):
    return a + torch.rand(4)


@declines()
def draw_like(m, a):
    return a + torch.randn_like(a)


@declines()
def draw_unused(m, a):
    torch.rand(3)
    return a * 2


@declines()
def dropout(m, a):
    return F.dropout(a, 0.5)


@declines(lambda: x(1, 2, 3, 4))
def attention_dropout(m, a):
    return F.scaled_dot_product_attention(a, a, a, dropout_p=0.3)


@declines(mean=lambda: torch.zeros(4), var=lambda: torch.ones(4))
def running_statistics(m, a):
    return F.batch_norm(a, m.mean, m.var, training=True), m.mean * 1


@declines(lambda: x(2, 4, 5), mean=lambda: torch.zeros(4), var=lambda: torch.ones(4))
def running_instance_statistics(m, a):
    return F.instance_norm(a, m.mean, m.var, use_input_stats=True), m.mean * 1


DECLINES["training"] = lambda: (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(), (x(),))
DECLINES["one_dropout_in_training"] = lambda: (nn.Sequential(nn.Linear(4, 4).eval(), nn.Dropout(0.5)), (x(),))


@takes()
def dropout_off(m, a):
    return F.dropout(a, 0.5, training=False), F.dropout(m.lin(a), 0.0)


@declines()
def python_generator(m, a):
    torch.manual_seed(3)
    return a + random.random() * 0


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
