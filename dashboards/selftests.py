"""The selftests of a store's hosts: does the gate see what it should, and nothing else? Pure.

Reads what :mod:`harness.selftest` writes; its docstring defines the fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dashboards.analyses import Analysis, item, number, objects, text


@dataclass(frozen=True, slots=True)
class SeriesTest:
    """One way of deciding: how often it alarms without a cause, and the smallest effect that it sees. Fractions."""

    name: str
    about: str
    nominal: float | None
    rate: float | None
    rate_low: float | None
    rate_high: float | None
    floor: float | None
    smallest: float | None
    margin: float | None
    sees: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected, and what caught it."""

    name: str
    how: str
    caught: bool
    by: str
    detail: str


@dataclass(frozen=True, slots=True)
class Selftest:
    """One host's selftest."""

    host: str
    fingerprint: str
    measured_at: float | None
    seconds: float | None
    quick: bool
    cell: str
    processes: float | None
    passed: bool
    series: tuple[SeriesTest, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def selftests(analyses: Iterable[Analysis]) -> tuple[Selftest, ...]:
    """Every host's, the newest first."""
    found = [_selftest(one) for one in analyses]
    return tuple(sorted(found, key=lambda one: (-(one.measured_at or 0.0), one.fingerprint)))


def _selftest(one: Analysis) -> Selftest:
    data = one.data
    notes = item(data, "notes")
    return Selftest(
        host=text(data, "host") or one.name,
        fingerprint=text(data, "fingerprint"),
        measured_at=number(data, "measured_at"),
        seconds=number(data, "seconds"),
        quick=item(data, "quick") is True,
        cell=text(data, "cell"),
        processes=number(data, "processes"),
        passed=item(data, "passed") is True,
        series=tuple(
            SeriesTest(
                text(row, "name"),
                text(row, "about"),
                number(row, "nominal"),
                number(row, "rate"),
                number(row, "rate_ci95", 0),
                number(row, "rate_ci95", 1),
                number(row, "floor"),
                number(row, "smallest_effect"),
                number(row, "margin"),
                item(row, "sees_margin") is True,
            )
            for row in objects(data, "series")
        ),
        faults=tuple(
            Fault(
                text(row, "name"), text(row, "how"), item(row, "caught") is True, text(row, "by"), text(row, "detail")
            )
            for row in objects(data, "faults")
        ),
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )
