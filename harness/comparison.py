"""What the interleaved comparison of two revisions says: rules and how they are shown. Rules: docs/gates.md. Pure.

One *pair* is a process of revision A and one of revision B that took turns. A cell's pairs decide its outcome
(:func:`decide`); while a cell is inconclusive its caller measures another pair, up to a cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from harness import stats, verdicts
from harness.stats import Array
from harness.verdicts import EXIT_CODES, Outcome

#: A slowdown of the whole cell by less than this is not called. Linears are half of a cell's time or more, so linears
#: that lost 8 % show as 4 % and more.
MARGIN = 0.02
#: Pairs before anything is decided. A sign-flip test over five pairs can reach 1/32.
MIN_PAIRS = 5
MAX_PAIRS = 14
#: False discoveries among the regressions that are called.
FALSE_DISCOVERIES = 0.05
#: Examples whose prediction may differ between the revisions. The same arithmetic flips none; another order of a sum
#: flips one that lay on the edge. The night's gate allows 3 % against FP32.
MAX_FLIPS = 0.01
#: Loss of the task's metric that must be excluded to call it no regression, and exceeded to call it one.
ACCURACY_MARGIN = 0.01
#: Marker by which a bot finds the comment that it wrote before.
MARKDOWN_MARKER = "<!-- harness compare -->"


@dataclass(frozen=True)
class Pairs:
    """Slice times of one cell in seconds an iteration: the n-th process of A, which ran beside the n-th of B."""

    a: tuple[Array, ...] = ()
    b: tuple[Array, ...] = ()

    def __len__(self) -> int:
        return len(self.a)

    def and_one(self, a: Array, b: Array) -> Pairs:
        """These pairs and one more."""
        return Pairs((*self.a, a), (*self.b, b))


@dataclass(frozen=True)
class SpeedVerdict:
    """A cell's speed: ``ratio`` is B's speed over A's with its interval, ``limit`` the ratio below which it is a
    regression, ``p_value`` that of "B is no slower than the limit", adjusted for the number of cells."""

    cell_key: str
    outcome: Outcome
    ratio: float | None
    interval: tuple[float, float] | None
    limit: float
    pairs: int
    p_value: float | None
    reason: str


@dataclass(frozen=True)
class AccuracyVerdict:
    """Predictions of both revisions on the same examples.

    ``flips``: fraction of ``n`` whose prediction differs; ``gained`` and ``lost``: how many became better and worse;
    ``delta``: B's metric minus A's with its interval; ``p_value``: McNemar's exact test.
    """

    cell_key: str
    outcome: Outcome
    n: int
    flips: float
    gained: int
    lost: int
    delta: float
    interval: tuple[float, float]
    p_value: float
    reason: str


@dataclass(frozen=True)
class Failure:
    """A cell that one of the revisions did not run, or not as its label says."""

    cell_key: str
    revision: str
    reason: str


@dataclass(frozen=True)
class Group:
    """Geometric mean of the speed ratios of one model's and recipe's cells."""

    name: str
    ratio: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Side:
    """A revision as the user named it, and its commit (None: the tree as it lies there)."""

    name: str
    commit: str | None

    @property
    def text(self) -> str:
        """How it is shown."""
        return self.name if self.commit is None else f"{self.name} ({self.commit[:10]})"


@dataclass(frozen=True)
class Comparison:
    """Everything that was concluded about B against A on one host. ``notes`` are sentences for the reader."""

    a: Side
    b: Side
    speed: tuple[SpeedVerdict, ...]
    accuracy: tuple[AccuracyVerdict, ...] = ()
    failures: tuple[Failure, ...] = ()
    groups: tuple[Group, ...] = ()
    invalid_reason: str | None = None
    host: str = ""
    fingerprint: str = ""
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The gravest outcome, in the order of the gate's exit codes."""
        found: set[Outcome] = {one.outcome for one in self.speed} | {one.outcome for one in self.accuracy}
        if self.invalid_reason is not None:
            found.add("invalid")
        if self.failures or not self.speed:
            found.add("failed")
        grave = next((outcome for outcome in EXIT_CODES if outcome in found), None)
        return grave or ("improvement" if "improvement" in found else "pass")

    @property
    def exit_code(self) -> int:
        """3 host disturbed, 2 something failed to run, 1 regression, 4 inconclusive, 0 pass."""
        return EXIT_CODES.get(self.outcome, 0)


