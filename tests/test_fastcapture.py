"""Fast capture against eager and against torch.export: the same, or it declines."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import re
import threading
import types

import pytest
import torch

import forge_ugc
from forge_ugc.fastcapture import Unsupported, capture_fast
from tests import cases
from tests.architectures import ARCHITECTURES, tiny
from tests.compare import assert_same, clone_args
from tests.fastcapture_modules import DECLINES, TAKES, Call, x
from tests.models.families import FAMILIES, build, input_ids

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::forge_ugc.FallbackWarning"),
]

TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=97)
WIDTHS = dict.fromkeys(FAMILIES, TINY) | {"gpt2": dict(n_embd=64, n_head=4, vocab_size=97)}

# branches on data, nonzero, draws in training mode, autocast
DECLINED_CASES = {"c10", "c11", "c24", "c25"}


def operators(compiled) -> list[str]:
    """The program: each instruction's operator, in order."""
    return re.findall(r"= *([a-z_.]+)", re.sub(r"#.*", "", compiled.ir("schedule")))


def state(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()} if isinstance(model, torch.nn.Module) else {}


def fresh(value, seed):
    """Arguments like the example's with other numbers."""
    draw = torch.Generator().manual_seed(seed)

    def other(t):
        if not t.is_floating_point() and not t.is_complex():
            return t.clone()
        made = clone_args(t)
        made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,), 0).copy_(
            torch.randn(made.untyped_storage().nbytes() // made.element_size(), generator=draw, dtype=t.dtype)
        )
        return made

    return torch.utils._pytree.tree_map_only(torch.Tensor, other, value)


def same_as_eager(model, twin, calls) -> forge_ugc.CompiledModel:
    """Compiles `model` for the first call, and compares all calls with `twin` in eager mode."""
    args, kwargs = calls[0]
    before, example = state(model), clone_args((args, kwargs))
    compiled = forge_ugc.compile(model, args, kwargs, capture="auto")
    assert_same(before, state(model), 0, 0, "state after compile()")
    assert_same(example, (args, kwargs), 0, 0, "example inputs after compile()")
    for number, call in enumerate(calls):
        eager_in, forge_in = clone_args(call), clone_args(call)
        with torch.no_grad():
            expected = twin(*eager_in[0], **eager_in[1])
            got = compiled(*forge_in[0], **forge_in[1])
        assert_same(expected, got, path=f"call {number}")
        assert_same(eager_in, forge_in, path=f"arguments after call {number}")
        assert_same(state(twin), state(model), path=f"state after call {number}")
    return compiled


# --- one by one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TAKES)
def test_takes(name):
    model, args = TAKES[name]()
    twin = copy.deepcopy(model)
    compiled = same_as_eager(model, twin, [(args, {}), (fresh(args, 1), {}), (fresh(args, 2), {})])
    assert compiled.report["capture"] == "fast", compiled.report["capture_declined"]


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    model, args = DECLINES[name]()
    before = state(model)
    attributes = [(m, dict(m.__dict__)) for m in model.modules()] if isinstance(model, torch.nn.Module) else []
    random_state = torch.get_rng_state()
    example = clone_args(args) if not name.startswith(("sub", "sparse", "conj")) else args
    with pytest.raises(Unsupported):
        capture_fast(model, args, {})
    if not before or all(t.layout is torch.strided for t in before.values()):
        assert_same(before, state(model), 0, 0)
    assert all(m.__dict__ == saved for m, saved in attributes)
    assert torch.equal(random_state, torch.get_rng_state())
    if example is not args:
        assert_same(example, args, 0, 0)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(cases.__path__)])
def test_cases(name):
    module = importlib.import_module(f"tests.cases.{name}")
    model, args, kwargs = module.case()
    if name[:3] in DECLINED_CASES:
        with pytest.raises(Unsupported):
            capture_fast(model, clone_args(args), clone_args(kwargs))
        return  # tests/test_cases.py goes through torch.export
    more = module.more() if hasattr(module, "more") else []
    compiled = same_as_eager(model, module.case()[0], [(args, kwargs), *more])
    assert compiled.report["capture"] == "fast", compiled.report["capture_declined"]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_the_same_program(name, attn_implementation):
    model = build(name, 2, attn_implementation=attn_implementation, **WIDTHS[name])
    ids = input_ids(model, seq=16)
    fast = forge_ugc.compile(model, (ids,), capture="auto")
    exported = forge_ugc.compile(model, (ids,), capture="export")
    assert fast.report["capture"] == "fast", fast.report["capture_declined"]
    assert operators(fast) == operators(exported)
    for key in ("instructions", "buffers", "transitions", "fallbacks", "nodes_final"):
        assert fast.report[key] == exported.report[key]
    other = input_ids(model, seq=16, seed=2)
    with torch.no_grad():
        assert torch.equal(fast(other), exported(other))
        assert_same(model(other), fast(other))


