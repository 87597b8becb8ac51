"""Corners of eager's semantics: rounding and promotion, views written in place, regions, odd types, Python state."""

from __future__ import annotations

import copy
import dataclasses
import enum
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_ugc
from tests.compare import assert_same, clone_args

inf, nan = float("inf"), float("nan")


def same(function: Any, *args: Any, exact: bool = False, calls: int = 2, **options: Any) -> Any:
    """Compiles, calls on copies, and compares results and written inputs with eager's."""
    bound = 0.0 if exact else None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        forge = forge_ugc.compile(function, clone_args(args), **options)
        for _ in range(calls):
            theirs, ours = clone_args(args), clone_args(args)
            assert_same(function(*theirs), forge(*ours), atol=bound, rtol=bound)
            assert_same(theirs, ours, path="args")
    return forge


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- rounding of half types -------------------------------------------------------------------------------------------

HALF: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "mul": lambda h, g, s: (h * s, s * h, h * 0.3),
    "div": lambda h, g, s: (h / s, s / h, h / 0.3, 0.3 / h),
    "add": lambda h, g, s: (h + s, s + h, h - s, s - h, h + 0.3, 0.3 - h),
    "alpha": lambda h, g, s: (torch.add(h, g, alpha=0.3), torch.sub(h, g, alpha=0.3), torch.rsub(h, g, alpha=0.7)),
    "alpha of 0-d": lambda h, g, s: (torch.add(h, s, alpha=0.7), torch.add(h, 0.3, alpha=0.7)),
    "rounding": lambda h, g, s: (h // s, h // 0.3, torch.div(h, s, rounding_mode="trunc"), h % s, torch.fmod(h, s)),
    "compare": lambda h, g, s: (h > s, h == s, torch.maximum(h, s), torch.where(h > 0, h, s), h.clamp(-0.3, 0.3)),
    "chain": lambda h, g, s: ((h * 0.3 + g) * 0.7 - h * s).relu(),
    "int scalar": lambda h, g, s: (h * torch.tensor(257), h + torch.tensor(257), h / torch.tensor(257)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_half_types_round_where_eager_does(name: str, dtype: torch.dtype) -> None:
    h, g = randn(16, 64).to(dtype), randn(64, 16).view(16, 64).to(dtype)
    same(HALF[name], h, g, torch.tensor(0.3), exact=True, calls=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_default_epsilon_of_rms_norm(dtype: torch.dtype) -> None:
    small = (randn(4, 64) * 1e-2).to(dtype)
    same(lambda x, w: (F.rms_norm(x, (64,)), F.rms_norm(x, (64,), w)), small, randn(64).to(dtype))


def test_integers_wrap_and_do_not_pass_through_floats() -> None:
    i, u = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32), torch.tensor([250, 3], dtype=torch.uint8)
    same(
        lambda i, u: (i + 1, i * 2, -i, i.abs(), u + 10, u - 5, -u, u << 1, u.sum(), u.cumsum(0), u * 2.5, 3 - u), i, u
    )
    big = torch.tensor([2**53 + 1, -(2**62) - 1, 2**63 - 1])
    same(lambda x: (x + (2**53 + 1), x == 2**53 + 1, x // 3, x % 1000, x.max(), torch.where(x > 0, x, 2**60 + 1)), big)


def test_signs_of_remainders_and_quotients_by_zero() -> None:
    a, b = torch.tensor([7, -7, 7, -7, 0]), torch.tensor([3, 3, -3, -3, 5])
    same(lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), 7 // b, a % -2), a, b)
    x, y = torch.tensor([1.0, -1, 0, nan, inf]), torch.tensor([0.0, -0.0, 0, 1, inf])
    same(lambda x, y: (x / y, x // y, x % y, torch.fmod(x, y), x**y, y**x, torch.atan2(x, y), x.clamp(1, 0)), x, y)
    same(lambda x: (x.argmax(), x.max(), x.sort().values, x.topk(2).values, x.nan_to_num(), x.logsumexp(0)), x)


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_masks() -> None:
    q, k, v = randn(2, 2, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 4)
    sdpa = F.scaled_dot_product_attention
    same(lambda q, k, v: (sdpa(q, k, v, is_causal=True), sdpa(k, q, q, is_causal=True)), q, k, v)
    hidden = torch.full((5, 7), -inf)
    hidden[1:, :3] = 0
    same(lambda q, k, v, m: (sdpa(q, k, v, attn_mask=m), sdpa(q, k, v, attn_mask=m == 0)), q, k, v, hidden)
    same(lambda q, k, v, m: ((q @ k.mT * 0.3) + m).softmax(-1) @ v, q, k, v, hidden)

    def soft_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(5)[:, None], torch.arange(7)[None]
        scores = torch.tanh(q @ k.mT / 5) * 5 - 0.25 * (i - j).abs()
        return scores.masked_fill((j > i) | (i - j >= 3), -inf).softmax(-1) @ v

    same(soft_capped, q, k, v)


# --- writes -----------------------------------------------------------------------------------------------------------


def test_views_written_in_place() -> None:
    def write(x: torch.Tensor) -> Any:
        x = x.clone()
        x[:, 1:] += 1
        x.t().add_(torch.arange(4.0))
        x[::2] *= 2
        x.view(-1)[3:6] = 7
        x[0, ...] = x[1]
        x[x > 1] = 0.5
        x[[0, 2]] = x[[2, 0]]
        x.diagonal().fill_(9)
        x[:, None, 1:3] -= 1
        x.narrow(0, 1, 2).zero_()
        x.select(1, 1).copy_(torch.arange(4))
        a, b = x.chunk(2)
        a.add_(1)
        b.sub_(a)
        return x, a

    same(write, randn(4, 5))


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 2, 6, 4))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        self.n += 1
        self.k[:, :, at] = x
        before = self.k.clone()
        self.k[:, :, 1:3] = x[:, :, :1]
        self.k.scatter_(2, at[None, None, :, None].expand(1, 2, 2, 4), x * self.n)
        return before, self.k[:, :, :3], self.n


def test_caches_in_buffers() -> None:
    ours, theirs = Cache().eval(), Cache().eval()
    x, at = randn(1, 2, 2, 4), torch.tensor([3, 5])
    forge = forge_ugc.compile(ours, (x, at))
    for shift in (0, -1, -3):
        assert_same(theirs(x, at + shift), forge(x, at + shift))
        assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))


# --- Python state -----------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.table = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(3.0)
        return x * self.calls + self.table


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_numbers_that_forward_changes_are_warned_of() -> None:
    model = Counts().eval()
    with pytest.warns(UserWarning, match="forward.. changes calls"):
        forge_ugc.compile(model, torch.ones(3))
    assert model.calls == 0 and model.table is None


@dataclasses.dataclass
class Inner:
    a: torch.Tensor
    n: int
    none: Any = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    items: list[Any]


class Dataclasses(nn.Module):
    def forward(self, x: torch.Tensor) -> Outer:
        return Outer(Inner(x + 1, 3), [x * 2, None])


def test_dataclasses_in_and_out() -> None:
    x = randn(2, 4)
    out = forge_ugc.compile(Dataclasses().eval(), x)(x)
    assert type(out) is Outer and type(out.inner) is Inner and out.inner.n == 3 and out.inner.none is None
    assert torch.equal(out.inner.a, x + 1) and torch.equal(out.items[0], x * 2) and out.items[1] is None
    forge = forge_ugc.compile(lambda d: d.a * d.n, (Inner(x, 2),))
    assert torch.equal(forge(Inner(x + 1, 2)), (x + 1) * 2)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


def test_constants_in_and_out() -> None:
    """Leaves that are no tensors: handed through, part of what the model is compiled for."""

    def function(x: torch.Tensor, rows: slice, at: range, dtype: torch.dtype, mode: Mode, turn: complex) -> Any:
        y = x * 2 if mode is Mode.DOUBLED else x
        return y[rows], [y[i] for i in at], y.to(dtype), x * turn, dtype, mode, x.device, x.shape, {"size": y[0].size()}

    args = (randn(4, 3), slice(1, 3), range(2), torch.float64, Mode.DOUBLED, 2j)
    forge = same(function, *args)
    for i, other in ((1, slice(1, 4)), (3, torch.float16), (4, Mode.PLAIN)):
        with pytest.raises(TypeError, match="fixed when compiling"):
            forge(*args[:i], other, *args[i + 1 :])


def test_what_a_graph_would_leave_out_is_refused() -> None:
    """torch.export says nothing of the first, and little of the others."""
    layer = nn.Linear(3, 3).eval()
    with pytest.raises(forge_ugc.CompileError, match="seeds"):
        forge_ugc.compile(lambda x: (torch.manual_seed(3), x + torch.rand(3))[1], randn(3))
    for model in (torch.jit.trace(layer, randn(3)), nn.Sequential(torch.jit.script(layer)).eval()):
        with pytest.raises(forge_ugc.CompileError, match="TorchScript"):
            forge_ugc.compile(model, randn(3))


def test_replaced_submodules_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))).eval()
    forge = forge_ugc.compile(model, randn(2, 4))
    inner, twin = model[1], copy.deepcopy(forge)
    inner[0] = nn.GELU()
    with pytest.raises(RuntimeError, match="submodule was replaced"):
        forge(randn(2, 4))
    twin(randn(2, 4))


