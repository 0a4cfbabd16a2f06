"""Does the gate see what it should, and nothing else? `harness selftest`. Rules: docs/gates.md.

Pairs of processes of one cell are measured once, both of this very tree, with slices in which a slowdown is injected
live. What differs between plain processes is noise: random splits of them through the deciding functions give the rate
of false alarms and the smallest effect that a series can see. Then faults are injected, each on the real path from a
worker to the verdict, and each must be caught.

The result is kept as ``<results>/analyses/selftest-<host id>.json``, one object:

    schema_version     1
    host, fingerprint  CPU model and host id
    commit, measured_at, seconds, quick
    cell, processes    what was measured, by how many processes
    series             list of: name (compare, gate), about, margin, nominal, false_alarms, splits, rate, rate_ci95,
                       floor (change that noise alone makes, as a fraction), smallest_effect (slowdown found in 9 of 10
                       splits; null: none up to 50 %), sees_margin
    faults             list of: name, how (live, recorded), caught, by, detail
    notes              sentences for the reader
    invalid_reason     why the host was disturbed meanwhile; null if it was not
    passed             true if every fault was caught and no series alarms more often than its nominal rate
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text
from scipy import stats as distributions

from harness import (
    analyses,
    compare,
    comparison,
    disturbance,
    faults,
    fingerprint,
    gating,
    host_lock,
    matrix,
    runner,
    stats,
    verdicts,
)
from harness.comparison import Pairs
from harness.errors import UsageError
from harness.matrix import Budget, Overrides
from harness.processes import Home
from harness.records import Disturbance, Record, Round, RunHeader, Store, Timing
from harness.revisions import Revision
from harness.stats import Array
from int8 import isa as isas

SCHEMA_VERSION = 1
#: Slowdowns injected live, as fractions of an iteration's time.
SLOWDOWNS = (0.08, 0.20)
SPLITS = 500
#: Rate of false alarms that a 95 % interval allows on the side of losses.
NOMINAL = 0.025
#: Share of the splits that must find an effect for it to count as seen.
POWER = 0.9
#: Slowdowns tried to find the smallest effect.
EFFECTS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.10, 0.12, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50)
_POWER_SPLITS = 60
BUDGET = Budget(rounds=6, slice_s=0.5, min_iterations=4, warmup_s=6.0)
QUICK_BUDGET = Budget(rounds=6, slice_s=0.15, min_iterations=4, warmup_s=1.5)
_MODEL, _TASK = "minilm", "reviews"
_EXAMPLES = 1000


@dataclass(frozen=True)
class Options:
    """What to measure: the cell's parts, how many pairs of processes, and each slice's budget.

    ``quick`` says that the cell is too small to speak for others.
    """

    cell: str
    task: str
    pairs: int = 8
    budget: Budget = BUDGET
    examples: int = _EXAMPLES
    splits: int = SPLITS
    quick: bool = False

    @classmethod
    def of(cls, quick: bool = False) -> Options:
        """The full self-test, or one for minutes of CI: a tiny model, fewer processes."""
        best = isas.best()
        if quick:
            cell = f"tiny-bert/int8/sq-static/{best}/offline:b8:s64"
            return cls(cell, "tiny-reviews", 6, QUICK_BUDGET, 256, quick=True)
        return cls(f"{_MODEL}/int8/sq-static/{best}/offline:b8:s128", _TASK)


@dataclass(frozen=True)
class Series:
    """How one way of deciding behaves on noise alone; see the module's docstring for the fields."""

    name: str
    about: str
    margin: float
    nominal: float
    false_alarms: int
    splits: int
    rate: float
    rate_ci95: tuple[float, float]
    floor: float
    smallest_effect: float | None

    @property
    def sees_margin(self) -> bool:
        """False if noise alone moves the series by more than its margin."""
        return self.floor <= self.margin

    @property
    def passed(self) -> bool:
        """True unless false alarms are surely more frequent than the nominal rate."""
        return self.rate_ci95[0] <= self.nominal


@dataclass(frozen=True)
class Fault:
    """A fault that was injected: ``how`` (live or recorded), whether it was caught, by what, and what was said."""

    name: str
    how: str
    caught: bool
    by: str
    detail: str