def test_architectures(capsys):
    """Nine in ten of the architectures are recorded, and all that are equal eager."""
    rows = []
    for name in ARCHITECTURES:
        model, kwargs = tiny(name)
        with torch.no_grad():
            expected = model(**clone_args(kwargs))
        try:
            capture_fast(model, (), clone_args(kwargs))
        except Unsupported as reason:
            rows.append((name, f"declined: {reason}"))
            continue
        compiled = forge_ugc.compile(model, (), clone_args(kwargs), capture="auto")
        with torch.no_grad():
            assert_same(expected, compiled(**clone_args(kwargs)), atol=2e-5, rtol=1e-4, path=name)
        rows.append((name, compiled.report["capture"]))
    taken = sum(how == "fast" for _, how in rows)
    with capsys.disabled():
        print(f"\nfast capture takes {taken} of {len(rows)} architectures")
        for name, how in rows:
            if how != "fast":
                print(f"  {name}: {how}")
    assert taken >= 0.9 * len(rows)


# --- around it --------------------------------------------------------------------------------------------------------


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, a, flag=True):
        return self.b(torch.relu(self.a(a))) * self.scale if flag else a


def test_report():
    model = Two().eval()
    fast, exported = forge_ugc.compile(model, x(), capture="auto"), forge_ugc.compile(model, x(), capture="export")
    assert "by recording" in str(fast.report) and "by recording" not in str(exported.report)
    told = fast.report.to_dict()
    assert told["capture"] == "fast" and told["capture_declined"] == ""
    assert told["nodes_captured"] == fast.report["nodes_captured"] == exported.report["nodes_captured"]
    assert exported.report["capture"] == "export"
    training = forge_ugc.compile(torch.nn.Sequential(Two().eval(), torch.nn.Identity().train()).train(False), x())
    assert training.report["capture_declined"] == ""
    with pytest.warns(UserWarning, match="training"):
        declined = forge_ugc.compile(Two(), x(), capture="auto")
    assert declined.report["capture"] == "export" and "training" in declined.report["capture_declined"]
    with pytest.raises(ValueError, match="capture"):
        forge_ugc.compile(model, x(), capture="trace")


def test_source_lines():
    captured = capture_fast(Two().eval(), (x(),), {})
    (relu,) = (n for n in captured.nodes if n.target is torch.ops.aten.relu.default)
    assert re.fullmatch(r".*test_fastcapture\.py:\d+ in forward", relu.source)


def test_changes_of_state_are_noticed():
    model = Two().eval()
    compiled = forge_ugc.compile(model, x(), capture="auto")
    with torch.no_grad():
        model.scale.mul_(3)
        assert_same(model(x()), compiled(x()))
        model.a.weight.zero_()
        assert_same(model(x()), compiled(x()))
        model.b.bias = torch.nn.Parameter(torch.full((4,), 2.0))
        assert_same(model(x()), compiled(x()))
        model.load_state_dict(Two().state_dict())
        assert_same(model(x()), compiled(x()))
    with pytest.raises(TypeError, match="flag"):
        compiled(x(), False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_leaves_the_model_as_it_was(error):
    model = Two().eval()
    original, attributes = model.b.forward, dict(model.__dict__)

    def interrupted(a):
        model.half_done = a
        raise error

    model.b.__dict__["forward"] = interrupted
    with pytest.raises(error):
        forge_ugc.compile(model, x(), capture="auto")
    del model.b.__dict__["forward"]
    assert model.__dict__ == attributes and model.b.forward == original
    with torch.no_grad():
        assert_same(model(x()), forge_ugc.compile(model, x(), capture="auto")(x()))


def test_hooks_that_forward_installs_are_taken_back():
    model, kwargs = tiny("Llama")
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    with pytest.raises(Unsupported):
        capture_fast(model, (), {**kwargs, "output_hidden_states": True})
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
    with torch.no_grad():
        assert len(model(**kwargs, output_hidden_states=True).hidden_states) == 3


def test_other_threads_may_call_the_model_meanwhile():
    model, inputs, wrong, stop = Two().eval(), x(), [], threading.Event()
    with torch.no_grad():
        expected = model(inputs)

    def call():
        with torch.no_grad():
            while not stop.is_set():
                got = model(inputs)
                if type(got) is not torch.Tensor or not torch.equal(got, expected):
                    wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        capture_fast(model, (inputs,), {})
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inputs_that_change_what_forward_does():
    """Recording specialises on structure and Python values as export does, never on values of tensors."""
    model = Two().eval()
    compiled = forge_ugc.compile(model, (x(), False), capture="auto")
    assert torch.equal(compiled(x(seed=5), False), x(seed=5))


def test_declines_what_export_is_for():
    program = torch.export.export(Two().eval(), (x(),))
    for model, shapes in ((program, None), (Two().eval(), {"a": {0: torch.export.Dim.AUTO}})):
        with pytest.raises(Unsupported):
            capture_fast(model, (x(),), {}, shapes)


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_default_dtype_may_change_between_compilations(capture):
    def function(a):
        return a / 2, a.sqrt(), torch.where(a > 3, 1.0, 0.0)

    a = torch.arange(6)
    forge_ugc.compile(function, (a,), capture=capture)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(function(a), forge_ugc.compile(function, (a,), capture=capture)(a))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_untied_weights_are_an_error(capture):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)).eval()
    model[1].weight = model[0].weight
    ids = torch.tensor([[1, 2]])
    compiled = forge_ugc.compile(model, (ids,), capture=capture)
    tied = torch.nn.Parameter(torch.ones(7, 4))
    model[0].weight = model[1].weight = tied
    with torch.no_grad():
        assert_same(model(ids), compiled(ids))
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    with torch.no_grad():
        assert_same(model(ids), compiled(ids))
    model[1].weight = torch.nn.Parameter(torch.randn(7, 4))
    with pytest.raises(RuntimeError, match="tied"):
        compiled(ids)


