"""The harness's word on runs, asked for once and kept with what the pages need: nothing is judged here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dashboards.facts import FAIL, PASS, UNJUDGED, Trust
from harness import gating, verdicts
from harness.records import Record, RunHeader, Store, slug
from harness.verdicts import Verdict


def trust(record: Record, header: RunHeader) -> Trust:
    """The rules' word on everything but the speed of ``record``, and whether its speed may be shown."""
    if record.status != "ok":
        return Trust(UNJUDGED, record.reason or record.status, (), False)
    found = verdicts.judge_itself(record, header)  # without speed, whose bootstrap would cost more than all the rest
    bad = [one for one in found if not one.good]
    if bad:
        return Trust(FAIL, "; ".join(one.reason for one in bad), tuple(one.metric for one in bad), False)
    judged = [one.reason for one in found if one.metric in ("accuracy", "flips")]
    if judged:
        return Trust(PASS, "; ".join(judged))
    if not verdicts.is_quantized(record.cell):
        return Trust(PASS, "nothing is quantized")
    if record.cell.task or record.cell.weights != "synthetic":
        return Trust(UNJUDGED, "nobody judged its accuracy, so its speed is not shown", ("accuracy",), False)
    return Trust(UNJUDGED, "synthetic weights: measured for speed alone")


def trusting(judgement: Judgement | None) -> Callable[[Record, RunHeader], Trust]:
    """:func:`trust`, and in a judged run the gate's word on what a record alone does not show: predictions that are
    others than those of the run before."""
    against: dict[str, Verdict] = {}
    for one in judgement.verdicts if judgement is not None else ():
        if one.metric == "flips_previous" and not one.good:
            against[one.cell_key] = one

    def of(record: Record, header: RunHeader) -> Trust:
        found = trust(record, header)
        bad = against.get(record.cell.key)
        if bad is None or record.status != "ok":
            return found
        reasons = [found.reason] if found.outcome == FAIL else []
        return Trust(FAIL, "; ".join([*reasons, bad.reason]), (*found.blame, bad.metric), False)

    return of


#: What the gate's exit code means, as the site says it: its word, and the sentence under it.
WORDS = {
    0: ("pass", "Pass", "Nothing that is gated became slower or less accurate."),
    1: ("regression", "Regression", "A gated cell became slower or less accurate than it may."),
    2: ("failed", "Failed", "A cell did not run what its label says."),
    3: ("invalid", "Invalid", "The host was disturbed; this run says nothing about speed."),
    4: ("inconclusive", "Inconclusive", "The measurement cannot tell whether a gated cell became slower."),
}

#: Worst first: which outcome stands for a cell that has several.
SEVERITY = ("regression", "failed", "invalid", "inconclusive", "improvement", "pass")


@dataclass(frozen=True)
class Judgement:
    """The gate's word on one run. ``baseline``: the id of the run it was compared with, None where there is none."""

    header: RunHeader
    baseline: str | None
    exit_code: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """One word for the look of it."""
        return WORDS.get(self.exit_code, WORDS[2])[0]

    @property
    def title(self) -> str:
        """The word that people read first."""
        return WORDS.get(self.exit_code, WORDS[2])[1]

    @property
    def sentence(self) -> str:
        """What the word means."""
        return WORDS.get(self.exit_code, WORDS[2])[2]

    def gated_cells(self) -> int:
        """How many cells decided."""
        return len({one.cell_key for one in self.verdicts if one.gated and one.cell_key != verdicts.WHOLE_RUN})

    def deciding(self) -> list[Shown]:
        """Gated verdicts that are not a pass, the worst first."""
        return _shown(self, [one for one in self.verdicts if one.gated and not one.good])

    def reported(self) -> list[Shown]:
        """What is not gated and not a pass, and improvements that nobody may have explained; the worst first."""
        return _shown(self, [one for one in self.verdicts if one.outcome != "pass" and (one.good or not one.gated)])

    def alarms(self) -> dict[str, str]:
        """Per cell the worst outcome of its speed that deserves a mark on the matrix."""
        marked: dict[str, str] = {}
        for one in self.verdicts:
            if one.metric == "speed" and one.outcome in ("regression", "inconclusive", "improvement"):
                before = marked.get(one.cell_key)
                if before is None or _severity(one.outcome) < _severity(before):
                    marked[one.cell_key] = one.outcome
        return marked


@dataclass(frozen=True, slots=True)
class Shown:
    """A verdict as a page shows it. ``href``: the cell's series; None for the run as a whole, and for several cells."""

    verdict: Verdict
    href: str | None
    commands: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str | None:
        """What it is about, where that is no page; None for the run as a whole."""
        return None if self.verdict.cell_key == verdicts.WHOLE_RUN else self.verdict.cell_key


def _shown(judgement: Judgement, found: list[Verdict]) -> list[Shown]:
    found.sort(key=lambda one: (_severity(one.outcome), one.cell_key, one.metric))
    return [
        Shown(
            one,
            None if one.cell_key == verdicts.WHOLE_RUN or one.metric == "geomean" else _page(one.cell_key),
            verdicts.commands(one, judgement.header.run_id),
        )
        for one in found
    ]


def _page(cell_key: str) -> str:
    return f"series/{slug(cell_key)}.html"


def _severity(outcome: str) -> int:
    return SEVERITY.index(outcome) if outcome in SEVERITY else 0


def judge(store: Store, run_id: str) -> Judgement:
    """What ``harness gate`` says about a run. Raises as :func:`harness.gating.gate`."""
    report = gating.gate(store, run_id)
    return Judgement(report.run.header, report.baseline_run, report.exit_code, report.verdicts, report.notes)
