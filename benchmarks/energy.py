"""Energy from the RAPL counters that Linux shows in /sys/class/powercap: of CPU packages, in microjoules."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys/class/powercap")
NO_COUNTER = "no counter"


class Rapl:
    """The packages' counters. `reason` says why there is none that can be read; empty if there is."""

    def __init__(self, root: Path = SYSFS) -> None:
        self.zones: list[tuple[Path, int]] = []
        self.reason = ""
        if not root.is_dir():
            self.reason = f"{NO_COUNTER}: {root} is not there"
            return
        for zone in sorted(root.glob("*rapl*:*"), key=lambda zone: ("mmio" in zone.name, zone.name)):
            try:
                # Subzones (intel-rapl:0:0, cores or memory) are part of their package; "psys" counts packages again.
                if zone.name.count(":") != 1 or not (zone / "name").read_text().startswith("package"):
                    continue
                span = int((zone / "max_energy_range_uj").read_text())
                int((zone / "energy_uj").read_text())
            except PermissionError:
                self.reason = f"{NO_COUNTER}: {zone}/energy_uj can be read by root only"
                continue
            except (OSError, ValueError):
                continue
            if not any(_same(zone, known) for known, _ in self.zones):
                self.zones.append((zone, span))
        if self.zones:
            self.reason = ""
        elif not self.reason:
            self.reason = f"{NO_COUNTER}: {root} has no package zone"

    def read(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone, _ in self.zones]

    def joules(self, before: list[int], after: list[int]) -> float:
        """Between two readings that are less than one wrap of the counter apart."""
        spent = 0
        for (_, span), start, end in zip(self.zones, before, after, strict=True):
            spent += end - start if end >= start else end + span - start
        return spent * 1e-6


def _same(a: Path, b: Path) -> bool:
    """intel-rapl:0 and intel-rapl-mmio:0 count the same package."""
    return (a / "name").read_text() == (b / "name").read_text()
