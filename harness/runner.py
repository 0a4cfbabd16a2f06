"""Runs a plan: starts workers, lets the compared ones take turns, and appends a record as soon as a cell is complete.

Cells are grouped by model, ISA and task. One worker serves one (model, engine, recipe, ISA, deploy, task) of a group,
for all its scenarios. For each group:

    prepare      one worker after the other: load, calibrate, quantize, compile, and proof of what runs
    evaluate     accuracy, in the first offline scenario's compiled graph
    time         scenario by scenario: warm-up, then slices A B C, C B A, A B C .. so that drift of the host cancels
    split        where the profile asks for it, and only after those slices: a few passes under torch's profiler
    record       one line a cell, as soon as its scenario's slices are complete

A kill at any point keeps every line written. A worker that dies fails its own cells and no others. Where memory does
not hold all workers of a group they are taken in chunks; the baseline ``int8/fp32`` stays and takes part in each.
"""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness import disturbance, fingerprint, host_lock, matrix, preload, team, time_split, timing
from harness.errors import UsageError
from harness.matrix import Budget, Overrides, PlannedCell, Profile, Scenario
from harness.processes import Timeouts, WorkerDeathError, WorkerError, WorkerHandle, worker_cpus
from harness.records import (
    STATUSES,
    Accuracy,
    Cell,
    Disturbance,
    Evidence,
    Instance,
    Memory,
    Record,
    Round,
    RunHeader,
    RunWriter,
    Speedup,
    Status,
    Store,
    Timing,
    new_run_id,
)
from harness.sources import Sources
from harness.team import Team
from harness.time_split import Kernel, Pass
from harness.worker import WorkerSpec
from int8 import isa as isas
from int8 import recipe as recipes

#: Part of the memory that workers may fill.
MEMORY_SHARE = 0.8
#: Cosine to eager FP32's output for the timed batch, by kind of weights, below which a cell that no task judges
#: computed something else. Synthetic weights have no outliers: sound recipes stay above 0.99 on them, and one layer
#: of twelve left out falls to 0.58. Real ones meet random tokens here, on which upstream's static quantization fell to
#: 0.71 on minilm: how good a recipe is, a task must say.
MIN_COSINE: Mapping[str | None, float] = {"synthetic": 0.98, "real": 0.5}
#: Bytes of a process that has torch and transformers loaded and no model.
PROCESS_BYTES = 700 << 20
#: A worker's peak over its model's FP32 bytes: the weights as loaded, quantized, packed, and what compiling keeps.
MODEL_COPIES = 4

#: Engines that run in torch, whose profiler sees their operators.
PROFILED_ENGINES = ("int8", "torchao")
#: Rounds in which a cell is profiled, taking turns like its slices, and how long each is.
SPLIT_ROUNDS = 4
SPLIT_BUDGET: Mapping[str, Any] = {"seconds": 0.25, "min_passes": 2, "max_passes": 10}

EventKind = Literal["notice", "plan", "worker", "phase", "slice", "record", "end"]


@dataclass(frozen=True)
class Event:
    """Something happened. ``done`` of ``total`` are estimated seconds of work, for a progress bar's remaining time."""

    kind: EventKind
    message: str
    done: float = 0.0
    total: float = 0.0
    cell: str | None = None


OnEvent = Callable[[Event], None]
OnKernels = Callable[[Cell, Mapping[str, int], tuple[Kernel, ...]], None]


@dataclass(frozen=True)
class RunOptions:
    """What to run.

    Attributes:
        profile: the matrix.
        overrides: what the command line replaces in it.
        run_id: the run's name; None for a new one.
        arguments: the command line after ``harness``, kept in the header.
        timeouts: seconds a phase may take.
        max_workers: bound on live workers; None leaves it to the memory. At least two, so that there is a comparison.
        sources: the user's own checkpoints and data.
        preload: libraries that workers are started with; empty for those of the profile.
        on_kernels: is told of each profiled cell the sizes of its encoder and the kernels of one pass.
    """

    profile: Profile
    overrides: Overrides = field(default_factory=Overrides)
    run_id: str | None = None
    arguments: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_workers: int | None = None
    sources: Sources = field(default_factory=Sources)
    preload: tuple[str, ...] = ()
    on_kernels: OnKernels | None = None


