"""What has to be measured for the tables: jobs, each in fresh processes, their results kept on disk for this boot."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import machine, session
from .compiling import REPEATS
from .models import FULL_DEPTH, MODELS, Subject
from .session import ROOT, Plan, Progress
from .systems import COMPARED

ABLATED = ("attention_fusion", "operator_fusion", "layout")
SWEEP = ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")
RUNS = 10  # of the variance table
LARGE_GB = 3.0  # weights of which a machine does not hold many copies
SMALL_GB = 1.0  # with --budget: larger models meet the paper's systems and eager only
HEADLINE = ("gpt2", "qwen2", "granite", "llama1b")  # with --budget these come first, in this order
SHAPES_ONLY = ("llama8b",)  # 32 GB of weights


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...]
    systems: tuple[str, ...] = COMPARED
    layers: int | None = None
    seq: int = 128
    threads: int = 1
    plan: Plan = field(default_factory=Plan)
    quick: bool = False
    brief: bool = False  # with --budget

    def subject(self, model: str, **changes: Any) -> Subject:
        return Subject(model, self.layers, seq=self.seq, **changes)

    @property
    def families(self) -> list[str]:
        return [m for m in self.models if not MODELS[m].encoder]

    @property
    def runnable(self) -> list[str]:
        """Families whose weights fit in memory (two layers of any do)."""
        return [m for m in self.families if m not in SHAPES_ONLY or self.layers is not None]

    @property
    def encoders(self) -> list[str]:
        return [m for m in self.models if MODELS[m].encoder]


@dataclass(frozen=True)
class Job:
    """`kind` and `arguments` say what is measured, and name its result."""

    kind: str
    arguments: tuple[tuple[str, Any], ...]
    title: str
    estimate_s: float

    def run(self, say: Progress) -> dict[str, Any]:
        given = dict(self.arguments)
        if self.kind == "session":
            return session.measure(given["subject"], list(given["systems"]), given["threads"], given["plan"], say)
        if self.kind == "variance":
            systems = ["forge"]
            runs = []
            for run in range(given["runs"]):
                say(f"{self.title}: run {run + 1} of {given['runs']}")
                runs.append(session.measure(given["subject"], systems, given["threads"], given["plan"]))
            return {"runs": runs}
        say(self.title)
        return compiling(self.kind, {k: asdict(v) if isinstance(v, Subject) else v for k, v in given.items()})

    @property
    def key(self) -> str:
        given = {k: asdict(v) if isinstance(v, (Subject, Plan)) else v for k, v in self.arguments}
        return json.dumps({"kind": self.kind, **given}, sort_keys=True)


def compiling(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """benchmarks.compiling in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiling", kind, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=session.PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise session.WorkerError(f"no answer within {session.PATIENCE_S:.0f} s") from error
    if done.returncode != 0 or not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:]
        raise session.WorkerError(f"exit status {done.returncode}: {''.join(last)[:300]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


# --- the jobs --------------------------------------------------------------------------------------------------------


def _job(kind: str, title: str, estimate_s: float, **arguments: Any) -> Job:
    return Job(kind, tuple(sorted(arguments.items())), title, estimate_s)


def _session(s: Settings, subject: Subject, systems: Iterable[str], title: str, plan: Plan | None = None) -> Job:
    systems = tuple(systems)
    plan = plan or s.plan
    estimate = 5.0 + min(plan.call_s, 12 * subject.gigabytes * plan.turns * len(systems) / 10)
    estimate += sum(_compile_estimate(subject, name) for name in systems)
    if subject.gigabytes > LARGE_GB:  # the others come one after the other, each with calls and Forge of its own
        others = len({session.home(name) for name in systems} - {"torch"})
        estimate += max(0, others - 1) * (estimate / len(systems))
    return _job("session", title, estimate, subject=subject, systems=systems, threads=s.threads, plan=plan)


def _compile_estimate(subject: Subject, name: str) -> float:
    """Seconds to load and compile, as measured on two cores of a server; for --budget."""
    layers, gb = subject.layers or FULL_DEPTH[subject.model], subject.gigabytes
    load = 6 + 5 * gb
    return {
        "openvino": load + 0.7 * layers + 6 * gb,
        "onnxruntime": load + 1.2 * layers + 14 * gb,
        "inductor": load + 3 * layers + 5 * gb,
        "forge": load + gb,
        "forge-export": load + 0.3 * layers,
        "export": load + 0.3 * layers,
    }.get(name.partition(":")[0], 1.0)


def main_session(s: Settings, model: str) -> Job:
    """All systems on one model: compile time, memory, fidelity, latency, energy."""
    systems = s.systems
    if s.brief and s.subject(model).gigabytes > SMALL_GB:
        systems = tuple(n for n in systems if n not in ("inductor", "openvino-default"))
    return _session(s, s.subject(model), systems, f"{MODELS[model].label}: all systems")


def glue_session(s: Settings, model: str) -> Job:
    """The last position's logits only; the paper's three systems."""
    systems = [n for n in ("forge", "eager", "openvino", "onnxruntime") if n in s.systems]
    return _session(s, s.subject(model, last_only=True), systems, f"{MODELS[model].label}: last position only")


def ablation_session(s: Settings, model: str) -> Job:
    """Forge with each fusion left out, on attention that is written out."""
    systems = ["forge", *(f"forge:without={name}" for name in ABLATED)]
    title = f"{MODELS[model].label}: without each fusion"
    return _session(s, s.subject(model, attention="eager"), systems, title, _variants(s))


def _variants(s: Settings) -> Plan:
    """How much Forge's variants are measured."""
    return replace(s.plan, call_s=30.0, sequences=0, exact=False, energy_s=0.0) if s.brief else s.plan


def alpha_session(s: Settings, model: str) -> Job:
    systems = ["forge", *(f"forge:alpha={alpha}" for alpha in SWEEP)]
    return _session(s, s.subject(model), systems, f"{MODELS[model].label}: alpha sweep", _variants(s))


def encoder_session(s: Settings, model: str, seq: int, batch: int) -> Job:
    subject = Subject(model, s.layers, batch=batch, seq=seq)
    systems = [n for n in s.systems if n not in ("openvino-default", "inductor")]
    plan = replace(s.plan, call_s=12.0, sequences=1, energy_s=0.0) if s.brief else s.plan
    return _session(s, subject, systems, f"{MODELS[model].label}: {batch} x {seq}", plan)


def plan_job(s: Settings, model: str, attention: str = "sdpa") -> Job:
    title = f"{MODELS[model].label}: passes, costs, memory plan" + (" (attention written out)" * (attention != "sdpa"))
    repeats = 2 if s.quick else REPEATS
    return _job("plan", title, 15.0, subject=s.subject(model, attention=attention), repeats=repeats)


def tops_job(s: Settings) -> Job | None:
    """The plan of a model with host operators between its layers."""
    if "gpt2" not in s.models:
        return None
    subject = s.subject("gpt2", tops=True)
    return _job("plan", "GPT-2 (125M), top 5 of each layer: plan", 10.0, subject=subject, repeats=1)


def scheduling_job(s: Settings) -> Job | None:
    """The same model on the software NPU."""
    if "gpt2" not in s.models:
        return None
    subject, calls = s.subject("gpt2", tops=True), 3 if s.quick else 30
    return _job("scheduling", "GPT-2 (125M), top 5 of each layer: schedules", 40.0, subject=subject, calls=calls)


def variance_job(s: Settings, model: str) -> Job:
    runs = 2 if s.quick else RUNS
    plan = replace(s.plan, sequences=0, exact=False, energy_s=0.0, call_s=8.0 if s.brief else 20.0)
    return _job(
        "variance",
        f"{MODELS[model].label}: {runs} runs",
        (8.0 + plan.call_s) * runs,
        subject=s.subject(model),
        threads=s.threads,
        plan=plan,
        runs=runs,
    )


def capture_jobs(s: Settings, model: str) -> dict[str, Job]:
    layers = s.layers or FULL_DEPTH[model]
    return {
        way: _job("capture", f"{MODELS[model].label}: capture, {way}", seconds, subject=s.subject(model), way=way)
        for way, seconds in (("fast", 6.0), ("export", 6 + 0.3 * layers), ("alone", 6 + 0.3 * layers))
    }


def growth_job(s: Settings) -> Job:
    depths, nodes = ((1, 2, 4), 2000) if s.quick else ((1, 2, 4, 8, 16, 32, 64, 128), 50_000)
    return _job("growth", "growth with depth", 60.0, layers=depths, nodes=nodes)


def shapes_job(s: Settings, model: str) -> Job:
    sizes = (16, 24) if s.quick else (32, 64, 200, 256)
    return _job(
        "shapes", f"{MODELS[model].label}: new shapes", 40.0, subject=s.subject(model), sizes=sizes, threads=s.threads
    )


def artefact_job(s: Settings, model: str) -> Job:
    rounds, calls = (1, 2) if s.quick else (7, 9)
    title = f"{MODELS[model].label}: loading what was saved"
    return _job("artefact", title, 70.0, subject=s.subject(model), threads=s.threads, rounds=rounds, calls=calls)


def priority(job: Job) -> float:
    """With a budget: what is shown first is measured first, whole tables before further rows."""
    given = dict(job.arguments)
    subject: Any = given.get("subject")
    model = subject.model if subject else ""
    place = HEADLINE.index(model) if model in HEADLINE else len(HEADLINE)
    within = place / 10 + (subject.gigabytes / 1000 if subject else 0.0)
    if job.kind != "session":
        late = 8 if job.kind == "shapes" and place else 0
        order = {"plan": 1, "capture": 2, "growth": 3, "scheduling": 3.5, "variance": 5, "shapes": 6, "artefact": 3.7}
        return order[job.kind] + late + within
    if "eager" not in given["systems"]:  # Forge's variants
        return (4.5 if place == 0 else 9) + within
    if MODELS[model].encoder:
        return (4 if subject.seq == 128 and subject.batch == 1 else 8) + within
    if subject.last_only:
        return 9 + within
    return within if place < len(HEADLINE) else 7 + within


# --- results on disk -------------------------------------------------------------------------------------------------


class Results:
    """Measures each job once a boot; what was measured with other code is not taken."""

    def __init__(self, folder: Path | None = None, fresh: bool = False, budget_s: float | None = None) -> None:
        self.folder = folder or ROOT / "build" / "benchmarks" / machine.boot()
        self.fresh, self.budget_s = fresh, budget_s
        self.found: dict[Job, dict[str, Any]] = {}
        self.missing: dict[Job, str] = {}
        self.machine: dict[str, Any] | None = None
        self.start = time.monotonic()
        self._took = self._estimated = 30.0  # of what was measured: how much slower than estimated this machine is

    def path(self, job: Job) -> Path:
        return self.folder / (hashlib.sha256((job.key + fingerprint()).encode()).hexdigest()[:24] + ".json")

    def measure(self, job: Job, say: Progress) -> None:
        if job in self.found or job in self.missing:
            return
        path = self.path(job)
        if path.exists() and not self.fresh:
            self.found[job] = json.loads(path.read_text())
            return
        left = None if self.budget_s is None else self.budget_s - (time.monotonic() - self.start)
        expected = job.estimate_s * self._took / self._estimated
        if left is not None and expected > left:
            self.missing[job] = f"left out: about {expected:.0f} s, of the budget {max(left, 0):.0f} s are left"
            return
        began = time.monotonic()
        try:
            result = job.run(say)
        except (session.WorkerError, OSError) as error:
            self.missing[job] = str(error)
            return
        self._took += time.monotonic() - began
        self._estimated += job.estimate_s
        result |= {"took_s": round(time.monotonic() - began, 1), "date": time.strftime("%Y-%m-%d %H:%M")}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"key": job.key, **result}))
        self.found[job] = result

    def __call__(self, job: Job) -> dict[str, Any] | None:
        return self.found.get(job)


@cache
def fingerprint() -> str:
    """Of the code that is measured and that measures."""
    digest = hashlib.sha256()
    for folder, patterns in (("forge_ugc", ("**/*.py", "*.so", "*.pyd")), ("benchmarks", ("*.py",))):
        for path in sorted(p for pattern in patterns for p in (ROOT / folder).glob(pattern)):
            if folder == "benchmarks" and path.name.startswith(("table", "report", "npu", "__main__")):
                continue
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
