"""The benchmark: one quick run of the command, and the parts that a machine may not show (counters, full memory)."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks import jobs, machine, measure, models, session, systems, tables
from benchmarks.__main__ import jobs_of, parse, settings_of
from benchmarks.energy import Rapl
from benchmarks.table_compile import line

ROOT = Path(__file__).parent.parent
PEER = next((n for n in ("openvino", "onnxruntime") if not systems.SYSTEMS[n].missing()), None)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run: forge, eager and a peer on two layers of GPT-2."""
    out = tmp_path_factory.mktemp("results")
    names = ",".join(n for n in ("forge", "eager", PEER) if n)
    tables = "4,5,6,7,9,16,20,21,22,latency,phases,memory,scheduling"
    done = run("--quick", "--fresh", "--models", "gpt2", "--systems", names, "--tables", tables, "--threads", "1",
               "--out", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def data(quick: Path) -> dict:
    return json.loads((quick / "results.json").read_text())


def table(data: dict, name: str) -> list[dict[str, str]]:
    found = next(t for t in data["tables"] if t["name"] == name)
    assert all(len(row) == len(found["columns"]) for row in found["rows"]), name
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def test_all_asked_tables_have_rows(data):
    for each in data["tables"]:
        assert table(data, each["name"]), each["name"]


def test_forge_is_eager(data):
    (row,) = table(data, "6")
    assert 0 < float(row["Forge-UGC max-abs"]) < 2.1e-5
    assert float(row["Forge-UGC KL"]) < 8.4e-9
    assert row["PPL eager"] == row["PPL Forge"]
    if PEER:
        assert float(row[f"{systems.label(PEER)} max-abs"]) < 1e-3


def test_calls_were_measured(data):
    rows = {row["System"]: row for row in table(data, "latency")}
    assert {"Forge-UGC", "eager"} <= set(rows)
    for row in rows.values():
        assert 0 < float(row["P50"].replace(",", "")) <= float(row["P99"].replace(",", ""))
        assert row["Calls"] == "4"
        assert row["FLOP share"].endswith("%")
    assert rows["Forge-UGC"]["/ Forge (quartiles)"].startswith("1.00")


def test_compile_phases_make_up_the_compile_time(data):
    row = next(r for r in table(data, "phases") if r["System"] == "Forge-UGC")
    phases = [part.rsplit(" ", 1) for part in row["Phases (ms)"].split(", ")]
    assert {"capture", "passes", "lower", "alloc", "schedule", "pack"} <= {name for name, _ in phases}
    assert math.isclose(sum(float(ms) for _, ms in phases) / 1e3, float(row["To callable (s)"]), abs_tol=0.01)


def test_nodes_get_fewer(data):
    (row,) = table(data, "5")
    assert int(row["torch.export"]) > int(row["Table"]) > int(row["Executed"]) > 0


def test_npu_tables_say_what_they_are(data):
    assert all("Cost change" in row for row in table(data, "21"))  # of the cost model: no latency is claimed
    notes = " ".join(next(t for t in data["tables"] if t["name"] == "21")["notes"])
    assert "plan" in notes and "an estimate of the cost model" in notes


def test_scheduling_saves_transitions(data):
    rows = {(row["Model"].rpartition(", ")[0] != "", row["Target"]): row for row in table(data, "scheduling")}
    assert rows[False, "CPU"]["Transitions"] == "0" and rows[False, "NPU4000"]["Transitions"] == "2"
    tops = rows[True, "NPU4000"]
    assert (tops["Transitions"], tops["scheduled"]) == ("6", "2")
    if (True, "software NPU") in rows:  # where there is OpenVINO and a loader
        measured = rows[True, "software NPU"]
        assert (measured["Transitions"], measured["scheduled"]) == ("6", "2")
        assert float(measured["P50 (ms)"]) > 0 and float(measured["scheduled (ms)"]) > 0


def test_markdown_and_plots(quick):
    text = (quick / "results.md").read_text()
    assert "Table 4: Compilation time" in text and machine.cpuinfo()[0] in text
    if importlib.util.find_spec("matplotlib"):
        assert (quick / "latency.png").stat().st_size > 1000 and "(latency.png)" in text


def test_measured_once_a_boot(data):
    names = ",".join(n for n in ("forge", "eager", PEER) if n)
    given = parse(["--quick", "--models", "gpt2", "--systems", names, "--tables", "5", "--threads", "1"])
    (job,) = jobs_of([tables.all_makers()["5"]], settings_of(given))
    results = jobs.Results()
    results.measure(job, lambda text: pytest.fail(f"measured again: {text}"))
    assert results(job)["nodes_captured"] > 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_help_and_list():
    assert "examples:" in run("--help").stdout
    shown = run("--list").stdout
    assert all(name in shown for name in ("gpt2", "onnxruntime", "encoders", "22"))


def test_loading_in_one_process(tmp_path):
    import numpy as np
    import torch

    import forge_ugc
    from benchmarks.artefact import load
    from benchmarks.table_artefact import cells

    forge_ugc.compile(torch.nn.Linear(4, 3).eval(), torch.ones(2, 4)).save(tmp_path / "forge")
    np.save(tmp_path / "input0.npy", np.ones((2, 4), np.float32))
    found = load("forge", tmp_path, threads=1, calls=2)
    assert found["load_s"] > 0 and found["first_s"] > 0 and len(found["call_s"]) == 2
    assert np.load(tmp_path / "forge.npy").shape == (2, 3)
    rounds = {key: [value] for key, value in found.items()}
    assert cells({"forge": rounds, "bytes": {"forge": 2_000_000}}, "forge")[0] == "2"


@pytest.mark.slow
def test_loading_what_was_saved():
    from benchmarks.artefact import artefact
    from benchmarks.models import Subject
    from benchmarks.table_artefact import cells

    found = artefact(Subject("gpt2", layers=1, seq=8), threads=1, rounds=1, calls=1)
    assert found["max_abs"] < 1e-4 and found["bytes"]["forge"] > 1e8
    assert found["forge"]["load_s"][0] > 0 and len(found["forge"]["call_s"][0]) == 1
    assert len(cells(found, "forge")) == 6
    if "openvino" in found:
        assert sum(found["forge"]["load_s"]) < sum(found["openvino"]["load_s"])


def test_dry_run_orders_by_need():
    given = parse(["--models", "gpt2,llama1b,qwen2", "--budget", "20"])
    found = jobs_of(list(tables.all_makers().values()), settings_of(given))
    kinds = [job.kind for job in found]
    assert len(found) == len(set(found))
    first = [dict(job.arguments)["subject"].model for job in found[:3]]
    assert kinds[:4] == ["session"] * 3 + ["plan"] and first == ["gpt2", "qwen2", "llama1b"]  # the headline first
    systems_of = {
        dict(j.arguments)["subject"].model: dict(j.arguments)["systems"]
        for j in reversed(found)
        if "all systems" in j.title
    }
    assert "inductor" in systems_of["gpt2"] and "inductor" not in systems_of["llama1b"]
    shown = run("--dry-run", "--models", "gpt2", "--tables", "4,5", "--threads", "1")
    assert shown.returncode == 0 and "GPT-2 (125M): all systems" in shown.stdout and "minutes" in shown.stdout


def test_unknown_names_are_errors():
    done = run("--models", "gpt5")
    assert done.returncode == 2 and "unknown name 'gpt5'" in done.stderr and "qwen2" in done.stderr


def test_tables_4_to_22():
    papers = {str(n) for n in range(4, 23)}
    assert papers <= set(tables.all_makers())


def test_budget_leaves_out_and_says_so():
    settings = settings_of(parse(["--models", "gpt2", "--budget", "0.01"]))
    results = jobs.Results(budget_s=0.6, fresh=True)
    job = jobs.main_session(settings, "gpt2")
    results.measure(job, lambda text: pytest.fail("it was measured"))
    assert "left out" in results.missing[job] and results(job) is None
    shown = tables.all_makers()["7"].make(settings, results)
    assert shown.rows[0][1:] == ["-"] * 12 and any("budget" in note for note in shown.notes)


def test_estimates_follow_what_was_measured(tmp_path, monkeypatch):
    """On a machine that takes three times as long as was thought, less fits into the budget."""
    results = jobs.Results(folder=tmp_path, budget_s=4000.0, fresh=True)
    slow, next_one = (jobs.Job("plan", (("n", n),), f"job {n}", 900.0) for n in (1, 2))
    clock = [results.start]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(jobs.Job, "run", lambda self, say: clock.__setitem__(0, clock[0] + 2700.0) or {})
    results.measure(slow, lambda text: None)
    results.measure(next_one, lambda text: None)
    assert slow in results.found and "budget 1300 s are left" in results.missing[next_one]


def test_every_table_can_be_made_of_nothing():
    settings = settings_of(parse([]))
    for maker in tables.all_makers().values():
        for job in maker.jobs(settings):
            json.loads(job.key)
        shown = maker.make(settings, jobs.Results())
        assert all(len(row) == len(shown.columns) for row in shown.rows), maker.name


# --- parts -----------------------------------------------------------------------------------------------------------


def zone(root: Path, name: str, label: str, energy: int, span: int = 1000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (("name", label), ("energy_uj", energy), ("max_energy_range_uj", span)):
        (folder / file).write_text(f"{text}\n")
    return folder


def test_rapl_counts_packages_and_wraps(tmp_path):
    first = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 900)
    zone(tmp_path, "intel-rapl:0:0", "core", 50)
    zone(tmp_path, "intel-rapl:2", "psys", 5000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    rapl = Rapl(tmp_path)
    assert rapl.reason == "" and len(rapl.zones) == 2
    before = rapl.read()
    (first / "energy_uj").write_text("400\n")
    (second / "energy_uj").write_text("50\n")
    assert rapl.joules(before, rapl.read()) == pytest.approx((300 + 150) * 1e-6)


def test_rapl_without_a_counter(tmp_path):
    assert Rapl(tmp_path / "none").reason.startswith("no counter")
    assert "no package zone" in Rapl(tmp_path).reason
    broken = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (broken / "energy_uj").write_text("many\n")
    assert "no counter" in Rapl(tmp_path).reason


def test_statistics():
    of = measure.Latency.of([0.001 * (i + 1) for i in range(100)])
    assert (of.p50, of.p90, of.mean) == pytest.approx((50.5, 90.1, 50.5))
    assert of.p99 == pytest.approx(99.01) and of.tail == pytest.approx(99.01 / 50.5)
    ratio = measure.Ratio.of([[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], [[1.0, 1.0]] * 3)
    assert (ratio.low, ratio.median, ratio.high) == (2.5, 3.0, 3.5)
    slope, start, r2 = line([(1, 3.0), (2, 5.0), (4, 9.0)])
    assert (slope, start, r2) == pytest.approx((2.0, 1.0, 1.0))


def test_groups_keep_to_the_memory():
    names = ["forge", "eager", "openvino", "openvino-default", "onnxruntime", "inductor"]
    small, left_out = session.groups(names, 0.5, 23.0)
    assert not left_out and len(small) == 1
    assert ["openvino", "openvino-default"] in small[0].processes and small[0].processes[-1] == ["forge", "eager"]
    large, left_out = session.groups(names, 4.6, 22.0)
    assert not left_out and len(large) > 1
    assert all(group.processes[-1] == ["forge", "eager"] for group in large)
    measured = [n for group in large for process in group.processes[:-1] for n in process]
    assert sorted(measured) == ["inductor", "onnxruntime", "openvino", "openvino-default"]
    none, left_out = session.groups(names, 32.0, 22.0)
    assert not none and set(left_out) == set(names) and "GB" in left_out["forge"]
    alone, left_out = session.groups(names, 9.6, 22.0)
    assert [g.processes for g in alone] == [[["forge", "eager"]]] and "openvino" in left_out


class Replies:
    """Stands in for a process: answers what worker.py would, until its time comes."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.died = fails_at, False

    def ask(self, do: str, **arguments: object) -> dict[str, object]:
        if do == self.fails_at:
            self.died = True
            raise session.WorkerError("killed, perhaps for want of memory: ")
        if do == "run":
            return {"seconds": [0.001] * int(str(arguments["count"]))}
        if do == "outputs":
            np.save(str(arguments["path"]), np.zeros((1, 2, 3), np.float32))
        return {"ids": [[1, 2]]}


@pytest.mark.parametrize("fails_at", ["run", "outputs"])
def test_a_system_that_fails_in_a_call_leaves_the_others(fails_at, tmp_path, monkeypatch):
    ours, peer = Replies(), Replies(fails_at)
    hosts = {"openvino": peer, "openvino-default": peer, "forge": ours, "eager": ours}
    measured = {name: {} for name in hosts}
    dropped = {}
    drop = session._dropper(hosts, measured, dropped)
    plan = session.Plan(turns=2, calls=2, sequences=1)
    session._fidelity(hosts, measured, plan, tmp_path, lambda text: None, drop)
    session._latency(hosts, measured, plan, lambda text: None, drop)
    assert set(dropped) == {"openvino", "openvino-default"} and "memory" in dropped["openvino"]
    assert all(len(measured[n]["turns"]) == 2 for n in ("forge", "eager"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")
def test_processes_end_with_their_parent():
    """The parent is killed, so that it can end nothing; its child would sleep on."""
    child = "from benchmarks import measure as m; m.end_with_parent(); print('up', flush=True); m.time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "up\n"
    start = time.monotonic()
    process.kill()
    process.wait()
    assert process.stdout.read() == "" and time.monotonic() - start < 30  # the child held the pipe's other end
    process.stdout.close()


def test_slow_calls_are_fewer():
    plan = session.Plan(turns=10, calls=5, call_s=60.0)
    assert session._amount(plan, 0.1, 0.0) == (5, 10)
    assert session._amount(plan, 3.0, 0.0) == (5, 3)
    assert session._amount(plan, 8.0, 0.0) == (2, 2)


def test_transitions_are_priced_as_the_cost_model_does():
    from benchmarks.table_program import TRANSITION_US

    assert f"TRANSITION_US = {TRANSITION_US:.1f};" in (ROOT / "csrc" / "npuir" / "cost.c").read_text()


def test_a_worker_that_dies_is_told(tmp_path):
    with pytest.raises(session.WorkerError, match="exit status 1"):
        session.Process(models.Subject("no such model"), ["eager"], 1, tmp_path)


def test_systems_from_text():
    assert systems.system("forge:alpha=0.4").options == {"alpha": "0.4"}
    with pytest.raises(ValueError, match="unknown system"):
        systems.system("tvm")
    left = systems.pipeline_without("cse").split(",")
    assert "cse" not in left and "dce" in left


def test_probe():
    peak = machine.peaks(0.005)
    assert all(rate["core"] > 0.1 for rate in peak["gflops"].values()) and peak["gbytes"]["core"] > 0.1
    assert machine.peak_gflops({"gflops": {"a": {"core": 2.0, "all": 3.0}}}, machine.cores()) == 3.0


def test_cpuinfo():
    name, flags = machine.cpuinfo("model name\t: X\nflags\t: avx2 fma\n\nmodel name\t: Y\n")
    assert name == "X" and flags == {"avx2", "fma"}


# --- decode -----------------------------------------------------------------------------------------------------------
def test_decode(tmp_path: Path) -> None:
    """Forge and eager in turn, with the same tokens; a peer that is not there leaves them."""
    command = [sys.executable, "-m", "benchmarks.decode", "--quick", "--layers", "1", "--llama", "/bin/false"]
    command += ["--systems", "eager,forge,llama.cpp"]
    command += ["--models", "gpt2", "--precisions", "fp32", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert {r["system"] for r in rows} == {"eager", "forge", "llama.cpp"}
    gone = next(r for r in rows if r["system"] == "llama.cpp")
    assert not gone["times"] and gone["error"] == "its process ended: exit status 1"
    rows.remove(gone)
    assert all(len(r["times"]) == 8 and min(r["times"]) > 0 and not r["error"] for r in rows)
    page = (tmp_path / "decode.md").read_text()
    assert "| GPT-2 | fp32 | forge | f32 |" in page and "11 of 11 tokens of Forge" in page


def test_decode_keeps_its_budget(tmp_path: Path) -> None:
    from benchmarks import decode

    folders = ["--out", str(tmp_path), "--folder", str(tmp_path)]
    assert decode.main(["--models", "gpt2,qwen2", "--precisions", "w8", "--budget", "1e-6", *folders]) == 1
    page = (tmp_path / "decode.md").read_text()
    assert "Left out for want of time: GPT-2 in w8." in page and "Qwen2-0.5B in w8" in page


def test_decode_does_not_wait_for_ever(tmp_path: Path) -> None:
    from benchmarks import decode

    process = decode.Process("/bin/cat", {"threads": 1})  # answers nothing: there is no file of the name "-m"
    assert process.ask(5, do="start")["error"].startswith("its process ended")
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "hangs").chmod(0o755)
    process = decode.Process(str(tmp_path / "hangs"), {"threads": 1})
    assert process.ask(0.2, do="start") == {"error": "no answer within 0.2 s"}
    process.end()


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama1b"])
def test_decode_counts_the_bytes_of_a_token(name: str) -> None:
    """All parameters once, but for position tables: the embedding is the head as well."""
    from benchmarks import decode
    from tests.models import families

    model = families.build(name, device="meta").m
    parameters = dict(model.named_parameters())
    parameters.pop("transformer.wpe.weight", None)
    expected = 4.0 * sum(p.numel() for p in parameters.values())
    assert decode.Row(name, "forge", "fp32").bytes(None) == expected
