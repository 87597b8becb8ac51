"""Measures Forge-UGC beside OpenVINO, ONNX Runtime, inductor and eager, and prints the paper's tables 4 to 22.

examples:
  python -m benchmarks                                        all tables for all models; hours
  python -m benchmarks --budget 20                            what 20 minutes allow, the main tables first
  python -m benchmarks --models gpt2,qwen2 --tables 4,7       two tables
  python -m benchmarks --quick --systems forge,eager          two layers and few calls: does it work?
  python -m benchmarks --list                                 the tables, models and systems that there are

Every compilation runs in a fresh process with imports done. The processes stay, and the systems' calls are made in turn
while the others wait, so that all see the same machine; where memory does not hold all systems, each meets Forge and
eager by itself. What has been measured since this machine was booted, with the same code, is not measured again
(build/benchmarks; --fresh does). Close everything else first: the report says what the load average was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import machine, report
from .jobs import SHAPES_ONLY, Job, Results, Settings, priority
from .models import FAMILIES, MODELS, available
from .session import ROOT, Plan
from .systems import COMPARED, SYSTEMS
from .tables import Maker, all_makers

QUICK = Plan(turns=2, calls=2, sequences=1, energy_s=0.1, call_s=5.0)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), metavar="NAMES", help=f"of {', '.join(MODELS)}; default all"
    )
    parser.add_argument(
        "--tables", metavar="NAMES", help="the paper's numbers or words as --list shows them; default all"
    )
    parser.add_argument(
        "--systems",
        default=",".join(COMPARED),
        metavar="NAMES",
        help=f"default {','.join(COMPARED)}; forge takes an option: forge:alpha=0.4, forge:without=layout",
    )
    parser.add_argument("--layers", type=int, help="only the first layers of each model; default all")
    parser.add_argument("--seq", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="of every system (default: all cores)")
    parser.add_argument("--turns", type=int, default=10, help="turns of calls in a session (default 10)")
    parser.add_argument("--calls", type=int, default=5, help="calls in a turn (default 5)")
    parser.add_argument("--sequences", type=int, default=4, help="whose logits are compared with eager's (default 4)")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="leave out what would take longer, and say so")
    parser.add_argument("--quick", action="store_true", help="two layers, few calls: a test of the benchmark")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured since the boot")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for results.md, results.json and plots "
        "(default benchmarks/results; build/benchmarks/quick with --quick)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be measured, and about how long it takes"
    )
    parser.add_argument("--list", action="store_true", help="show tables, models and systems")
    given = parser.parse_args(arguments)
    makers = all_makers()
    for option, known in (("models", MODELS), ("systems", SYSTEMS), ("tables", makers)):
        text = getattr(given, option)
        names = list(known) if text is None else [n.strip() for n in text.split(",") if n.strip()]
        for name in names:
            if (name.partition(":")[0] if option == "systems" else name) not in known:
                parser.error(f"--{option}: unknown name {name!r}; there are {', '.join(known)}")
        setattr(given, option, tuple(dict.fromkeys(names)))
    for option in ("threads", "turns", "calls", "seq", "layers"):
        value = getattr(given, option)
        if value is not None and value < 1:
            parser.error(f"--{option} must be positive")
    return given


def settings_of(given: argparse.Namespace) -> Settings:
    plan = QUICK if given.quick else Plan(turns=given.turns, calls=given.calls, sequences=given.sequences)
    if given.budget and not given.quick:
        plan = Plan(turns=given.turns, calls=given.calls, sequences=min(given.sequences, 2), energy_s=1.0, call_s=45.0)
    layers = 2 if given.quick and given.layers is None else given.layers
    seq = min(given.seq, 32) if given.quick else given.seq
    return Settings(given.models, given.systems, layers, seq, given.threads, plan, given.quick, bool(given.budget))


def jobs_of(makers: list[Maker], settings: Settings) -> list[Job]:
    """Without repetition, the most wanted first."""
    return sorted(dict.fromkeys(job for maker in makers for job in maker.jobs(settings)), key=priority)


def show_list(console: Console) -> None:
    console.print("[bold]tables[/]")
    for name, maker in all_makers().items():
        console.print(f"  {name:>9}  {maker.title}", highlight=False)
    console.print("[bold]models[/]")
    for name, model in MODELS.items():
        why = available(name) or ("plans only: its weights take 32 GB" if name in SHAPES_ONLY else "")
        console.print(f"  {name:>9}  {model.label}" + (f"  [yellow]{why}[/]" if why else ""), highlight=False)
    console.print("[bold]systems[/]")
    for name, cls in SYSTEMS.items():
        missing = cls.missing()
        console.print(
            f"  {name:>16}  {cls.label}" + (f"  [yellow]pip install {missing}[/]" if missing else ""), highlight=False
        )


def show_jobs(console: Console, jobs: list[Job], results: Results) -> None:
    total = 0.0
    for job in jobs:
        done = results.path(job).exists() and not results.fresh
        total += 0 if done else job.estimate_s
        console.print(f"  {'measured' if done else f'{job.estimate_s:6.0f} s':>8}  {job.title}", highlight=False)
    console.print(f"about {total / 60:.0f} minutes on a quiet machine", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if given.list:
        show_list(console)
        return 0
    for name in given.models:
        if why := available(name):
            console.print(f"[yellow]{name} is left out: {why}[/]")
    given.models = tuple(n for n in given.models if not available(n))
    settings = settings_of(given)
    if not settings.families and any(t != "encoders" for t in given.tables):
        given.tables = ("encoders",)
    if not given.models:
        console.print(f"[red]nothing to measure; the families are {', '.join(FAMILIES)}[/]")
        return 1
    makers = [m for name, m in all_makers().items() if name in given.tables]
    results = Results(fresh=given.fresh, budget_s=given.budget * 60 if given.budget else None)
    jobs = jobs_of(makers, settings)
    if given.dry_run:
        show_jobs(console, jobs, results)
        return 0
    results.machine = machine.describe(0.02 if given.quick else 0.15)
    if results.machine["load"] > 0.5:
        console.print(
            f"[yellow]other work runs here (load average {results.machine['load']}): times will be too long[/]"
        )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.title)
            results.measure(job, lambda text: progress.update(task, description=text))
            progress.advance(task)
    tables = [maker.make(settings, results) for maker in makers]
    console.print(report.machine_text(results.machine, settings), highlight=False)
    console.print()
    for table in tables:
        report.show(console, table)
    out = given.out or (ROOT / "build" / "benchmarks" / "quick" if given.quick else ROOT / "benchmarks" / "results")
    report.write(out, settings, results, tables)
    console.print(f"written to {out}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
