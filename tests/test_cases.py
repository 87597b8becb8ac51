"""Each module of tests/cases through forge_ugc.compile: what its docstring says, asserted."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings

import pytest
import torch

import forge_ugc
from tests import cases
from tests.compare import assert_same, clone_args, leaves, tensors

NAMES = sorted(m.name for m in pkgutil.iter_modules(cases.__path__))
ONE_GRAPH = [n for n in NAMES if not n.startswith(("c10_", "c24_"))]  # those two have tests of their own below

# transformers renames arguments from one release to the next and says so at each call.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def load(name):
    (full,) = (n for n in NAMES if n.startswith(name))
    return importlib.import_module(f"tests.cases.{full}")


def compiled_case(name, **sizes):
    """(compiled model, its module, args, kwargs). The arguments are fresh: compile() got copies."""
    model, args, kwargs = load(name).case(**sizes)
    return forge_ugc.compile(model, clone_args(args), clone_args(kwargs)), model, args, kwargs


def calls_of(name):
    module = load(name)
    _, args, kwargs = module.case()
    return [(args, kwargs), *(module.more() if hasattr(module, "more") else [])]


def state(model):
    return {k: v.detach().clone() for k, v in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_same_as_eager(name):
    """Calls give eager's outputs, writes what eager writes into arguments and buffers, alters no earlier result."""
    eager_model = load(name).case()[0]
    forge_model, args, kwargs = load(name).case()
    before, example = state(forge_model), (clone_args(args), clone_args(kwargs))
    compiled = forge_ugc.compile(forge_model, args, kwargs)
    assert_same(before, state(forge_model), 0, 0, "state after compile()")
    assert_same(example, (args, kwargs), 0, 0, "example inputs after compile()")

    kept = []
    for number, (args, kwargs) in enumerate(calls_of(name)):
        eager_in, forge_in = (clone_args(args), clone_args(kwargs)), (clone_args(args), clone_args(kwargs))
        with torch.no_grad():
            expected = eager_model(*eager_in[0], **eager_in[1])
            got = compiled(*forge_in[0], **forge_in[1])
        assert_same(expected, got, path=f"call {number}")
        assert_same(eager_in, forge_in, path=f"arguments after call {number}")
        assert_same(state(eager_model), state(forge_model), path=f"state after call {number}")
        kept.append((got, clone_args(got)))
    for number, (got, copy) in enumerate(kept):
        assert_same(copy, got, 0, 0, f"result of call {number} after the later calls")


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_outputs_own_their_memory(name):
    """An output shares memory with an argument only where eager's does, and never with another call's output."""
    eager_model, args, kwargs = load(name).case()
    compiled, _, _, _ = compiled_case(name)

    def shared(model):
        call = (clone_args(args), clone_args(kwargs))
        with torch.no_grad():
            out = model(*call[0], **call[1])
        owned = {t.untyped_storage().data_ptr() for t in tensors(call) if t.numel()}
        return out, [
            path for path, t in leaves(out) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in owned
        ]

    _, eager_shared = shared(eager_model)
    first, forge_shared = shared(compiled)
    assert set(forge_shared) <= set(eager_shared)
    second, _ = shared(compiled)
    storages = [{t.untyped_storage().data_ptr() for t in tensors(out) if t.numel()} for out in (first, second)]
    assert not storages[0] & storages[1]


def test_c01_row_without_keys_is_zero():
    compiled, _, args, _ = compiled_case("c01")
    by_bool, by_ninf, by_lowest = compiled(*args)
    for out in (by_bool, by_ninf):
        assert (out[0, :, 0] == 0).all()
        assert out.isfinite().all()
    assert torch.allclose(by_lowest[0, :, 0], args[2][0].mean(1), atol=1e-6)