@dataclass(frozen=True)
class Summary:
    """What a run came to: its id and how many cells have each status."""

    run_id: str
    counts: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """0 if every cell is ok or skipped, 2 if one failed, 3 if none did but the host was disturbed."""
        if self.counts.get("failed"):
            return 2
        return 3 if self.counts.get("invalid") else 0


def catalog(sources: Sources | None = None) -> matrix.Catalog:
    """The names of models and tasks: the catalog's, those of tests included, and the sources' models.

    Raises:
        UsageError: the sources name a task that does not exist.
    """
    from harness import models, tasks

    sources = sources or Sources()
    for task in (*sources.data, *(task for _, task in sources.checkpoints)):
        tasks.head_of(task)
    known, judging = models.known(hidden=True), tasks.known(hidden=True)
    named = tuple(name for name in sources.models if name not in known)
    unjudged = [(m, t) for m in known for t in judging if tasks.unsupported(t, m) is not None]
    unjudged += [(m, t) for m in named for t in judging]
    return matrix.Catalog(known + named, judging, frozenset(unjudged) - set(sources.checkpoints))


def plan(options: RunOptions) -> matrix.Plan:
    """The cells that ``options`` ask for on this host. UsageError as :func:`harness.matrix.plan`."""
    known = catalog(options.sources)
    asked = options.overrides.models or ()
    # A folder may be named without a slash; it is a model like any other.
    folders = tuple(name for name in asked if name not in known.models and Path(name).is_dir())
    known = dataclasses.replace(known, models=known.models + folders)
    return matrix.plan(options.profile, options.overrides, isas.supported(), known, len(worker_cpus()))


def run(options: RunOptions, store: Store, on_event: OnEvent = lambda event: None) -> Summary:
    """Measure what ``options`` ask for and write one run into ``store``.

    Args:
        on_event: is told what happens, one event at a time; where workers are made ready together, from their threads.

    Returns:
        The run's id and the counts of statuses.

    Raises:
        UsageError: a name that does not exist, or nothing to measure.
        StoreError: the store cannot be written, or another process measures into it or on this host.
        ToolchainMissing: a library that is to be preloaded does not exist.
        KeyboardInterrupt: after ending the workers; what was measured is in the store.
    """
    planned = plan(options)
    if not planned.cells:
        raise UsageError("no cell is left to measure; look at --shard, --engines and --recipes")
    wanted = options.preload or options.profile.preload
    with store.exclusive(), host_lock.exclusive(), preload.preloaded(wanted):
        header = _header(options)
        with store.create_run(header) as writer, tempfile.TemporaryDirectory(prefix="harness-") as scratch:
            session = _Session(options, writer, Path(scratch), on_event, _estimate_s(planned.cells, options.profile))
            for notice in planned.notices:
                session.tell("notice", notice)
            session.tell("plan", f"run {header.run_id}: {len(planned.cells)} cells")
            for cell, reason in ((p.cell, p.skip_reason) for p in planned.cells):
                if reason is not None:
                    session.append(session.record(cell, "skipped", reason))
            for group in _groups(planned.cells):
                _Group(session, group).run()
            invalid_reason = session.invalid_reason()
            writer.finish(host=_host_at_end(), invalid_reason=invalid_reason)
            if invalid_reason is not None:
                session.tell("notice", f"the run is invalid: {invalid_reason}")
            session.tell("end", f"run {header.run_id} is complete")
            return Summary(header.run_id, {str(status): count for status, count in session.counts.items()})


def _header(options: RunOptions) -> RunHeader:
    host = fingerprint.collect()
    commit, dirty = fingerprint.git_commit()
    now = time.time()
    return RunHeader(
        run_id=options.run_id or new_run_id(now),
        started_at=now,
        commit=commit,
        fingerprint=fingerprint.comparable_id(host),
        host=host,
        versions=fingerprint.versions(),
        profile=options.profile.name,
        gated=options.profile.gated,
        arguments=options.arguments,
        dirty=dirty,
    )


def _host_at_end() -> dict[str, Any]:
    """Fields that say whether the host was disturbed, read again."""
    names = ("load_1min", "cpu_busy_s", "steal_s", "memory_available_bytes", "frequency_mhz")
    return {name: fingerprint.collect_field(name) for name in names}


