"""Prints the records of a run: as a table for people, as JSON and CSV for programs."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import NoneType
from typing import Any, get_args, get_type_hints

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import verdicts
from harness.records import Record, Run, Speedup, to_json

#: Lists of measurements, which have no place in one field of a CSV row. Everything else of a record is a column.
_NOT_IN_CSV = frozenset({"timing.rounds"})
_COLOURS = {"ok": "green", "failed": "bold red", "skipped": "dim", "invalid": "yellow"}


def as_json(run: Run) -> str:
    """The records as a JSON list of objects with the names of the record's table in the design.

    As in the other forms, a speed-up is there only where accuracy passed: speed without it is never published.
    """
    return json.dumps([to_json(record) for record in _published(run)], indent=1, allow_nan=False)


def _published(run: Run) -> tuple[Record, ...]:
    return verdicts.published(run, verdicts.judge(run))


def as_csv(run: Run) -> str:
    """The records as CSV, a row a record, a column a field (``timing.latency_s.p50``). The columns never vary."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns(), lineterminator="\n")
    writer.writeheader()
    for record in _published(run):
        flat = dict(_flatten(to_json(record), ""))
        writer.writerow({name: flat.get(name) for name in columns()})
    return buffer.getvalue().rstrip("\n")


@functools.cache
def columns() -> tuple[str, ...]:
    """Names of the CSV's columns: the leaves of a record."""
    return tuple(name for name in _leaves(Record, "") if name not in _NOT_IN_CSV)


def _leaves(kind: Any, prefix: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = [item for item in get_args(hints[field.name]) if item is not NoneType] or [hints[field.name]]
        if dataclasses.is_dataclass(inner[0]) and len(inner) == 1:
            yield from _leaves(inner[0], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _flatten(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(column, value) of the leaves of ``data``; a list or a mapping that is a column of its own is written as JSON."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name in columns():
            yield name, json.dumps(value) if isinstance(value, (list, dict)) else value
        elif isinstance(value, dict):
            yield from _flatten(value, f"{name}.")


def as_table(run: Run) -> RenderableType:
    """The records as a table: speed, speed-up, accuracy and evidence in one row a cell, reasons below.

    A speed-up is shown only where accuracy passed: speed without it is never published.
    """
    return rows(_published(run), _title(run))


def rows(records: Sequence[Record], title: Text | None = None) -> RenderableType:
    """A table of ``records`` as they are; columns that none of them fills are left out."""
    shown = [name for name in _COLUMNS if any(_COLUMNS[name](record) for record in records)]
    table = Table("cell", "status", title=title, title_justify="left")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        status = Text(record.status, style=_COLOURS[record.status])
        table.add_row(Text(_plain(record.cell.key)), status, *(Text(_COLUMNS[name](record)) for name in shown))
    reasons = [
        Text(f"{record.status}: {_plain(record.cell.key)}: {_plain(record.reason)}")
        for record in records
        if record.reason and record.status != "ok"
    ]
    return Group(table, *reasons)


def notices(run: Run) -> list[str]:
    """What a reader of the run must know: what could not be read of it, that it is invalid, that it never ended."""
    found = [_plain(problem) for problem in run.problems]
    if run.header.invalid_reason:
        found.append(f"run {run.header.run_id} is invalid: {_plain(run.header.invalid_reason)}")
    if not run.finished:
        found.append(f"run {run.header.run_id} has no end: it was stopped, or still goes on")
    return found


def _title(run: Run) -> Text:
    header = run.header
    started = datetime.fromtimestamp(header.started_at, UTC)
    commit = (header.commit or "unknown")[:12] + (" with changes" if header.dirty else "")
    return Text(f"run {header.run_id}, {started:%Y-%m-%d %H:%M} UTC, commit {commit}, host {header.fingerprint}")


def _plain(text: str | None) -> str:
    """``text`` on one line without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text or "")


def _throughput(record: Record) -> str:
    value = record.timing.throughput
    return "" if value is None else f"{value:.4g}" + (" (brief)" if record.timing.brief else "")


def _latency(record: Record) -> str:
    latency = record.timing.latency_s
    return "" if latency is None else f"{latency.p50 * 1e3:.3g}"


def _speedup(record: Record) -> str:
    return _times(record.speedup)


def _linear_speedup(record: Record) -> str:
    return _times(record.linear_speedup)


def _times(speedup: Speedup | None) -> str:
    if speedup is None:
        return ""
    interval = speedup.ci95
    return f"{speedup.value:.2f}x" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _accuracy(record: Record) -> str:
    found = record.accuracy
    return "" if found is None else f"{found.value:.4f} ({found.delta:+.4f})"


def _flips(record: Record) -> str:
    return "" if record.accuracy is None else f"{record.accuracy.flips:.2%}"


def _sqnr(record: Record) -> str:
    found = record.accuracy
    return "" if found is None or found.sqnr_db is None else f"{found.sqnr_db:.1f}"


def _examples(record: Record) -> str:
    return "" if record.accuracy is None else str(record.accuracy.n)


def _fused(record: Record) -> str:
    evidence = record.evidence
    counts = (evidence.fused_linears, evidence.quantized_linears, evidence.linears)
    return "/".join("?" if count is None else str(count) for count in counts) if any(counts) else ""


def _amx(record: Record) -> str:
    return {True: "yes", False: "no", None: ""}[record.evidence.amx_permission]


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "sequences/s": _throughput,
    "p50 ms": _latency,
    "speed-up": _speedup,
    "linears alone": _linear_speedup,
    "accuracy (delta)": _accuracy,
    "flips": _flips,
    "SQNR dB": _sqnr,
    "judged": _examples,
    "fused/quantized/linears": _fused,
    "AMX": _amx,
}
