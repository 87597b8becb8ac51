"""Artefacts with any change: ArtefactError, or they run or refuse in an orderly way. Never a crash."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import forge_ugc
from forge_ugc import ArtefactError
from forge_ugc.artefact import MANIFEST, WEIGHTS
from tests.artefacts import hostile_manifest, members, mutated, rewrite

FILES = 10_000  # of the long form, in parts of 2,500


class Everything(torch.nn.Module):
    """Weights, state, an argument that is written, calls of torch, objects whose sizes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.GELU(), torch.nn.LayerNorm(24))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor, log: torch.Tensor) -> Any:
        self.count += x.sum(1)
        log[0] = self.count
        inverse = torch.linalg.inv(torch.eye(3) + x[:, :3].tril(-1))
        return {"y": self.body(x)}, inverse, (x > 0).nonzero(), log, 3.0


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = tmp_path_factory.mktemp("fuzz") / "m.forge"
    args = (torch.ones(3, 12), torch.zeros(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forge_ugc.FallbackWarning)
        forge_ugc.compile(Everything().eval(), args, device="cpu").save(path)
    return SimpleNamespace(data=path.read_bytes(), members=members(path), args=[a.numpy() for a in args])


def try_file(path: Path, args: list[Any]) -> bool:
    """Whether it loads; what loads must run, or refuse in an orderly way."""
    try:
        model = forge_ugc.load(path, num_threads=1, device="cpu")
    except ArtefactError:
        return False
    small = all(np.prod(shape, dtype=float) < 1e6 for p in model._programs for _, shape in [*p.inputs, *p.outputs])
    if small and model.report["buffers"]["arena_bytes"] < 1e7:
        try:
            model(*(a.copy() for a in args))
        except (TypeError, IndexError, MemoryError):
            pass
        except (RuntimeError, ValueError) as error:  # what torch says of arguments that its operators do not take
            assert '"hosts"' in json.dumps(model.manifest) and not isinstance(error, ArtefactError)
    return True


def hostile_call(manifest: Any, rng: random.Random) -> Any:
    """One place of a host call replaced."""
    names = ["aten.add.Tensor", "aten.sum.default", "aten.nonzero.default", "aten.sin_.default", "operator.getitem"]
    names += [
        "aten.as_strided.default",
        "aten.sort.default",
        "aten.from_file.default",
        "aten.expand.default",
        "os.system",
    ]
    values = [None, -1, 1 << 40, 2.5, "x", [], {}, {"operand": 0}, {"operand": 9}, {"dtype": "int8"}, [1, [2]], True]
    call = rng.choice([call for call in manifest["programs"][0]["hosts"] if call is not None])
    kind = rng.random()
    if kind < 0.4:
        call["target"] = rng.choice(names)
    elif kind < 0.8:
        call["args"] = [rng.choice([{"operand": 0}, *values]) for _ in range(rng.randrange(4))]
    else:
        call[rng.choice(list(call))] = rng.choice(values)
    return manifest


def fuzz(subject: SimpleNamespace, path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    good, loads = subject.members, 0
    for i in range(count):
        if i % 5 == 0:
            path.write_bytes(mutated(subject.data, rng))
        elif i % 5 < 3:
            change = hostile_manifest if i % 5 == 1 else hostile_call
            manifest = change(json.loads(good[MANIFEST]), rng)
            rewrite(path, {**good, MANIFEST: json.dumps(manifest).encode()})
        elif i % 5 == 3:
            rewrite(path, {**good, "program0.graph": mutated(good["program0.graph"], rng)})
        else:
            size = int.from_bytes(good[WEIGHTS][:8], "little")
            header = mutated(good[WEIGHTS][: 8 + size], rng)
            rewrite(path, {**good, WEIGHTS: header + good[WEIGHTS][8 + size :]})
        loads += try_file(path, subject.args)
    assert 0 < loads < count


def test_unchanged(subject: SimpleNamespace, tmp_path: Path) -> None:
    assert try_file(rewrite(tmp_path / "m.forge", subject.members), subject.args)


def test_fuzz(subject: SimpleNamespace, tmp_path: Path) -> None:
    """Any bytes of the file, and of each member under a right checksum."""
    fuzz(subject, tmp_path / "fuzz.forge", 0, 600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_fuzz_long(subject: SimpleNamespace, tmp_path: Path, seed: int) -> None:
    fuzz(subject, tmp_path / "fuzz.forge", seed, FILES // 4)