def _groups(cells: Sequence[PlannedCell]) -> list[list[Cell]]:
    """The cells to measure, by model, ISA and task, in the plan's order; each scenario ``multi`` by itself."""
    groups: dict[tuple[str, str, str | None, str | None], list[Cell]] = {}
    for planned in cells:
        if planned.skip_reason is None:
            cell = planned.cell
            own = cell.scenario if Scenario.parse(cell.scenario).kind == "multi" else None
            groups.setdefault((cell.model, cell.isa, cell.task, own), []).append(cell)
    return list(groups.values())


# --- progress: estimated seconds of work, so that a bar's remaining time means something ------------------------------

_PREPARE_S, _COMPILE_S, _EVALUATE_S = 15.0, 25.0, 30.0


def _estimate_s(cells: Sequence[PlannedCell], profile: Profile) -> float:
    kept = [planned.cell for planned in cells if planned.skip_reason is None]
    workers = len({_worker_key(cell) for cell in kept})
    judged = len({_worker_key(cell) for cell in kept if cell.task})
    slices = sum(_budget(cell, profile).rounds * _budget(cell, profile).slice_s for cell in kept)
    return workers * _PREPARE_S + len(kept) * _COMPILE_S + judged * _EVALUATE_S + slices


def _budget(cell: Cell, profile: Profile) -> Budget:
    return matrix.BRIEF_BUDGET if matrix.is_brief(cell) else profile.budget


def _limit(cell: Cell, options: RunOptions) -> int | None:
    """Examples that the cell is judged on."""
    limit = options.overrides.limit or options.profile.limit
    if not recipes.get(cell.recipe).quantized and options.overrides.limit is None:
        limit = options.profile.float_limit or limit
    return min(limit or matrix.BRIEF_LIMIT, matrix.BRIEF_LIMIT) if matrix.is_brief(cell) else limit


def _worker_key(cell: Cell) -> tuple[str | None, ...]:
    return cell.model, cell.engine, cell.recipe, cell.isa, cell.deploy, cell.task


def worker_spec(
    cells: Sequence[Cell], cpus: tuple[int, ...], judged_in: str | None, limit: int | None, sources: Sources
) -> WorkerSpec:
    """What one worker makes ready for ``cells``, which differ in their scenario alone."""
    one = cells[0]
    checkpoint = sources.checkpoint(one.model, one.task)
    return WorkerSpec(
        one.model,
        one.engine,
        one.recipe,
        one.isa,
        one.deploy,
        one.task,
        tuple(cell.scenario for cell in cells),
        cpus,
        judged_in,
        limit,
        checkpoint=None if checkpoint is None else checkpoint.location,
        data=None if one.task is None else sources.data.get(one.task),
        labels=None if checkpoint is None else checkpoint.labels,
    )


def _judged_in(cells: Sequence[Cell]) -> str:
    """The scenario whose graph judges accuracy: the first offline one, else the first."""
    offline = (cell.scenario for cell in cells if Scenario.parse(cell.scenario).kind == "offline")
    return next(offline, cells[0].scenario)


class _Session:
    """What all groups of a run share: where records go, and who is told."""

    def __init__(
        self, options: RunOptions, writer: RunWriter, scratch: Path, on_event: OnEvent, total_s: float
    ) -> None:
        self.options = options
        self.writer = writer
        self.scratch = scratch
        self.cpus = worker_cpus()
        self.counts = dict.fromkeys(STATUSES, 0)
        self.windows: list[Disturbance] = []
        self._on_event = on_event
        self._done_s = 0.0
        self._total_s = total_s
        self._names = 0
        self._lock = threading.RLock()  # workers may be made ready at the same time, each from a thread of its own
        self.judging = threading.Lock()  # but judged one at a time: their OpenMP threads would wait for each other

    def tell(self, kind: EventKind, message: str, cell: str | None = None, done_s: float = 0.0) -> None:
        """Report an event; ``done_s`` estimated seconds of work are now done."""
        with self._lock:
            self._done_s = min(self._done_s + done_s, self._total_s)
            self._on_event(Event(kind, message, self._done_s, self._total_s, cell))

    def path(self, suffix: str) -> Path:
        """A new file's path in the run's scratch folder."""
        with self._lock:
            self._names += 1
            return self.scratch / f"{self._names}{suffix}"

    def invalid_reason(self) -> str | None:
        """Why the run as a whole is invalid: its host was disturbed over all that was timed."""
        return disturbance.reason(disturbance.without_frequency(disturbance.total(self.windows)))

    def record(self, cell: Cell, status: Status, reason: str | None, **fields: Any) -> Record:
        """A record of this run."""
        header = self.writer.header
        return Record(header.run_id, header.commit, status, reason, cell, fingerprint=header.fingerprint, **fields)

    def append(self, record: Record) -> None:
        """Write a record and report it."""
        with self._lock:
            self.writer.append(record)
            self.counts[record.status] += 1
        reason = f": {record.reason}" if record.reason else ""
        self.tell("record", f"{record.cell.key} {record.status}{reason}", record.cell.key)