def decide(
    cells: Mapping[str, Pairs], margin: float = MARGIN, floors: Mapping[str, float] | None = None
) -> list[SpeedVerdict]:
    """What the pairs measured so far say of each cell.

    A cell is a regression only if the whole interval of its ratio lies beyond the larger of ``margin`` and its noise
    floor, and the test against that limit still says so after allowing for the number of cells; a pass only if none of
    the interval does. Otherwise, and with fewer than ``MIN_PAIRS`` pairs, it is inconclusive.

    Args:
        cells: pairs by cell key.
        margin: fraction of A's speed that B may lose.
        floors: the smallest change that a cell's own noise does not make, where `harness selftest` has measured it.
    """
    floors = floors or {}
    limits = {key: max(margin, floors.get(key, 0.0)) for key in cells}
    tested = {key: pairs for key, pairs in cells.items() if len(pairs) >= MIN_PAIRS}
    raw = [stats.sign_flip(stats.pair_log_ratios(p.a, p.b), -math.log1p(-limits[key])) for key, p in tested.items()]
    adjusted = dict(zip(tested, stats.benjamini_hochberg(np.array(raw)).tolist(), strict=True)) if raw else {}
    return [_speed_verdict(key, pairs, limits[key], margin, adjusted.get(key)) for key, pairs in cells.items()]


def _speed_verdict(key: str, pairs: Pairs, limit: float, margin: float, p_value: float | None) -> SpeedVerdict:
    floor = 1.0 - limit
    if not len(pairs) or p_value is None:
        reason = f"{len(pairs)} pairs of processes, {MIN_PAIRS} are needed"
        return SpeedVerdict(key, "inconclusive", None, None, floor, len(pairs), None, reason)
    # Pairs alone are resampled: what their slices spread is in the spread of their medians already.
    ratio = stats.group_ratio(stats.pair_log_ratios(pairs.a, pairs.b)[:, None])
    outcome = verdicts.speed_beyond_margin(ratio, limit)
    if outcome == "regression" and p_value > FALSE_DISCOVERIES:
        outcome = "inconclusive"
    reason = f"{100 * ratio.value:.1f} % of A's speed"
    if ratio.interval is not None:
        reason += f", {100 * ratio.interval[0]:.1f} to {100 * ratio.interval[1]:.1f} % over {len(pairs)} pairs"
    reason += f"; {100 * floor:g} % is needed"
    if limit > margin:
        reason += f" (the series' own noise; the margin of {100 * margin:g} % is below it)"
    if outcome == "inconclusive":
        reason += "; the interval covers the limit" if _covers(ratio.interval, floor) else "; too few pairs for so many"
    return SpeedVerdict(key, outcome, ratio.value, ratio.interval, floor, len(pairs), p_value, reason)


def _covers(interval: tuple[float, float] | None, limit: float) -> bool:
    return interval is None or interval[0] <= limit <= interval[1]


