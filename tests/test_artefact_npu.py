"""Artefacts with the NPU's compiled graphs inside: nothing is compiled where driver and device are the same, and what
is not is said. The software NPU compiles; its compiler command counts."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc import ArtefactError, npu
from forge_ugc.artefact import MANIFEST, PAGE
from forge_ugc.testing import SoftwareNpu, software_npu
from tests.artefacts import hostile_manifest, members, mutated, rewrite
from tests.compare import assert_same
from tests.models.families import input_ids
from tests.npu_stack import EXACT, X, needed, stack  # noqa: F401 (a fixture)
from tests.test_npu_session import SMALL, small

NO_CACHE = {**EXACT, "cache": False}


class Machine:
    """An NPU whose compilations are counted."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.log = folder / f"compiled-{len(list(folder.iterdir()))}"
        self.log.touch()
        self._npu = software_npu(compiler=f"echo once >> '{self.log}'", **options)

    def __enter__(self) -> Machine:
        self.device: SoftwareNpu = self._npu.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        npu.settle(60)
        self._npu.__exit__(*error)

    def compiled(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path) as machine:
        yield machine


def on_npu(model: Any, *example: Any, **options: Any) -> forge_ugc.CompiledModel:
    compiled = forge_ugc.compile(model, example, **{"device": "npu", "npu_options": NO_CACHE, **options})
    assert compiled.wait(60)
    return compiled


def load(path: Path, **options: Any) -> forge_ugc.LoadedModel:
    return forge_ugc.load(path, **{"device": "npu", "npu_options": NO_CACHE, **options})


def entries(path: Path) -> list[dict[str, Any]]:
    return [p["npu"] for p in json.loads(members(path)[MANIFEST])["programs"] if "npu" in p]


def changed(path: Path, entry: Any = None, **contents: bytes) -> Path:
    """The file with another entry for the graphs of its only program, and with members replaced."""
    found = members(path)
    manifest = json.loads(found[MANIFEST])
    if entry is not None:
        manifest["programs"][0]["npu"] = entry
    return rewrite(path, {**found, MANIFEST: json.dumps(manifest).encode(), **contents})


# --- the same machine -------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fold", ["auto", True, False])
def test_a_new_process_compiles_nothing(machine: Machine, tmp_path: Path, fold: Any) -> None:
    """With an empty cache, and without torch."""
    model, path = stack(3), tmp_path / "m.forge"
    forge = on_npu(model, X, fold=fold, npu_options=EXACT)
    forge.save(path)
    assert machine.compiled() == (2 if fold == "auto" else forge.report["npu"]["blocks"])
    np.save(tmp_path / "x.npy", X.numpy())
    code = """
import json, sys
sys.modules["torch"] = None  # importing it fails
import numpy, forge_ugc
folder, fold = sys.argv[1], json.loads(sys.argv[2])
options = {"types": "f32", "border": "f32"}
model = forge_ugc.load(folder + "/m.forge", device="npu", fold=fold, npu_options=options)
numpy.save(folder + "/y.npy", model(numpy.load(folder + "/x.npy")))
assert model.wait(60)
print(json.dumps(model.report["npu"]))
"""
    before, empty = machine.compiled(), tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(fold)],
        env={**os.environ, "FORGE_CACHE_DIR": str(empty)}, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert machine.compiled() == before
    assert report["artefact_hits"] == report["blocks"] and report["cache_hits"] == report["compiled"] == 0
    assert report["tier"] == int(fold is not True) and report["artefact"] is None
    assert not empty.exists(), "the cache got graphs of a file"
    assert_same(model(X), torch.from_numpy(np.load(tmp_path / "y.npy")))


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [n if n in ("gpt2", "qwen2") else pytest.param(n, marks=pytest.mark.slow) for n in SMALL]
)
@pytest.mark.parametrize("fold", [True, False])
def test_what_is_saved_is_what_a_loaded_program_asks_for(
    machine: Machine, tmp_path: Path, name: str, fold: bool
) -> None:
    model = small(name, 2)
    ids = input_ids(model, seq=12)
    forge = on_npu(model, ids, fold=fold)
    forge.save(tmp_path / "m.forge")
    before = machine.compiled()
    loaded = load(tmp_path / "m.forge", fold=fold)
    assert machine.compiled() == before and loaded.report["npu"]["artefact_hits"] == forge.report["npu"]["blocks"]
    assert torch.equal(loaded(ids), forge(ids))