@dataclass
class _Member:
    """One worker of a group and what is known about it. ``cells``: those of its scenarios not yet recorded."""

    cells: list[Cell]
    handle: WorkerHandle | Team | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    accuracy: Accuracy | None = None
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Measured:
    """Rounds of one member in one scenario, and how its warm-up went.

    ``passes`` and ``linear``: what was profiled, all passes, and their linears' seconds by round.
    """

    rounds: list[Round] = field(default_factory=list)
    #: CPUs of each instance of a scenario multi, by its process
    cpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    linear: list[Round] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    warmup: timing.WarmUp | None = None
    windows: list[Disturbance] = field(default_factory=list)


class _Group:
    """The cells of one model under one ISA, judged on one task."""

    def __init__(self, session: _Session, cells: Sequence[Cell]) -> None:
        self._session = session
        by_worker: dict[tuple[str | None, ...], list[Cell]] = {}
        for cell in cells:
            by_worker.setdefault(_worker_key(cell), []).append(cell)
        self._waiting = [_Member(worker_cells) for worker_cells in by_worker.values()]
        self._scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
        self._baseline: _Member | None = None
        self._live: list[_Member] = []
        self._model_bytes = 0
        self._at_once = session.options.profile.prepare_at_once
        self._stopped = False

    def run(self) -> None:
        """Measure every cell; whatever happens, no worker is left."""
        live = self._live
        try:
            while self._waiting:
                self._fill(live)
                for scenario in self._scenarios:
                    self._measure(scenario, live)
                for member in live:
                    if member is not self._baseline or not self._waiting:
                        self._end(member)
                live[:] = [m for m in live if m is self._baseline and m.handle is not None]
        finally:
            for member in live:
                if member.handle is not None:
                    member.handle.kill()

    def _fill(self, live: list[_Member]) -> None:
        """Prepare waiting members until the memory is full. At least one, whatever the estimate says."""
        session, admitted = self._session, 0
        while self._waiting and (admitted == 0 or self._fits(live)):
            together = [self._waiting.pop(0)]
            while self._waiting and len(together) < self._at_once and self._fits([*live, *together]):
                together.append(self._waiting.pop(0))
            admitted += len(together)
            live.extend(together)
            self._prepare_all(together)
            for member in together:
                if member.handle is None:
                    live.remove(member)
                elif member.cells and matrix.is_baseline(member.cells[0]):
                    self._baseline = member
        if self._waiting:
            session.tell("notice", f"memory holds {len(live)} workers at once; {len(self._waiting)} more follow")

    def _prepare_all(self, members: Sequence[_Member]) -> None:
        """Prepare some members, at the same time where there are several.

        All are started here: Linux ends a worker when the thread that started it ends, not only with the process.
        """
        for member in members:
            self._guard(member, None, lambda m=member: self._start(m))  # type: ignore[misc]
        alive = [member for member in members if member.handle is not None]
        if len(alive) < 2:
            for member in alive:
                self._guard(member, None, lambda m=member: self._prepare(m))  # type: ignore[misc]
            return
        with ThreadPoolExecutor(len(alive)) as pool:
            started = [pool.submit(self._guard, one, None, lambda m=one: self._prepare(m)) for one in alive]  # type: ignore[misc]
            try:
                for one in started:
                    one.result()
            except BaseException:  # Ctrl-C: end the workers, so that the threads that wait for them end
                self._stopped = True
                for member in members:
                    if member.handle is not None:
                        member.handle.kill()
                raise

    def _fits(self, live: Sequence[_Member]) -> bool:
        limit = self._session.options.max_workers
        if limit is not None and len(live) >= max(limit, 2):
            return False
        peaks = [member.memory.peak_rss_bytes or 0 for member in live]
        instances = Scenario.parse(self._scenarios[0]).instances
        return memory_holds(self._model_bytes, peaks, _available_bytes(), fingerprint.memory_limit_bytes(), instances)

    def _start(self, member: _Member) -> None:
        """Start the member's worker."""
        session, cells = self._session, member.cells
        judged_in = _judged_in(cells) if cells[0].task else None
        limit = _limit(cells[0], session.options)
        spec = worker_spec(cells, session.cpus, judged_in, limit, session.options.sources)
        session.tell("worker", f"{spec.label}: start", cells[0].key)
        member.handle = team.start(spec, session.path(".log"), session.options.timeouts)

    def _prepare(self, member: _Member) -> None:
        """Make the worker's model ready, compile all its scenarios, prove what runs, judge accuracy."""
        session, cells, handle = self._session, member.cells, member.handle
        if self._stopped or handle is None:
            return
        first, spec = cells[0], handle.spec
        judged_in = _judged_in(cells) if first.task else None
        ready = handle.prepare(lambda phase: session.tell("phase", f"{spec.label}: {phase}", first.key))
        session.tell("phase", f"{spec.label}: compile", first.key, _PREPARE_S)
        member.seconds = ready["seconds"]
        member.memory = Memory(**ready["memory"])
        member.identity = {"family": ready["family"], "weights": ready["weights"]}
        self._model_bytes = max(self._model_bytes, member.memory.model_bytes or 0)
        for cell in list(cells):
            if member.handle is not None:
                self._guard(member, cell.scenario, lambda c=cell: self._compile(member, c))  # type: ignore[misc]
        if judged_in is not None and member.handle is not None and member.cells:
            self._evaluate(member, judged_in)

    def _compile(self, member: _Member, cell: Cell) -> None:
        """Compile one scenario and check the evidence; a cell that runs something else than it says fails here."""
        assert member.handle is not None
        answer = member.handle.request("compile", scenario=cell.scenario)
        member.compile_s[cell.scenario] = float(answer["seconds"])
        member.evidence[cell.scenario] = _evidence(answer)
        self._session.tell("phase", f"{member.handle.spec.label}: compiled {cell.scenario}", cell.key, _COMPILE_S)
        reason = disproof(dataclasses.replace(cell, **member.identity), member.evidence[cell.scenario])
        if reason is not None:
            self._fail(member, [cell], reason)

    def _evaluate(self, member: _Member, scenario: str) -> None:
        """Judge accuracy once for all scenarios. A cell whose own graph failed before is judged no more."""
        session, handle = self._session, member.handle
        if handle is None or _cell(member, scenario) is None:
            return
        path = session.path(".npz")
        session.tell("phase", f"{handle.spec.label}: evaluate", member.cells[0].key)
        with session.judging:
            answer = handle.request("evaluate", scenario=scenario, limit=handle.spec.limit, path=str(path))
        key = next(cell.key for cell in member.cells if cell.scenario == scenario)
        outputs = session.writer.write_outputs(key, _arrays(path))
        member.accuracy = dataclasses.replace(_accuracy(answer["accuracy"]), outputs=outputs)
        session.tell("phase", f"{handle.spec.label}: evaluated", key, _EVALUATE_S)

    def _measure(self, scenario: str, live: Sequence[_Member]) -> None:
        """Time one scenario on all live workers in turns, then record those cells."""
        taking = {
            id(member): (member, _Measured())
            for member in live
            if member.handle is not None and (member is self._baseline or _cell(member, scenario) is not None)
        }
        for member, measured in taking.values():
            self._guard(member, scenario, lambda m=member, r=measured: self._warm_up(m, scenario, r))  # type: ignore[misc]
        # A worker that died in its warm-up has none.
        budgets = {key: self._budget(member) for key, (member, _) in taking.items() if member.handle is not None}
        for turn in range(max((budget.rounds for budget in budgets.values()), default=0)):
            order = list(taking) if turn % 2 == 0 else list(reversed(taking))
            for key in order:
                member, measured = taking[key]
                if member.handle is not None and turn < budgets[key].rounds:
                    self._guard(
                        member,
                        scenario,
                        lambda m=member, r=measured, b=budgets[key]: self._slice(m, scenario, r, b),  # type: ignore[misc]
                    )
        if self._session.options.profile.split:
            self._split(scenario, taking.values())
        self._record(scenario, list(taking.values()))

    def _split(self, scenario: str, taking: Iterable[tuple[_Member, _Measured]]) -> None:
        """Profile all live workers in turns, as they were timed."""
        able = [(m, r) for m, r in taking if m.handle is not None and self._splittable(m.handle.spec, scenario)]
        for turn in range(SPLIT_ROUNDS):
            for member, measured in able if turn % 2 == 0 else reversed(able):
                if member.handle is not None:
                    self._guard(member, scenario, lambda m=member, r=measured: self._profile(m, scenario, r))  # type: ignore[misc]
        for member, measured in able:
            if member.handle is not None and self._session.options.on_kernels is not None:
                self._guard(member, scenario, lambda m=member, r=measured: self._tell_kernels(m, scenario, r))  # type: ignore[misc]

    def _tell_kernels(self, member: _Member, scenario: str, measured: _Measured) -> None:
        cell, tell = _cell(member, scenario), self._session.options.on_kernels
        assert member.handle is not None and tell is not None
        if cell is not None:
            tell(cell, member.handle.request("shape")["shape"], time_split.merged(measured.kernels))

    def _splittable(self, spec: WorkerSpec, scenario: str) -> bool:
        """Whether torch's profiler can see what a worker runs, and looking is worth its time."""
        brief = matrix.is_brief(Cell(spec.model, spec.engine, spec.recipe, spec.isa, scenario))
        return spec.engine in PROFILED_ENGINES and Scenario.parse(scenario).kind != "multi" and not brief

    def _profile(self, member: _Member, scenario: str, measured: _Measured) -> None:
        assert member.handle is not None
        answer = member.handle.request("split", scenario=scenario, **SPLIT_BUDGET)
        passes = [Pass(**one) for one in answer["passes"]]
        measured.passes += passes
        measured.linear.append(Round(answer["t0"], answer["process"], tuple(one.linear_s for one in passes)))
        measured.kernels += [Kernel.from_json(kernel) for kernel in answer["kernels"]]

    def _budget(self, member: _Member) -> Budget:
        spec = member.handle.spec if member.handle is not None else None
        assert spec is not None
        cell = Cell(spec.model, spec.engine, spec.recipe, spec.isa, spec.scenarios[0])
        return _budget(cell, self._session.options.profile)

    def _warm_up(self, member: _Member, scenario: str, measured: _Measured) -> None:
        assert member.handle is not None
        cap = self._budget(member).warmup_s
        measured.warmup = timing.WarmUp(**member.handle.request("warm_up", scenario=scenario, cap_s=cap))

    def _slice(self, member: _Member, scenario: str, measured: _Measured, budget: Budget) -> None:
        assert member.handle is not None
        cpus, pids = member.handle.spec.cpus, self._pids()
        before = disturbance.read(cpus, pids)
        answers = member.handle.time(scenario, budget)
        window = disturbance.between(before, disturbance.read(cpus, pids), len(cpus))
        measured.windows.append(window)
        self._session.windows.append(window)
        for answer in answers:
            measured.rounds.append(Round(answer["t0"], answer["process"], tuple(answer["samples_s"])))
            if "cpus" in answer:
                measured.cpus[answer["process"]] = tuple(answer["cpus"])
        label = member.handle.spec.label
        self._session.tell("slice", f"{label}/{scenario}: slice {len(measured.rounds)}", done_s=budget.slice_s)

    def _pids(self) -> list[int]:
        """Process ids of this group's workers: whatever they use was not taken by others."""
        handles = [member.handle for member in self._live if member.handle is not None]
        return [pid for handle in handles for pid in handle.pids]

    def _record(self, scenario: str, taking: Sequence[tuple[_Member, _Measured]]) -> None:
        """Append the scenario's records. Others are set against the baseline's timing in this very chunk."""
        timings = {id(m): _timing(m, scenario, r, self._brief(m)) for m, r in taking if m.handle is not None}
        reference = timings.get(id(self._baseline))
        baseline = next((r for m, r in taking if m is self._baseline), _Measured())
        for member, measured in taking:
            cell = _cell(member, scenario)
            if cell is not None and member.handle is not None:
                own = timings[id(member)]
                fields = {
                    "speedup": _speedup(reference, own),
                    "time_split_s": time_split.split(measured.passes, member.evidence[scenario].linears),
                    "linear_speedup": _linear_speedup(baseline, measured, member.evidence[scenario].linears),
                    "disturbance": disturbance.total(measured.windows),
                }
                self._guard(member, scenario, lambda m=member, c=cell, t=own, f=fields: self._finish(m, c, t, f))  # type: ignore[misc]

    def _brief(self, member: _Member) -> bool:
        return self._budget(member) is matrix.BRIEF_BUDGET

    def _finish(self, member: _Member, cell: Cell, own: Timing, fields: Mapping[str, Any]) -> None:
        """Ask for the evidence once more, now that the cell has run, and append its record; ``fields`` are its own."""
        assert member.handle is not None
        answer = member.handle.request("evidence", scenario=cell.scenario)
        evidence = _evidence(answer)
        if own.brief:
            note = f"brief: BF16 is emulated on {cell.isa}, so only a few iterations and examples were run"
            evidence = dataclasses.replace(evidence, notes=(*evidence.notes, note))
        reason = disproof(dataclasses.replace(cell, **member.identity), evidence)
        status: Status = "ok" if reason is None else "failed"
        disturbed = disturbance.reason(fields["disturbance"])
        if reason is None and disturbed is not None:
            status, reason = "invalid", f"the host was disturbed: {disturbed}"
        member.cells.remove(cell)
        self._session.append(
            self._session.record(
                dataclasses.replace(cell, **member.identity),
                status,
                None if reason is None else f"{reason}; {_replay(cell, self._session.options)}",
                timing=own,
                **fields,
                memory=Memory(**answer["memory"]),
                accuracy=member.accuracy if cell.task else None,
                evidence=evidence,
            )
        )

    def _fail(self, member: _Member, cells: Sequence[Cell], reason: str) -> None:
        """Append failed records, with the worker's log beside them."""
        session = self._session
        for cell in list(cells):
            member.cells.remove(cell)
            log = member.handle.log_text() if member.handle is not None else ""
            where = f"; log: {session.writer.write_log(cell.key, log)}" if log else ""
            record = session.record(
                dataclasses.replace(cell, **member.identity),
                "failed",
                f"{reason}; {_replay(cell, session.options)}{where}",
                timing=_timing(member, cell.scenario, _Measured(), matrix.is_brief(cell)),
                evidence=member.evidence.get(cell.scenario, Evidence()),
                memory=member.memory,
                accuracy=member.accuracy,
            )
            session.append(record)

    def _guard(self, member: _Member, scenario: str | None, step: Callable[[], None]) -> None:
        """Run one step of one worker. If it fails, its cells fail and nobody else's.

        A death fails all that the worker has left; a refused request fails the scenario's cell, or all of them while
        the model is not ready yet.
        """
        try:
            step()
        except WorkerDeathError as error:
            if self._stopped:  # it was ended on purpose, and says nothing about its cells
                return
            self._fail(member, member.cells, str(error))
            self._drop(member)
        except WorkerError as error:
            hit = member.cells if scenario is None else [c for c in member.cells if c.scenario == scenario]
            self._fail(member, hit, str(error))
            if scenario is None:
                self._drop(member)

    def _drop(self, member: _Member) -> None:
        if member.handle is not None:
            member.handle.kill()
            member.handle = None
        if member is self._baseline:
            self._baseline = None

    def _end(self, member: _Member) -> None:
        if member.handle is not None:
            member.handle.end()
            member.handle = None


