"""A session: the systems of one model, each group of them in a fresh process, measured in turn.

The processes stay: what was compiled with the clock running is what the latency is measured on. While one works the
others wait on a pipe. Where memory does not hold all, Forge and eager meet the others one after the other.
"""

from __future__ import annotations

import json
import math
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import machine
from .models import Subject
from .systems import SYSTEMS, label

ROOT = Path(__file__).parent.parent
PAUSE = 0.02  # between two systems' calls: threads that spin after a call have stopped by then
PROCESS_GB = 0.9  # of a process that has imported all
PATIENCE_S = 900.0  # for one answer of a process

Progress = Callable[[str], None]


class WorkerError(RuntimeError):
    """The process died, or said what went wrong."""


class Process:
    """The other end of worker.py."""

    def __init__(self, subject: Subject, systems: list[str], threads: int, scratch: Path) -> None:
        self.systems = systems
        job = {"subject": asdict(subject), "systems": systems, "threads": threads, "scratch": str(scratch)}
        self.log = tempfile.TemporaryFile("w+", dir=scratch)
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(job)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT
        )
        self._reply()

    @property
    def died(self) -> bool:
        return self.process.poll() is not None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # _reply says how it ended
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE_S)[0]:
            self.process.kill()
            self.process.wait()
            raise WorkerError(f"no answer within {PATIENCE_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.log.seek(0)
            last = self.log.read().strip().splitlines()[-1:]
            how = "killed, perhaps for want of memory" if status == -9 else f"exit status {status}"
            raise WorkerError(f"{how}: {''.join(last)[:300]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    turns: int = 10
    calls: int = 5  # in a turn, after one that is not counted
    exact: bool = True  # compare eager and Forge with a float64 run, too
    sequences: int = 4  # whose outputs are compared with eager's
    energy_s: float = 2.0
    call_s: float = 180.0  # for the calls of a session: fewer turns if they would take longer


@dataclass
class Group:
    """Processes that live at once."""

    processes: list[list[str]] = field(default_factory=list)
    need_gb: float = 0.0


def home(name: str) -> str:
    """Systems that share a process: all that run on the torch model's weights, and OpenVINO's two precisions."""
    base = name.partition(":")[0]
    return {"eager": "torch", "forge": "torch", "openvino-default": "openvino"}.get(base, base)


def need_gb(systems: list[str], weights_gb: float) -> tuple[float, float]:
    """(while compiling, from then on) of a process that hosts them."""
    classes = [SYSTEMS[s.partition(":")[0]] for s in systems]
    steady = 1.0 + sum(c.steady for c in classes)
    return PROCESS_GB + weights_gb * max(1.0 + max(c.peak for c in classes), steady), PROCESS_GB + weights_gb * steady


def groups(systems: list[str], weights_gb: float, available_gb: float) -> tuple[list[Group], dict[str, str]]:
    """Which processes live at once, and for the systems that fit in no group the reason.

    The processes that are compared with (forge and eager) are in each group; those that take most while compiling start
    first.
    """
    homes: dict[str, list[str]] = {}
    for name in systems:
        homes.setdefault(home(name), []).append(name)
    base = homes.pop("torch", [])
    left_out: dict[str, str] = {}
    found: list[Group] = []
    base_peak = need_gb(base, weights_gb)[0] if base else 0.0
    if base_peak > available_gb:
        return [], dict.fromkeys(systems, f"needs {base_peak:.0f} GB of memory, {available_gb:.0f} are free")

    def least(process: list[str]) -> float:
        peak, steady = need_gb(process, weights_gb)
        return max(peak, steady + base_peak)

    # Systems that would share a process, but do not fit together, get one each.
    processes = [
        p for names in homes.values() for p in ([names] if least(names) <= available_gb else [[n] for n in names])
    ]
    for process in sorted(processes, key=lambda names: -need_gb(names, weights_gb)[0]):
        if least(process) > available_gb:
            why = f"needs {least(process):.0f} GB of memory, {available_gb:.0f} are free"
            left_out |= dict.fromkeys(process, why)
            continue
        group = next((g for g in found if g.need_gb + least(process) <= available_gb), None)
        if group is None:
            group = Group()
            found.append(group)
        group.processes.append(process)
        group.need_gb += need_gb(process, weights_gb)[1]
    if base:
        found = found or [Group()]
        for group in found:
            group.processes.append(base)
    return found, left_out


def measure(
    subject: Subject, systems: list[str], threads: int, plan: Plan, say: Progress = lambda text: None
) -> dict[str, Any]:
    """{"systems": {name: what was measured}, "groups": [names], "left_out": {name: why}}."""
    usable: list[str] = []
    left_out: dict[str, str] = {}
    for name in systems:
        missing = SYSTEMS[name.partition(":")[0]].missing()
        if missing:
            left_out[name] = f"{missing} is not installed"
        else:
            usable.append(name)
    found, too_big = groups(usable, subject.gigabytes, machine.available_gb() * 0.95)
    result: dict[str, Any] = {"subject": asdict(subject), "groups": [], "left_out": left_out | too_big}
    with tempfile.TemporaryDirectory(prefix="forge_bench_") as scratch:
        for group in found:
            result["groups"].append(_group(subject, group, threads, plan, Path(scratch), say, result["left_out"]))
    return result


def _group(
    subject: Subject, group: Group, threads: int, plan: Plan, scratch: Path, say: Progress, left_out: dict[str, str]
) -> dict[str, Any]:
    measured: dict[str, dict[str, Any]] = {}
    hosts: dict[str, Process] = {}
    with ExitStack() as stack:
        for names in group.processes:
            say(f"{subject.label}: loading {label(names[0])}")
            try:
                process = Process(subject, names, threads, scratch)
            except WorkerError as error:
                left_out |= dict.fromkeys(names, str(error))
                continue
            stack.callback(process.close)
            try:
                for name in names:
                    say(f"{subject.label}: compiling with {label(name)}")
                    measured[name] = process.ask("compile", name=name)
                    hosts[name] = process
                left = process.ask("drop_model")["resident_bytes"]
                measured[names[0]]["resident_bytes"] = left
            except WorkerError as error:
                left_out |= {name: str(error) for name in names if name not in hosts}
        if "eager" in hosts:
            measured["eager"]["flops"] = hosts["eager"].ask("flops")["flops"]
            if plan.exact and hosts.get("forge") is hosts["eager"]:
                say(f"{subject.label}: a run in float64")
                for name, distance in hosts["eager"].ask("exact", names=["forge", "eager"])["to_float64"].items():
                    measured[name]["to_float64"] = distance
        if hosts:
            drop = _dropper(hosts, measured, left_out)
            _fidelity(hosts, measured, plan, scratch, lambda text: say(f"{subject.label}: {text}"), drop)
            _latency(hosts, measured, plan, lambda text: say(f"{subject.label}: {text}"), drop)
    return measured


Drop = Callable[[str, WorkerError], None]


def _dropper(hosts: dict[str, Process], measured: dict[str, dict[str, Any]], left_out: dict[str, str]) -> Drop:
    """A system that fails when it is called is left out, with those of its process if that died; the others go on."""

    def drop(name: str, error: WorkerError) -> None:
        process = hosts[name]
        for other in [n for n, host in hosts.items() if n == name or (host is process and process.died)]:
            left_out[other] = str(error)
            del hosts[other], measured[other]

    return drop


def _latency(
    hosts: dict[str, Process], measured: dict[str, dict[str, Any]], plan: Plan, say: Progress, drop: Drop
) -> None:
    for each in measured.values():
        each["turns"] = []
    estimate = 0.0
    for name in list(hosts):
        if name not in hosts:
            continue
        try:
            estimate += min(hosts[name].ask("run", name=name, count=2, warm=0)["seconds"])
        except WorkerError as error:
            drop(name, error)
    calls, turns = _amount(plan, estimate, PAUSE * len(hosts))
    for turn in range(turns):
        say(f"calls, turn {turn + 1} of {turns}")
        names = list(hosts)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            if name not in hosts:
                continue
            time.sleep(PAUSE)
            try:
                measured[name]["turns"].append(hosts[name].ask("run", name=name, count=calls, warm=1)["seconds"])
            except WorkerError as error:
                drop(name, error)
    say("energy")
    for name in list(hosts):
        if name not in hosts:
            continue
        time.sleep(PAUSE)
        try:
            measured[name]["energy"] = hosts[name].ask("energy", name=name, seconds=plan.energy_s)
        except WorkerError as error:
            drop(name, error)


def _amount(plan: Plan, one_call_each: float, pauses: float) -> tuple[int, int]:
    """(calls in a turn, turns) that take about `plan.call_s`; at least two turns, of two calls."""
    calls = plan.calls
    while calls > 2 and 2 * (one_call_each * (calls + 1) + pauses) > plan.call_s:
        calls -= 1
    one_turn = one_call_each * (calls + 1) + pauses
    return calls, max(2, min(plan.turns, math.floor(plan.call_s / one_turn))) if one_turn else 2


def _fidelity(
    hosts: dict[str, Process], measured: dict[str, dict[str, Any]], plan: Plan, scratch: Path, say: Progress, drop: Drop
) -> None:
    if "eager" not in hosts:
        return
    import numpy as np

    for name in hosts:
        measured[name]["fidelity"] = {"max_abs": 0.0, "kl": 0.0, "perplexity": [], "sequences": plan.sequences}
    for seed in range(plan.sequences):
        say(f"outputs, sequence {seed + 1} of {plan.sequences}")
        ids = np.asarray(hosts["eager"].ask("tokens", seed=seed)["ids"])
        eager = None
        for name in ("eager", *(n for n in hosts if n != "eager")):
            path = scratch / "outputs.npy"
            if name not in hosts:
                continue
            try:
                hosts[name].ask("outputs", name=name, seed=seed, path=str(path))
            except WorkerError as error:
                if name == "eager":
                    raise
                drop(name, error)
                continue
            values = np.load(path).astype(np.float32, copy=False)
            path.unlink()
            eager = values if eager is None else eager
            found = measured[name]["fidelity"]
            found["max_abs"] = max(found["max_abs"], _max_abs(eager, values))
            found["kl"] += _divergence(eager, values) / plan.sequences
            if values.ndim == 3 and values.shape[:2] == ids.shape:
                found["perplexity"].append(_cross_entropy(values, ids))
    for name in hosts:
        entropies = measured[name]["fidelity"]["perplexity"]
        measured[name]["fidelity"]["perplexity"] = math.exp(sum(entropies) / len(entropies)) if entropies else None


def _rows(values: Any, step: int = 32) -> Iterator[Any]:
    """Log-probabilities in float64, some positions at a time: a large vocabulary's are large."""
    import numpy as np

    flat = values.reshape(-1, values.shape[-1])
    for start in range(0, len(flat), step):
        rows = flat[start : start + step].astype(np.float64)
        rows = rows - rows.max(-1, keepdims=True)
        yield rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def _max_abs(a: Any, b: Any) -> float:
    import numpy as np

    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return float(max(np.abs(x.astype(np.float64) - y).max() for x, y in zip(a, b, strict=True)))


def _divergence(a: Any, b: Any) -> float:
    """KL(a || b), mean over positions."""
    import numpy as np

    total, count = 0.0, 0
    for p, q in zip(_rows(a), _rows(b), strict=True):
        total += float((np.exp(p) * (p - q)).sum())
        count += len(p)
    return total / count


def _cross_entropy(values: Any, ids: Any) -> float:
    """Of each token after the first, in nats."""
    import numpy as np

    if ids.shape[1] < 2 or values.shape[-1] <= int(ids.max()):
        return math.nan
    logs = np.concatenate(list(_rows(values[:, :-1])))
    return float(-logs[np.arange(len(logs)), ids[:, 1:].reshape(-1)].mean())
