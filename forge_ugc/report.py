"""What a compilation did, in numbers and words."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Report(Mapping[str, Any]):
    """Times, nodes, passes, buffers, transitions, placement, fallbacks and weights of one compilation.

    `to_dict()` has the public keys `phases`, `passes`, `nodes_captured`, `nodes_final`, `buffers`, `transitions`,
    `placement`, `fallbacks`, `weights`, and more; `str()` and `to_markdown()` are for reading, `save("r.html")` and
    notebooks show it with pictures. `schedule` has the instructions in order and the buffers of the memory plan, as
    `_core.Program.schedule` gives them. `operators` counts what was captured, `instructions` what is executed.

    `nodes_captured` is torch.export's count. After a fast capture (`capture` is "fast") it is found by exporting when
    it is first asked for, by `to_dict()` too; None if torch.export cannot capture the model. `capture_declined` says
    why capture="auto" took torch.export.

    `device`, `device_reason`, `precision`, `tier` (0: folded graphs, 1: graphs with constant weights; None without an
    NPU) and `npu` (segments, blocks, compile times) are those of now: they follow what happens after compiling.
    """

    def __init__(
        self, core: dict[str, Any], *, capture_ms: float, table_ms: float, total_ms: float, capture: str,
        capture_declined: str, nodes_captured: int, fallbacks: list[dict[str, Any]],
        borrowed_bytes: int, live: weakref.ReferenceType[Callable[[], dict[str, Any]]], sources: list[str],
        operators: dict[str, int], schedule: dict[str, Any] | None, title: str,
    ) -> None:  # fmt: skip
        phases = {
            "capture_ms": capture_ms,
            "table_ms": table_ms + core["table_ms"],
            "passes_ms": core["passes_ms"],
            "lower_ms": core["lower_ms"],
            "alloc_ms": core["alloc_ms"],
            "schedule_ms": core["schedule_ms"],
            "npu_ms": core["npu_ms"],
            "pack_ms": core["pack_ms"],
            "total_ms": total_ms,
        }
        remarks = []
        for remark in core.get("remarks", ()):
            source = remark.get("source")
            if isinstance(source, int):
                source = sources[source] if 0 <= source < len(sources) else ""
            remarks.append({**remark, "source": source or ""})
        self.schedule = schedule
        self.title = title
        self._recorded: int | None = None
        self._counter: Callable[[], int | None] | None = None
        self._live: weakref.ReferenceType[Callable[[], dict[str, Any]]] | None = live
        self._data: dict[str, Any] = {
            "phases": phases,
            "passes": core["passes"],
            "capture": capture,
            "capture_declined": capture_declined,
            "nodes_captured": nodes_captured,
            "nodes_table": core["nodes_table"],
            "nodes_final": core["nodes_final"],
            "buffers": core["buffers"],
            "transitions": core["transitions"],
            "groups": core["groups"],
            "placement": core["placement"],
            "fallbacks": fallbacks,
            "weights": {
                "borrowed_bytes": borrowed_bytes,
                "packed_bytes": core["packed_bytes"],
                "quantised_bytes": core["quantised_bytes"],
            },
            "alpha": core["alpha"],
            "remarks": remarks,
            "operators": operators,
            "instructions": core.get("instructions", {}),
        }
        self._update()

    def _update(self) -> None:
        """Asks the compiled model, while it is there, for what may have changed."""
        now = self._live() if self._live is not None else None
        if now is not None:
            self._data.update(now())

    def follow(self, live: weakref.ReferenceType[Callable[[], dict[str, Any]]]) -> Report:
        """The report of a copy of the model."""
        other = Report.__new__(Report)
        other.__dict__.update(self.__dict__)
        other._data, other._live = dict(self._data), live
        return other

    def to_dict(self) -> dict[str, Any]:
        """A copy made of dicts, lists, numbers and strings only."""
        self._count()
        self._update()
        copy: dict[str, Any] = json.loads(json.dumps(self._data))
        return copy

    def __getitem__(self, key: str) -> Any:
        if key == "nodes_captured":
            self._count()
        self._update()
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data  # a Mapping's own asks for the value, which may take an export

    __eq__ = object.__eq__  # reports of two compilations are two, and can be keys
    __hash__ = object.__hash__

    def count_later(self, count: Callable[[], int | None]) -> None:
        """`nodes_captured` counts recorded calls so far: `count` finds torch.export's when it is asked for."""
        self._recorded, self._counter = self._data["nodes_captured"], count

    def _count(self) -> None:
        if self._counter is not None:
            self._data["nodes_captured"], self._counter = self._counter(), None

    def __getstate__(self) -> dict[str, Any]:
        self._count()
        self._update()
        return {**self.__dict__, "_live": None}

    def _captured(self) -> str:
        if self._recorded is None:
            return f"{self._data['nodes_captured']} captured"
        return f"{self._recorded} captured by recording"

    def _way(self) -> str:
        declined = self._data["capture_declined"]
        if self._data["capture"] == "fast":
            return "fast, by recording forward()"
        if self._data["capture"] == "artefact":
            return f"none: an artefact of {declined}"
        return "torch.export" + (f"; not by recording: {declined}" if declined else "")

    def _summary(self) -> list[tuple[str, str]]:
        d = self._data
        buffers, moves, weights = d["buffers"], d["transitions"], d["weights"]
        placement = ", ".join(f"{n} on {device}" for device, n in d["placement"].items() if n) or "none"
        return [
            ("device", f"{d['device']}: {d['device_reason']}"),
            *self._npu_rows(),
            ("capture", self._way()),
            ("nodes", f"{self._captured()}, {d['nodes_table']} in the table, {d['nodes_final']} executed"),
            ("instructions", placement),
            (
                "buffers",
                f"{buffers['virtual']} virtual in {buffers['physical']} physical (rho {buffers['rho']:.1%}), arena "
                f"{_bytes(buffers['arena_bytes'])}, lower bound {_bytes(buffers['lower_bound_bytes'])}",
            ),
            ("transitions", f"{moves['before']} before scheduling, {moves['after']} after"),
            *self._group_row(),
            (
                "weights",
                f"{_bytes(weights['borrowed_bytes'])} borrowed, {_bytes(weights['packed_bytes'])} packed"
                + (f", {_bytes(weights['quantised_bytes'])} as {d['precision']}" if weights["quantised_bytes"] else ""),
            ),
            ("alpha", f"{d['alpha']:g}"),
        ]

    def _group_row(self) -> list[tuple[str, str]]:
        groups, instructions = self._data["groups"]["groups"], self._data["groups"]["instructions"]
        return [("groups", f"{groups}, of {instructions} products that run together")] if groups else []

    def _npu_rows(self) -> list[tuple[str, str]]:
        d = self._data
        npu = d["npu"]
        if not npu:
            return []
        share = npu["flops"]["npu"] / max(npu["flops"]["npu"] + npu["flops"]["cpu"], 1.0)
        rows = [("npu", f"{npu['segments']} segments with {share:.1%} of the operations, {d['precision']}")]
        if d["tier"] is not None:
            tier = "graphs with constant weights" if d["tier"] else "folded graphs"
            kept = f"{_bytes(npu['blob_bytes'])} compiled, {_bytes(npu['weight_bytes'])} of weights as arguments"
            rows.append(("tier", f"{d['tier']}: {tier}; {npu['blocks']} for {npu['calls']} calls, {kept}"))
            found = f"{npu['artefact_hits']} from the file, " if npu["artefact_hits"] or npu.get("artefact") else ""
            rows.append(("graphs", f"{found}{npu['cache_hits']} from the cache, {npu['compiled']} compiled"))
        return rows

    def _phase_rows(self) -> list[tuple[str, str]]:
        return [(name.removesuffix("_ms"), f"{ms:.2f}") for name, ms in self._data["phases"].items()]

    def _pass_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                p["name"], f"{p['ms']:.2f}", f"{p['nodes_before']} -> {p['nodes_after']}",
                f"{p['cost_before']:.0f} -> {p['cost_after']:.0f}",
            )
            for p in self._data["passes"]
        ]  # fmt: skip

    def _remark_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (r["pass"], r["text"], str(r["count"]), r["source"]) for r in self._data["remarks"]
        ]
        failed = self._data["npu"] and self._data["npu"].get("upgrade_error")
        if failed:
            rows.append(("npu", f"graphs with constant weights: {failed.splitlines()[0]}", "1", ""))
        not_used = self._data["npu"] and self._data["npu"].get("artefact")
        if not_used:
            rows.append(("npu", not_used, "1", ""))
        return rows

    def _fallback_rows(self) -> list[tuple[str, ...]]:
        return [(f["op"], str(f["count"]), f["where"]) for f in self._data["fallbacks"]]

    def _tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
            ("Phases", ("phase", "ms"), list(self._phase_rows())),
            ("Passes", ("pass", "ms", "nodes", "cost"), self._pass_rows()),
            ("Remarks", ("pass", "what", "count", "source"), self._remark_rows()),
            ("Run by torch", ("operator", "count", "where"), self._fallback_rows()),
        ]
        return [t for t in tables if t[2]]

    def __str__(self) -> str:
        self._update()
        lines = [f"{name:>13}  {text}" for name, text in self._summary()]
        for title, head, rows in self._tables():
            widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
            lines += ["", title]
            lines += [
                "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
            ]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """The report as Markdown tables."""
        self._update()
        lines = ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in self._summary())]
        for title, head, rows in self._tables():
            lines += ["", f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """The report as an HTML page with pictures of memory plan and schedule. It loads nothing and has no script."""
        from .html import page

        self._update()
        return page(self, self.title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report; .html, .md, .json or .txt says as what. ValueError for another ending."""
        made = {
            ".html": self.to_html,
            ".md": self.to_markdown,
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".txt": lambda: f"{self}\n",
        }
        path = Path(path)
        if path.suffix.lower() not in made:
            raise ValueError(f"{path}: a report is saved as {', '.join(made)}")
        path.write_text(made[path.suffix.lower()](), encoding="utf-8")

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        from .html import fragment

        self._update()
        return fragment(self, self.title)

    def __repr__(self) -> str:
        d = self._data
        return f"<Report {self._captured()} -> {d['nodes_final']} nodes, {d['phases']['total_ms']:.0f} ms>"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
