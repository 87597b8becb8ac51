"""Artefacts: what is saved runs the same, with and without torch; damaged files are errors."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from collections import defaultdict, deque, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import forge_ugc
from forge_ugc import ArtefactError, LoadedModel
from forge_ugc.artefact import MANIFEST, WEIGHTS
from tests.artefacts import members, rewrite
from tests.models import families

Pair = namedtuple("Pair", ["first", "second"])


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.LayerNorm(48), torch.nn.Linear(48, 8)
    ).eval()


def saved(model: Any, inputs: Any, path: Path, kwargs: dict[str, Any] | None = None, **options: Any) -> LoadedModel:
    compiled = forge_ugc.compile(model, inputs, kwargs, **options)
    compiled.save(path)
    return forge_ugc.load(path)


# --- same results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "granite", "qwen2", "llama1b", "lfm2"])
def test_families(name: str, tmp_path: Path) -> None:
    model = families.build(name, layers=1)
    ids = torch.randint(0, 1000, (1, 9))
    compiled = forge_ugc.compile(model, ids)
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    assert torch.equal(loaded(ids), compiled(ids))
    assert loaded(ids.numpy()).dtype == np.float32
    assert np.array_equal(loaded(ids.numpy()), compiled(ids).numpy())
    assert (tmp_path / "m.forge").stat().st_size < 1.02 * sum(p.nbytes for p in set(model.parameters())) + 2e6


def test_without_torch(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 24)
    compiled = forge_ugc.compile(model, x)
    compiled.save(tmp_path / "m.forge")
    np.save(tmp_path / "x.npy", x.numpy())
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
import numpy, forge_ugc
model = forge_ugc.load(sys.argv[1] + "/m.forge")
numpy.save(sys.argv[1] + "/y.npy", model(numpy.load(sys.argv[1] + "/x.npy")))
assert sys.modules["torch"] is None
try:
    forge_ugc.compile
except ImportError as error:
    assert "needs torch" in str(error)
else:
    raise SystemExit("compile without torch")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert np.array_equal(np.load(tmp_path / "y.npy"), compiled(x).numpy())


def test_structures(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        training = False

        def forward(self, a: Any, scale: float = 2.0, *, extra: Any = None) -> Any:
            x, (y, z) = a["x"], a["rest"]
            return Pair(x * scale, y + z), [extra["k"] - x, 3, None], {"n": x.sum(), "same": x}

    x, y, z, k = (torch.randn(2, 3) for _ in range(4))
    args = ({"x": x, "rest": (y, z)},)
    loaded = saved(Model().eval(), args, tmp_path / "m.forge", {"extra": {"k": k}})
    pair, items, named = loaded(*args, extra={"k": k})
    assert torch.equal(pair.first, x * 2.0) and torch.equal(pair[1], y + z)
    assert torch.equal(items[0], k - x) and items[1:] == [3, None]
    assert torch.equal(named["same"], x) and named["same"].data_ptr() != x.data_ptr()
    with pytest.raises(TypeError, match=r"extra.*missing"):
        loaded(*args)
    with pytest.raises(TypeError, match=r"a\['rest'\]: expected a tuple"):
        loaded({"x": x, "rest": [y, z]}, extra={"k": k})
    with pytest.raises(TypeError, match=r"a\['x'\]: expected f32\[2, 3\], given f32\[4, 3\]"):
        loaded({"x": torch.randn(4, 3), "rest": (y, z)}, extra={"k": k})
    with pytest.raises(TypeError, match="1 positional"):
        loaded(*args, 3.0, extra={"k": k})
    with pytest.raises(TypeError, match="'scale' was not part"):
        loaded(*args, scale=3.0, extra={"k": k})
    with pytest.raises(TypeError, match=r"'extar' was not part of .*; those are a, extra"):
        loaded(*args, extar={"k": k})
    with pytest.raises(TypeError, match=r"a\['x'\]: .* on cpu of layout torch.sparse_coo"):
        loaded({"x": x.to_sparse(), "rest": (y, z)}, extra={"k": k})
    with pytest.raises(TypeError, match=r"a\['x'\]: a tensor of a torch.func transform"):
        torch.vmap(lambda x: loaded({"x": x, "rest": (y, z)}, extra={"k": k}))(torch.stack([x, x]))


def test_named_results_of_torch(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    loaded = saved(lambda x: (x.max(1), x.sort(0, descending=True)), (x,), tmp_path / "m.forge")
    largest, ordered = loaded(x)
    values, indices = largest
    assert torch.equal(values, x.max(1).values) and torch.equal(indices, x.max(1).indices)
    assert torch.equal(ordered[0], x.sort(0, descending=True).values) and ordered.indices is ordered[1]


def test_named_tuples_and_dataclasses(tmp_path: Path) -> None:
    """As results and as arguments: what unpacks does so, what has names has them, whatever they are called."""
    Odd = namedtuple("Odd", ["items", "keys"])

    @dataclasses.dataclass
    class Record:
        sum: torch.Tensor
        inner: Any
        nothing: Any = None

    def function(pair: Pair, record: Record) -> Any:
        odd = Odd(pair.first + record.sum, pair.second)
        twice = Record(odd.items * 2, Pair(record.inner, odd.keys))
        return odd, twice, pair.first.shape, defaultdict(list, x=odd.items)

    x, y, z = (torch.randn(2, 3) for _ in range(3))
    loaded = saved(function, (Pair(x, y), Record(z, x, y)), tmp_path / "m.forge")
    for given in (Pair(x, y), SimpleNamespace(first=x, second=y)):
        odd, record, shape, named = loaded(given, Record(z, x, y))
        items, keys = odd
        assert torch.equal(items, x + z) and torch.equal(keys, y) and odd.items is items
        first, second = record.inner
        assert torch.equal(record.sum, items * 2) and torch.equal(first, x) and torch.equal(second, y)
        assert record.nothing is None and shape == (2, 3) and torch.equal(named["x"], items)
    with pytest.raises(TypeError, match=r"there is no pair\.second"):
        loaded(SimpleNamespace(first=x), Record(z, x, y))


def test_constant_arguments(tmp_path: Path) -> None:
    def function(x: torch.Tensor, n: int, flag: bool = True) -> torch.Tensor:
        return x * n if flag else x

    x = torch.randn(3)
    loaded = saved(function, (x, 4), tmp_path / "m.forge", {"flag": False})
    assert torch.equal(loaded(x, 4, False), x) and torch.equal(loaded(x), x)
    with pytest.raises(TypeError, match="saved for 4, given 5"):
        loaded(x, 5)
    with pytest.raises(TypeError, match="saved for False, given True"):
        loaded(x, 4, flag=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = (torch.arange(70) % 5 - 2).to(dtype)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.weight])

    x = torch.ones(3).to(dtype)
    loaded = saved(Model().eval(), x, tmp_path / "m.forge")
    assert torch.equal(loaded(x), torch.cat([x, weight]))
    if dtype is torch.bfloat16:
        bits = loaded(x.view(torch.int16).numpy().view(np.uint16))
        assert np.array_equal(bits, torch.cat([x, weight]).view(torch.int16).numpy().view(np.uint16))
    else:
        assert np.array_equal(loaded(x.numpy()), torch.cat([x, weight]).numpy())


def test_strides(tmp_path: Path) -> None:
    """Inputs of any strides; weights that are transposed, expanded and shared."""
    base = torch.randn(40, 50)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned, self.other = base.t(), base
            self.wide = torch.randn(1, 50).expand(60, 50)

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.turned, x[:, :40] @ self.other, x[:1] * self.wide

    model = Model().eval()
    x = torch.randn(50, 7).t()
    compiled = forge_ugc.compile(model, x)
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    for a, b, c in zip(loaded(x), compiled(x), loaded(x.numpy()), strict=True):
        assert torch.equal(a, b) and np.array_equal(b.numpy(), c)
    assert loaded.report["weights"]["packed_bytes"] == 0 or os.path.getsize(tmp_path / "m.forge") < 100_000


def test_state_and_written_inputs(tmp_path: Path) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
            self.count += x
            log.add_(self.count)
            return self.count * 2

    model, log = Counter().eval(), torch.zeros(2)
    model.count.fill_(5.0)
    compiled = forge_ugc.compile(model, (torch.ones(2), log))
    compiled.save(tmp_path / "m.forge")
    first, second = forge_ugc.load(tmp_path / "m.forge"), forge_ugc.load(tmp_path / "m.forge")
    assert first(torch.ones(2), log).tolist() == [12.0, 12.0] and log.tolist() == [6.0, 6.0]
    array = np.zeros(2, np.float32)
    assert first(np.ones(2, np.float32), array).tolist() == [14.0, 14.0] and array.tolist() == [7.0, 7.0]
    assert second(torch.ones(2), log).tolist() == [12.0, 12.0]
    assert model.count.tolist() == [5.0, 5.0]
    with pytest.raises(TypeError, match="shares memory"):
        first(log, log)


def test_state_that_is_written_and_handed_out(tmp_path: Path) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2, 3).t())

        def forward(self, x: torch.Tensor) -> Any:
            self.count += x
            return self.count, self.count[0], self.count

    x = torch.ones(3, 2)
    loaded = saved(Counter().eval(), x, tmp_path / "m.forge")
    first, second = loaded(x), loaded(x.numpy())
    assert [float(t.max()) for t in (*first, *second)] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert [t.shape for t in second] == [(3, 2), (2,), (3, 2)]


def test_dynamic_shapes(tmp_path: Path) -> None:
    model = mlp()
    batch = torch.export.Dim("batch", min=1, max=64)
    compiled = forge_ugc.compile(model, torch.randn(3, 24), dynamic_shapes=({0: batch},))
    compiled(torch.randn(5, 24))
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    for n in (3, 5):
        x = torch.randn(n, 24)
        assert torch.equal(loaded(x), compiled(x))
    with pytest.raises(TypeError, match=r"\[3, 24\] or \[5, 24\], given f32\[4, 24\]"):
        loaded(torch.randn(4, 24))


def test_hugging_face_outputs(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained("examples/small_gpt2").eval()
    ids = torch.randint(0, 100, (1, 6))
    compiled = forge_ugc.compile(model, (), {"input_ids": ids, "use_cache": False})
    compiled.save(tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    out = loaded(input_ids=ids)
    expected = compiled(input_ids=ids, use_cache=False).logits  # packs what the file has turned already
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=2.1e-5)
    assert out["logits"] is out.logits is out[0]
    with pytest.raises(AttributeError, match="logits"):
        out.loss  # noqa: B018


def test_pickle(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 24)
    compiled = forge_ugc.compile(model, x)
    copy = pickle.loads(pickle.dumps(compiled))
    again = pickle.loads(pickle.dumps(copy))
    assert torch.equal(copy(x), compiled(x)) and torch.equal(again(x), compiled(x))


def test_threads(tmp_path: Path) -> None:
    x = [torch.randn(3, 24) for _ in range(8)]
    loaded = saved(mlp(), x[0], tmp_path / "m.forge")
    expected = [loaded(t) for t in x]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(50) if not torch.equal(loaded(x[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_npu_emulation(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 24)
    compiled = forge_ugc.compile(model, x, device="npu:emulate")
    compiled.save(tmp_path / "m.forge")
    assert torch.equal(forge_ugc.load(tmp_path / "m.forge", device="npu:emulate")(x), compiled(x))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_format(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "m.forge"
    compiled = forge_ugc.compile(model, torch.randn(3, 24))
    compiled.save(path)
    before = path.read_bytes()
    compiled.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["program0.graph", "program0.npuir", WEIGHTS, MANIFEST]
        weights = safetensors.numpy.load(archive.read(WEIGHTS))
        at = before.index(archive.read(WEIGHTS)[:64])
    assert at % 64 == 0
    assert np.array_equal(weights["0.weight"], model[0].weight.detach().numpy())
    forge_ugc.load(path, verify=True)


def test_links_and_devices(tmp_path: Path) -> None:
    """A link leads to the new file; what is no file is not replaced by one."""
    compiled, target, link = forge_ugc.compile(mlp(), torch.randn(3, 24)), tmp_path / "m.forge", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    compiled.save(link)
    assert link.is_symlink() and forge_ugc.load(target).manifest["model"] == "Sequential"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "to_pipe"):
        with pytest.raises(OSError, match="no plain file"):
            compiled.save(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.forge"
    model = transformers.AutoModelForCausalLM.from_pretrained("examples/small_gpt2").eval()
    compiled = forge_ugc.compile(model, (), {"input_ids": torch.ones(1, 4, dtype=torch.int64)})
    with pytest.raises(ArtefactError, match="use_cache=False"):
        compiled.save(path)
    with torch.device("meta"):
        meta = torch.nn.Linear(64, 64)
    compiled = forge_ugc.compile(meta, torch.randn(2, 64, device="meta"))
    with pytest.raises(ArtefactError, match="meta"):
        compiled.save(path)
    assert not path.exists()
    compiled = forge_ugc.compile(mlp(), torch.randn(3, 24))
    with pytest.raises(FileNotFoundError):
        compiled.save(tmp_path / "nowhere" / "m.forge")
    x = torch.randn(2)
    for function, args, says in [
        (lambda x: {"a": [x + 1, x.dtype]}, (x,), r"output\['a'\]\[1\] is dtype torch.float32: of results, only"),
        (lambda x: (x + 1, 2j), (x,), r"output\[1\] is complex 2j"),
        (lambda x: {("k", 1): x + 1}, (x,), r"output: a dict with the key tuple \('k', 1\)"),
        (lambda x, dtype: x.to(dtype), (x, torch.float64), "input dtype is dtype torch.float64: of inputs, only"),
        (lambda x: deque([x + 1]), (x,), "output: a deque"),
    ]:
        with pytest.raises(ArtefactError, match=says):
            forge_ugc.compile(function, args).save(path)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "m.forge"
    forge_ugc.compile(mlp(), torch.randn(3, 24)).save(path)
    return path


def test_damaged_files(artefact: Path, tmp_path: Path) -> None:
    data, path = artefact.read_bytes(), tmp_path / "bad.forge"
    for cut in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ArtefactError, match=r"bad\.forge"):
            forge_ugc.load(path)
    good = members(artefact)
    manifest = json.loads(good[MANIFEST])
    for change, message in [
        ({MANIFEST: json.dumps({**manifest, "format": 99}).encode()}, "newer Forge-UGC"),
        ({MANIFEST: b"{"}, "damaged"),
        ({MANIFEST: b"[1]"}, "no format"),
        ({"program0.graph": b"graph {"}, r"program0\.graph"),
        ({"program0.graph": good["program0.graph"].replace(b"[48,24]", b"[48,25]")}, "program0"),
        ({"program0.graph": good["program0.graph"].replace(b"linear", b"linera")}, "linera"),
        ({WEIGHTS: good[WEIGHTS][:-1]}, "lies outside"),
        ({MANIFEST: json.dumps({**manifest, "outputs": {"namedtuple": [["a b", {"leaf": 0}]]}}).encode()}, "a b"),
        ({WEIGHTS: b"\xff" * 8 + good[WEIGHTS][8:]}, "no header"),
        ({WEIGHTS: good[WEIGHTS].replace(b'"F32"', b'"F16"')}, "size is not"),
    ]:
        with pytest.raises(ArtefactError, match=message):
            forge_ugc.load(rewrite(path, {**good, **change}))
    for name in good:
        if not name.endswith(".npuir"):
            with pytest.raises(ArtefactError, match=name):
                forge_ugc.load(rewrite(path, {k: v for k, v in good.items() if k != name}))
    with pytest.raises(ArtefactError, match="compressed"):
        forge_ugc.load(rewrite(path, good, zipfile.ZIP_DEFLATED))
    flipped = bytearray(data)
    flipped[data.index(good[WEIGHTS][-64:]) + 5] ^= 1
    path.write_bytes(flipped)
    forge_ugc.load(path)
    with pytest.raises(ArtefactError, match="checksum"):
        forge_ugc.load(path, verify=True)
    for threads in (0, 10**30):
        with pytest.raises(ValueError, match="num_threads must be from 1 to 1024"):
            forge_ugc.load(artefact, num_threads=threads)
    with pytest.raises(FileNotFoundError):
        forge_ugc.load(tmp_path / "none.forge")