def _branches(m, a):
    return m.lin(a) if m.buf[1] * 2 > m.buf.mean() else a


def _counts(m, a):
    for _ in range(int(m.buf.max())):
        a = m.lin(a)
    return a


def _lists(m, a):
    return m.lin(a) if 2 in m.buf.long().tolist() else a


@pytest.mark.parametrize("read", [_branches, _counts, _lists])
def test_values_of_buffers_that_python_reads(read):
    """They are fixed when compiling; the other weights are not."""
    model = Call(read, buf=torch.arange(4.0)).eval()
    compiled = forge_ugc.compile(model, x())
    assert compiled.report["capture"] == "fast"
    with torch.no_grad():
        model.lin.weight.mul_(2)
        assert_same(model(x()), compiled(x()))
        model.buf.copy_(torch.arange(4.0))
        assert_same(model(x()), compiled(x()))
        model.buf.mul_(-1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="'buf' has changed"):
                compiled(x())
        model.buf = torch.arange(4.0)
        assert_same(model(x()), compiled(x()))
        other = copy.deepcopy(compiled)
        other._model.buf.zero_()
        with pytest.raises(RuntimeError, match="'buf' has changed"):
            other(x())
        assert_same(model(x()), compiled(x()))


def test_values_that_python_reads_and_forward_changes():
    def function(m, a):
        m.buf.add_(1)
        return a * 2 if m.buf[0] > 3 else a

    with pytest.raises(forge_ugc.CompileError, match="data-dependent"):
        forge_ugc.compile(Call(function, buf=torch.arange(4.0)).eval(), x())


def test_parameter_as_input():
    def function(a):
        return a * 2 if isinstance(a, torch.nn.Parameter) and a.requires_grad else a * 3

    a = torch.nn.Parameter(x())
    compiled = forge_ugc.compile(function, (a,))
    with torch.no_grad():
        assert_same(function(a), compiled(a))
    assert compiled.report["capture"] == "fast"


_CACHED: dict[int, torch.Tensor] = {}


@functools.lru_cache(maxsize=3)
def _remembered(model):
    return model.lin.weight * 2


def _nested(model):
    if model.things["a"][0] is None:
        model.things["a"][0] = model.lin.weight * 2
    return model.things["a"][0]


def _object(model):
    if model.plain.table is None:
        model.plain.table = model.lin.weight * 2
    return model.plain.table


def _global(model):
    if id(model) not in _CACHED:
        _CACHED[id(model)] = model.lin.weight * 2
    return _CACHED[id(model)]


@pytest.mark.parametrize("table", [_remembered, _nested, _object, _global])
def test_caches_are_as_they_were(table):
    """What recording put into caches of forward() is gone when it fails, and eager runs as ever."""
    model = Call(lambda m, a: a @ table(m), things={"a": [None]}, plain=types.SimpleNamespace(table=None)).eval()
    twin = copy.deepcopy(model)
    for call in (model, lambda a: model(a)):
        with pytest.raises(Unsupported):
            capture_fast(call, (x(),), {})
    with torch.no_grad():
        assert_same(twin(x()), model(x()))


def test_wrong_result_types_are_noticed():
    """torch.export gives packed sequences the type of another length."""

    def function(a):
        return torch.nn.utils.rnn.pack_padded_sequence(a, torch.tensor([3, 2, 1]), batch_first=True).data

    compiled = forge_ugc.compile(function, (x(3, 4, 1),))
    try:
        got = compiled(x(3, 4, 1))
    except RuntimeError as error:
        assert "captured type" in str(error)
    else:
        assert_same(function(x(3, 4, 1)), got)


@pytest.mark.filterwarnings("ignore::forge_ugc.FallbackWarning")
@pytest.mark.parametrize("capture", ["auto", "export"])
def test_source_of_torchs_own_modules(capture):
    """Who called compile() did not compute it."""
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 2, 2), torch.nn.ReLU()).eval()
    (fallback,) = forge_ugc.compile(model, torch.zeros(1, 3, 4, 4), device="cpu", capture=capture).report["fallbacks"]
    assert re.fullmatch(r".*torch/nn/modules/conv.py:\d+ in forward", fallback["where"]), fallback