def test_c04_padding_changes_nothing_real():
    module = load("c04")
    compiled, model, _, kwargs = compiled_case("c04")
    padded = compiled(**kwargs).logits
    assert padded.isfinite().all()
    bare = {"input_ids": kwargs["input_ids"][:1, module.PADDING :]}
    with torch.no_grad():
        expected = model(**bare).logits
    torch.testing.assert_close(padded[:1, module.PADDING :], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(forge_ugc.compile(model, (), bare)(**bare).logits, expected, atol=1e-5, rtol=1e-5)


def test_c05_callers_cache_grows():
    compiled, _, _, kwargs = compiled_case("c05")
    first, second = clone_args(kwargs), clone_args(kwargs)
    out = compiled(**first)
    assert first["past_key_values"].get_seq_length() == 6
    assert out.past_key_values is first["past_key_values"]
    assert second["past_key_values"].get_seq_length() == 5
    again = compiled(**second)
    assert_same(out.logits, again.logits, 0, 0)
    grown = [t.clone() for t in tensors(first["past_key_values"])]
    compiled(**load("c05").more()[1][1])
    assert_same(grown, tensors(first["past_key_values"]), 0, 0, "the first call's cache after another call")


def test_c05_grown_cache_is_another_shape():
    compiled, *_ = compiled_case("c05")
    longer = load("c05").inputs(9, torch.Generator().manual_seed(1), past=6)
    with pytest.raises(TypeError, match=r"(?s)attention_mask|past_key_values") as error:
        compiled(**longer)
    assert "7" in str(error.value) and "6" in str(error.value)


def test_c08_tied_weight_is_stored_once():
    compiled, model, args, _ = compiled_case("c08")
    table, mix = model.emb.weight, model.mix.weight
    assert list(model.state_dict()) == ["emb.weight", "head.weight", "mix.weight"]
    assert model.head.weight is table
    weights = compiled.report.to_dict()["weights"]
    assert weights["borrowed_bytes"] <= table.nbytes + mix.nbytes

    before = table.detach().clone()
    compiled(*args)
    assert torch.equal(table, before)
    with torch.no_grad():
        table.mul_(1.5)  # the packed form and the table follow alike
        assert_same(model(*args), compiled(*args))


def test_c08_weights_are_packed_once_each_way():
    compiled, model, _, _ = compiled_case("c08", v=4096, d=96)
    table, mix = model.emb.weight.nbytes, model.mix.weight.nbytes
    weights = compiled.report.to_dict()["weights"]
    assert weights["borrowed_bytes"] <= table + mix
    # the table as [vocabulary, width]; mix as it is and transposed; padding to whole panels
    assert weights["packed_bytes"] <= 1.1 * (table + 2 * mix)


def test_c09_structure():
    compiled, _, args, kwargs = compiled_case("c09")
    out = compiled(*args, **kwargs)
    assert list(out) == ["z", "a", "same"]
    assert type(out["z"]).__name__ == "Out" and type(out["a"]) is list
    assert out["z"].extra is None
    assert type(out["z"].n) is int and out["z"].n == 7
    assert out["a"][0].data_ptr() == args[0]["b"].data_ptr(), "an input handed back is that input"


def test_c10_error_names_the_line():
    module = load("c10")
    model, args, kwargs = module.case()
    source, first = inspect.getsourcelines(module.Branches.forward)
    line = first + next(i for i, text in enumerate(source) if "if mask.all()" in text)
    with pytest.raises(forge_ugc.CompileError) as error:
        forge_ugc.compile(model, args, kwargs)
    text = str(error.value)
    assert f"{module.__name__.rpartition('.')[2]}.py:{line}" in text
    assert "torch.where" in text and "torch.cond" in text


def test_c14_caller_sees_the_writes():
    compiled, _, args, _ = compiled_case("c14")
    x, c = clone_args(args)
    out = compiled(x, c)
    assert type(out) is tuple and len(out) == 3
    assert torch.equal(x[:, 1:], args[0][:, 1:] * 2) and (x[:, 0] == 0).all()
    assert torch.allclose(c[0], (args[0] * 2).sum()) and c[1] == 0
    assert out[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x.fill_(3)
    assert (out[1] == 3).all()


def test_c16_overlapping_input_is_not_written_to():
    compiled, _, args, _ = compiled_case("c16")
    copy = clone_args(args)
    compiled(*args)
    assert_same(copy, args, 0, 0)


def test_c18_integral_cumsum():
    compiled, _, args, _ = compiled_case("c18")
    pos, _, sums, total, _, _ = compiled(*args)
    assert pos.dtype == sums.dtype == total.dtype == torch.int64
    assert pos[0, :6].tolist() == [1, 1, 1, 0, 1, 2]
    assert sums[0, -1] == 300 and total == 300


def test_c23_finite():
    compiled, _, args, _ = compiled_case("c23")
    for out in compiled(*args):
        assert out.isfinite().all()


def test_c24_draws_are_draws():
    model, args, _ = load("c24").case()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compiled = forge_ugc.compile(model, args)
    assert sum("train" in str(w.message).lower() for w in seen) == 1
    assert model.training
    assert (model.prev == 0).all()

    def run(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        verdicts = compiled(torch.ones(64))
        assert all(v.dtype == torch.bool and v.shape == () for v in verdicts)
        return verdicts, model.prev.clone()

    draws = []
    for _ in range(3):
        verdicts, prev = run()
        assert all(verdicts), verdicts
        draws.append(prev)
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    (_, first), (_, other), (_, again) = run(7), run(8), run(7)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_c24_dropout_vanishes_under_eval():
    model, args, _ = load("c24").case()
    verdicts = forge_ugc.compile(model.eval(), args)(*args)
    # two draws differ; two eval dropouts do not; the buffer is not what was drawn; in [0, 1); nothing was doubled
    assert [bool(v) for v in verdicts] == [True, False, True, True, False]


def test_c25_dtypes():
    compiled, _, args, _ = compiled_case("c25")
    assert [t.dtype for t in compiled(*args)] == [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("sizes", [{}, {"i": 512, "o": 256, "group": 32}])
def test_c28_weight_stays_four_bits(sizes):
    compiled, model, args, kwargs = compiled_case("c28", **sizes)
    with torch.no_grad():
        assert_same(model(*args, **kwargs), compiled(*args, **kwargs))
    weights = compiled.report.to_dict()["weights"]
    small = model.packed.nbytes + model.scale.nbytes
    assert weights["borrowed_bytes"] + weights["packed_bytes"] <= small + 64  # 64: the scalars 15, 4 and 8
