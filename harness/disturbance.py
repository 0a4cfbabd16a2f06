"""Was the host disturbed while something was timed? Reads counters before and after each slice. Imports no torch.

What is read, on the CPUs that are measured: their busy and stolen time (``/proc/stat``), the CPU time of our own
processes, the number of times that they were throttled for heat and their frequency, where the kernel shows these. What
the CPUs were busy with beyond our own processes was somebody else. Limits: docs/gates.md.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records import Disturbance

#: Set to ``record``, this variable keeps the evidence but makes nothing invalid: for CI machines shared with others.
VARIABLE = "INT8_HOST_CHECKS"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CPU = "sys/devices/system/cpu"


@dataclass(frozen=True)
class Limits:
    """Beyond these a timing is invalid. ``others`` and ``steal``: share of the CPUs' time; ``frequency``: lowest over
    highest reading of a cell; ``seconds``: shorter watches are not judged, as counters tick in hundredths."""

    others: float = 0.20
    steal: float = 0.10
    frequency: float = 0.75
    seconds: float = 0.5


@dataclass(frozen=True)
class Reading:
    """Counters at one moment: seconds since boot or start, except ``frequency_mhz``. None: not shown here."""

    at_s: float
    busy_s: float | None
    steal_s: float | None
    own_s: float
    throttled: int | None
    frequency_mhz: float | None


def read(cpus: Sequence[int], processes: Iterable[int], root: Path = Path("/")) -> Reading:
    """The counters of ``cpus`` and of our own ``processes`` now; this process is always among ours."""
    busy, steal = _cpu_seconds(cpus, root)
    own = sum(_process_seconds(pid, root) for pid in {os.getpid(), *processes})
    return Reading(time.monotonic(), busy, steal, own, _throttled(cpus, root), _frequency_mhz(cpus, root))


def between(before: Reading, after: Reading, cpus: int) -> Disturbance:
    """What happened between two readings of ``cpus`` CPUs."""
    seconds = after.at_s - before.at_s
    whole = seconds * cpus
    others = steal = None
    if whole > 0 and None not in (before.busy_s, after.busy_s, before.steal_s, after.steal_s):
        busy = (after.busy_s or 0.0) - (before.busy_s or 0.0)
        others = min(max((busy - (after.own_s - before.own_s)) / whole, 0.0), 1.0)
        steal = min(max(((after.steal_s or 0.0) - (before.steal_s or 0.0)) / whole, 0.0), 1.0)
    known = before.throttled is not None and after.throttled is not None
    throttled = (after.throttled or 0) - (before.throttled or 0) if known else None
    frequencies = [one for one in (before.frequency_mhz, after.frequency_mhz) if one]
    return Disturbance(
        seconds, others, steal, throttled, min(frequencies, default=None), max(frequencies, default=None)
    )


def total(windows: Sequence[Disturbance]) -> Disturbance | None:
    """All ``windows`` as one: shares weighted by their seconds, events added up. None where nothing was watched."""
    seconds = sum(one.seconds for one in windows)
    if seconds <= 0:
        return None
    throttled = [one.throttled for one in windows if one.throttled is not None]
    lows = [one.lowest_mhz for one in windows if one.lowest_mhz is not None]
    highs = [one.highest_mhz for one in windows if one.highest_mhz is not None]
    return Disturbance(
        seconds,
        _weighted([(one.others, one.seconds) for one in windows]),
        _weighted([(one.steal, one.seconds) for one in windows]),
        sum(throttled) if throttled else None,
        min(lows, default=None),
        max(highs, default=None),
    )


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    weight = sum(weight for _, weight in known)
    return sum(value * part for value, part in known) / weight if weight > 0 else None


def reason(found: Disturbance | None, limits: Limits | None = None) -> str | None:
    """Why a timing under ``found`` is invalid, with the evidence; None if it is not."""
    limits = limits or Limits()
    if found is None or found.seconds < limits.seconds or os.environ.get(VARIABLE) == "record":
        return None
    reasons = []
    if found.others is not None and found.others > limits.others:
        reasons.append(f"other processes took {found.others:.0%} of its CPUs (at most {limits.others:.0%})")
    if found.steal is not None and found.steal > limits.steal:
        reasons.append(f"other guests of the machine took {found.steal:.0%} of its CPUs (at most {limits.steal:.0%})")
    if found.throttled:
        reasons.append(f"its CPUs were throttled for heat {found.throttled} times")
    if found.lowest_mhz and found.highest_mhz and found.lowest_mhz < limits.frequency * found.highest_mhz:
        reasons.append(f"its CPUs ran at {found.lowest_mhz:.0f} to {found.highest_mhz:.0f} MHz")
    return "; ".join(reasons) or None


def without_frequency(found: Disturbance | None) -> Disturbance | None:
    """``found`` for a whole run: its cells may well differ in frequency, as AMX and AVX512 lower it."""
    return None if found is None else dataclasses.replace(found, lowest_mhz=None, highest_mhz=None)


# --- readers ----------------------------------------------------------------------------------------------------------


def _cpu_seconds(cpus: Sequence[int], root: Path) -> tuple[float | None, float | None]:
    """Busy and stolen seconds of ``cpus`` since boot, added up."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    try:
        lines = (root / "proc/stat").read_text(encoding="ascii").splitlines()
        rows = [[int(field) for field in line.split()[1:]] for line in lines if line.split()[0] in wanted]
        if len(rows) != len(wanted):
            return None, None
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = sum(row[0] + row[1] + row[2] + row[5] + row[6] for row in rows)
        return busy * _TICK_S, sum(row[7] for row in rows) * _TICK_S
    except (OSError, ValueError, IndexError):
        return None, None


def _process_seconds(pid: int, root: Path) -> float:
    """CPU seconds of a process, all its threads and the children that it has waited for; 0 if it is gone."""
    try:
        fields = (root / f"proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) * _TICK_S
    except (OSError, ValueError):
        return 0.0


def _throttled(cpus: Sequence[int], root: Path) -> int | None:
    counts = [_number(root / f"{_CPU}/cpu{cpu}/thermal_throttle/core_throttle_count") for cpu in cpus]
    known = [int(count) for count in counts if count is not None]
    return sum(known) if known else None


def _frequency_mhz(cpus: Sequence[int], root: Path) -> float | None:
    found = [_number(root / f"{_CPU}/cpu{cpu}/cpufreq/scaling_cur_freq") for cpu in cpus]
    known = [value / 1000.0 for value in found if value]
    return statistics.fmean(known) if known else None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
