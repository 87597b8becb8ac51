"""Artefacts whose programs call torch: kept by name, loaded where torch is, and nothing but operators is believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc import ArtefactError, FallbackWarning
from forge_ugc.artefact import MANIFEST
from tests.artefacts import members, rewrite


def inverse(x: torch.Tensor) -> Any:
    return torch.linalg.inv(x) @ x


def data_dependent(x: torch.Tensor) -> Any:
    found = (x > 0).nonzero()
    return found, x[x > 0] * 2, found.shape[0] * 2, torch.linalg.inv(x)


def several(x: torch.Tensor) -> Any:
    values, vectors = torch.linalg.eigh(x + x.T)
    return vectors.abs(), values, torch.fft.rfft(x, norm="ortho").abs(), torch.unique(x.round())


def typed(x: torch.Tensor) -> Any:
    a = torch.linalg.vector_norm(torch.linalg.pinv(x), dtype=torch.float64)
    return a, torch.histc(x, bins=4, min=-1.5, max=1.5), torch.stft(x.flatten(), 4, return_complex=True).abs()


def save(function: Any, x: torch.Tensor, path: Path) -> Any:
    with pytest.warns(FallbackWarning):
        compiled = forge_ugc.compile(function, x)
    with pytest.warns(FallbackWarning, match=r"loads only where torch is: aten\.\w+.*test_artefact_hosts\.py:\d+"):
        compiled.save(path)
    return compiled


@pytest.mark.parametrize("function", [inverse, data_dependent, several, typed])
def test_same_results(function: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    compiled = save(function, x, tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    assert type(loaded.report) is forge_ugc.Report and loaded.report["capture"] == "artefact"
    counts = [{(f["op"], f["count"]) for f in model.report["fallbacks"]} for model in (loaded, compiled)]
    assert counts[0] >= counts[1] != set()  # a file does not tell arithmetic on sizes from operators
    results, expected, arrays = loaded(x), compiled(x), loaded(x.numpy())
    for got, want, array in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (results, expected, arrays)), strict=True
    ):
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want) and isinstance(array, np.ndarray) and np.array_equal(array, want.numpy())
        else:
            assert got == want == array
    assert {row.operator for row in loaded.profile(x).rows} & {
        "aten.linalg_inv.default",
        "aten.linalg_eigh.default",
    } or (function is typed)


def test_random_operators(tmp_path: Path) -> None:
    compiled = save(lambda x: x + torch.randn(3), torch.zeros(3), tmp_path / "m.forge")
    loaded = forge_ugc.load(tmp_path / "m.forge")
    torch.manual_seed(5)
    expected = compiled(torch.zeros(3))
    torch.manual_seed(5)
    loaded.profile(torch.zeros(3))
    assert torch.equal(loaded(torch.zeros(3)), expected)


def test_without_torch(tmp_path: Path) -> None:
    save(inverse, torch.eye(3), tmp_path / "m.forge")
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
import forge_ugc
try:
    forge_ugc.load(sys.argv[1])
except forge_ugc.ArtefactError as error:
    print(error)
"""
    run = [sys.executable, "-c", code, str(tmp_path / "m.forge")]
    done = subprocess.run(run, check=True, timeout=120, capture_output=True, text=True)
    assert "run through torch, which is not installed: aten.linalg_inv.default" in done.stdout


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    with torch.library._scoped_library("forge_artefact_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.warns(FallbackWarning):
            compiled = forge_ugc.compile(lambda x: torch.ops.forge_artefact_test.twice(x), torch.eye(3))
        with pytest.raises(ArtefactError, match=r"twice.*test_artefact_hosts.*no ATen operator"):
            compiled.save(tmp_path / "m.forge")
    assert not list(tmp_path.iterdir())


# --- hostile files ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("hosts") / "m.forge"
    save(inverse, torch.eye(3), path)
    return members(path)


def changed(good: dict[str, bytes], path: Path, **call: Any) -> Path:
    manifest = json.loads(good[MANIFEST])
    manifest["programs"][0]["hosts"][0] |= call
    return rewrite(path, {**good, MANIFEST: json.dumps(manifest).encode()})


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "operator.pow",
        "torch.load",
        "torch.sym_sqrt",
        "aten.from_file.default",  # maps files
        "aten.add_.Tensor",  # writes
        "aten.add.out",
        "aten.set_.source_Tensor",
        "aten._sparse_coo_tensor_unsafe.default",  # believes its arguments
        "aten.sparse_csr_tensor.crow_col_value",
        "aten.list.t",  # TorchScript's
        "aten.linalg_inv.__call__",
        "aten.linalg_inv._schema",
        "aten.__class__.default",
        "aten.no_such_operator.default",
        "prims.sin.default",
        "aten.linalg_inv",
        "aten.linalg_inv.default\n",
        "",
        7,
        None,
    ],
)
def test_hostile_names(good: dict[str, bytes], tmp_path: Path, name: Any) -> None:
    with pytest.raises(ArtefactError):
        forge_ugc.load(changed(good, tmp_path / "m.forge", target=name))


