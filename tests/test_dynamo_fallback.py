"""torch.compile(backend="forge"): what falls back, visibly; beside torch's other tools."""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from forge_ugc import FallbackWarning, last_reports
from forge_ugc.dynamo import forge
from tests.compare import assert_same
from tests.dynamo_check import (
    MARKS,
    MLP,
    calls,
    check,
    fresh,  # noqa: F401 (fixtures)
    pair,
)

pytestmark = MARKS


# --- what falls back --------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_other_devices_fall_back_and_say_so():
    with pytest.warns(FallbackWarning, match="an input is on meta"):
        y = torch.compile(lambda x: x * 2, backend=forge)(torch.randn(3, 3, device="meta"))
    assert y.device.type == "meta"
    (graph,) = last_reports()
    assert graph.calls == 0 and graph.eager_calls == 1 and "on meta" in graph.fallback


def test_tensor_subclasses_fall_back():
    x = torch.randn(3).as_subclass(Wrapped)
    with pytest.warns(FallbackWarning, match="an input is a Wrapped"):
        y = torch.compile(lambda x: x * 2, backend=forge)(x)
    assert type(y) is Wrapped and torch.equal(y.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor) * 2)
    assert calls() == 0


def test_strict_raises():
    compiled = torch.compile(MLP(), backend=forge, options={"strict": True})
    with pytest.raises(Exception, match="require grad"):
        compiled(torch.randn(2, 8))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.linalg.qr(x)[0], backend=forge, options={"strict": True})
    with pytest.raises(Exception, match="linalg_qr"):
        compiled(torch.randn(3, 3))


def test_operators_of_torch_are_named():
    with pytest.warns(FallbackWarning, match="linalg_qr"):
        got = torch.compile(lambda x: torch.linalg.qr(x)[0], backend=forge)(torch.eye(3))
    assert torch.equal(got.abs(), torch.eye(3)) and calls() == 1
    assert last_reports()[0].report["fallbacks"][0]["op"] == "aten.linalg_qr.default"


def test_random_numbers():
    def f(x):
        return F.dropout(x, 0.5) + torch.rand(4)

    compiled = torch.compile(f, backend=forge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(3):
            torch.manual_seed(seed)
            got = compiled(torch.ones(4))
            torch.manual_seed(seed)
            assert_same(got, f(torch.ones(4)))
    assert calls() == 3


def test_errors_of_the_graph_are_torchs():
    compiled = torch.compile(lambda x, i: x[i], backend=forge)
    x = torch.arange(5.0)
    check(compiled, lambda x, i: x[i], x, torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([1, 20]))


# --- torch's other tools ----------------------------------------------------------------------------------------------


def test_cond_and_nested_compile():
    inner = torch.compile(lambda x: x * 3, backend=forge)

    def f(x):
        return inner(x) + torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = torch.compile(f, backend=forge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for x in (torch.ones(3), -torch.ones(3)):
            assert_same(compiled(x), 3 * x + (x + 1 if x.sum() > 0 else x - 1))
    assert calls() == 2


def test_vmap_and_grad_inside():
    def f(x):
        return torch.vmap(lambda row: row.softmax(0) * 2)(x)

    compiled = torch.compile(f, backend=forge)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert_same(compiled(x), f(x))
    assert calls() == 1
    g = torch.compile(lambda x: torch.func.grad(lambda v: (v**3).sum())(x), backend=forge)
    with pytest.warns(FallbackWarning, match="differentiates inside"):
        assert_same(g(x), 3 * x**2)


def test_under_a_transform():
    compiled = torch.compile(lambda x: x * 2 + 1, backend=forge)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(torch.vmap(compiled)(x), x * 2 + 1)


def test_deepcopy_pickle_and_export_afterwards():
    compiled, eager = pair(MLP())
    x = torch.randn(2, 8)
    with torch.no_grad():
        check(compiled, eager, x)
        twin = copy.deepcopy(compiled)
        twin._orig_mod.a.weight.zero_()
        check(compiled, eager, x)
        zeroed = copy.deepcopy(eager)
        zeroed.a.weight.zero_()
        check(twin, zeroed, x)
        again = pickle.loads(pickle.dumps(compiled._orig_mod))
        assert_same(again(x), eager(x))
        buffer = io.BytesIO()
        torch.save(compiled.state_dict(), buffer)
        program = torch.export.export(compiled._orig_mod, (x,))
        assert_same(program.module()(x), eager(x))


def test_reset_and_recompilation():
    compiled, eager = pair(MLP())
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
        torch._dynamo.reset()
        assert last_reports() == []
        check(compiled, eager, torch.randn(2, 8))
        check(compiled, eager, torch.randn(2, 8).double().float())
        check(compiled.double(), eager.double(), torch.randn(2, 8).double())
    assert len(last_reports()) == 2


def test_threads():
    compiled, eager = pair(MLP(), dynamic=True)
    with torch.no_grad():
        inputs = [torch.randn(rows, 8) for rows in (2, 3, 4, 5)]
        expected = [eager(x) for x in inputs]
        check(compiled, eager, inputs[0])
    failures = []

    def work(offset):
        try:
            with torch.no_grad():
                for i in range(40):
                    at = (i + offset) % len(inputs)
                    assert_same(compiled(inputs[at]), expected[at])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert calls() == 161 and len(last_reports()[0].reports) == 4


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_dump(tmp_path, monkeypatch, capture):
    monkeypatch.setenv("FORGE_DUMP", str(tmp_path))
    compiled, eager = pair(MLP(), options={"capture": capture})
    with torch.no_grad():
        check(compiled, eager, torch.randn(2, 8))
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert folder.name.startswith("graph_") and (folder / "report.md").exists()
    aten = (folder / "00_aten.txt").read_text()
    assert re.search(r"gelu.*# .*dynamo_check.py:\d+ in forward", aten)
    assert "self.a.weight" in aten