def disproof(cell: Cell, evidence: Evidence) -> str | None:
    """Why the evidence shows that a cell did not run what its label says; None if it did.

    Our own INT8 cells must run every quantized linear in a fused kernel. Upstream is measured as it is, so that only
    having quantized nothing is a failure there. The AMX permission proves a mask: without it an AMX instruction ends
    the process. A kernel that cannot say whether it granted AMX has not granted it. Where no task judges, the output
    for the timed batch must be that of eager FP32 within :data:`MIN_COSINE`.
    """
    if evidence.isa_effective != cell.isa:
        return f"the worker ran under ISA {evidence.isa_effective}, not {cell.isa}"
    if cell.isa == "amx" and evidence.amx_permission is not True:
        return "the process never got Linux's permission to use AMX, so no AMX instruction can have run"
    if cell.isa != "amx" and evidence.amx_permission:
        return f"the process holds Linux's permission to use AMX, so the mask {cell.isa} is not proven"
    if cell.task is None and evidence.fp32_cosine is not None:
        least = MIN_COSINE.get(cell.weights, 0.0)
        if not evidence.fp32_cosine >= least:  # not a number is no proof either
            return f"its output has cosine {evidence.fp32_cosine:.4f} to eager FP32's, below {least:g}"
    if not recipes.get(cell.recipe).quantized:
        return None
    quantized, fused = evidence.quantized_linears, evidence.fused_linears
    if not quantized:
        return "no linear was quantized"
    if cell.engine == "int8" and fused != quantized:
        return f"only {fused} of {quantized} quantized linears run in a fused kernel"
    return None


