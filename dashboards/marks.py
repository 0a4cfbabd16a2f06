"""What happened to a series: steps in its speed, runs that were accepted, known changes, other versions. Pure.

Steps are those of :func:`harness.changepoints.watch`, the rule by which the gate follows a history, asked once for each
host, because a level on one machine says nothing about another.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.changes import version_changes
from dashboards.series import Series
from harness import changepoints
from harness.records import RunHeader

#: How many marks a series page lists, the newest first.
LISTED = 40


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one point of a series.

    Attributes:
        place: of the point in the series.
        run: its run's place in the list of headers.
        kind: slower, faster, accepted, known or versions.
        title: in a few words.
        detail: in a sentence; may be empty.
        before: place in the list of headers of the run before it on the same host; None for the first.
        lasts: for a step whether the alarm still stands.
    """

    place: int
    run: int
    kind: str
    title: str
    detail: str
    before: int | None
    lasts: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A change that people listed as meant, where it meets a series: the first run of its host that has it, and their
    words."""

    run_id: str
    reason: str
    who: str


def marks(
    series: Series, headers: Sequence[RunHeader], accepted: Collection[str], known: Sequence[Known] = ()
) -> tuple[Mark, ...]:
    """Everything that happened to ``series``, oldest first.

    Args:
        series: one cell's history.
        headers: all runs, oldest first.
        accepted: ids of the accepted runs.
        known: listed changes that apply to this series.
    """
    by_host: dict[str, list[int]] = {}
    for place, run in enumerate(series.runs):
        by_host.setdefault(headers[run].fingerprint, []).append(place)
    found = [mark for places in by_host.values() for mark in _of_host(series, headers, places, accepted, known)]
    return tuple(sorted(found, key=lambda mark: (mark.run, mark.kind)))


def _of_host(
    series: Series,
    headers: Sequence[RunHeader],
    places: Sequence[int],
    accepted: Collection[str],
    known: Sequence[Known],
) -> Iterator[Mark]:
    runs = [series.runs[place] for place in places]
    before: list[int | None] = [None, *runs[:-1]]

    def mark(index: int, kind: str, title: str, detail: str = "", lasts: bool = False) -> Mark:
        return Mark(places[index], runs[index], kind, title, detail, before[index], lasts)

    taken = [index for index, run in enumerate(runs) if headers[run].run_id in accepted]
    meant = [(at, one) for one in known if (at := _first_at(runs, headers, one.run_id)) is not None]
    costs = [series.at("p50_s", place) if series.status[place] == "o" else None for place in places]
    for change in changepoints.watch(costs, accepted=taken, known=[at for at, _ in meant]):
        kind = "slower" if change.size > 0 else "faster"
        ended = None if change.ended is None else headers[runs[min(change.ended, len(runs) - 1)]].run_id
        detail = f"found by run {headers[runs[change.found]].run_id}"
        detail += "; it stands" if ended is None else f"; ended by run {ended}"
        yield mark(change.first, kind, f"{abs(100 * change.size):.1f} % {kind}", detail, ended is None)
    for index in taken:
        yield mark(index, "accepted", "accepted", "a new level counts from here")
    for index, one in meant:
        yield mark(index, "known", f"known change: {one.reason}", f"listed by {one.who}" if one.who else "")
    for index, (old, new) in enumerate(itertools.pairwise(runs), start=1):
        if headers[old].versions != headers[new].versions:
            changed = version_changes(headers[old].versions, headers[new].versions)
            yield mark(
                index, "versions", ", ".join(f"{name} {now}" for name, _, now in changed[:4]), _versions(changed)
            )


def _first_at(runs: Sequence[int], headers: Sequence[RunHeader], run_id: str) -> int | None:
    """The first of ``runs`` that is no older than a run of the same host; None for a run of another host."""
    start = next((header for header in headers if header.run_id == run_id), None)
    if start is None or not runs or headers[runs[0]].fingerprint != start.fingerprint:
        return None
    since = (start.started_at, start.run_id)
    return next(
        (index for index, run in enumerate(runs) if (headers[run].started_at, headers[run].run_id) >= since), None
    )


def _versions(changed: Sequence[tuple[str, str, str]]) -> str:
    return "; ".join(f"{name} {old} → {new}" for name, old, new in changed)


def script_marks(found: Sequence[Mark]) -> list[dict[str, Any]]:
    """What ``static/series.js`` draws; versions are in the runs' own script."""
    return [{"at": one.place, "kind": one.kind, "text": one.title[:60]} for one in found if one.kind != "versions"]


def listed(found: Sequence[Mark], headers: Sequence[RunHeader], files: Sequence[str]) -> list[Mapping[str, Any]]:
    """The newest marks for the page's list, the newest first, with their runs and the commits on both sides."""
    return [
        {
            "mark": one,
            "header": headers[one.run],
            "file": files[one.run],
            "before": None if one.before is None else headers[one.before],
        }
        for one in reversed(found[-LISTED:])
    ]
