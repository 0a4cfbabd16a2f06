"""Measures two revisions against each other on this host: `harness compare`.

A pair is one process of each revision, both alive at once: their slices take turns (A B, B A, A B ..), so that what the
host does hits both alike, and which of them starts first changes from pair to pair. The process is the unit: its memory
layout and its compilation are drawn anew in each pair, and only what survives that is a property of the revision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness import assets, comparison, disturbance, fingerprint, host_lock, matrix, revisions, runner, team
from harness.comparison import Comparison, Failure, Pairs, Side
from harness.errors import UsageError
from harness.matrix import Budget, Overrides, Scenario
from harness.processes import Timeouts, WorkerError, WorkerHandle, worker_cpus
from harness.records import Cell, Disturbance, Evidence
from harness.revisions import Revision
from harness.sources import Sources
from harness.stats import Array
from harness.team import Team

#: Slices of each scenario in one pair, and how long each is.
BUDGET = Budget(rounds=6, slice_s=0.7, min_iterations=4, max_iterations=2000, warmup_s=8.0)
#: Examples whose predictions are compared.
EXAMPLES = 400
#: Disturbed pairs, each of which is measured again, after which the comparison gives up.
DISTURBED_PAIRS = 5
#: Seconds that making one process ready is taken to last, for the progress bar.
_READY_S = 30.0

#: Told what happens: a line, and how much of the estimated work is done and in all, in seconds.
OnProgress = Callable[[str, float, float], None]
Kept = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
        overrides: what the command line asks for; None leaves model ``minilm``, the gated recipes, the host's best ISA
            and ``offline:b8:s128``.
        margin: fraction of A's speed that B may lose.
        max_pairs: pairs of processes after which a cell that is not decided stays inconclusive.
        floors: noise floors by cell key, from `harness selftest`.
    """

    overrides: Overrides = field(default_factory=Overrides)
    margin: float = comparison.MARGIN
    max_pairs: int = comparison.MAX_PAIRS
    floors: Mapping[str, float] = field(default_factory=dict)
    budget: Budget = BUDGET
    timeouts: Timeouts = field(default_factory=Timeouts)
    examples: int = EXAMPLES
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise UsageError(f"--margin {self.margin:g} is no fraction; 0.02 allows a loss of 2 %")
        if self.max_pairs < comparison.MIN_PAIRS:
            raise UsageError(f"--max-rounds {self.max_pairs}: fewer than {comparison.MIN_PAIRS} decide nothing")


class RevisionFailedError(WorkerError):
    """One revision could not run; ``revision`` is its name."""

    def __init__(self, revision: str, reason: str) -> None:
        super().__init__(reason)
        self.revision = revision


@dataclass(frozen=True)
class Sample:
    """What one pair gave: slice times by scenario for A and B, what was kept of judged examples, if any were, and what
    else happened on the host meanwhile."""

    times: Mapping[str, tuple[Array, Array]]
    kept: tuple[Kept, Kept] | None = None
    disturbance: Disturbance | None = None


def plan(options: Options) -> list[list[Cell]]:
    """The cells to compare, in lists that one worker serves.

    Raises:
        UsageError: a name that does not exist, or nothing that this host can measure.
    """
    quick = matrix.get_profile("quick")
    asked = options.overrides
    wanted = dataclasses.replace(
        asked,
        models=asked.models or ("minilm",),
        engines=asked.engines or ("int8",),
        recipes=asked.recipes or quick.gated,
        isas=asked.isas or ("native",),
        scenarios=asked.scenarios or ("offline:b8:s128",),
    )
    planned = runner.plan(runner.RunOptions(quick, wanted, sources=options.sources))
    groups: dict[tuple[Cell, str | None], list[Cell]] = {}
    for cell in (one.cell for one in planned.cells if one.skip_reason is None):
        own = cell.scenario if Scenario.parse(cell.scenario).kind == "multi" else None
        groups.setdefault((dataclasses.replace(cell, scenario=""), own), []).append(cell)
    if not groups:
        why = next((one.skip_reason for one in planned.cells if one.skip_reason), "nothing was asked for")
        raise UsageError(f"no cell is left to compare: {why}")
    return list(groups.values())


def compare(a: Revision, b: Revision, options: Options, tell: OnProgress = lambda *_: None) -> Comparison:
    """Measure pairs of both revisions until every cell is decided or the cap is reached.

    Raises:
        UsageError: as :func:`plan`.
        StoreError: something else is being measured on this host.
    """
    groups = plan(options)
    session = _Session(a, b, options, groups, tell)
    with host_lock.exclusive():
        while open_groups := session.open_groups():
            for cells in open_groups:
                session.measure(cells)
    host = fingerprint.collect()
    return Comparison(
        Side(a.name, a.commit),
        Side(b.name, b.commit),
        tuple(session.verdicts()),
        tuple(session.accuracy()),
        tuple(session.failures),
        comparison.group(session.pairs, _model_and_recipe),
        session.invalid_reason(),
        host=str(host["cpu_model"]),
        fingerprint=fingerprint.comparable_id(host),
        notes=tuple(_notes(a, b)),
    )