@dataclass(frozen=True)
class Report:
    """Everything that the self-test found; see the module's docstring for the fields."""

    host: str
    fingerprint: str
    commit: str | None
    measured_at: float
    seconds: float
    quick: bool
    cell: str
    processes: int
    series: tuple[Series, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    invalid_reason: str | None = None

    @property
    def exit_code(self) -> int:
        """0 passed, 3 the host was disturbed, 1 neither."""
        return 0 if self.passed else 3 if self.invalid_reason else 1

    @property
    def passed(self) -> bool:
        """True if every fault was caught and no series alarms more often than its nominal rate."""
        return all(one.passed for one in self.series) and all(one.caught for one in self.faults)


@dataclass(frozen=True)
class Measured:
    """Pairs of plain processes, and of plain ones beside slowed ones, by slowdown."""

    plain: Pairs
    slowed: Mapping[float, Pairs] = field(default_factory=dict)


# --- noise: pure ------------------------------------------------------------------------------------------------------


def compare_series(key: str, pairs: Pairs, splits: int = SPLITS, margin: float = comparison.MARGIN) -> Series:
    """How `harness compare` behaves on pairs that differ by noise alone.

    A split draws some of the pairs (as many as a comparison may stop at), and which process of each counts as A.
    """
    rng = np.random.default_rng(stats.SEED)
    logs = stats.pair_log_ratios(pairs.a, pairs.b)
    drawn = [_split(rng, len(pairs)) for _ in range(splits)]
    alarms = sum(_is_regression(key, _swapped(pairs, *split), margin) for split in drawn)
    centres = [float(stats.hodges_lehmann(logs[chosen] * np.where(swap, -1, 1))) for chosen, swap in drawn]
    floor = -math.expm1(-float(np.quantile(np.abs(centres), 0.95)))

    def seen(effect: float) -> float:
        slower = [_slower(_swapped(pairs, *split), effect) for split in drawn[:_POWER_SPLITS]]
        return float(np.mean([_is_regression(key, one, margin) for one in slower]))

    about = "pairs of processes in turns, as `harness compare` decides"
    return _series("compare", about, margin, alarms, splits, floor, _smallest(seen))


def _split(rng: np.random.Generator, pairs: int) -> tuple[Any, Any]:
    count = int(rng.integers(min(comparison.MIN_PAIRS, pairs), pairs + 1))
    return rng.permutation(pairs)[:count], rng.random(count) < 0.5


def _swapped(pairs: Pairs, chosen: Any, swap: Any) -> Pairs:
    drawn = [(pairs.a[n], pairs.b[n]) for n in chosen]
    sides = [(b, a) if swapped else (a, b) for (a, b), swapped in zip(drawn, swap, strict=True)]
    return Pairs(tuple(a for a, _ in sides), tuple(b for _, b in sides))


def _slower(pairs: Pairs, effect: float) -> Pairs:
    """``pairs`` with B's iterations longer by ``effect`` of themselves."""
    return Pairs(pairs.a, tuple(times * (1.0 + effect) for times in pairs.b))


def _is_regression(key: str, pairs: Pairs, margin: float) -> bool:
    return comparison.decide({key: pairs}, margin)[0].outcome == "regression"


def gate_series(record: Record, processes: Sequence[Array], splits: int = SPLITS) -> Series:
    """How `harness gate` behaves between runs that differ by noise alone: one process against another, at random.

    Args:
        record: of the cell; its timing is replaced.
        processes: slice times of each process, in seconds an iteration.
    """
    rng = np.random.default_rng(stats.SEED)
    rules = verdicts.Rules()
    drawn = [rng.choice(len(processes), size=2, replace=False) for _ in range(splits)]

    def regressed(one: int, other: int, effect: float = 0.0) -> bool:
        before, after = with_times(record, processes[one]), with_times(record, processes[other] * (1.0 + effect))
        return verdicts.judge_speed(after, before, True, rules).outcome == "regression"

    alarms = sum(regressed(one, other) for one, other in drawn)
    medians = np.log([float(np.median(times)) for times in processes])
    floor = -math.expm1(-float(np.quantile([abs(medians[one] - medians[other]) for one, other in drawn], 0.95)))

    def seen(effect: float) -> float:
        return float(np.mean([regressed(one, other, effect) for one, other in drawn[:_POWER_SPLITS]]))

    about = "one process against another, as `harness gate` decides between two runs"
    return _series("gate", about, 1.0 - rules.speed_floor, alarms, splits, floor, _smallest(seen))


def _series(
    name: str, about: str, margin: float, alarms: int, splits: int, floor: float, smallest: float | None
) -> Series:
    found = distributions.binomtest(alarms, splits).proportion_ci(0.95, method="exact")
    interval = (float(found.low), float(found.high))
    return Series(name, about, margin, NOMINAL, alarms, splits, alarms / splits, interval, floor, smallest)


def _smallest(seen: Callable[[float], float]) -> float | None:
    """The smallest of ``EFFECTS`` that is seen often enough; more slowdown is never seen less."""
    low, high = 0, len(EFFECTS)
    while low < high:
        middle = (low + high) // 2
        if seen(EFFECTS[middle]) >= POWER:
            high = middle
        else:
            low = middle + 1
    return EFFECTS[low] if low < len(EFFECTS) else None


def with_times(record: Record, times_s: Array) -> Record:
    """``record`` with a timing of one process whose rounds have one iteration each."""
    rounds = tuple(Round(float(n), 1, (float(time_s),)) for n, time_s in enumerate(times_s))
    typical = float(np.median(times_s))
    batch = matrix.Scenario.parse(record.cell.scenario).batch
    return dataclasses.replace(record, timing=Timing(rounds=rounds, throughput=batch / typical, steady=True))


# --- measuring --------------------------------------------------------------------------------------------------------


def run(options: Options, tell: compare.OnProgress = lambda *_: None) -> Report:
    """Measure, split, inject and judge. Takes minutes.

    Raises:
        UsageError: a name that does not exist.
        WorkerError: the cell cannot be measured at all.
    """
    begin, started = time.monotonic(), time.time()
    progress = _Progress(options, tell)
    with host_lock.exclusive():
        measured, disturbed = measure(options, progress)
    host = fingerprint.collect()
    with tempfile.TemporaryDirectory(prefix="harness-selftest-") as scratch:
        clean = _run(options, None, Path(scratch) / "clean", progress)
        injected = list(_slowdown_faults(options, measured, clean, Path(scratch)))
        injected += _live_faults(options, clean, Path(scratch), progress)
        injected += _recorded_faults(clean, Path(scratch))
        record = _record(clean)
    plain = (*measured.plain.a, *measured.plain.b)
    series = (compare_series(options.cell, measured.plain, options.splits), gate_series(record, plain, options.splits))
    return Report(
        str(host["cpu_model"]),
        fingerprint.comparable_id(host),
        fingerprint.git_commit()[0],
        started,
        time.monotonic() - begin,
        options.quick,
        options.cell,
        len(plain),
        series,
        tuple(injected),
        tuple(_notes(options, series)),
        disturbed,
    )


def _notes(options: Options, series: Sequence[Series]) -> Iterator[str]:
    for one in series:
        if not one.sees_margin:
            yield (
                f"series {one.name} cannot see its own margin: noise alone moves it by {100 * one.floor:.1f} %, "
                f"the margin is {100 * one.margin:g} %; measure longer, or on a quieter host"
            )
    if options.quick:
        yield "a quick self-test: a tiny model on few processes, which says nothing about larger cells"
    yield "splits of the same processes are not independent, so the true interval of a rate is wider than the one shown"


class _Progress:
    """Estimated seconds of work, for a bar."""

    def __init__(self, options: Options, tell: compare.OnProgress) -> None:
        self._tell = tell
        self.pair_s = 60.0 if not options.quick else 30.0
        self.run_s = 60.0 if not options.quick else 30.0
        self._total_s = options.pairs * self.pair_s + 4 * self.run_s
        self._done_s = 0.0

    def step(self, message: str, done_s: float = 0.0) -> None:
        self._done_s += done_s
        self._tell(message, self._done_s, self._total_s)


def measure(options: Options, progress: _Progress) -> tuple[Measured, str | None]:
    """Pairs of processes of this tree, each with plain and slowed slices; and whether the host was disturbed.

    Raises:
        WorkerError: a process could not run what its label says.
    """
    here = Revision("this tree", None, Home.own())
    cell = matrix.parse_cell(options.cell)
    settings = compare.Options(Overrides(), budget=options.budget)
    plain, slowed = Pairs(), {slowdown: Pairs() for slowdown in SLOWDOWNS}
    windows: list[Disturbance] = []
    for number in range(options.pairs):
        progress.step(f"pair {number + 1} of {options.pairs}")
        sample = compare.measure_pair((here, here), [cell], settings, number, slowdowns=(0.0, *SLOWDOWNS))
        found = sample.times
        windows += [sample.disturbance] if sample.disturbance else []
        plain = plain.and_one(*found[cell.scenario])
        for index, slowdown in enumerate(SLOWDOWNS, start=1):
            slowed[slowdown] = slowed[slowdown].and_one(*found[f"{cell.scenario}#{index}"])
        progress.step(f"pair {number + 1} done", progress.pair_s)
    return Measured(plain, slowed), disturbance.reason(disturbance.without_frequency(disturbance.total(windows)))


def _run(options: Options, fault: str | None, folder: Path, progress: _Progress, isa: str | None = None) -> Store:
    """A run of the cell, judged on its task, with a fault in its workers, in a store of its own."""
    progress.step(f"fault {fault}" if fault else "a run without a fault")
    cell = matrix.parse_cell(options.cell)
    profile = dataclasses.replace(
        matrix.get_profile("smoke"), budget=dataclasses.replace(options.budget, rounds=4), split=False
    )
    overrides = Overrides(
        models=(cell.model,),
        engines=(cell.engine,),
        recipes=(cell.recipe,),
        isas=(isa or cell.isa,),
        scenarios=(cell.scenario,),
        tasks=(options.task,),
        limit=options.examples,
    )
    store = Store(folder)
    with _environment(faults.VARIABLE, fault):
        runner.run(runner.RunOptions(profile, overrides), store)
    progress.step("judged", progress.run_s)
    return store


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    try:
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _record(store: Store) -> Record:
    return store.load().records[-1]


# --- faults -----------------------------------------------------------------------------------------------------------


def _slowdown_faults(options: Options, measured: Measured, clean: Store, scratch: Path) -> Iterator[Fault]:
    """Slowdowns that were injected live: by the comparison both, by the gate the large one."""
    for slowdown, pairs in measured.slowed.items():
        verdict = comparison.decide({options.cell: pairs})[0]
        name = f"{100 * slowdown:g} % slower"
        yield Fault(name, "live", verdict.outcome == "regression", "compare", verdict.reason)
    largest = max(SLOWDOWNS)
    pairs = measured.slowed[largest]
    store = Store(scratch / "slower")
    record = _record(clean)
    for index, times in enumerate((pairs.a[0], pairs.b[0])):
        _write(store, clean, with_times(record, times), f"run-{index}", 1000.0 + index)
    yield _gated(f"{100 * largest:g} % slower", "live", store, {1})


def _live_faults(options: Options, clean: Store, scratch: Path, progress: _Progress) -> Iterator[Fault]:
    code = gating.gate(clean).exit_code
    yield Fault("none (control)", "live", code == 0, "gate", f"exit {code}, 0 is right")
    yield _gated("wrong scale", "live", _run(options, "scale", scratch / "scale", progress), {1, 2})
    yield _gated("unfused linear", "live", _run(options, "unfused", scratch / "unfused", progress), {2})
    masks = isas.supported()[1:]
    if masks:
        yield _gated("mask not obeyed", "live", _run(options, "mask", scratch / "mask", progress, masks[0]), {2})
    record = _record(clean)
    best = record.cell.isa
    other = dataclasses.replace(record.evidence, isa_effective="vnni" if best != "vnni" else "amx")
    yield _rewritten("mask not obeyed: other ISA", clean, dataclasses.replace(record, evidence=other), scratch / "isa")
    if best != "amx":
        granted = dataclasses.replace(record.evidence, amx_permission=True)
        changed = dataclasses.replace(record, evidence=granted)
        yield _rewritten("mask not obeyed: AMX granted", clean, changed, scratch / "permission")


def _recorded_faults(clean: Store, scratch: Path) -> Iterator[Fault]:
    yield _stale_baseline(clean, scratch / "stale")
    yield _corrupted(clean, scratch / "corrupted")


def _rewritten(name: str, clean: Store, record: Record, folder: Path) -> Fault:
    store = Store(folder)
    _write(store, clean, record, "run-0", 1000.0)
    return _gated(name, "recorded", store, {2})


def _stale_baseline(clean: Store, folder: Path) -> Fault:
    """The accepted baseline is a slow run of a host with other microcode; the host as it is now was faster by a fifth.

    Held against the stale one the newest run would pass; it must be held against the comparable one, and naming the
    stale one must be refused.
    """
    store, record = Store(folder), _record(clean)
    now = np.array([stats.median_time_s(record.timing) or math.nan] * 4)
    other = {"microcode": "0x0-another", "fingerprint": "0" * 12}
    _write(store, clean, with_times(record, now * 1.5), "run-stale", 1000.0, other)
    store.accept("run-stale")
    _write(store, clean, with_times(record, now / 1.25), "run-before", 2000.0)
    _write(store, clean, with_times(record, now), "run-now", 3000.0)
    report = gating.gate(store, "run-now")
    try:
        gating.gate(store, "run-now", "run-stale")
        refused = False
    except UsageError:
        refused = True
    caught = report.exit_code == 1 and report.baseline_run == "run-before" and refused
    named = "refused" if refused else "taken"
    detail = f"compared with {report.baseline_run}, exit {report.exit_code}; the stale one is {named} when named"
    return Fault("stale baseline", "recorded", caught, "gate", detail)


def _corrupted(clean: Store, folder: Path) -> Fault:
    """A byte of a stored record's line is not what was written."""
    store = Store(folder)
    _write(store, clean, _record(clean), "run-0", 1000.0)
    path = store.root / "runs" / "run-0.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"samples_s"', b'"samples_s', 1)
    path.write_bytes(b"\n".join(lines))
    return _gated("corrupted record", "recorded", store, {2})


def _write(
    store: Store, clean: Store, record: Record, run_id: str, started_at: float, changes: Mapping[str, str] | None = None
) -> None:
    """A run of its own with one record, on the host of the clean run, or on one that differs by ``changes``."""
    header = clean.load().header
    fields = dict(changes or {})
    host_id = fields.pop("fingerprint", header.fingerprint)
    made: RunHeader = dataclasses.replace(
        header, run_id=run_id, started_at=started_at, fingerprint=host_id, host={**header.host, **fields}
    )
    with store.create_run(made) as writer:
        writer.append(dataclasses.replace(record, run_id=run_id, fingerprint=host_id))
        writer.finish()


def _gated(name: str, how: str, store: Store, right: set[int]) -> Fault:
    report = gating.gate(store)
    grave = [one for one in report.verdicts if one.gated and not one.good]
    detail = f"exit {report.exit_code}" + (f": {grave[0].metric}: {grave[0].reason}" if grave else "")
    return Fault(name, how, report.exit_code in right, "gate", detail)


# --- keeping and showing ----------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values; the module's docstring has the fields."""
    series = [
        {**dataclasses.asdict(one), "rate_ci95": list(one.rate_ci95), "sees_margin": one.sees_margin}
        for one in report.series
    ]
    fields = {**dataclasses.asdict(report), "series": series, "notes": list(report.notes)}
    fields["faults"] = [dataclasses.asdict(one) for one in report.faults]
    return {"schema_version": SCHEMA_VERSION, **fields, "passed": report.passed}


def save(report: Report, results: Path) -> Path:
    """Keep the report below ``results``, in place of this host's earlier one; returns the file."""
    return analyses.write(results, "selftest", report.fingerprint, to_json(report))


def stored_floors(results: Path) -> dict[str, float]:
    """The noise floor of each cell that a self-test of this host measured for comparisons, by cell key."""
    path = analyses.path_of(results, "selftest", fingerprint.comparable_id(fingerprint.collect()))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        floors = [float(one["floor"]) for one in found["series"] if one["name"] == "compare"]
        return {str(found["cell"]): floor for floor in floors if math.isfinite(floor)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def tables(report: Report) -> tuple[Table, Table]:
    """The series and the faults, for a terminal."""
    columns = ("series", "false alarms", "95 % interval", "nominal", "noise floor", "margin", "smallest effect seen")
    title = f"{report.processes} processes of {report.cell}"
    noise = Table(*columns, "verdict", title=title, title_justify="left", show_edge=False, pad_edge=False)
    for one in report.series:
        effect = "none up to 50 %" if one.smallest_effect is None else f"{100 * one.smallest_effect:g} %"
        words = ("ok" if one.passed else "too many alarms") + ("" if one.sees_margin else ", cannot see its own margin")
        noise.add_row(
            one.name,
            f"{one.false_alarms} of {one.splits} ({100 * one.rate:.1f} %)",
            f"{100 * one.rate_ci95[0]:.1f} to {100 * one.rate_ci95[1]:.1f} %",
            f"{100 * one.nominal:g} %",
            f"{100 * one.floor:.1f} %",
            f"{100 * one.margin:g} %",
            effect,
            Text(words, style="bold red" if not one.passed else "green" if one.sees_margin else "yellow"),
        )
    found = Table("fault", "injected", "by", "caught", "what was said", show_edge=False, pad_edge=False)
    for fault in report.faults:
        caught = Text("yes", style="green") if fault.caught else Text("NO", style="bold red")
        found.add_row(fault.name, fault.how, fault.by, caught, Text(fault.detail))
    return noise, found


def closing_lines(report: Report) -> list[str]:
    """What follows the tables: notes, and last the result."""
    missed = [one.name for one in report.faults if not one.caught]
    noisy = [one.name for one in report.series if not one.passed]
    why = [*(f"not caught: {name}" for name in missed), *(f"too many false alarms: {name}" for name in noisy)]
    result = "passed" if report.passed else f"failed: {'; '.join(why)}"
    disturbed = [f"note: the host was disturbed: {report.invalid_reason}"] if report.invalid_reason else []
    notes = [*(f"note: {note}" for note in report.notes), *disturbed]
    return [*notes, f"selftest: {result}, {report.seconds / 60:.1f} minutes"]
