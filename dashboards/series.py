"""The history of each cell: columns of numbers, filled run by run, and what a series page needs of them.

Columns are arrays of doubles with NaN for what was not measured, so that 200 cells over three years of nights take tens
of megabytes and not a gigabyte of objects.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dashboards import wording
from dashboards.facts import FAIL, PASS, Facts
from harness.records import Cell, RunHeader, slug

#: The columns of a series; also the names in its CSV file and in its script. Units: s, sequences/s, fraction, byte, dB.
COLUMNS = (
    "throughput",
    "throughput_low",
    "throughput_high",
    "p50_s",
    "p50_low_s",
    "p50_high_s",
    "p90_s",
    "p99_s",
    "speedup",
    "speedup_low",
    "speedup_high",
    "accuracy",
    "accuracy_fp32",
    "delta",
    "delta_low",
    "delta_high",
    "flips",
    "flips_gained",
    "flips_lost",
    "sqnr_db",
    "cosine",
    "peak_rss_bytes",
    "model_bytes",
    "compile_s",
)

STATUS_CODES = {"ok": "o", "failed": "f", "skipped": "s", "invalid": "i"}
VERDICT_CODES = {PASS: "p", FAIL: "x"}

_NAN = math.nan


def _pair(interval: tuple[float, float] | None) -> tuple[float, float]:
    return interval if interval is not None else (_NAN, _NAN)


def row_of(facts: Facts) -> tuple[float, ...]:
    """The numbers of one record in the order of :data:`COLUMNS`; NaN where not measured."""
    accuracy = facts.accuracy
    judged = (
        (
            accuracy.value,
            accuracy.fp32_value,
            accuracy.delta,
            *_pair(accuracy.delta_ci95),
            accuracy.flips,
            accuracy.flips_gained,
            accuracy.flips_lost,
            accuracy.sqnr_db,
            accuracy.cosine,
        )
        if accuracy
        else (None,) * 10
    )
    numbers = (
        facts.throughput,
        *_pair(facts.throughput_ci),
        facts.p50,
        *_pair(facts.p50_ci),
        facts.p90,
        facts.p99,
        facts.speedup,
        *_pair(facts.speedup_ci),
        *judged,
        facts.memory.peak_rss_bytes,
        facts.memory.model_bytes,
        facts.compile_s,
    )
    return tuple(_NAN if number is None else float(number) for number in numbers)


@dataclass(slots=True)
class Series:
    """One cell over all runs that have it, in the order of the runs. ``runs`` holds places in the list of headers."""

    cell: Cell
    key: str
    runs: list[int] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})

    def add(self, run: int, facts: Facts) -> None:
        """Append what run number ``run`` found."""
        self.cell = facts.cell
        self.runs.append(run)
        self.status.append(STATUS_CODES.get(facts.status, "f"))
        self.verdict.append(VERDICT_CODES.get(facts.trust.outcome, "u"))
        if facts.status != "ok" or facts.withheld:
            self.reasons[len(self.runs) - 1] = facts.reason or facts.trust.reason
        for column, number in zip(self.columns.values(), row_of(facts), strict=True):
            column.append(number)

    def at(self, name: str, index: int) -> float | None:
        """Number ``index`` of a column, or None where it was not measured."""
        number = self.columns[name][index]
        return None if math.isnan(number) else number

    def withheld(self) -> str | None:
        """Why the newest point shows no speed although it was measured; None where it shows it."""
        last = len(self.runs) - 1
        return self.reasons.get(last) if self.status[last] == STATUS_CODES["ok"] else None

    def row(self, index: int) -> dict[str, Any]:
        """Point ``index`` as a mapping."""
        return {
            "run": self.runs[index],
            "status": self.status[index],
            "verdict": self.verdict[index],
            "reason": self.reasons.get(index),
            **{name: self.at(name, index) for name in COLUMNS},
        }


def _rounded(number: float) -> float | int | None:
    """Six significant digits: below the noise of anything measured here, and half the bytes."""
    if math.isnan(number):
        return None
    short = float(f"{number:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


#: Columns as files hold them: rounded, None where not measured. A column that holds nothing is left out.
Table = dict[str, list[float | int | None]]


def rounded(series: Series) -> Table:
    """The columns of a series as its script and its CSV file hold them."""
    return {
        name: [_rounded(number) for number in column]
        for name, column in series.columns.items()
        if not all(map(math.isnan, column))
    }


def script_data(series: Series, table: Table, marks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What ``static/series.js`` draws."""
    return {
        "key": series.key,
        "runs": series.runs,
        "status": "".join(series.status),
        "verdict": "".join(series.verdict),
        "reasons": {str(index): reason[:300] for index, reason in series.reasons.items()},
        "columns": table,
        "marks": list(marks),
    }