def _model_and_recipe(key: str) -> str:
    cell = matrix.parse_cell(key)
    return f"{cell.model} {cell.recipe}"


def _notes(a: Revision, b: Revision) -> list[str]:
    notes = []
    if not revisions.same_environment(a, b):
        notes.append("the lock files differ: each revision ran in an environment of its own")
    if None in (a.commit, b.commit):
        notes.append(f"{revisions.WORKTREE} is the tree as it lay there, uncommitted changes included")
    return notes


class _Session:
    """Pairs measured so far, and what failed."""

    def __init__(
        self, a: Revision, b: Revision, options: Options, groups: Sequence[list[Cell]], tell: OnProgress
    ) -> None:
        self.pairs: dict[str, Pairs] = {cell.key: Pairs() for cells in groups for cell in cells}
        self.failures: list[Failure] = []
        self._a, self._b, self._options, self._groups = a, b, options, groups
        self._kept: dict[str, tuple[Kept, Kept]] = {}
        self._disturbed: list[str] = []
        self._tell = tell
        self._done_s = 0.0

    def open_groups(self) -> list[list[Cell]]:
        """Groups that need another pair: none of their cells failed, and one is not decided yet."""
        if self.invalid_reason() is not None:
            return []
        undecided = {one.cell_key for one in self.verdicts() if one.outcome == "inconclusive"}
        failed = {one.cell_key for one in self.failures}
        return [
            cells
            for cells in self._groups
            if any(cell.key in undecided for cell in cells)
            and not any(cell.key in failed for cell in cells)
            and len(self.pairs[cells[0].key]) < self._options.max_pairs
        ]

    def measure(self, cells: list[Cell]) -> None:
        """One pair more of a group. What cannot be run fails its cells."""
        number = len(self.pairs[cells[0].key])
        judge = number == 0 and cells[0].task is not None
        label = "/".join(cells[0].key.split("/")[:4])
        self._tell(f"{label}: pair {number + 1}", self._done_s, self._total_s())
        try:
            found = measure_pair((self._a, self._b), cells, self._options, number, judge)
        except RevisionFailedError as error:
            self.failures += [Failure(cell.key, error.revision, str(error)) for cell in cells]
            return
        disturbed = disturbance.reason(found.disturbance)
        if disturbed is not None:
            self._disturbed.append(disturbed)
            self._tell(f"{label}: pair {number + 1} is measured again: {disturbed}", self._done_s, self._total_s())
            return
        for cell in cells:
            self.pairs[cell.key] = self.pairs[cell.key].and_one(*found.times[cell.scenario])
        if found.kept is not None:
            self._kept[cells[0].key] = found.kept
        self._done_s += self._pair_s(cells)
        self._tell(f"{label}: pair {number + 1} done", self._done_s, self._total_s())

    def invalid_reason(self) -> str | None:
        """Why nothing can be concluded: too many pairs were disturbed and had to be left out."""
        if len(self._disturbed) < DISTURBED_PAIRS:
            return None
        return f"{len(self._disturbed)} pairs were left out; of the last one, {self._disturbed[-1]}"

    def verdicts(self) -> list[comparison.SpeedVerdict]:
        """What the pairs say so far of cells that ran."""
        failed = {one.cell_key for one in self.failures}
        ran = {key: pairs for key, pairs in self.pairs.items() if key not in failed}
        # A self-test knows a cell without the task that a comparison also judges it on.
        floors = {key: self._options.floors.get(key.partition("@")[0], 0.0) for key in ran}
        return comparison.decide(ran, self._options.margin, floors)

    def accuracy(self) -> list[comparison.AccuracyVerdict]:
        """What the predictions say."""
        return [comparison.judge_predictions(key, *kept) for key, kept in self._kept.items()]

    def _pair_s(self, cells: Sequence[Cell]) -> float:
        return 2 * (_READY_S + len(cells) * self._options.budget.rounds * self._options.budget.slice_s)

    def _total_s(self) -> float:
        """Estimated seconds in all: each group needs the least number of pairs, or one more than it has."""
        needed = [max(comparison.MIN_PAIRS, len(self.pairs[cells[0].key]) + 1) for cells in self._groups]
        return sum(pairs * self._pair_s(cells) for pairs, cells in zip(needed, self._groups, strict=True))


def measure_pair(
    pair: tuple[Revision, Revision],
    cells: Sequence[Cell],
    options: Options,
    number: int = 0,
    judge: bool = False,
    slowdowns: Sequence[float] = (0.0,),
) -> Sample:
    """One process of each revision, measured in turns.

    Args:
        cells: cells that one worker serves.
        number: of the pair; in odd ones B starts first.
        judge: also have both judge the task.
        slowdowns: for `harness selftest`: each is injected into slices of B of its own, in the same turns; times of
            scenario ``s`` under the n-th beyond the first are returned as ``s#n``.

    Raises:
        RevisionFailedError: a worker could not run what its label says.
    """
    order = (0, 1) if number % 2 == 0 else (1, 0)
    handles: dict[int, WorkerHandle | Team] = {}
    with tempfile.TemporaryDirectory(prefix="harness-compare-") as scratch:
        try:
            for side in order:
                with _named(pair[side]):
                    handles[side] = _ready(pair[side], cells, options, Path(scratch) / f"{side}.log", judge)
            kept = None
            if judge:
                kept = tuple(_judged(pair[s], handles[s], cells[0], options, Path(scratch)) for s in (0, 1))
            times: dict[str, tuple[Array, Array]] = {}
            windows: list[Disturbance] = []
            for cell in cells:
                times |= _turns(pair, handles, cell, options.budget, order, slowdowns, windows)
            for side in order:
                with _named(pair[side]):
                    handles[side].end()
            return Sample(times, None if kept is None else (kept[0], kept[1]), disturbance.total(windows))
        finally:
            for handle in handles.values():
                handle.kill()


@contextlib.contextmanager
def _named(revision: Revision) -> Iterator[None]:
    """Turn a worker's error inside the block into one that names the revision."""
    try:
        yield
    except RevisionFailedError:
        raise
    except WorkerError as error:
        raise RevisionFailedError(revision.name, str(error)) from error


def _ready(revision: Revision, cells: Sequence[Cell], options: Options, log: Path, judge: bool) -> WorkerHandle | Team:
    """A worker with its scenarios compiled and proven."""
    spec = runner.worker_spec(
        cells, worker_cpus(), cells[0].scenario if judge else None, options.examples, options.sources
    )
    # Another tree has no assets of its own; both must read the same.
    environment = {**os.environ, "INT8_ASSETS": str(assets.root())}
    handle = team.start(spec, log, options.timeouts, environment, revision.home)
    try:
        handle.prepare()
        for cell in cells:
            _prove(cell, handle.request("compile", scenario=cell.scenario))
    except BaseException:
        handle.kill()
        raise
    return handle


def _prove(cell: Cell, answer: Mapping[str, Any]) -> None:
    known = {one.name for one in dataclasses.fields(Evidence)}
    values = {name: value for name, value in answer["evidence"].items() if name in known}
    reason = runner.disproof(cell, Evidence(**{**values, "notes": tuple(values.get("notes", ()))}))
    if reason is not None:
        raise WorkerError(reason)


def _judged(revision: Revision, handle: WorkerHandle | Team, cell: Cell, options: Options, scratch: Path) -> Kept:
    path = scratch / f"{handle.spec.recipe}-{id(handle)}.npz"
    with _named(revision):
        handle.request("evaluate", scenario=cell.scenario, limit=options.examples, path=str(path))
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _turns(
    pair: tuple[Revision, Revision],
    handles: Mapping[int, WorkerHandle | Team],
    cell: Cell,
    budget: Budget,
    order: tuple[int, int],
    slowdowns: Sequence[float],
    windows: list[Disturbance],
) -> dict[str, tuple[Array, Array]]:
    """Slices of both in turns: A B, B A, A B .. For each slowdown of B its own slices, beside the same ones of A.

    What else happened on the host is added to ``windows``.
    """
    cpus = worker_cpus()
    pids = [pid for handle in handles.values() for pid in handle.pids]
    for side in order:
        with _named(pair[side]):
            handles[side].request("warm_up", scenario=cell.scenario, cap_s=budget.warmup_s)
    plain: list[float] = []
    slowed: list[list[float]] = [[] for _ in slowdowns]
    for turn in range(budget.rounds):
        before = disturbance.read(cpus, pids)
        for side in order if turn % 2 == 0 else order[::-1]:
            with _named(pair[side]):
                if side == 0:
                    plain.append(slice_time_s(handles[side].time(cell.scenario, budget)))
                else:
                    for times, slowdown in zip(slowed, slowdowns, strict=True):
                        times.append(slice_time_s(handles[side].time(cell.scenario, budget, slowdown)))
        windows.append(disturbance.between(before, disturbance.read(cpus, pids), len(cpus)))
    names = [cell.scenario, *(f"{cell.scenario}#{n}" for n in range(1, len(slowdowns)))]
    return {name: (np.array(plain), np.array(times)) for name, times in zip(names, slowed, strict=True)}


def slice_time_s(answers: Sequence[Mapping[str, Any]]) -> float:
    """Seconds an iteration of one slice: the median; of several instances, the inverse of their rates' sum."""
    medians = [float(np.median(answer["samples_s"])) for answer in answers]
    return 1.0 / sum(1.0 / median for median in medians)
