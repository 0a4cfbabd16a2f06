"""What differs between two runs of one host: cells that changed their speed, their accuracy or their status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards import wording
from dashboards.facts import Digest, Facts
from harness.records import RunHeader, slug

#: A change of speed below this share is not worth a line: the intervals hold the spread within a run, not between runs.
SMALL = 0.03
#: How many lines the overview shows.
MOST = 10
#: A run so much older than the newest one is yesterday's; a younger one is of the same evening.
YESTERDAY_S = (18 * 3600.0, 42 * 3600.0)


@dataclass(frozen=True, slots=True)
class Change:
    """One cell that is not as it was. ``kind``: better, worse or other; ``weight`` sorts, the largest first."""

    key: str
    href: str
    kind: str
    what: str
    weight: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The newest run against an earlier one. ``more``: how many changes are not listed."""

    title: str
    since: RunHeader
    changes: tuple[Change, ...]
    more: int
    versions: tuple[tuple[str, str, str], ...]


def _apart(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    if one is None or other is None:
        return False
    return one[0] > other[1] or one[1] < other[0]


def change_of(before: Facts, after: Facts) -> Change | None:
    """How ``after`` differs from ``before``, or None where it does not beyond the intervals of both."""
    href = f"series/{slug(after.key)}.html"
    if before.status != after.status:
        kind = "better" if after.status == "ok" else "worse"
        return Change(after.key, href, kind, f"{before.status} → {after.status}", 100.0)
    if before.trust.outcome != after.trust.outcome:
        kind = {"pass": "better", "fail": "worse"}.get(after.trust.outcome, "other")
        what = f"accuracy verdict {before.trust.outcome} → {after.trust.outcome}"
        return Change(after.key, href, kind, what, 50.0)
    if before.p50 and after.p50 and _apart(before.p50_ci, after.p50_ci):
        ratio = before.p50 / after.p50 - 1
        if abs(ratio) >= SMALL:
            what = f"{abs(100 * ratio):.1f} % {'faster' if ratio > 0 else 'slower'}"
            what += f" ({wording.duration(before.p50)} → {wording.duration(after.p50)} a batch)"
            return Change(after.key, href, "better" if ratio > 0 else "worse", what, abs(ratio))
    return None


def version_changes(before: dict[str, str], after: dict[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Names with the old and the new version, where they differ."""
    names = sorted(set(before) | set(after))
    changed = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return tuple(item for item in changed if item[1] != item[2])


def earlier_runs(
    headers: Sequence[RunHeader], baseline: str | None, pinned: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """What the newest of one host's runs is compared with, as (title, run id), each run once.

    Args:
        headers: the host's runs, oldest first.
        baseline: the run that the gate compared it with, if any.
        pinned: ids of pinned releases, the one pinned last at the end.
    """
    if not headers:
        return ()
    newest, before = headers[-1], headers[:-1]
    ids = {header.run_id for header in before}
    found: dict[str, str] = {}
    yesterday = next((one for one in reversed(before) if newest.started_at - one.started_at >= YESTERDAY_S[0]), None)
    if yesterday is not None and newest.started_at - yesterday.started_at <= YESTERDAY_S[1]:
        found[yesterday.run_id] = "Since yesterday"
    elif before:
        found[before[-1].run_id] = "Since the previous run"
    release = next((run_id for run_id in reversed(pinned) if run_id in ids), None)
    for run_id, title in ((release, "Since the pinned release"), (baseline, "Since the baseline")):
        if run_id is not None and run_id in ids:
            found[run_id] = f"{found[run_id]}, {title[0].lower()}{title[1:]}" if run_id in found else title
    return tuple((title, run_id) for run_id, title in found.items())


def compare(title: str, before: Digest, after: Digest) -> Comparison:
    """The cells that both runs have and that changed, the largest change first."""
    old = {one.key: one for one in before.facts}
    found = [change_of(old[one.key], one) for one in after.facts if one.key in old]
    changes: Sequence[Change] = sorted(
        (one for one in found if one is not None), key=lambda one: (-one.weight, one.key)
    )
    versions = version_changes(before.header.versions, after.header.versions)
    return Comparison(title, before.header, tuple(changes[:MOST]), max(len(changes) - MOST, 0), versions)
