"""pytest plugin of Forge-UGC: the fixture `forge_fidelity`, and a table of what it measured.

def test_my_model(forge_fidelity):
    forge_fidelity(model, inputs, atol=2e-5, top1=1.0)

It stands outside the package, so that pytest starts without importing torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_PROPERTY = "forge_fidelity"
_COLUMNS = ("max_abs", "relative", "kl", "top1", "perplexity")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forge", "Forge-UGC")
    group.addoption("--forge-device", metavar="DEVICE", help="device that forge_fidelity compiles for (default: auto)")
    group.addoption(
        "--forge-dump", metavar="FOLDER", help="folder for every stage of what forge_fidelity compiles, one for a test"
    )


@pytest.fixture
def forge_fidelity(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`forge_ugc.testing.assert_fidelity`, with the device of --forge-device and dumps as of --forge-dump.

    What it measures stands in the summary at the end of the run, and among the test's properties (JUnit).
    """
    from forge_ugc.testing import assert_fidelity

    device, folder = request.config.getoption("--forge-device"), request.config.getoption("--forge-dump")
    runs = 0

    def check(model: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = lambda info: isinstance(info.value, AssertionError)  # the test's own line is what matters  # noqa: E731
        nonlocal runs
        runs += 1
        if device is not None:
            kwargs.setdefault("device", device)
        row = {"model": type(model).__name__, "device": kwargs.get("device", "auto"), "outcome": "passed"}
        try:
            with pytest.MonkeyPatch.context() as patch:
                if folder is not None:
                    name = re.sub(r"[^\w.\[\]-]+", "_", request.node.nodeid)
                    patch.setenv("FORGE_DUMP", os.path.join(folder, name if runs == 1 else f"{name}-{runs}"))
                figures = assert_fidelity(model, *args, **kwargs)
        except AssertionError as error:
            failed = getattr(error, "figures", None)
            row.update(outcome="failed", **(failed.to_dict() if failed is not None else {}))
            raise
        else:
            row.update(figures.to_dict())
        finally:
            if "max_abs" in row:
                request.node.user_properties.append((_PROPERTY, row))
        return figures

    yield check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row for each comparison, if there was one."""
    rows = [
        (report.nodeid, row)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, row in report.user_properties
        if name == _PROPERTY
    ]
    if not rows:
        return
    table = [["test", "model", "device", *_COLUMNS, ""]]
    for test, row in sorted(rows, key=lambda r: r[0]):
        table.append([test, row["model"], row["device"], *(_number(row[c]) for c in _COLUMNS), row["outcome"]])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    terminalreporter.write_sep("=", "Forge-UGC fidelity")
    for line in table:
        terminalreporter.write_line("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " -> ".join(map(_number, value))
    return "-" if value is None else f"{value:.4g}"