@torch.no_grad()
def test_the_file(machine: Machine, tmp_path: Path) -> None:
    """Each graph once, on pages of its own; no more bytes than they have."""
    model, path, bare = stack(3), tmp_path / "m.forge", tmp_path / "bare.forge"
    forge = on_npu(model, X)
    forge.save(path)
    forge.save(bare, npu_blobs=False)
    again = tmp_path / "again.forge"
    forge.save(again)
    assert path.read_bytes() == again.read_bytes()
    (entry,) = entries(path)
    assert not entries(bare) and entry["tier"] == 1 and entry["graphs"] == 1
    blobs = {name: data for name, data in members(path).items() if name.startswith("npu/")}
    assert [f"npu/{b['key']}.blob" for b in entry["blobs"]] == list(blobs)
    size = sum(map(len, blobs.values()))
    assert size == forge.report["npu"]["blob_bytes"] == sum(b["bytes"] for b in entry["blobs"])
    assert size < path.stat().st_size - bare.stat().st_size < size + len(blobs) * (PAGE + 1000) + 1000
    artefact = load(path)._artefact
    assert all((address - artefact._bytes.ctypes.data) % PAGE == 0 for address, _ in artefact.blobs.values())
    before = machine.compiled()
    assert load(bare).report["npu"]["artefact_hits"] == 0 and machine.compiled() > before
    forge_ugc.load(path, device="cpu", verify=True)


@torch.no_grad()
def test_shapes_that_were_called(machine: Machine, tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()).eval()
    x = torch.randn(4, 16)
    forge = on_npu(model, x[:2], dynamic_shapes=({0: batch},))
    forge(x)
    assert forge.wait(60)
    forge.save(tmp_path / "m.forge")
    before = machine.compiled()
    loaded = load(tmp_path / "m.forge")
    assert_same(model(x), loaded(x))
    assert_same(model(x[:2]), loaded(x[:2]))
    assert machine.compiled() == before == 2 and len(entries(tmp_path / "m.forge")) == 2


@torch.no_grad()
def test_pickles_carry_them(machine: Machine) -> None:
    model = stack(2)
    forge = on_npu(model, X)
    before = machine.compiled()
    there = pickle.loads(pickle.dumps(forge))
    assert there.report["npu"]["artefact_hits"] == 1 and machine.compiled() == before
    there = pickle.loads(pickle.dumps(there))
    assert there.report["npu"]["artefact_hits"] == 1 and machine.compiled() == before
    assert_same(model(X), there(X))


@torch.no_grad()
def test_they_can_be_left_alone(machine: Machine, tmp_path: Path) -> None:
    on_npu(stack(2), X).save(tmp_path / "m.forge")
    before = machine.compiled()
    loaded = load(tmp_path / "m.forge", npu_blobs=False, fold=False)
    assert loaded.report["npu"]["artefact_hits"] == 0 and machine.compiled() == before + 1
    again = pickle.loads(pickle.dumps(loaded))
    assert again.report["npu"]["artefact_hits"] == 0 and machine.compiled() == before + 2


@torch.no_grad()
def test_precision_is_that_of_the_saved_model(machine: Machine, tmp_path: Path) -> None:
    model, path = stack(2), tmp_path / "m.forge"
    forge = on_npu(model, X, precision="w8a16")
    forge.save(path)
    before = machine.compiled()
    loaded = load(path)
    assert loaded._live()["precision"] == "w8a16" and machine.compiled() == before
    assert torch.equal(loaded(X), forge(X))
    other = load(path, precision="fp16", fold=True).report["npu"]
    assert other["artefact_hits"] == 0 and "precision w8a16 there, fp16 here" in other["artefact"]
    assert_same(model(X), forge_ugc.load(path, device="cpu")(X))
    with pytest.raises(ArtefactError, match="precision"):
        forge_ugc.load(changed_precision(path, "w9a16"))


def changed_precision(path: Path, precision: Any) -> Path:
    found = members(path)
    manifest = {**json.loads(found[MANIFEST]), "npu_precision": precision}
    return rewrite(path, {**found, MANIFEST: json.dumps(manifest).encode()})


