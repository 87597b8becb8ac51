"""device="npu" and "auto" on the software NPU: right results on every version of the graph extension and from many
threads, and each fault of the driver in turn. An NPU that fails is an NpuError or the host, never a crash, a leak or a
wrong number."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc import NpuError, npu
from forge_ugc.softnpu import FOR_EVER, SoftwareNpu
from forge_ugc.testing import software_npu
from tests import ze_client
from tests.models.families import FAMILIES, build, input_ids

F32 = {"types": "f32", "border": "f32", "cache": False}
TOLERANCE = 1e-4

NARROW: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=192, n_head=6, vocab_size=20000),  # the head is several tiles
    "granite": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, intermediate_size=512),
    "qwen2": dict(hidden_size=224, num_attention_heads=14, num_key_value_heads=2, intermediate_size=608),
    "llama1b": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024),
    "lfm2": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024),
    "llama8b": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=1, intermediate_size=896),
}


@pytest.fixture(scope="module", autouse=True)
def needed() -> Iterator[None]:
    ze_client.require_software_npu()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models, often
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(width: int = 24, seed: int = 0) -> nn.Module:
    """Equal blocks, so that one graph serves them all: a call is 4 executions."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(width) for _ in range(4)]).eval()


X = torch.randn(5, 24, generator=torch.Generator().manual_seed(7))


def compiled_on(device: str, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"npu_options": F32, "fold": True, **options}
    return forge_ugc.compile(blocks() if model is None else model, (X,), device=device, **options)


def expected(model: nn.Module | None = None, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return (blocks() if model is None else model)(x)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - wanted).abs().max() <= TOLERANCE


@pytest.fixture
def device() -> Iterator[SoftwareNpu]:
    with software_npu(check=True) as found:
        yield found


# --- right results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [*((name, 2) for name in FAMILIES), ("gpt2", 4)])
def test_family(device: SoftwareNpu, name: str, layers: int) -> None:
    """Folded graphs, where there are any, and those with constant weights."""
    model = build(name, layers, **{"vocab_size": 2000, **NARROW[name]})
    ids = input_ids(model, seq=32)
    fold: Any = True if layers == 4 else "auto"
    compiled = forge_ugc.compile(model, (ids,), device="npu", fold=fold, npu_options=F32)
    if fold is True:
        plan = compiled.report.to_dict()["npu"]
        assert plan["blocks"] < plan["calls"]
    with torch.no_grad():
        wanted = model(ids)
        assert_close(compiled(ids), wanted)
        assert compiled.wait(60)
        assert_close(compiled(ids), wanted)
    assert device.counters()["execution"] >= 2
    report = compiled.report.to_dict()
    assert report["fallbacks"] == []
    assert report["transitions"]["after"] == 2, "one way to the NPU and one back"


@pytest.mark.parametrize("extension", ["1.4", "1.5", "1.7", "1.8", "1.12", "1.15", "1.16"])
@pytest.mark.parametrize("fold", [True, False, "auto"])
def test_extensions(extension: str, fold: bool | str) -> None:
    with software_npu(extension=extension, check=True) as device:
        compiled = compiled_on("npu", fold=fold)
        for scale in (1.0, -2.0):
            assert_close(compiled(X * scale), expected(x=X * scale))
        assert compiled.wait(60)
        assert_close(compiled(X), expected())
        del compiled
        assert device.misuses() == []


def test_wrapped_handles() -> None:
    """The loader wraps handles where there are two drivers; extension functions get them wrapped."""
    with software_npu(intercept=True, check=True):
        assert_close(compiled_on("npu")(X), expected())


def test_threads(device: SoftwareNpu) -> None:
    """8 threads, 100 calls each, two models: what serial calls give, bit for bit."""
    models = [blocks(seed=0), blocks(seed=1)]
    both = [compiled_on("npu", m) for m in models]
    inputs = [X * (i + 1) / 8 for i in range(8)]
    wanted = [[c(x).clone() for x in inputs] for c in both]
    for m, row in zip(models, wanted, strict=True):
        for x, y in zip(inputs, row, strict=True):
            assert_close(y, expected(m, x))
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            for k in range(100):
                which, i = (number + k) % 2, (number * 3 + k) % 8
                if not torch.equal(both[which](inputs[i]), wanted[which][i]):
                    wrong.append((number, k))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    assert not wrong, wrong[:3]