def _replay(cell: Cell, options: RunOptions) -> str:
    sources = "" if options.sources.path is None else f" --sources {shlex.quote(str(options.sources.path))}"
    return f"again: harness replay {cell.key}{sources}"


def _cell(member: _Member, scenario: str) -> Cell | None:
    return next((cell for cell in member.cells if cell.scenario == scenario), None)


def _timing(member: _Member, scenario: str, measured: _Measured, brief: bool) -> Timing:
    """The clocks of a cell. Percentiles and throughput are over the samples of all its rounds; instances that ran at
    once add up."""
    samples = [sample for one in measured.rounds for sample in one.samples_s]
    sequences = Scenario.parse(scenario).batch
    instances = tuple(_instance(process, cpus, measured, sequences) for process, cpus in measured.cpus.items())
    alone = timing.throughput(samples, sequences) if samples else None
    return Timing(
        rounds=tuple(measured.rounds),
        throughput=sum(one.throughput for one in instances) if instances else alone,
        latency_s=timing.latency(samples) if samples else None,
        load_s=member.seconds.get("load"),
        calibrate_s=member.seconds.get("calibrate"),
        quantize_s=member.seconds.get("quantize"),
        compile_s=member.compile_s.get(scenario),
        warmup_s=measured.warmup.seconds if measured.warmup else None,
        steady=measured.warmup.steady if measured.warmup else None,
        brief=brief,
        instances=instances,
    )


