"""What the pages show of a run, taken out of its records once: compact, so that years of history fit in memory.

A run is read, digested and dropped; its rounds of samples, nine tenths of its bytes, become one interval. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scipy import special

from harness.records import Accuracy, Cell, Evidence, Memory, Record, Round, Run, RunHeader, Timing

Interval = tuple[float, float]

#: Whether a record's speed may be believed: ``unjudged`` where no accuracy was measured for what it ran.
PASS, FAIL, UNJUDGED = "pass", "fail", "unjudged"


@dataclass(frozen=True, slots=True)
class Trust:
    """What the rules say about everything but speed: evidence, accuracy, flips, chance.

    Attributes:
        outcome: pass, fail or unjudged.
        reason: in a sentence.
        blame: what failed, by the rules' own names (``accuracy``, ``flips``, ``evidence``, ...).
        shows_speed: whether the speed may be shown. An unjudged quantized cell on real weights may not.
        of: the cell whose failure it is, where that is another one of the same prepared model.
    """

    outcome: str
    reason: str
    blame: tuple[str, ...] = ()
    shows_speed: bool = True
    of: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One record, as the pages show it. Times in seconds, throughput in sequences a second.

    ``throughput``, ``p50`` to ``p99``, ``speedup`` and their intervals are None when ``trust`` forbids to show speed:
    speed without accuracy is never published, so it never gets as far as a page.
    """

    cell: Cell
    key: str
    status: str
    reason: str | None
    throughput: float | None
    throughput_ci: Interval | None
    p50: float | None
    p90: float | None
    p99: float | None
    p50_ci: Interval | None
    speedup: float | None
    speedup_ci: Interval | None
    rounds: int
    samples: int
    steady: bool | None
    brief: bool
    load_s: float | None
    calibrate_s: float | None
    quantize_s: float | None
    compile_s: float | None
    warmup_s: float | None
    memory: Memory
    accuracy: Accuracy | None
    trust: Trust
    evidence: Evidence

    @property
    def withheld(self) -> bool:
        """True where speed was measured and is not shown."""
        return self.status == "ok" and not self.trust.shows_speed


@dataclass(frozen=True, slots=True)
class Digest:
    """A run as the pages show it."""

    header: RunHeader
    facts: tuple[Facts, ...]
    problems: tuple[str, ...]
    finished: bool

    def counts(self) -> dict[str, int]:
        """Records by status."""
        found = {"ok": 0, "failed": 0, "skipped": 0, "invalid": 0}
        for one in self.facts:
            found[one.status] = found.get(one.status, 0) + 1
        return found


@lru_cache(maxsize=64)
def _t_quantile(units: int) -> float:
    return float(special.stdtrit(units - 1, 0.975))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(rounds: Iterable[Round]) -> Interval | None:
    """Factors around 1 that hold a round's median time in 95 % of the cases for the mean of the rounds; else None.

    The round is the unit, because iterations of one slice agree with each other better than with the next slice: a
    t interval of the logarithms of the rounds' medians. None with fewer than two usable rounds.
    """
    logs = []
    for one in rounds:
        if one.samples_s:
            middle = _median(one.samples_s)
            if not (math.isfinite(middle) and middle > 0):
                return None
            logs.append(math.log(middle))
    if len(logs) < 2:
        return None
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = _t_quantile(len(logs)) * deviation / math.sqrt(len(logs))
    return math.exp(-half), math.exp(half)


def _around(value: float | None, factors: Interval | None) -> Interval | None:
    return None if value is None or factors is None else (value * factors[0], value * factors[1])


def finite(value: float | None) -> float | None:
    """The number, or None where it is missing, infinite or not a number: nothing on a page may be a guess."""
    return value if value is not None and math.isfinite(value) else None


def _finite_interval(interval: Interval | None) -> Interval | None:
    if interval is None or not all(math.isfinite(end) for end in interval):
        return None
    return float(interval[0]), float(interval[1])


def facts_of(record: Record, trust: Trust) -> Facts:
    """``record`` without its samples; without its speed too, where ``trust`` forbids it."""
    shown = record.status == "ok" and trust.shows_speed
    timing: Timing = record.timing if shown else Timing()
    speedup = record.speedup if shown else None
    factors = spread(timing.rounds)
    latency = timing.latency_s
    throughput = finite(timing.throughput)
    p50 = finite(latency.p50) if latency else None
    return Facts(
        cell=record.cell,
        key=record.cell.key,
        status=record.status,
        reason=record.reason,
        throughput=throughput,
        throughput_ci=_around(throughput, factors),
        p50=p50,
        p90=finite(latency.p90) if latency else None,
        p99=finite(latency.p99) if latency else None,
        p50_ci=_around(p50, factors),
        speedup=finite(speedup.value) if speedup else None,
        speedup_ci=_finite_interval(speedup.ci95) if speedup else None,
        rounds=len(record.timing.rounds),
        samples=sum(len(one.samples_s) for one in record.timing.rounds),
        steady=record.timing.steady,
        brief=record.timing.brief,
        load_s=record.timing.load_s,
        calibrate_s=record.timing.calibrate_s,
        quantize_s=record.timing.quantize_s,
        compile_s=record.timing.compile_s,
        warmup_s=record.timing.warmup_s,
        memory=record.memory,
        accuracy=record.accuracy,
        trust=trust,
        evidence=record.evidence,
    )


def prepared(cell: Cell) -> tuple[str, str, str, str, str]:
    """What the cells share that one prepared model serves: where it fails under one scenario, no other shows speed."""
    return (cell.model, cell.engine, cell.recipe, cell.isa, cell.deploy)


def digest(run: Run, judge: Callable[[Record, RunHeader], Trust]) -> Digest:
    """``run`` for the pages; of a cell with several records the last one counts.

    Args:
        run: as read.
        judge: the rules' word on one record of a run with that header.
    """
    records = {record.cell.key: record for record in run.records}
    trusts = {key: judge(record, run.header) for key, record in records.items()}
    broken: dict[tuple[str, str, str, str, str], tuple[str, Trust]] = {}
    for key, record in records.items():
        if trusts[key].outcome == FAIL:
            broken.setdefault(prepared(record.cell), (key, trusts[key]))
    facts = []
    for key, record in records.items():
        trust = trusts[key]
        culprit = broken.get(prepared(record.cell))
        if culprit is not None and trust.outcome != FAIL and record.status == "ok":
            of, theirs = culprit
            trust = Trust(FAIL, f"the same model fails in {of}: {theirs.reason}", theirs.blame, False, of)
        facts.append(facts_of(record, trust))
    return Digest(run.header, tuple(facts), run.problems, run.finished)