# --- each entry point fails in turn -----------------------------------------------------------------------------------


def undisturbed(device: SoftwareNpu) -> dict[str, int]:
    """Calls of each entry point by opening, compiling, calling twice and dropping it all."""
    before = device.counters()
    compiled = compiled_on("npu")
    compiled(X), compiled(X)
    del compiled
    device.assert_no_leaks()
    return {name: n - before.get(name, 0) for name, n in device.counters().items() if n > before.get(name, 0)}


def attempt(device: SoftwareNpu, where: str) -> str:
    """Compiles for `where` and calls twice; what came of it. The results must be right or there must be none."""
    wanted = [(x, expected(x=x)) for x in (X, -X)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            compiled = compiled_on(where)
            for x, y in wanted:
                assert_close(compiled(x), y)
        except NpuError as error:
            assert error.reason != "none" and str(error)
            return f"NpuError({error.reason})"
    return "host" if any(issubclass(w.category, forge_ugc.NpuWarning) for w in warned) else "result"


@pytest.mark.parametrize(("where", "extension"), [("npu", "1.4"), ("npu", "1.16"), ("auto", "1.16")])
def test_each_entry_point(where: str, extension: str) -> None:
    """Its first and its last call fail; then all is released, and the next compilation works."""
    with software_npu(extension=extension, check=True) as device:
        calls = undisturbed(device)
        assert len(calls) > 25, "the sweep has lost sight of the driver"
        outcomes = {}
        for name, n in calls.items():
            for nth in sorted({1, n}):
                device.fail(name, nth, result="unknown")
                outcomes[name, nth] = attempt(device, where)
                device.heal()
                device.assert_no_leaks()
            assert attempt(device, where) == "result", f"after {name} failed"
            device.assert_no_leaks()
        if where == "auto":
            assert {key: o for key, o in outcomes.items() if o not in ("host", "result")} == {}
            return
        failed = {name for (name, _), outcome in outcomes.items() if outcome != "result"}
        needed = {"zeInit", "zeContextCreate", "zeMemAllocHost", "zeCommandListCreate", "zeFenceHostSynchronize",
                  "zeCommandQueueExecuteCommandLists", "pfnAppendGraphExecute", "execution", "pfnGetProperties",
                  "pfnCreate" if extension == "1.4" else "pfnCreate3"}  # fmt: skip
        assert needed <= failed, f"no failure seen of {needed - failed}"


@pytest.mark.parametrize("result", ["device-lost", "out-of-host-memory", "out-of-device-memory"])
@pytest.mark.parametrize("name", ["zeCommandQueueExecuteCommandLists", "zeFenceHostSynchronize", "execution"])
def test_calls_fail_for_ever(device: SoftwareNpu, name: str, result: str) -> None:
    compiled, fallback = compiled_on("npu"), compiled_on("auto")
    device.fail(name, times=FOR_EVER, result=result)
    reason = "device-lost" if result == "device-lost" else "out-of-memory"
    with pytest.raises(NpuError) as caught:
        compiled(X)
    assert caught.value.reason == reason
    with pytest.warns(forge_ugc.NpuWarning, match=reason):
        assert_close(fallback(X), expected())
    device.heal()
    assert_close(fallback(X), expected())


# --- what happens to users --------------------------------------------------------------------------------------------


def test_device_lost_once() -> None:
    """It is opened again once, and the call that met the loss gives its result."""
    with software_npu(lose_after=9, check=True) as device:
        compiled = compiled_on("npu")
        for i in range(6):
            assert_close(compiled(X * i), expected(x=X * i))
        assert device.counters()["zeContextCreate"] == 2
        assert device.counters()["execution"] == 6 * 4 + 2, "two of the third call were lost"
        del compiled


def test_device_lost_for_good() -> None:
    with software_npu(recovers=False, check=True) as device:
        compiled, fallback = compiled_on("npu"), compiled_on("auto")
        assert_close(compiled(X), expected())
        device.lose()
        for _ in range(2):
            with pytest.raises(NpuError) as caught:
                compiled(X)
            assert caught.value.reason == "device-lost"
        with pytest.warns(forge_ugc.NpuWarning, match="device-lost"):
            assert_close(fallback(X), expected())
        assert fallback.report.to_dict()["device"] == "cpu"
        del compiled, fallback, caught


def test_lost_in_threads() -> None:
    """A loss while many threads call: each gets its result."""
    with software_npu(lose_after=70, check=True) as device:
        model = blocks()
        compiled = compiled_on("auto", model)
        wrong: list[Any] = []

        def work(number: int, compiled: Any) -> None:
            try:
                for k in range(10):
                    x = X * (number + k)
                    assert_close(compiled(x), expected(model, x))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i, compiled)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not wrong and not any(t.is_alive() for t in threads)
        assert device.counters()["zeContextCreate"] > 1
        del compiled, threads