def runs_script(headers: Sequence[RunHeader], files: Sequence[str]) -> dict[str, Any]:
    """The runs as all series pages share them: columns, with each distinct set of versions and host named once."""
    hosts = {header.fingerprint: str(header.host.get("cpu_model") or header.fingerprint) for header in headers}
    order = {fingerprint: place for place, fingerprint in enumerate(hosts)}
    versions: dict[tuple[tuple[str, str], ...], int] = {}
    which = [versions.setdefault(tuple(sorted(header.versions.items())), len(versions)) for header in headers]
    return {
        "id": [header.run_id for header in headers],
        "file": list(files),
        "t": [round(header.started_at) for header in headers],
        "commit": [header.commit for header in headers],
        "host": [order[header.fingerprint] for header in headers],
        "hosts": [{"fingerprint": fingerprint, "title": title} for fingerprint, title in hosts.items()],
        "versions": which,
        "version_sets": [dict(items) for items in versions],
    }


def _inert(text: str | None) -> str:
    """A cell that no spreadsheet takes for a formula."""
    if text is None:
        return ""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


#: Kinds that need no quoting; asked for by identity, since years of history have millions of them.
_NUMBERS = (float, int)


def csv_text(header: Sequence[str], rows: Iterator[Sequence[Any]]) -> str:
    """Rows as CSV; None is an empty field, and text that looks like a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([item if type(item) in _NUMBERS else _inert(item) for item in row] for row in rows)
    return out.getvalue()


def series_csv(series: Series, table: Table, headers: Sequence[RunHeader]) -> str:
    """The series' data: one line a run."""
    words = {code: status for status, code in STATUS_CODES.items()}
    outcomes = {"p": PASS, "x": FAIL, "u": "unjudged"}
    nothing: list[float | int | None] = [None] * len(series.runs)
    columns = [table.get(name, nothing) for name in COLUMNS]

    def rows() -> Iterator[Sequence[Any]]:
        for index, run in enumerate(series.runs):
            header = headers[run]
            yield (
                header.run_id,
                wording.iso(header.started_at),
                header.commit,
                header.fingerprint,
                words[series.status[index]],
                outcomes[series.verdict[index]],
                *(column[index] for column in columns),
            )

    return csv_text(("run_id", "started_at", "commit", "fingerprint", "status", "accuracy_verdict", *COLUMNS), rows())


def noise(values: Sequence[float]) -> float | None:
    """Run-to-run spread as a fraction: a robust standard deviation of the changes from one value to the next.

    1.4826 times the median absolute change of the logarithms over sqrt(2): a step or a slow drift moves it little.
    None with fewer than six values.
    """
    logs = [math.log(value) for value in values if value > 0]
    if len(logs) < 6:
        return None
    changes = [abs(after - before) for before, after in itertools.pairwise(logs)]
    return 1.4826 * statistics.median(changes) / math.sqrt(2)


def sparkline(values: Sequence[float | None], width: float = 120, height: float = 26, pad: float = 3) -> str:
    """SVG path data of a line through ``values``; gaps where there is none. Empty with fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    middle, half = (low + high) / 2, max((high - low) / 2, 0.02 * abs(high) or 1.0)
    step = (width - 2 * pad) / (len(values) - 1)
    path, pen = [], "M"
    for index, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        y = height / 2 - (value - middle) / half * (height / 2 - pad)
        path.append(f"{pen}{pad + index * step:.1f} {y:.1f}")
        pen = "L"
    return "".join(path)


#: How many of a series' newest points its page shows as a table.
TABLE_ROWS = 30


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a series page's table."""

    header: RunHeader
    file: str
    row: dict[str, Any]


def newest_points(series: Series, headers: Sequence[RunHeader], files: Sequence[str]) -> list[Point]:
    """The newest points, the newest first, with the runs they are from."""
    last = len(series.runs) - 1
    rows = [series.row(index) for index in range(last, max(last - TABLE_ROWS, -1), -1)]
    return [Point(headers[row["run"]], files[row["run"]], row) for row in rows]


@dataclass(frozen=True, slots=True)
class IndexLine:
    """One series in the list of all."""

    series: Series
    href: str
    last: dict[str, Any]
    path: str


def index_lines(all_series: Iterable[Series]) -> list[IndexLine]:
    """The list of all series, in the order of the overview."""
    found = []
    for one in sorted(all_series, key=_place):
        start = max(len(one.runs) - 60, 0)
        values = [one.at("throughput", index) for index in range(start, len(one.runs))]
        found.append(IndexLine(one, f"{slug(one.key)}.html", one.row(len(one.runs) - 1), sparkline(values)))
    return found


def _place(one: Series) -> tuple[Any, ...]:
    cell = one.cell
    return (
        cell.model,
        wording.rank(cell.isa, wording.ISA_ORDER),
        cell.scenario,
        wording.rank(cell.engine, wording.ENGINE_ORDER),
        wording.rank(cell.recipe, wording.RECIPE_ORDER),
        one.key,
    )


def latest_csv(facts: Iterable[Facts]) -> str:
    """The cells of the overview: one line a cell. Speed that may not be shown is empty."""
    names = ("model", "family", "weights", "engine", "recipe", "isa", "scenario", "deploy", "task")
    rows = (
        (
            *(getattr(one.cell, name) for name in names),
            one.status,
            one.reason,
            one.trust.outcome,
            one.trust.reason,
            *(_rounded(number) for number in row_of(one)),
        )
        for one in facts
    )
    return csv_text((*names, "status", "reason", "accuracy_verdict", "accuracy_reason", *COLUMNS), rows)
