"""compile() and calling what it returns: forms of model and arguments, outputs, errors."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import forge_ugc
from tests.compare import assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x))) * scale


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@torch.no_grad()
def test_module_function_and_exported_program() -> None:
    model, x = net(), torch.randn(4, 6)
    program = torch.export.export(model, (x,), strict=False)
    expected = model(x)
    for subject in (model, lambda x: model(x), program):
        for example in (x, (x,), [x]):
            assert_same(expected, forge_ugc.compile(subject, example)(x))
    assert_same(expected, forge_ugc.compile(program)(x))
    assert_same(expected, forge_ugc.compile(model, {"x": x})(x=x))


def test_examples_that_an_exported_program_does_not_take() -> None:
    program = torch.export.export(net(), (torch.randn(4, 6),))
    for other, says in ((torch.randn(5, 6), r"given float32\[5, 6\]; export with"), (torch.ones(4, 6).long(), "int64")):
        with pytest.raises(TypeError, match=rf"input args\[0\]: expected float32\[4, 6\].*{says}"):
            forge_ugc.compile(program, other)
    with pytest.raises(ValueError, match="dynamic_shapes: an ExportedProgram has its own"):
        forge_ugc.compile(program, torch.randn(4, 6), dynamic_shapes=({0: torch.export.Dim("n")},))
    forge_ugc.compile(program, torch.empty(4, 6, device="meta"), device="npu:plan")


@torch.no_grad()
def test_arguments_may_be_spelled_in_any_way() -> None:
    def function(a: Any, b: Any, *rest: Any, c: float = 2.0, flag: bool = True, **named: Any) -> Any:
        return a * c + (b if flag else -b) + sum(rest) + named.get("d", 0)

    a, b, d = torch.randn(3), torch.randn(3), torch.randn(3)
    forge = forge_ugc.compile(function, (a, b), {"d": d})
    expected = function(a, b, d=d)
    for call in (
        lambda: forge(a, b, d=d),
        lambda: forge(d=d, b=b, a=a),
        lambda: forge(a, d=d, b=b, c=2.0),
        lambda: forge(a, b, flag=True, d=d),
    ):
        assert_same(expected, call())
    with pytest.raises(TypeError, match=r"'c'.*default 2.0.*3.0"):
        forge(a, b, d=d, c=3.0)
    with pytest.raises(TypeError, match="'d' is missing"):
        forge(a, b)
    with pytest.raises(TypeError, match=r"rest\[0\].*not part of the example"):
        forge(a, b, a, d=d)
    with pytest.raises(TypeError, match="'b'"):
        forge(a, d=d)
    rest = forge_ugc.compile(function, (a, b, d, a))
    assert_same(function(a, b, d, a), rest(a, b, d, a))


def test_wrong_inputs_are_named() -> None:
    forge = forge_ugc.compile(lambda pair, x: pair["k"][0] + x, ({"k": (torch.ones(2), torch.ones(2))}, torch.ones(2)))
    good = {"k": (torch.ones(2), torch.ones(2))}
    forge(good, torch.ones(2))
    with pytest.raises(TypeError, match=r"input pair\['k'\]\[1\]: expected float32\[2\].*given float32\[3\]"):
        forge({"k": (torch.ones(2), torch.ones(3))}, torch.ones(2))
    with pytest.raises(TypeError, match=r"input x: expected float32\[2\].*given int64\[2\]"):
        forge(good, torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"input x: expected a tensor.*given float"):
        forge(good, 1.0)
    with pytest.raises(TypeError, match=r"input pair: expected the keys \['k'\]"):
        forge({"j": good["k"]}, torch.ones(2))
    with pytest.raises(TypeError, match=r"input pair\['k'\]: expected a tuple"):
        forge({"k": list(good["k"])}, torch.ones(2))
    with pytest.raises(TypeError, match=r"input x.*meta"):
        forge(good, torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match=r"input x.*layout torch.sparse_coo$"):
        forge(good, torch.ones(2).to_sparse())


def test_wrong_examples_are_named() -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
    with pytest.raises(TypeError, match=r"example_kwargs: expected a dict.*tuple"):
        forge_ugc.compile(model, x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"numpy array; torch.from_numpy"):
        forge_ugc.compile(model, x.numpy())


LONG, DOUBLE, BFLOAT = torch.ones(3, 4, dtype=torch.long), torch.ones(3, 4).double(), torch.ones(3, 4).bfloat16()
MIXED: dict[str, Any] = {
    "linear": (torch.nn.Linear(4, 2), (LONG, DOUBLE, BFLOAT)),
    "matmul": (lambda x: x @ torch.ones(4, 2), (LONG, DOUBLE, BFLOAT)),
    "addmm": (lambda x: torch.addmm(torch.ones(2), x, torch.ones(4, 2)), (LONG, DOUBLE, BFLOAT)),
    "layer_norm": (torch.nn.LayerNorm(4), (DOUBLE,)),
    "group_norm": (torch.nn.GroupNorm(2, 4), (DOUBLE,)),
    "batch_norm": (torch.nn.BatchNorm1d(4).eval(), (DOUBLE,)),
}


@pytest.mark.parametrize("capture", ["auto", "export"])
@pytest.mark.parametrize("name", MIXED)
@torch.no_grad()
def test_dtypes_that_eager_refuses(name: str, capture: str) -> None:
    model, inputs = MIXED[name]
    for x in inputs:
        with pytest.raises(RuntimeError):
            model(x)
        with pytest.raises(forge_ugc.CompileError, match=rf"{name}: operands of .*float.*eager PyTorch refuses"):
            forge_ugc.compile(model, x, device="cpu", capture=capture)


@torch.no_grad()
def test_dtypes_that_eager_mixes() -> None:
    norm = torch.nn.LayerNorm(4)
    for function, x in (
        (norm, BFLOAT),
        (lambda x: torch.addr(torch.ones(3, 4), x[:, 0], torch.ones(4)), DOUBLE),
        (lambda x: torch.nn.functional.rms_norm(x, (4,), torch.ones(4)), DOUBLE),
        (lambda x: x * torch.ones(4) + LONG, DOUBLE),
        (lambda x: torch.inner(torch.tensor(2.0), x), DOUBLE),
    ):
        assert_same(function(x), forge_ugc.compile(function, x, device="cpu")(x))


class Pair(NamedTuple):
    y: torch.Tensor
    n: int | None


@torch.no_grad()
def test_outputs_keep_structure_identity_and_aliases() -> None:
    weight = nn.Parameter(torch.randn(3))

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            z = x + y
            return {
                "z": z, "again": z, "x": x, "view": x[1:], "split": x.chunk(2)[1], "w": self.w, "t": self.table[1],
                "pair": Pair(x.view(2, 2).t(), None), "n": 7, "text": "hello", "none": None,
                "c": torch.tensor([1.0, 2.0]),
            }  # fmt: skip

    model = M().eval()
    forge = forge_ugc.compile(model, (torch.randn(4), torch.randn(4)))
    x, y = torch.randn(4), torch.randn(4)
    out, expected = forge(x, y), model(x, y)
    assert_same(expected, out)
    assert list(out) == list(expected) and isinstance(out["pair"], Pair)
    assert out["z"] is out["again"] and out["x"] is x and out["w"] is weight
    for name in ("view", "split"):
        assert out[name].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert out["t"].untyped_storage().data_ptr() == model.table.untyped_storage().data_ptr()
    assert out["pair"].y._base is x or out["pair"].y.untyped_storage().data_ptr() == x.data_ptr()
    assert out["c"].data_ptr() != forge(x, y)["c"].data_ptr()
    out["c"].zero_()
    out["z"].zero_()
    assert_same(model(x, y), forge(x, y))


def test_lists_and_dicts_that_forward_changes() -> None:
    def function(items: list[Any], store: dict[str, Any], x: torch.Tensor) -> Any:
        items.append(x * 2)
        store["last"] = items[0] + x
        return items, store["last"]

    forge = forge_ugc.compile(function, ([torch.ones(2)], {"a": torch.ones(2)}, torch.ones(2)))
    ours, theirs = [([torch.zeros(2)], {"a": torch.ones(2)}) for _ in range(2)]
    x = torch.randn(2)
    out, expected = forge(*ours, x), function(*theirs, x)
    assert_same(expected, out)
    assert_same(theirs, ours)
    assert out[0] is ours[0]


@torch.no_grad()
def test_input_layouts() -> None:
    forge = forge_ugc.compile(lambda a, b: (a * 2 + b, a.sum(0)), (torch.randn(3, 4), torch.randn(4)))
    base = torch.randn(8, 6)
    for a in (
        torch.randn(4, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        base[::3, 1:5],
        torch.randn(3, 4).to(torch.float32),
    ):
        for b in (torch.randn(8)[::2], torch.randn(1).expand(4), torch.randn(4)):
            assert_same((a * 2 + b, a.sum(0)), forge(a, b))
    negative = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert_same((negative * 2, negative.sum(0)), forge(negative, torch.zeros(4)))
    assert_same((a * 2 + b, a.sum(0)), forge(nn.Parameter(a), b.as_subclass(torch.Tensor)))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
              torch.float32, torch.float64, torch.complex64],
)  # fmt: skip
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 3], [4, 5, 6]]).to(dtype)

    def function(x: torch.Tensor) -> Any:
        return x + x, x.reshape(-1)[1:], x.t().contiguous(), x[0, 0], x[:, :0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(function(x), forge_ugc.compile(function, x)(x))


def test_compile_leaves_model_example_and_rng_alone() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            noise.add_(torch.rand_like(noise))
            return self.norm(x) + noise

    model = M().train()
    x, noise = torch.randn(4, 3), torch.zeros(4, 3)
    state = copy.deepcopy(model.state_dict())
    modules = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    rng = torch.get_rng_state()
    with pytest.warns(UserWarning, match="training mode"):
        forge = forge_ugc.compile(model, (x, noise))
    assert torch.equal(torch.get_rng_state(), rng) and not noise.any()
    assert_same(state, dict(copy.deepcopy(model.state_dict())) if type(state) is dict else model.state_dict())
    assert modules == {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    twin = copy.deepcopy(model)
    for _ in range(2):
        a, b = torch.zeros(4, 3), torch.zeros(4, 3)
        torch.manual_seed(3)
        expected = twin(x, a).detach()
        torch.manual_seed(3)
        assert_same(expected, forge(x, b))
        assert_same(a, b)
        assert_same(dict(twin.named_buffers()), dict(model.named_buffers()))


def test_data_dependent_control_flow_names_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(forge_ugc.CompileError, match=r"torch.where") as caught:
        forge_ugc.compile(function, torch.ones(3))
    assert "data-dependent" in str(caught.value)

    class M(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(
        forge_ugc.CompileError, match=r"test_api.py:\d+ in forward \(`return x if x.sum\(\) > 0 else -x`\)"
    ):
        forge_ugc.compile(M().eval(), torch.ones(3))
    assert capfd.readouterr() == ("", ""), "all that there is to say is in the error"
    with pytest.raises(RuntimeError):
        torch.export.export(M().eval(), (torch.ones(3),))
    assert "def forward" in capfd.readouterr().err, "torch.export itself still prints"


def test_strict_lists_what_would_run_through_torch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) + torch.lgamma(x + 1)

    with pytest.raises(forge_ugc.FallbackError, match=r"aten.lgamma.default x2") as caught:
        forge_ugc.compile(function, torch.ones(3), strict=True)
    assert caught.value.fallbacks[0]["count"] == 2
    with pytest.warns(forge_ugc.FallbackWarning, match=r"aten.lgamma.default x2.*test_api.py") as seen:
        forge = forge_ugc.compile(function, torch.ones(3))
    assert len(seen) == 1
    x = torch.rand(3) + 1
    assert_same(function(x), forge(x))


def test_grad_inputs_warn_once() -> None:
    model, x = net(), torch.randn(4, 6, requires_grad=True)
    forge = forge_ugc.compile(model, x)
    with pytest.warns(UserWarning, match="no autograd graph") as seen:
        outputs = [forge(x), forge(x)]
    assert len(seen) == 1 and not any(o.requires_grad for o in outputs)


def test_autocast_around_is_refused_inside_is_kept() -> None:
    model, x = net(), torch.randn(4, 6)
    forge = forge_ugc.compile(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="autocast"):
            forge(x)
        with pytest.raises(RuntimeError, match="autocast"):
            forge_ugc.compile(model, x)

    def inside(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t()
            z = torch.cat([y, x @ x.t()]) + 1
            with torch.autocast("cpu", enabled=False):
                w = x @ x.t()
        with torch.no_grad():
            v = x.exp()
        return y, z, w, v, torch.softmax(y, -1)

    assert_same(inside(x), forge_ugc.compile(inside, x)(x))


def test_devices_and_options() -> None:
    model, x = net(), torch.randn(4, 6)
    for device in ("npu:plan", "npu:plan:npu3720"):
        plan = forge_ugc.compile(model, x, device=device)
        assert plan.device.startswith("npu:plan:npu") and plan.report["placement"]
        with pytest.raises(RuntimeError, match="only the plan exists"):
            plan(x)
    for wrong in (
        {"device": "gpu"},
        {"device": "npu:plan:npu1"},
        {"alpha": 2.0},
        {"num_threads": 0},
        {"passes": "dce,nonsense"},
    ):
        with pytest.raises(ValueError):
            forge_ugc.compile(model, x, **wrong)
    with pytest.raises(TypeError, match=r"nn.Module"):
        forge_ugc.compile("model", x)
    with torch.no_grad():
        for options in (
            {"alpha": 0.0},
            {"alpha": 0.5},
            {"autotune": True},
            {"passes": "none"},
            {"num_threads": 1},
            {"pack": False},
            {"progress": False},
        ):
            assert_same(model(x), forge_ugc.compile(model, x, **options)(x))


def test_without_packing_no_weight_is_copied() -> None:
    class Conv1D(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1024, 16384))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with torch.no_grad():
        model, x = Conv1D(), torch.randn(4, 1024)
        size = model.weight.nbytes
        forge_ugc.compile(torch.nn.Linear(8, 8).eval(), torch.randn(2, 8))  # what the first compilation loads
        packed = forge_ugc.compile(model.eval(), x, device="cpu")
        assert packed.report["weights"]["packed_bytes"] >= size
        want = packed(x)
        del packed
        gc.collect()
        before = resident()
        forge = forge_ugc.compile(model, x, device="cpu", pack=False)
        got = forge(x)
        assert resident() - before <= 0.1 * size + 2 * got.nbytes
        assert forge.report["weights"]["packed_bytes"] == 0
        assert torch.equal(got, want)
        model.weight.mul_(2)  # compiled again, as it was asked for
        assert torch.equal(forge(x), want * 2) and resident() - before <= 0.1 * size + 4 * got.nbytes


def test_meta_models_can_be_planned() -> None:
    with torch.device("meta"):
        model = net()
    forge = forge_ugc.compile(model, torch.randn(4, 6))
    assert forge.report["nodes_final"] == 2
    with pytest.raises(RuntimeError, match="meta"):
        forge(torch.randn(4, 6))


def test_copies_and_pickle() -> None:
    model, x = net(), torch.randn(4, 6)
    forge = forge_ugc.compile(model, x)
    assert copy.copy(forge) is forge
    twin = copy.deepcopy(forge)
    before = forge(x)
    with torch.no_grad():
        model.first.weight.mul_(2)
        assert_same(model(x), forge(x))
    assert_same(before, twin(x))
    assert torch.equal(pickle.loads(pickle.dumps(forge))(x), forge(x))  # a LoadedModel: tests/test_artefact.py


def test_control_flow_operators_run_through_torch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)) + 1

    with pytest.warns(forge_ugc.FallbackWarning, match="cond"):
        forge = forge_ugc.compile(function, torch.ones(3))
    for x in (torch.ones(3), -torch.ones(3)):
        assert_same(function(x), forge(x))


def test_bisect_names_no_pass_for_a_right_pipeline_and_testing_finds_a_wrong_model() -> None:
    model, x = net(), torch.randn(4, 6)
    result = forge_ugc.bisect_passes(model, x)
    assert result.culprit is None and not result.differences and "agree" in str(result)
    forge_ugc.testing.assert_fidelity(model, x)

    class Moody(nn.Module):
        """Not a function of its inputs: what is compiled is not what runs."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Moody.calls += 1
            return x * float(Moody.calls)

    with pytest.raises(AssertionError, match="outputs differ"):
        forge_ugc.testing.assert_fidelity(Moody().eval(), x)
    found = forge_ugc.bisect_passes(Moody().eval(), x)
    assert found.position == -1 and found.differences


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda"}, "unknown device 'cuda'"),
        ({"passes": "dce,foo"}, "unknown pass 'foo'; known are dce, cse"),
        ({"passes": ["dce", "cse"]}, "passes: expected names in one string"),
        ({"alpha": 1.5}, "alpha must be a number"),
        ({"alpha": None}, "alpha must be a number"),
        ({"num_threads": 0}, "num_threads must be from 1 to 1024, given 0"),
        ({"num_threads": 10**30}, "num_threads must be from 1 to 1024"),
        ({"num_threads": 1.5}, "num_threads: expected a whole number, given 1.5"),
        ({"pack": "no"}, "pack: expected True or False, given 'no'"),
        ({"strict": None}, "strict: expected True or False"),
        ({"dynamic_shapes": 3}, "dynamic_shapes: expected a dict or tuple"),
        ({"capture": "slow"}, "unknown capture 'slow'"),
    ],
)
def test_wrong_options_are_refused_before_capture(options: dict[str, Any], says: str) -> None:
    calls = []
    with pytest.raises((TypeError, ValueError), match=says):
        forge_ugc.compile(lambda x: calls.append(x), torch.ones(1, 2), **options)
    assert not calls