def test_out_of_memory() -> None:
    with software_npu(memory=1 << 14, check=True) as device:
        with pytest.raises(NpuError) as caught:
            compiled_on("npu")(X)
        assert caught.value.reason == "out-of-memory"
        with pytest.warns(forge_ugc.NpuWarning, match="out-of-memory"):
            assert_close(compiled_on("auto")(X), expected())
        del caught
        device.set("memory", 0)
        assert_close(compiled_on("npu")(X), expected())


def test_refused_by_the_compiler() -> None:
    """The error has the compiler's own words, and the user's line."""
    with software_npu(refuse=["Gelu"], check=True) as device:
        with pytest.raises(NpuError) as caught:
            compiled_on("npu")
        assert caught.value.reason == "compile-failed"
        assert "Unsupported operation" in str(caught.value) and "with type Gelu" in str(caught.value)
        assert "test_npu_faults.py" in str(caught.value)
        del caught
        with pytest.warns(forge_ugc.NpuWarning, match="compile-failed"):
            assert_close(compiled_on("auto")(X), expected())
        device.set("refuse", "")
        assert_close(compiled_on("npu")(X), expected())


def test_second_tier_fails(device: SoftwareNpu) -> None:
    """The folded graphs go on serving."""
    device.set("latency_us", 1000)
    device.fail("pfnCreate3", nth=2, times=FOR_EVER, result="invalid-argument", log="too large")
    compiled = compiled_on("npu", fold="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled.wait(60)
        except NpuError as error:
            assert "too large" in str(error)
    assert_close(compiled(X), expected())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(no_compiler=True), "no-compiler"),
        (dict(extension="0.0"), "old-extension"),
        (dict(extension="1.3"), "old-extension"),
        (dict(firmware_mismatch=True), "version-mismatch"),
    ],
    ids=["no compiler", "no extension", "old extension", "firmware"],
)
def test_unusable(options: dict[str, Any], reason: str) -> None:
    with software_npu(**options, check=True):
        with pytest.raises(NpuError) as caught:
            compiled_on("npu")
        assert caught.value.reason == reason
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = compiled_on("auto")
        assert_close(compiled(X), expected())
        assert reason in compiled.report.to_dict()["device_reason"]
        del compiled, caught


def test_blob_cache(device: SoftwareNpu) -> None:
    """A second program takes its graphs from the disk; a blob that the driver refuses is compiled again."""
    options = {**F32, "cache": True}
    hits = []
    for refusals in (0, 0, 1):
        device.fail("pfnCreate3", times=refusals, result="invalid-native-binary")
        compiled = compiled_on("npu", npu_options=options)
        assert_close(compiled(X), expected())
        hits.append(compiled.report.to_dict()["npu"]["cache_hits"])
        del compiled
    assert hits == [0, 1, 0]


def test_nothing_stays(device: SoftwareNpu) -> None:
    """Programs that come and go leave nothing behind, also when they were never called."""
    for i in range(5):
        compiled = compiled_on("npu", blocks(seed=i), fold=("auto", True, False)[i % 3])
        if i % 2:
            assert_close(compiled(X), expected(blocks(seed=i)))
        del compiled
        gc.collect()
    device.assert_no_leaks()
    assert npu is not None
