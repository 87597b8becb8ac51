"""A KV cache of a fixed size on the NPU: attention reads the old cache and the new rows, all of a step is one segment,
and the rows are written in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge_ugc
from forge_ugc import npu
from forge_ugc.testing import SoftwareNpu, software_npu
from tests import ze_client
from tests.npu_decode import WithCache, arguments
from tests.opcheck import tensor

pytest.importorskip("transformers")
from forge_ugc.integrations.transformers import compile_config
from tests.test_generation import NAMES, generate, model_of, prompts

B, H, G, T, D = 2, 4, 2, 12, 8


class Step(torch.nn.Module):
    """Attention of `s` tokens to a cache that their keys and values are written into."""

    def __init__(self, s: int, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.s, self.q, self.out = s, torch.nn.Linear(width, H * D), torch.nn.Linear(H * D, width)
        self.k, self.v = torch.nn.Linear(width, G * D), torch.nn.Linear(width, G * D)

    def forward(self, x: Any, keys: Any, values: Any, length: Any, mask: Any) -> Any:
        at = torch.arange(self.s) + length
        q, k, v = (
            part(x).view(x.shape[0], self.s, n, D).transpose(1, 2)
            for part, n in ((self.q, H), (self.k, G), (self.v, G))
        )
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], self.s, H * D))


def mask_of(kind: str, s: int, length: int, batch: int = B) -> torch.Tensor:
    """[batch, 1, s, T]: query i sees the positions up to length + i, but for the first of the second row.
    A row that is all finfo.min means nothing on an NPU, so there it sees its own position."""
    seen = torch.arange(T) <= torch.arange(length, length + s)[:, None]
    seen = seen.expand(batch, 1, s, T).clone()
    seen[1:, :, :, 0] = kind == "least" and length == 0
    if kind == "bool":
        return seen
    low = float("-inf") if kind == "float" else torch.finfo(torch.float32).min
    return torch.zeros(seen.shape).masked_fill(~seen, low)


def caches() -> list[torch.Tensor]:
    """Keys and values; the rows behind are what an earlier use has left."""
    return [tensor(B, G, T, D, seed=seed) for seed in (5, 6)]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float", "least"])
@pytest.mark.parametrize(("s", "length"), [(1, 0), (1, 5), (1, T - 1), (3, 0), (4, 7)])
def test_attention_to_a_cache(s: int, length: int, kind: str) -> None:
    model, x, mask = Step(s).eval(), tensor(B, s, 32, seed=7), mask_of(kind, s, length)
    fast = forge_ugc.compile(model, (x, *caches(), torch.tensor(2), mask), device="npu:emulate")
    assert fast.report["transitions"]["after"] == 2
    expected, got = caches(), caches()
    pointers = [t.data_ptr() for t in got]
    want = model(x, *expected, torch.tensor(length), mask)
    torch.testing.assert_close(fast(x, *got, torch.tensor(length), mask), want, atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    for a, b, old in zip(got, expected, caches(), strict=True):  # the other rows are untouched
        rest = [i for i in range(T) if not length <= i < length + s]
        assert torch.equal(a[:, :, rest], old[:, :, rest]) and torch.equal(b[:, :, rest], old[:, :, rest])
    assert [t.data_ptr() for t in got] == pointers
    plan = fast._kept()
    assert len(plan.in_place) == 2, "a copy of the cache is made"


@torch.no_grad()
def test_positions_are_checked_before_the_cache_is_written() -> None:
    model, x, mask = Step(1).eval(), tensor(B, 1, 32), mask_of("bool", 1, 3)
    fast = forge_ugc.compile(model, (x, *caches(), torch.tensor(2), mask), device="npu:emulate")
    for wrong in (T, -1):
        got = caches()
        with pytest.raises(IndexError):
            fast(x, *got, torch.tensor(wrong), mask)
        assert all(torch.equal(a, b) for a, b in zip(got, caches(), strict=True))


@torch.no_grad()
def test_what_is_left_as_it_is() -> None:
    """No mask, a mask for all keys alike, positions that may repeat: right all the same."""

    def no_mask(x: Any, keys: Any, at: Any) -> Any:
        keys.index_copy_(2, at, x)
        return F.scaled_dot_product_attention(x, keys, keys)

    def one_column(x: Any, keys: Any, at: Any) -> Any:
        keys.index_copy_(2, at, x)
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=torch.ones(2, 1, dtype=torch.bool))

    for function in (no_mask, one_column):
        x, at = tensor(1, 2, 2, 8), torch.tensor([3, 1])
        fast = forge_ugc.compile(function, (x, tensor(1, 2, 9, 8, seed=1), at), device="npu:emulate")
        a, b = tensor(1, 2, 9, 8, seed=1), tensor(1, 2, 9, 8, seed=1)
        torch.testing.assert_close(fast(x, a, at), function(x, b, at), atol=3e-3, rtol=3e-3)
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
        notes = [r["text"] for r in fast.report["remarks"] if r["pass"] == "cache_update"]
        assert any(note.startswith("declined: ") for note in notes), notes


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[SoftwareNpu]:
    ze_client.require_software_npu()
    torch._dynamo.reset()
    with software_npu() as device, warnings.catch_warnings():
        warnings.simplefilter("error", forge_ugc.FallbackWarning)
        yield device
        torch._dynamo.reset()
        npu.settle(60)
    assert not device.misuses()


def executions(device: SoftwareNpu) -> int:
    return device.counters().get("zeCommandQueueExecuteCommandLists", 0)


def on_npu(calls: int) -> list[Any]:
    """The graphs that were compiled, after a look that each is one segment of the NPU and ran in it."""
    graphs = forge_ugc.last_reports()
    assert all(g.fallback == "" and g.eager_calls == 0 for g in graphs)
    assert sum(g.calls for g in graphs) == calls
    for g in graphs:
        assert g.report["device"] == "npu" and g.report["npu"]["segments"] == 1
        assert g.report["transitions"]["after"] == 2
    return graphs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in ("Granite", "Qwen2") else []) for n in NAMES]
)
def test_generate_on_the_npu(device: SoftwareNpu, name: str) -> None:
    """The same tokens as eager's, each step of which is one segment."""
    model, steps = model_of(name), 10
    for lengths in ([5], [2, 7]):
        inputs = prompts(lengths)
        expected = generate(model, inputs, steps)
        before, executed = sum(g.calls for g in forge_ugc.last_reports()), executions(device)
        config = compile_config(device="npu", npu_options={"types": "f32", "border": "f32"})
        got = generate(model, inputs, steps, compile_config=config)
        assert torch.equal(got, expected)
        on_npu(before + steps - 1)
        assert executions(device) == executed + steps - 1


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_steps_on_the_npu(device: SoftwareNpu, name: str) -> None:
    """A graph for the prompt and one for a step, with the cache as input and output."""
    model, size, prompt, batch = model_of(name), 16, 5, 2
    options: dict[str, Any] = dict(device="npu", npu_options={"types": "f32", "border": "f32"})
    ids = torch.randint(3, 90, (batch, size), generator=torch.Generator().manual_seed(2))
    caches, logits = [], []
    for compiled in (False, True):
        functions: list[Any] = [WithCache(model, batch, size, started) for started in (False, True)]
        state, found = functions[0].state(), []
        for first, count in [(0, prompt), *((p, 1) for p in range(prompt, prompt + 4))]:
            args = arguments(ids[:, first : first + count], first, size)
            which = int(first > 0)
            if compiled and isinstance(functions[which], WithCache):
                fast = forge_ugc.compile(functions[which], (*args, *(t.clone() for t in state)), **options)
                assert fast.report["transitions"]["after"] == 2 and fast.report["npu"]["segments"] == 1
                functions[which] = fast
            found.append(functions[which](*args, *state))
            assert found[-1].shape[:2] == (batch, 1)  # lm_head for the last position alone
        if compiled:
            written = [where for where, _ in functions[1]._kept().lowered.plan.writes]
            copied = set(written) - {where for _, _, where in functions[1]._kept().in_place}
            assert all(state[where - 3].dim() == 0 for where in copied), "a copy of the cache is made"
        caches.append(state)
        logits.append(found)
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-4)
