"""Tables as Markdown, JSON and on the terminal; plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from . import table_compile, table_latency
from .jobs import Results, Settings, growth_job, main_session, plan_job
from .models import MODELS
from .systems import label
from .tables import Table, systems_of


def machine_text(described: dict[str, Any], settings: Settings) -> str:
    peak = described["peak"]
    rates = ", ".join(
        f"{isa} {rate['core']:.0f} GFLOP/s a core ({rate['all']:.0f} on all)" for isa, rate in peak["gflops"].items()
    )
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items())
    depth = f"{settings.layers} layers" if settings.layers else "full depth"
    return (
        f"{described['date']}: {described['cpu']}, {described['cores']} cores ({', '.join(described['isa'])}), "
        f"{described['memory_gb']} GB, {described['system']}; measured peak: {rates}; "
        f"reads {peak['gbytes']['core']} GB/s a core ({peak['gbytes']['all']} on all). {packages}. "
        f"{settings.threads} threads, {depth}, load average {described['load']} at the start."
    )


def markdown(table: Table) -> str:
    name = f"Table {table.name}" if table.name.isdigit() else table.name
    lines = [f"### {name}: {table.title}", ""]
    if table.rows:
        lines += ["| " + " | ".join(table.columns) + " |", "|---" + "|---:" * (len(table.columns) - 1) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    else:
        lines.append("Not measured.")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


def write(folder: Path, settings: Settings, results: Results, tables: list[Table]) -> None:
    """results.json, results.md and plots into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    assert results.machine is not None
    head = machine_text(results.machine, settings)
    plots = draw(folder, settings, results)
    text = [
        "# Benchmark results",
        "",
        head,
        "",
        "Made by `python -m benchmarks`; what a word means is below its table.",
        "",
    ]
    text += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots]
    text += ["", *(markdown(table) for table in tables)]
    (folder / "results.md").write_text("\n".join(text))
    raw = [{"job": json.loads(job.key), **result} for job, result in results.found.items()]
    data = {"machine": results.machine, "settings": asdict(settings), "tables": [asdict(t) for t in tables], "raw": raw}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")


def show(console: Console, table: Table) -> None:
    name = f"Table {table.name}" if table.name.isdigit() else table.name
    shown = RichTable(title=f"{name}: {table.title}", title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    for note in table.notes:
        console.print(f"  [dim]{note}[/]", highlight=False)
    console.print()


# --- plots -----------------------------------------------------------------------------------------------------------


def draw(folder: Path, settings: Settings, results: Results) -> list[str]:
    """The names of the plots that there was something to draw for; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    found = []
    for name, plot in (("compile", _compile), ("latency", _latency), ("nodes", _nodes), ("growth", _growth)):
        figure = plot(settings, results)
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
            found.append(f"{name}.png")
    return found


def _bars(settings: Settings, results: Results, value: Any, names: tuple[str, ...], title: str, log: bool) -> Any:
    from matplotlib.figure import Figure

    sessions = {m: systems_of(results(main_session(settings, m))) for m in settings.runnable}
    sessions = {m: found for m, found in sessions.items() if found}
    names = tuple(n for n in names if any(n in found for found in sessions.values()))
    if not sessions or not names:
        return None
    figure = Figure(figsize=(2.2 + 1.9 * len(sessions), 3.4))
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * width for j, found in enumerate(sessions.values()) if name in found]
        bars = axes.bar(
            at, [value(found[name]) for found in sessions.values() if name in found], width, label=label(name)
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=6)
    axes.set_xticks(range(len(sessions)), [MODELS[m].label for m in sessions])
    axes.set_title(title)
    if log:
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure


def _compile(settings: Settings, results: Results) -> Any:
    names = ("forge", *table_compile.PEERS)
    return _bars(settings, results, lambda m: m["compile_s"], names, "nn.Module to callable (s, logarithmic)", log=True)


def _latency(settings: Settings, results: Results) -> Any:
    names = settings.systems
    return _bars(settings, results, lambda m: table_latency.latency(m).p50, names, "latency, P50 (ms)", log=False)


def _nodes(settings: Settings, results: Results) -> Any:
    from matplotlib.figure import Figure

    plans = {m: plan for m in settings.families if (plan := results(plan_job(settings, m)))}
    if not plans:
        return None
    figure = Figure(figsize=(7, 3.4))
    axes = figure.subplots()
    for model, plan in plans.items():
        passes = plan["target"]["cpu"]["passes"]
        counts = [
            plan["nodes_captured"],
            plan["nodes_table"],
            *(p["nodes_after"] for p in passes),
            plan["target"]["cpu"]["executed"],
        ]
        stages = ["torch.export", "table", *(f"{i + 1} {p['name']}" for i, p in enumerate(passes)), "executed"]
        axes.plot(stages, counts, marker=".", label=MODELS[model].label)
    axes.tick_params(axis="x", rotation=60, labelsize=7)
    axes.set_title("nodes after each pass")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure


def _growth(settings: Settings, results: Results) -> Any:
    from matplotlib.figure import Figure

    result = results(growth_job(settings))
    if not result:
        return None
    figure = Figure(figsize=(5, 3.4))
    axes = figure.subplots()
    layers = [at["layers"] for at in result["depths"]]
    axes.plot(layers, [at["phases"]["capture_ms"] for at in result["depths"]], marker=".", label="capture")
    axes.plot(layers, [at["after_capture_ms"] for at in result["depths"]], marker=".", label="after capture")
    axes.set_xlabel("layers")
    axes.set_title("compile time by depth (ms)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure
