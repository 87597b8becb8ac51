"""Reports as HTML: a fragment for notebooks, or a page. Nothing is loaded from elsewhere and no script is run; colours
are those that are read on light and on dark, text takes the colour of what is around it. The markup is XML too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from . import _core

if TYPE_CHECKING:
    from .report import Report

_STYLE = """
.forge-ugc { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; }
.forge-ugc h2 { font-size: 1.25em; margin: 0 0 .4em; }
.forge-ugc h3 { font-size: 1.05em; margin: 1.4em 0 .3em; }
.forge-ugc p { margin: .2em 0 .5em; opacity: .8; }
.forge-ugc table { border-collapse: collapse; margin: 0; font-size: .95em; }
.forge-ugc th, .forge-ugc td { text-align: left; vertical-align: top; padding: .15em 1em .15em 0; background: none;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); overflow-wrap: anywhere; }
.forge-ugc th { font-weight: 600; white-space: nowrap; }
.forge-ugc td.n, .forge-ugc th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.forge-ugc td.bar { width: 9em; vertical-align: middle; }
.forge-ugc td.bar span { display: block; height: .7em; min-width: 1px; background: #4c86c6; border-radius: 2px; }
.forge-ugc .beside { display: flex; flex-wrap: wrap; column-gap: 3em; }
.forge-ugc svg { display: block; width: 100%; height: auto; }
.forge-ugc .key { opacity: 1; }
.forge-ugc .key span { display: inline-block; margin-right: 1.2em; }
.forge-ugc .key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 2em; }}</style>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_MATRIX, _ATTENTION, _NORM, _ELEMENTWISE, _TORCH, _OTHER = range(6)
_KINDS = (
    ("matrix products", "#4c86c6"),
    ("attention, rope", "#e08a2e"),
    ("norms, softmax", "#3fa564"),
    ("elementwise", "#9a77cf"),
    ("run by torch", "#d94f4f"),
    ("moving, indexing, reducing", "#8d8d8d"),
)
_NAMED = {
    "conv": _MATRIX, "attention": _ATTENTION, "rope": _ATTENTION, "layer_norm": _NORM, "rms_norm": _NORM,
    "group_norm": _NORM, "softmax": _NORM, "log_softmax": _NORM,
}  # fmt: skip
_BY_FLAG = (("CONTRACTION", _MATRIX), ("ELEMENTWISE", _ELEMENTWISE))
_FLAGS = {info["name"]: {flag.upper() for flag in info["flags"]} for info in _core.ops()}
_LEFT, _WIDTH = 78, 1000  # of the pictures: where they begin, and where they end
_MANY = 1500  # instructions: more are drawn as runs on one device


def fragment(report: Report, title: str = "") -> str:
    """The report as `<div>`, with its style."""
    return f'<div class="forge-ugc">\n<style>{_STYLE}</style>\n{_body(report, title)}</div>\n'


def page(report: Report, title: str = "") -> str:
    """The report as a whole document."""
    body = f'<div class="forge-ugc">\n{_body(report, title)}</div>'
    return _PAGE.format(title=escape(title or "Forge-UGC report"), style=_STYLE, body=body)


def titled(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """A fragment with a heading over each part, which is HTML already."""
    body = "\n".join(f"<h3>{escape(heading)}</h3>\n{part}" for heading, part in parts)
    return f'<div class="forge-ugc">\n<style>{_STYLE}</style>\n<h2>{escape(title)}</h2>\n{body}\n</div>\n'


def _body(report: Report, title: str) -> str:
    data = report._data
    parts = [f"<h2>{escape(title or 'Forge-UGC report')}</h2>", _summary(report)]
    parts += [_fallbacks(report), _beside(_phases(data), _passes(data))]
    if report.schedule is not None:
        parts += [_memory(report.schedule, data), _lanes(report.schedule, data)]
    parts += [_operators(data), _remarks(report)]
    return "\n".join(part for part in parts if part) + "\n"


# --- tables -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; columns in `numbers` are set right."""

    def row(cells: Sequence[str], tag: str) -> str:
        made = (f'<{tag}{" class=" + chr(34) + "n" + chr(34) if i in numbers else ""}>{c}</{tag}>'
                if not c.startswith("<td") else c for i, c in enumerate(cells))  # fmt: skip
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return f"<table>\n<thead>{row(head, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def bar(share: float) -> str:
    """A cell with a bar of that share of its width."""
    if share <= 0:
        return "<td></td>"
    return f'<td class="bar"><span style="width:{100 * min(share, 1.0):.1f}%"></span></td>'


def where(source: str) -> str:
    """A source line: the end of its path, the rest as a tooltip."""
    path, _, rest = source.partition(":")
    short = "/".join(path.split("/")[-2:]) if path.count("/") > 2 else path
    return f'<span title="{escape(source)}">{escape(short + (":" + rest if rest else ""))}</span>' if source else ""


def _beside(*parts: str) -> str:
    return '<div class="beside">' + "\n".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def _summary(report: Report) -> str:
    rows = "\n".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in report._summary())
    return f"<table><tbody>\n{rows}\n</tbody></table>"


def _phases(data: dict[str, Any]) -> str:
    phases = {name.removesuffix("_ms"): ms for name, ms in data["phases"].items()}
    total = phases["total"] or 1.0
    rows = [(escape(name), f"{ms:.2f}", bar(ms / total)) for name, ms in phases.items()]
    return "<h3>Phases</h3>\n" + table(("phase", "ms", ""), rows, (1,))


def _passes(data: dict[str, Any]) -> str:
    passes = data["passes"]
    if not passes:
        return ""
    most = max(max(p["nodes_before"], p["nodes_after"]) for p in passes) or 1
    rows = [
        (
            escape(p["name"]), f"{p['ms']:.2f}", str(p["nodes_before"]), str(p["nodes_after"]),
            f"{p['cost_before']:.0f}", f"{p['cost_after']:.0f}", bar(p["nodes_after"] / most),
        )
        for p in passes
    ]  # fmt: skip
    head = ("pass", "ms", "nodes before", "after", "cost before", "after", "nodes after")
    return "<h3>Passes</h3>\n" + table(head, rows, (1, 2, 3, 4, 5))


def _operators(data: dict[str, Any]) -> str:
    before, after = data["operators"], data["instructions"]
    names = sorted({*before, *after}, key=lambda name: (-after.get(name, 0), -before.get(name, 0), name))
    most = max([*before.values(), *after.values()], default=1)
    rows = [
        (escape(name), str(before.get(name, 0)), str(after.get(name, 0)), bar(after.get(name, 0) / most))
        for name in names
    ]
    rows.append(("<b>all</b>", str(sum(before.values())), str(sum(after.values())), "<td></td>"))
    return "<h3>Graph before and after</h3>\n" + table(("operator", "captured", "executed", ""), rows, (1, 2))


def _fallbacks(report: Report) -> str:
    rows = [(escape(f["op"]), str(f["count"]), where(f["where"])) for f in report._data["fallbacks"]]
    if not rows:
        return "<h3>Fallbacks</h3>\n<p>None: no operator is run by torch.</p>"
    return "<h3>Fallbacks: operators run by torch</h3>\n" + table(("operator", "count", "source line"), rows, (1,))


def _remarks(report: Report) -> str:
    rows = [(escape(a), escape(b), escape(c), where(d)) for a, b, c, d in report._remark_rows()]
    return "<h3>Remarks</h3>\n" + table(("pass", "what", "count", "source line"), rows, (2,)) if rows else ""


# --- pictures ---------------------------------------------------------------------------------------------------------


def kind_of(op: str) -> int:
    """Which of the kinds of operators that have a colour."""
    if "." in op:  # ATen
        return _TORCH
    flags = _FLAGS.get(op, set())
    return _NAMED.get(op) or next((kind for flag, kind in _BY_FLAG if flag in flags), _OTHER)


def _svg(height: float, items: Iterable[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 10} {height:g}" role="img" '
        f'aria-label="{escape(label)}" font-size="12" fill="currentColor">\n' + "\n".join(items) + "\n</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, dash: str = "", opacity: float = 0.45) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="currentColor" stroke-opacity="{opacity:g}"'
        f"{dashed}/>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{max(height, 0.6):.2f}" fill="{fill}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _step(count: int) -> float:
    return (_WIDTH - _LEFT) / max(count, 1)


def _instruction(schedule: dict[str, Any], position: int) -> str:
    row = schedule["instructions"][position]
    return f"{position}: {row['op']} {row['type']}" + (f" ({row['source']})" if row["source"] else "")


def _memory(schedule: dict[str, Any], data: dict[str, Any]) -> str:
    """Each buffer as a box: from left to right the instructions that it lives for, upwards its place in the arena."""
    parts = []
    for device, arena in schedule["arena_bytes"].items():
        rows = [b for b in schedule["buffers"] if b["device"] == device and b["bytes"] > 0]
        if rows and arena:
            parts.append(_arena(schedule, device, arena, rows))
    if not parts:
        return ""
    b = data["buffers"]
    text = (
        f"{b['virtual']} buffers in {b['physical']} pieces of memory. From left to right: instructions in order; "
        "upwards: the place in the arena. A colour is a place that buffers share over time. Scratch memory of kernels "
        "is drawn, and not counted."
    )
    return f"<h3>Memory plan</h3>\n<p>{text}</p>\n" + "\n".join(parts)


def _arena(schedule: dict[str, Any], device: str, arena: int, rows: list[dict[str, Any]]) -> str:
    from .report import _bytes

    count = len(schedule["instructions"])
    top, height, step = 20.0, 190.0, _step(count)
    bottom = top + height
    items = [_text(0, 12, f"{device}: {_bytes(arena)}"), _text(_LEFT - 6, bottom, "0", "end")]
    items += [
        _text(_LEFT - 6, top + 10, _bytes(arena), "end"),
        _text(_LEFT - 6, top + height / 2, _bytes(arena / 2), "end"),
    ]
    for b in rows:
        tall = height * b["bytes"] / arena
        y = bottom - height * b["offset"] / arena - tall
        color = f"hsl({(b['slot'] * 137 + 210) % 360}, 50%, 56%)"
        title = (
            f"buffer {b['id']}, {_bytes(b['bytes'])} at {b['offset']}, memory {b['slot']}\n"
            f"from {_instruction(schedule, b['first'])}\nto {_instruction(schedule, b['last'])}"
        )
        gap = min(1.0, step / 5)
        items.append(
            _rect(_LEFT + b["first"] * step, y, (b["last"] - b["first"] + 1) * step - gap, tall - 0.5, color, title)
        )
    items += [
        _line(_LEFT, bottom, _WIDTH, bottom),
        _line(_LEFT, top, _WIDTH, top, "4 3"),
        _line(_LEFT, top, _LEFT, bottom),
    ]
    items += _axis(count, bottom + 14)
    return _svg(bottom + 20, items, f"memory plan of {device}")


def _axis(count: int, y: float) -> list[str]:
    step = _step(count)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 1 << 62) if count / n <= 16)
    return [_text(_LEFT + (i + 0.5) * step, y, str(i), "middle") for i in range(0, count, every)]


def _lanes(schedule: dict[str, Any], data: dict[str, Any]) -> str:
    """A lane for each device, a box for each instruction in order."""
    rows = schedule["instructions"]
    devices = [d for d in schedule["arena_bytes"] if any(row["device"] == d for row in rows)]
    if not devices:
        return ""
    count, tall, step = len(rows), 30.0, _step(len(rows))
    place = {device: i * (tall + 8) for i, device in enumerate(devices)}
    items = [_text(0, place[device] + 20, device) for device in devices]
    for first, last in _runs(rows):
        row = rows[first]
        kind = kind_of(row["op"])
        title = _instruction(schedule, first) if last == first else f"{first} to {last} on {row['device']}"
        color = _KINDS[kind][1] if last == first else _KINDS[_OTHER][1]
        gap = min(1.0, step / 5)
        items.append(
            _rect(_LEFT + first * step, place[row["device"]], (last - first + 1) * step - gap, tall, color, title)
        )
    for p in range(1, count):
        if rows[p]["device"] != rows[p - 1]["device"]:
            x, low, high = _LEFT + p * step, place[rows[p - 1]["device"]], place[rows[p]["device"]]
            items.append(_line(x, low + tall / 2, x, high + tall / 2, opacity=1.0))
    height = len(devices) * (tall + 8)
    items += _axis(count, height + 8)
    used = sorted({kind_of(row["op"]) for row in rows})
    key = " ".join(f'<span><i style="background:{_KINDS[k][1]}"></i>{_KINDS[k][0]}</span>' for k in used)
    moves = data["transitions"]
    text = f"{count} instructions in order, {moves['after']} changes of device ({moves['before']} before scheduling)."
    picture = _svg(height + 14, items, "schedule")
    return f'<h3>Schedule</h3>\n<p>{text}</p>\n{picture}\n<p class="key">{key}</p>'


def _runs(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(first, last) of what is one box."""
    if len(rows) <= _MANY:
        return [(p, p) for p in range(len(rows))]
    runs: list[tuple[int, int]] = []
    for p, row in enumerate(rows):
        if runs and rows[p - 1]["device"] == row["device"]:
            runs[-1] = (runs[-1][0], p)
        else:
            runs.append((p, p))
    return runs