@torch.no_grad()
def test_a_lost_device_loads_them_again(tmp_path: Path) -> None:
    model = stack(2)
    with Machine(tmp_path, recovers=True) as machine:
        on_npu(model, X).save(tmp_path / "m.forge")
        before, loaded = machine.compiled(), load(tmp_path / "m.forge")
        machine.device.lose()
        assert_same(model(X), loaded(X))
        assert loaded.report["npu"]["artefact_hits"] == 1 and machine.compiled() == before


class Views(torch.nn.Module):
    """Results that share memory, which those of a file do not; state and an argument that are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = torch.relu(self.linear(x))
        self.seen += h.mean(0)
        y.mul_(2)
        return h.view(2, -1), h, y


@torch.no_grad()
@pytest.mark.parametrize("schedule", [True, False])
def test_a_program_that_is_saved_otherwise_than_it_runs(machine: Machine, tmp_path: Path, schedule: bool) -> None:
    model, args = Views().eval(), (torch.randn(4, 16), torch.randn(3))
    forge = on_npu(model, *args, schedule=schedule)
    before = machine.compiled()
    forge.save(tmp_path / "m.forge")
    assert machine.compiled() == before + 1
    loaded = load(tmp_path / "m.forge")
    assert loaded.report["npu"]["artefact_hits"] == 1 and machine.compiled() == before + 1
    assert_same(model(args[0], args[1].clone()), loaded(args[0], args[1].clone()))
    machine.device.fail("pfnCreate3", result="device-lost")
    forge.save(tmp_path / "m.forge")
    assert not entries(tmp_path / "m.forge")


@torch.no_grad()
def test_changed_weights_are_not_in_old_graphs(machine: Machine, tmp_path: Path) -> None:
    model = stack(2)
    forge = on_npu(model, X)
    model.layers[0].up.weight.mul_(2)
    forge.save(tmp_path / "m.forge")
    assert not entries(tmp_path / "m.forge")
    assert_same(model(X), load(tmp_path / "m.forge")(X))
    forge(X)
    assert forge.wait(60)
    forge.save(tmp_path / "m.forge")
    before = machine.compiled()
    assert_same(model(X), load(tmp_path / "m.forge")(X))
    assert machine.compiled() == before


@torch.no_grad()
def test_graphs_that_came_from_the_cache_or_a_file(machine: Machine, tmp_path: Path) -> None:
    """They are kept as those that were compiled; of what the cache has lost since, nothing."""
    model, path = stack(2), tmp_path / "m.forge"
    on_npu(model, X, fold=False, npu_options=EXACT)
    forge = on_npu(model, X, fold=False, npu_options=EXACT)
    assert forge.report["npu"]["cache_hits"] == 1
    forge.save(path)
    assert load(path).report["npu"]["artefact_hits"] == 1
    for file in Path(os.environ["FORGE_CACHE_DIR"]).glob("*.blob"):
        file.unlink()
    forge.save(path)
    (entry,) = entries(path)
    assert entry["graphs"] == 1 and not entry["blobs"]
    report = load(path, fold=False).report["npu"]
    assert report["compiled"] == 1 and "the file has 0 of 1" in report["artefact"]


# --- other machines ---------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"driver_version": 2}, "driver 1 there, 2 here"),
        ({"compiler_version": "7.31"}, "compiler 7.30 there, 7.31 here"),
        ({"device": "npu5010"}, "device Software NPU"),
        ({"extension": "1.15"}, "graph extension 1.16 there, 1.15 here"),
    ],
)
def test_another_machine_compiles_and_says_so(tmp_path: Path, other: Any, says: str) -> None:
    model, path = stack(2), tmp_path / "m.forge"
    with Machine(tmp_path):
        on_npu(model, X).save(path)
    with Machine(tmp_path, **other) as machine:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load(path)
        first = loaded.report["npu"]
        assert first["artefact_hits"] == 0 and says in first["artefact"], first
        assert machine.compiled() >= first["compiled"] == first["blocks"]
        assert_same(model(X), loaded(X))
        assert loaded.wait(60) and loaded.report["npu"]["tier"] == 1
        assert_same(model(X), loaded(X))
        del loaded
    with Machine(tmp_path) as machine:  # the file is as it was
        assert load(path).report["npu"]["artefact"] is None and machine.compiled() == 0


@torch.no_grad()
def test_folded_graphs_serve_until_others_are_compiled(machine: Machine, tmp_path: Path) -> None:
    model, path = stack(3), tmp_path / "m.forge"
    on_npu(model, X, fold=True).save(path)
    before = machine.compiled()
    loaded = load(path)
    assert_same(model(X), loaded(X))
    assert loaded.wait(60)
    report = loaded.report["npu"]
    assert report["tier"] == 1 and machine.compiled() == before + report["compiled"] == before + 1
    assert "the file has folded graphs, these are graphs with constant weights" in report["artefact"]


@torch.no_grad()
def test_the_command_line_says_it(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_npu(stack(2), X).save(tmp_path / "m.forge")
    from forge_ugc.cli import main

    assert main(["report", str(tmp_path / "m.forge"), "--device", "npu"]) == 0  # f16, where the file has f32
    text = " ".join(capsys.readouterr().out.split())
    assert "0 from the file, 0 from the cache," in text and "types f32 there, f16 here" in text


def test_without_an_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = stack(2), tmp_path / "m.forge"
    with Machine(tmp_path), torch.no_grad():
        on_npu(model, X).save(path)
    monkeypatch.setattr(forge_ugc._core, "npu_likely", lambda: False)
    loaded = forge_ugc.load(path)
    assert loaded.device == "cpu" and loaded.report["npu"] is None
    with torch.no_grad():
        assert_same(model(X), loaded(X))


# --- hostile files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(machine: Machine, tmp_path: Path) -> tuple[Path, dict[str, Any], bytes]:
    """A file with one graph, its entry, the graph."""
    path = tmp_path / "m.forge"
    with torch.no_grad():
        on_npu(stack(2), X).save(path)
    (entry,) = entries(path)
    return path, entry, members(path)[f"npu/{entry['blobs'][0]['key']}.blob"]


def test_damaged_graphs(machine: Machine, kept: tuple[Path, dict[str, Any], bytes]) -> None:
    path, entry, blob = kept
    (one,) = entry["blobs"]
    name = f"npu/{one['key']}.blob"
    for at in (0, len(blob) // 2, len(blob) - 1):
        changed(path, **{name: blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]})
        with pytest.raises(ArtefactError, match="damaged: its checksum is wrong"):
            load(path)
        forge_ugc.load(path, device="cpu")  # where they are not read
        assert load(path, npu_blobs=False).device == "npu"
    changed(path, **{name: blob[:-1]})
    for device in ("npu", "cpu"):
        with pytest.raises(ArtefactError, match=f"{len(blob) - 1} bytes, not {len(blob)}"):
            load(path, device=device)
    whole = changed(path, **{name: blob}).read_bytes()
    assert load(path).report["npu"]["artefact_hits"] == 1
    for wrong in ({"key": "x"}, {"key": "0" * 32}, {"key": 7}, {"checksum": "A" * 32}, {"bytes": -1}, {"bytes": "9"}):
        changed(path, {**entry, "blobs": [{**one, **wrong}]})
        with pytest.raises(ArtefactError):
            load(path, device="cpu")
        path.write_bytes(whole)
    for entry_wrong in ({**entry, "tier": 2}, {**entry, "graphs": None}, {**entry, "for": []}, {"blobs": []}, 7, "x"):
        changed(path, entry_wrong)
        with pytest.raises(ArtefactError):
            load(path, device="cpu")
        path.write_bytes(whole)
    path.write_bytes(whole.replace(blob, blob[::-1]))  # the directory of the zip knows better
    with pytest.raises(ArtefactError, match="checksum of npu/"):
        forge_ugc.load(path, device="cpu", verify=True)


@torch.no_grad()
@pytest.mark.parametrize("result", ["invalid-native-binary", "unsupported-version", "unknown"])
def test_a_graph_that_the_driver_refuses(machine: Machine, kept: Any, result: str) -> None:
    path, _, _ = kept
    before = machine.compiled()
    machine.device.fail("pfnCreate3", result=result)
    loaded = load(path)
    report = loaded.report["npu"]
    assert report["artefact_refused"] == report["compiled"] == 1 and machine.compiled() == before + 1
    assert "1 were refused" in report["artefact"]
    assert_same(stack(2)(X), loaded(X))


@torch.no_grad()
def test_a_graph_of_another_model(machine: Machine, kept: Any, tmp_path: Path) -> None:
    """That the driver takes, under this model's key: its arguments give it away."""
    path, entry, _ = kept
    on_npu(stack(2), X[:, :7]).save(tmp_path / "other.forge")
    (other,) = entries(tmp_path / "other.forge")
    blob = members(tmp_path / "other.forge")[f"npu/{other['blobs'][0]['key']}.blob"]
    key = entry["blobs"][0]["key"]
    changed(path, {**entry, "blobs": [{**other["blobs"][0], "key": key}]}, **{f"npu/{key}.blob": blob})
    before = machine.compiled()
    loaded = load(path)
    assert loaded.report["npu"]["artefact_refused"] == 1 and machine.compiled() == before + 1
    assert "compile-failed" in loaded.report["npu"]["artefact"]
    assert_same(stack(2)(X), loaded(X))


