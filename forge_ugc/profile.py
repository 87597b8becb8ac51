"""Where the time of a call goes: by instruction, operator, device and source line."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_GROUPS = ("instruction", "operator", "device", "source")


@dataclass(frozen=True)
class Row:
    """One instruction, or `count` of them that a device ran in one go. `ms`: of each call."""

    first: int
    count: int
    operator: str
    device: str
    type: str
    source: str
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


class Profile:
    """What `CompiledModel.profile` or `LoadedModel.profile` measured.

    `rows` has the instructions in order; `total_ms` the time of each call in C, from the first instruction's start to
    the last one's end. Times are medians over the calls. `to_table()` and `str()` are for reading, `to_dict()` for
    programs, `save_trace("t.json")` for https://ui.perfetto.dev and chrome://tracing.
    """

    def __init__(self, title: str, schedule: dict[str, Any], calls: list[list[tuple[int, int, int, int]]]) -> None:
        self.title = title
        self._instructions = schedule["instructions"]
        self._calls = calls
        self.rows = [self._row(number) for number in range(len(calls[0]))]
        self.total_ms = [(tasks[-1][3] - tasks[0][2]) / 1e6 if tasks else 0.0 for tasks in calls]

    def _row(self, number: int) -> Row:
        first, count, _, _ = self._calls[0][number]
        head, last = self._instructions[first], self._instructions[first + count - 1]
        one = count == 1
        return Row(
            first=first,
            count=count,
            operator=head["op"] if one else f"segment ({count} instructions)",
            device=head["device"],
            type=head["type"] if one else f"{head['op']} .. {last['op']}",
            source=head["source"],
            ms=tuple((end - start) / 1e6 for _, _, start, end in (tasks[number] for tasks in self._calls)),
        )

    def by(self, what: str) -> list[dict[str, Any]]:
        """Sums by "operator", "device" or "source", or each "instruction"; the dearest first.

        Of each: name, ms (medians over calls, summed), share of all of them, count (of instructions).
        """
        if what not in _GROUPS:
            raise ValueError(f"by: expected one of {', '.join(_GROUPS)}, given {what!r}")
        sums: dict[str, list[float]] = {}
        for row in self.rows:
            name = {
                "instruction": f"{row.first}: {row.operator} {row.type}",
                "operator": row.operator if row.count == 1 else "segment",
                "device": row.device,
                "source": row.source or "unknown",
            }[what]
            entry = sums.setdefault(name, [0.0, 0])
            entry[0] += row.median_ms
            entry[1] += row.count
        whole = sum(ms for ms, _ in sums.values()) or 1.0
        found = [{"name": n, "ms": ms, "share": ms / whole, "count": int(count)} for n, (ms, count) in sums.items()]
        return sorted(found, key=lambda entry: -entry["ms"])

    def to_dict(self) -> dict[str, Any]:
        """Keys: model, calls, total_ms (of each call), instructions [{first, count, operator, device, type, source, ms
        (of each call), median_ms}], operators, devices, sources (as `by` gives them)."""
        return {
            "model": self.title,
            "calls": len(self.total_ms),
            "total_ms": list(self.total_ms),
            "instructions": [{**vars(row), "ms": list(row.ms), "median_ms": row.median_ms} for row in self.rows],
            "operators": self.by("operator"),
            "devices": self.by("device"),
            "sources": self.by("source"),
        }

    def to_table(self, by: str = "operator", limit: int = 20) -> Table:
        """A rich table of the `limit` dearest of `by("operator")`, "instruction", "device" or "source"."""
        from rich.table import Table
        from rich.text import Text

        entries = self.by(by)
        table = Table(title=Text(f"{self.title}: {self._total()}"))
        table.add_column(by)
        for column in ("ms", "share", "instructions"):
            table.add_column(column, justify="right")
        for name, *rest in _cells(entries, limit):
            table.add_row(Text(name), *rest)
        return table

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the calls as a Chrome trace, a lane for each device; Perfetto opens it."""
        start = self._calls[0][0][2] if self.rows else 0
        lanes = {name: lane for lane, name in enumerate(["call", *dict.fromkeys(row.device for row in self.rows)], 1)}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": f"Forge-UGC: {self.title}"}}
        ]
        for name, lane in lanes.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": lane, "args": {"sort_index": lane}})

        def span(name: str, lane: int, begin: int, end: int, **about: Any) -> None:
            times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
            events.append({"name": name, "cat": "forge", "ph": "X", "pid": 1, "tid": lane, **times, "args": about})

        for number, tasks in enumerate(self._calls):
            if tasks:
                span(f"call {number}", lanes["call"], tasks[0][2], tasks[-1][3])
            for row, (_, _, begin, end) in zip(self.rows, tasks, strict=True):
                about = {"instruction": row.first, "count": row.count, "result": row.type, "source": row.source}
                span(row.operator, lanes[row.device], begin, end, **about)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _total(self) -> str:
        times = self.total_ms
        return f"{statistics.median(times):.3f} ms a call, median of {len(times)} (fastest {min(times):.3f})"

    def __str__(self) -> str:
        lines = [f"{self.title}: {self._total()}"]
        for by in ("device", "operator", "source"):
            rows = [(by, "ms", "share", "instructions"), *_cells(self.by(by), 20)]
            widths = [max(len(row[i]) for row in rows) for i in range(4)]
            lines.append("")
            lines += [
                "  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
                for name, *rest in rows
            ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Profile of {self.title}: {self._total()}>"

    def _repr_html_(self) -> str:
        from .html import bar, table, titled, where

        parts = []
        for by in ("device", "operator", "source", "instruction"):
            entries = self.by(by)[:20]
            named = where if by == "source" else escape
            rows = [(named(e["name"]), f"{e['ms']:.3f}", str(e["count"]), bar(e["share"])) for e in entries]
            parts.append((f"By {by}", table((by, "ms", "instructions", ""), rows, (1, 2))))
        return titled(f"{self.title}: {self._total()}", parts)


def _cells(entries: list[dict[str, Any]], limit: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (e["name"], f"{e['ms']:.3f}", f"{e['share']:.1%}", str(e["count"])) for e in entries[:limit]
    ]
    rest = entries[limit:]
    if rest:
        ms, share, count = (sum(e[key] for e in rest) for key in ("ms", "share", "count"))
        rows.append((f"{len(rest)} others", f"{ms:.3f}", f"{share:.1%}", str(count)))
    return rows


__all__ = ["Profile", "Row"]