def judge_predictions(key: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> AccuracyVerdict:
    """Compare what a task kept of each example (``Task.kept``) under both revisions.

    Raises:
        ValueError: the revisions judged different examples.
    """
    (first, before), (second, after) = _predictions(a), _predictions(b)
    if len(first) != len(second):
        raise ValueError(f"{key}: the revisions judged {len(first)} and {len(second)} examples")
    flips = float(np.mean(first != second))
    gained, lost = int(np.sum(after > before)), int(np.sum(after < before))
    delta, interval = stats.paired_difference(after, before)
    worse = verdicts.noninferiority(interval, ACCURACY_MARGIN) == "regression"
    outcome: Outcome = "regression" if worse or flips > MAX_FLIPS else "pass"
    reason = (
        f"{100 * flips:.2f} % of {len(first)} predictions differ, {gained} better, {lost} worse; at most "
        f"{100 * MAX_FLIPS:g} % may; metric {100 * delta:+.2f} points"
    )
    p_value = stats.mcnemar(gained, lost)
    return AccuracyVerdict(key, outcome, len(first), flips, gained, lost, delta, interval, p_value, reason)


def _predictions(kept: Mapping[str, Any]) -> tuple[Any, Array]:
    """The prediction of each example, and its score."""
    if "answers" in kept:
        return np.asarray(kept["answers"]), np.asarray(kept["f1"], dtype=np.float64)
    predicted = np.argmax(kept["logits"], axis=1)
    return predicted, (predicted == np.asarray(kept["labels"])).astype(np.float64)


def group(cells: Mapping[str, Pairs], name: Callable[[str], str]) -> tuple[Group, ...]:
    """The geometric mean of the ratios of cells that share a name and were measured by the same pairs."""
    members: dict[str, list[Pairs]] = {}
    for key, pairs in cells.items():
        if len(pairs):
            members.setdefault(name(key), []).append(pairs)
    found = []
    for title, several in members.items():
        shortest = min(map(len, several))
        logs = np.stack([stats.pair_log_ratios(p.a, p.b)[:shortest] for p in several], axis=1)
        ratio = stats.group_ratio(logs)
        found.append(Group(title, ratio.value, ratio.interval))
    return tuple(found)


# --- how it is shown --------------------------------------------------------------------------------------------------


def headline(found: Comparison) -> str:
    """The result in one line."""
    why = f": the host was disturbed: {found.invalid_reason}" if found.invalid_reason else ""
    return f"compare: {found.outcome} (exit {found.exit_code}): {found.b.text} against {found.a.text}{why}"


def closing_lines(found: Comparison) -> list[str]:
    """What follows the table: failures, means, notes, and last the result."""
    lines = [f"failed: {one.cell_key} at {one.revision}: {one.reason}" for one in found.failures]
    for one in found.groups:
        interval = "" if one.interval is None else f" ({one.interval[0]:.3f} to {one.interval[1]:.3f})"
        lines.append(f"geometric mean of {one.name}: {one.ratio:.3f}{interval} of A's speed")
    lines += [f"note: {note}" for note in found.notes]
    return [*lines, headline(found)]


def table(found: Comparison) -> Table:
    """Every verdict as a table for a terminal."""
    grid = Table("cell", "metric", "verdict", "reason", show_edge=False, pad_edge=False)
    for key, metric, outcome, reason in _rows(found):
        grid.add_row(Text(key), metric, Text(outcome, style=_style(outcome)), Text(reason))
    return grid


def _style(outcome: str) -> str:
    return {"pass": "green", "improvement": "bold green", "inconclusive": "yellow"}.get(outcome, "bold red")


def _rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = [(s.cell_key, "speed", s.outcome, s.reason) for s in found.speed]
    return rows + [(one.cell_key, "predictions", one.outcome, one.reason) for one in found.accuracy]


def to_json(found: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON values, with schema version, outcome and exit code."""
    fields = dataclasses.asdict(found)
    return {"schema_version": 1, "outcome": found.outcome, "exit_code": found.exit_code, **_plain(fields)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(found: Comparison) -> str:
    """The comparison as a comment for a pull request."""
    lines = [MARKDOWN_MARKER, f"### {_safe(headline(found))}", ""]
    rows = _rows(found)
    if rows:
        lines += ["| cell | metric | verdict | reason |", "|---|---|---|---|"]
        lines += [f"| `{key}` | {metric} | {outcome} | {_safe(reason)} |" for key, metric, outcome, reason in rows]
        lines.append("")
    lines += [f"* {_safe(line)}" for line in closing_lines(found)[:-1]]
    command = f"harness compare {found.a.commit or found.a.name} {found.b.commit or found.b.name}"
    cells = [*{key.split("/")[0] for key, *_ in rows}]
    models = f" --models {','.join(sorted(cells))}" if cells else ""
    return "\n".join([*lines, "", f"Again, on {_safe(found.host)}:", "", f"    {command}{models}"]) + "\n"


def _safe(text: str) -> str:
    for character in "\\|<>*_`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
