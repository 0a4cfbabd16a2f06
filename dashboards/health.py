"""The health page: what went wrong with runs, and how much each series moves from night to night. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dashboards.series import Series, noise, sparkline
from harness.records import RunHeader, slug

#: How many of a series' newest points tell its noise.
WINDOW = 60
#: A change of this many run-to-run deviations is the smallest that one more run can tell from noise: two-sided 5 %
#: with a power of 80 %, for the difference of two single nights.
VISIBLE = 2.8 * 2**0.5


@dataclass(frozen=True, slots=True)
class RunHealth:
    """A run that is not simply fine, in words."""

    header: RunHeader
    file: str
    kind: str
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """How quiet a series is. Fractions; ``visible``: the smallest change that one more run can show."""

    key: str
    href: str
    runs: int
    spread: float
    visible: float
    path: str
    margin: float | None

    @property
    def blind(self) -> bool:
        """True where the series cannot see a change of the size of its margin."""
        return self.margin is not None and self.visible > self.margin


def run_health(header: RunHeader, file: str, problems: Sequence[str], finished: bool, failed: int) -> RunHealth | None:
    """What is the matter with a run; None where nothing is."""
    why = list(problems)
    kind = ""
    if failed:
        kind = "failed cells"
        why.insert(0, f"{failed} cell{'' if failed == 1 else 's'} failed")
    if problems:
        kind = "damaged"
    if not finished:
        kind = "unfinished"
        why.insert(0, "it has no end: it was killed, or is still going on")
    if header.invalid_reason:
        kind = "invalid"
        why.insert(0, header.invalid_reason)
    return RunHealth(header, file, kind, tuple(why)) if kind else None


def noises(all_series: Iterable[Series], fingerprints: Sequence[str], margin: float | None) -> list[Noise]:
    """The noise of each series on the host of its newest run, the loudest first."""
    found = []
    for one in all_series:
        if not one.runs:
            continue
        host = fingerprints[one.runs[-1]]
        mine = [index for index, run in enumerate(one.runs) if fingerprints[run] == host][-WINDOW:]
        values = [one.at("throughput", index) if one.status[index] == "o" else None for index in mine]
        known = [value for value in values if value is not None]
        spread = noise(known)
        if spread is None:
            continue
        found.append(
            Noise(
                one.key, f"series/{slug(one.key)}.html", len(known), spread, VISIBLE * spread, sparkline(values), margin
            )
        )
    return sorted(found, key=lambda item: -item.spread)
