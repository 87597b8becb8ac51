"""What a table is, and the list of them in the paper's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import Job, Results, Settings


@dataclass
class Table:
    name: str  # the paper's number, or a word
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Maker:
    """How a table is made: the jobs that it needs, and the table from their results."""

    name: str
    title: str
    jobs: Callable[[Settings], list[Job]]
    make: Callable[[Settings, Results], Table]


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def change(new: float | None, old: float | None) -> str:
    """In percent of the old value."""
    return "-" if new is None or not old else f"{(new - old) / old * 100:+.1f}%"


def times(above: float | None, below: float | None) -> str:
    return "-" if above is None or not below else f"{above / below:.1f}x"


def missing_notes(results: Results, jobs: Sequence[Job]) -> list[str]:
    """Why rows or cells are empty, each reason once."""
    notes = [f"{job.title}: {results.missing[job]}" for job in jobs if job in results.missing]
    for job in jobs:
        reasons: dict[str, list[str]] = {}
        for name, why in (results(job) or {}).get("left_out", {}).items():
            reasons.setdefault(why, []).append(name)
        notes += [f"{job.title}: {', '.join(names)}: {why}" for why, names in reasons.items()]
    return notes


def systems_of(result: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """What a session measured, by system. Forge and eager are in each group: the first counts."""
    found: dict[str, dict[str, Any]] = {}
    for group in (result or {}).get("groups", []):
        for name, measured in group.items():
            found.setdefault(name, measured)
    return found


def beside(result: dict[str, Any] | None, name: str, reference: str = "forge") -> tuple[Any, Any] | None:
    """(what was measured of `name`, of the reference in the same group)."""
    for group in (result or {}).get("groups", []):
        if name in group and reference in group:
            return group[name], group[reference]
    return None


def all_makers() -> dict[str, Maker]:
    from . import table_artefact, table_compile, table_latency, table_passes, table_program

    makers = [
        *table_artefact.MAKERS,
        *table_compile.MAKERS,
        *table_latency.MAKERS,
        *table_passes.MAKERS,
        *table_program.MAKERS,
    ]
    makers.sort(key=lambda m: (not m.name.isdigit(), int(m.name) if m.name.isdigit() else 0))
    return {m.name: m for m in makers}
