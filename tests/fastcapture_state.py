"""Modules that write, keep state or draw random numbers: what a recorder of calls may get wrong."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.fastcapture_registry import DECLINES, TAKES, Call, declines, takes, x

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


@takes()
def write_through_view(m, a):
    y = m.lin(a)
    y[:, 0] = 1
    return y


@takes()
def write_through_input_view(m, a):
    a[:, 0].zero_()
    return a * 2


@takes()
def write_with_live_view(m, a):
    y = m.lin(a)
    v = y.view(-1)
    y.add_(1)
    return v.sum(), y


@takes()
def write_through_views_of_views(m, a):
    y = m.lin(a)
    rows = y.t().unsqueeze(0)[:, 1:3]
    before = rows * 1
    rows[0, 0] = 7
    rows.mul_(2)
    y.view(-1)[::3] -= 1
    return before, rows * 1, y


@takes()
def write_parts(m, a):
    y = m.lin(a)
    left, right = y.split(2, 1)
    last = y.unbind(0)[-1]
    for i, part in enumerate((*y.chunk(3, 1), *right.split_with_sizes([1, 1], 1), last, y.narrow(1, -2, 1))):
        part.add_(i + 1.5)
    y.diagonal(1).fill_(5)
    y.permute(-1, 0)[0].neg_()
    y.transpose(0, 1).swapaxes(0, 1).T[3].copy_(a[:, 0])
    y.unflatten(1, (2, 2))[:, 1].squeeze().view_as(right).mul_(right)
    y.expand(2, 3, 4)  # not alive when y is written
    wide = y[:1].expand(3, 4)
    y[a > 0] = 0
    y[[0, 2], 1:] += 1
    return left * 1, right * 1, last.sum(), wide * 2, y


@takes()
def write_view_of_reshaped(m, a):
    y = m.lin(a)
    y = y.reshape(2, 6)
    y[:, 1:] = y[:, :-1].clone()
    return y


@takes()
def write_shifted(m, a):
    """As transformers makes the decoder's input of the labels."""
    shifted = a.new_zeros(a.shape)
    shifted[:, 1:] = a[:, :-1].clone()
    shifted[:, 0] = 3
    return shifted.masked_fill_(shifted < 0, 9)


@takes(buf=lambda: torch.zeros(3, 4))
def write_views_of_state(m, a):
    rows, flat = m.buf[1:], m.buf.view(-1)
    rows.copy_(a[1:])
    flat[:2].add_(a[0, :2])
    m.buf.mul_(2)
    return rows, flat[1:], m.buf.sum()


@declines()
def write_expanded(m, a):
    y = m.lin(a)
    v = y[:1].expand(3, 4)
    v.add_(1)
    return y, v


@declines()
def write_where_a_reshape_may_see_it(m, a):
    v = a.reshape(-1)
    a.add_(1)
    return v * 1


@declines()
def write_reshape_that_may_copy(m, a):
    y = m.lin(a)
    v = y.t().reshape(-1)
    v.add_(1)
    return y, v


@takes()
def write_detached(m, a):
    a.detach().add_(1)
    return a * 2


@takes()
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


@takes()
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


class Recurrent(nn.Module):
    """Holds its parameters in a list of its own besides."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(4, 4, batch_first=True, num_layers=2, dropout=0.5, **options)

    def forward(self, a):
        return self.rnn(a)[0] * torch.stack([p.sum() for p in self.rnn._flat_weights]).sum()


TAKES["lstm"] = lambda: (Recurrent(nn.LSTM, bidirectional=True).eval(), (x(2, 3, 4),))
TAKES["gru"] = lambda: (Recurrent(nn.GRU, bias=False).eval(), (x(2, 3, 4),))
TAKES["rnn"] = lambda: (Recurrent(nn.RNN).eval(), (x(2, 3, 4),))
TAKES["rnn_relu"] = lambda: (Recurrent(nn.RNN, nonlinearity="relu").eval(), (x(2, 3, 4),))


def _recurrent_in_training():
    model = Recurrent(nn.GRU).eval()
    model.rnn.training = True  # so its dropout draws
    return model, (x(2, 3, 4),)


DECLINES["recurrent_in_training"] = _recurrent_in_training
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