@pytest.mark.parametrize(
    "call",
    [
        {"args": [{"operand": 1}]},
        {"args": [{"operand": -1}]},
        {"args": [{"operand": True}]},
        {"args": [{"operand": 0, "dtype": "float32"}]},
        {"args": [{"dtype": "load"}]},
        {"args": [{"device": "cuda"}]},
        {"args": [{"code": "print(1)"}]},
        {"args": [{}]},
        {"args": 3},
        {"kwargs": [1]},
        {"autocast": "complex1"},
        {"several": 1},
        {"source": None},
    ],
)
def test_hostile_arguments(good: dict[str, bytes], tmp_path: Path, call: dict[str, Any]) -> None:
    with pytest.raises(ArtefactError):
        forge_ugc.load(changed(good, tmp_path / "m.forge", **call))


def test_hostile_calls(good: dict[str, bytes], tmp_path: Path) -> None:
    """What an operator makes must be what the graph takes, whatever the file says."""
    path = tmp_path / "m.forge"
    x = torch.eye(3)
    for call, message in [
        ({"target": "aten.sum.default"}, r"gave.*captured type"),
        ({"target": "aten.tril_indices.default", "args": [3, 3]}, r"gave.*captured type"),
        ({"target": "aten.linalg_inv.default", "args": ["x"]}, "linalg_inv"),
        ({"target": "operator.add", "args": [{"operand": 0}, 1]}, "expected numbers"),
        ({"several": True, "target": "aten.unbind.int"}, r"gave.*captured type"),
    ]:
        loaded = forge_ugc.load(changed(good, path, **call))
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            loaded(x)
    graph = good["program0.graph"]
    for change in [
        graph.replace(b"{name=", b"{index=1, name="),
        graph.replace(b"%0 = input {index=0} : f32[3,3]", b"%0 = input {index=0} : object[]"),
        graph.replace(b": f32[3,3]", b": f32[3,30]"),
    ]:
        assert change != graph
        with pytest.raises(ArtefactError):
            forge_ugc.load(rewrite(path, {**good, "program0.graph": change}))
    assert torch.equal(forge_ugc.load(rewrite(path, good))(x), x)


def test_writes_do_not_reach_the_file(tmp_path: Path) -> None:
    """Batch norm writes operands that its schema does not say it writes: a copy of the file's memory, no more."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.linalg.solve(x @ x.T, self.mean)

    path = tmp_path / "m.forge"
    x = torch.randn(64, 64)
    save(Norm().eval(), x, path)
    good = members(path)
    call = {"target": "aten.batch_norm.default", "args": [{"operand": 0}, None, None, {"operand": 1}, {"operand": 1}]}
    call["args"] += [True, 0.5, 1e-5, False]
    loaded = forge_ugc.load(changed(good, path, **call))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="captured type"):
        loaded(x)
    assert path.read_bytes() == before
    assert loaded._artefact.tensors["mean"].array().any()  # it was written