def test_transforms_of_a_compiled_model_are_refused() -> None:
    """Their tensors have no memory, or a derivative that the results would not have."""
    model, x = nn.Linear(2, 2).eval(), torch.ones(3, 2)
    forge = forge_ugc.compile(model, x)
    for transformed in (
        lambda: torch.vmap(forge)(torch.ones(2, 3, 2)),
        lambda: torch.func.grad(lambda x: forge(x).sum())(x),
        lambda: torch.func.jvp(forge, (x,), (x,)),
    ):
        for _ in range(2):
            with pytest.raises(TypeError, match=r"input input belongs to a torch.func transform"):
                transformed()
            torch.testing.assert_close(forge(x), model(x))
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(forge(x), model(x))
        with pytest.raises(TypeError, match="input input carries a forward-mode derivative"):
            forge(torch.autograd.forward_ad.make_dual(x, x))
    # an operator of the transform that does not reach the model
    assert torch.vmap(lambda y: y * forge(x).sum())(torch.ones(2)).shape == (2,)


def test_wrong_models_and_examples_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1, 2)
    forge = forge_ugc.compile(nn.Linear(2, 2).eval(), x, device=torch.device("cpu"))
    for model, says in ((nn.Linear, "the class Linear"), (forge, "compiled already"), (3, "given int")):
        with pytest.raises(TypeError, match=says):
            forge_ugc.compile(model, x)
    with pytest.raises(TypeError, match="the model's arguments: missing a required argument: 'input'"):
        forge_ugc.compile(nn.Linear(2, 2).eval())
    for call in (forge, lambda **kwargs: forge_ugc.compile(nn.Linear(2, 2).eval(), kwargs)):
        with pytest.raises(TypeError, match="the model's arguments: there is no 'inptu'; there are input"):
            call(inptu=x)
    with pytest.raises(forge_ugc.CompileError, match="RuntimeError:\na and b must have same reduction dim"):
        forge_ugc.compile(nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 3))
    assert capfd.readouterr().err == ""