@torch.no_grad()
def test_a_tier_that_the_file_only_claims(machine: Machine, kept: Any) -> None:
    """Folded graphs that are called final: others are compiled, and it is said."""
    path, _, _ = kept
    model = stack(3)
    on_npu(model, X, fold=True).save(path)
    (entry,) = entries(path)
    changed(path, {**entry, "tier": 1})
    loaded = load(path)
    report = loaded.report["npu"]
    assert report["tier"] == 1 and report["artefact_hits"] == 0 and report["artefact"].endswith("the file has others")
    assert_same(model(X), loaded(X))


@torch.no_grad()
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_fuzz(machine: Machine, kept: Any, tmp_path: Path, count: int) -> None:
    """Any bytes of the file, of the entry and of the graph under right sums of the zip: ArtefactError, or it runs."""
    path, entry, blob = kept
    whole, good, rng = path.read_bytes(), members(path), random.Random(count)
    name = f"npu/{entry['blobs'][0]['key']}.blob"
    file, loads, used = tmp_path / "fuzz.forge", 0, 0
    expected = stack(2)(X)
    for i in range(count):
        if i % 3 == 0:
            file.write_bytes(mutated(whole, rng))
        elif i % 3 == 1:
            manifest = json.loads(good[MANIFEST])
            manifest["programs"][0]["npu"] = hostile_manifest(manifest["programs"][0]["npu"], rng)
            rewrite(file, {**good, MANIFEST: json.dumps(manifest).encode()})
        else:
            rewrite(file, {**good, name: mutated(blob, rng)})
        try:
            loaded = load(file, fold=False)
        except ArtefactError:
            continue
        loads += 1
        used += loaded.report["npu"]["artefact_hits"]
        if i % 3:  # what is compiled and what is taken from the file are the same
            assert_same(expected, loaded(X))
    assert 0 < used < loads < count
    assert not machine.device.misuses()


def test_the_corner_of_the_door(machine: Machine, kept: Any) -> None:
    """What `_core.load` says of arguments that loaded.py never gives it."""
    path, _, _ = kept
    text = members(path)["program0.graph"].decode()
    for blobs, error in (
        ([("0" * 32, "0" * 32, 1, 0)], ValueError),
        ([("0" * 32, "0" * 32, 0, 1)], ValueError),
        ([("0" * 31, "0" * 32, 1, 1)], ValueError),
        ([("0" * 32, "g" * 32, 1, 1)], ValueError),
        ([(7, "0" * 32, 1, 1)], ValueError),
        ([("0" * 32, "0" * 32, 1)], TypeError),
        ([7], TypeError),
        (7, TypeError),
    ):
        with pytest.raises(error):
            forge_ugc._core.load(text, [], blobs=blobs)  # type: ignore[arg-type]


def test_writing_that_fails_is_the_callers_exception(machine: Machine) -> None:
    with torch.no_grad():
        program = on_npu(stack(2), X)._now().program
    views = []

    def write(key: str, checksum: str, data: memoryview) -> None:
        views.append(data)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        program.npu_blobs(write)
    with pytest.raises(ValueError, match="released"):
        views[0][0]