def _instance(process: int, cpus: tuple[int, ...], measured: _Measured, sequences: int) -> Instance:
    own = [sample for one in measured.rounds if one.process == process for sample in one.samples_s]
    return Instance(cpus, process, timing.throughput(own, sequences))


def _speedup(reference: Timing | None, own: Timing) -> Speedup | None:
    from harness import stats

    return None if reference is None or not own.rounds or not reference.rounds else stats.speedup(reference, own)


def _linear_speedup(baseline: _Measured, own: _Measured, linears: int | None) -> Speedup | None:
    """As the speed-up, of the linears alone; None where a profile did not see them all."""
    known = time_split.split(baseline.passes, linears) and time_split.split(own.passes, linears)
    return _speedup(Timing(tuple(baseline.linear)), Timing(tuple(own.linear))) if known else None


def _evidence(answer: Mapping[str, Any]) -> Evidence:
    values = dict(answer["evidence"])
    return Evidence(**{**values, "notes": tuple(values["notes"])})


def _accuracy(values: Mapping[str, Any]) -> Accuracy:
    interval = values["delta_ci95"]
    return Accuracy(**{**values, "delta_ci95": None if interval is None else (interval[0], interval[1])})


def _arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def memory_holds(model_bytes: int, peaks: Sequence[int], available: int, limit: int | None, instances: int = 1) -> bool:
    """Whether one more worker (or ``instances`` of them, where they run at once) fits.

    Args:
        model_bytes: the model's FP32 parameters.
        peaks: peak resident bytes of the live workers.
        available: bytes that the host has free now; the live workers' are no longer among them.
        limit: bytes that the cgroup grants; None for no limit.
    """
    need = instances * (PROCESS_BYTES + MODEL_COPIES * model_bytes)
    within_limit = limit is None or sum(peaks) + need <= MEMORY_SHARE * limit
    return need <= MEMORY_SHARE * available and within_limit


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