# --- types that C does not carry --------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eight", randn(4, 4).to(torch.float8_e4m3fn))
        self.register_buffer("short", torch.arange(4).to(torch.uint16))
        self.register_buffer("complex", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("deep", randn(1, 1, 1, 1, 1, 1, 1, 1, 1, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.eight.float(), x * self.short.int(), (x * self.complex).real, self.eight, self.deep.sum() + x


def test_weights_of_odd_types_and_ranks() -> None:
    same(Odd().eval(), randn(2, 4))


class Empty(nn.Module):
    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("empty", torch.empty(shape))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.empty)


def test_buffers_without_elements() -> None:
    same(Empty(lambda x, e: (x + e.sum(), e, e.view(2, 0) + 1), 0).eval(), randn(2, 4))
    same(Empty(lambda x, e: (x * e.prod(0), x[:, :0] @ e), 0, 4).eval(), randn(2, 4))


def test_inputs_of_odd_types() -> None:
    same(
        lambda f, u, c: (f.float() * 2, f, u.to(torch.int32) + 1, c.abs(), c.conj() * 2, c.real),
        randn(3).to(torch.float8_e5m2), torch.tensor([1, 2], dtype=torch.uint16), torch.complex(randn(3), randn(3)),
    )  # fmt: skip


# --- dynamic shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [torch.export.Dim("n"), torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO])
def test_an_example_of_size_one_keeps_the_dimension_open(size: Any) -> None:
    model = nn.Linear(4, 3).eval()
    forge = forge_ugc.compile(model, torch.ones(1, 4), dynamic_shapes=({0: size},))
    for n in (1, 5, 2):
        x = randn(n, 4)
        with torch.no_grad():
            assert_same(model(x), forge(x))


# --- regions ----------------------------------------------------------------------------------------------------------


def test_regions_inside_forward() -> None:
    def regions(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x * 2
        with torch.enable_grad():
            z = y.clone() + 1
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            low = z[None] @ z[:, None]
            with torch.autocast("cpu", enabled=False):
                full = z[None] @ z[:, None]
        return y, z, low, full

    forge = same(regions, randn(3))
    with torch.inference_mode():
        x = randn(3)
        assert_same(regions(x), forge(x))


def test_caches_of_encoder_and_decoder() -> None:
    """transformers' pair of caches comes out of forward() and goes into the next step, where it grows in place."""
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = transformers.T5Model(transformers.T5Config(**small)).eval()
    first = {"input_ids": torch.randint(3, 64, (1, 5)), "decoder_input_ids": torch.tensor([[3, 4]])}
    with torch.no_grad():
        expected = model(**first)
        got = forge_ugc.compile(model, (), first)(**first)
        assert_same(expected, got)

        (name,) = (key for key, value in expected.items() if hasattr(value, "cross_attention_cache"))
        step = {"encoder_outputs": (expected.encoder_last_hidden_state,), "decoder_input_ids": torch.tensor([[7]])}
        theirs, ours = {**step, name: expected[name]}, {**step, name: got[name]}
        inner = got[name].self_attention_cache
        forge = forge_ugc.compile(model, (), clone_args(ours))
        assert_same(model(**theirs), forge(**ours))
        assert_same(expected[name], got[name])
        assert got[name].self_attention_cache is inner and inner.get_seq_length() == 3


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_caches_beside_writes(capture: str) -> None:
    """The decoder's input is made of the labels, by writes into slices; caches are among the results."""
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).eval()
    inputs = {"input_ids": torch.randint(3, 64, (1, 5)), "labels": torch.tensor([[5, 6, -100]])}
    forge = forge_ugc.compile(model, (), inputs, capture=capture)
    assert forge.report["capture"] == ("fast" if capture == "auto" else "export")
    inputs["labels"] = torch.tensor([[9, -100, 8]])
    with torch.no_grad():
        assert_same(model(**inputs), forge(**inputs))
