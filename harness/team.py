"""Several workers that run one model at once, each on CPUs of its own: scenario ``multi``.

A :class:`Team` answers like one :class:`~harness.processes.WorkerHandle`. Requests go to all its workers at the same
time, from one thread each, which block in a read meanwhile. Slices start at a barrier, and only iterations count during
which all instances were running: before and after, the others' caches and memory channels would have been free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import matrix
from harness.matrix import Budget, Scenario
from harness.processes import Home, Timeouts, WorkerError, WorkerHandle, slice_fields
from harness.worker import WorkerSpec

#: Requests that one instance answers for all: their result does not depend on the others.
_OF_THE_FIRST = frozenset({"evaluate", "profile"})
#: What must be equal in the evidence of all instances.
_SAME = ("isa_effective", "quantized_linears", "fused_linears", "amx_permission")
#: Seconds that instances wait for each other at the barrier: they are all warm by then.
BARRIER_S = 120.0


def start(
    spec: WorkerSpec,
    log: Path,
    timeouts: Timeouts | None = None,
    environment: Mapping[str, str] | None = None,
    home: Home | None = None,
) -> WorkerHandle | Team:
    """The worker of ``spec``, or a team of them where its scenario is ``multi``."""
    if Scenario.parse(spec.scenarios[0]).kind != "multi":
        return WorkerHandle(spec, log, timeouts, environment, home)
    return Team(spec, log, timeouts, environment, home)


class Team:
    """The workers of one ``multi`` scenario. Used like a worker's handle; end it with :meth:`end` or :meth:`kill`."""

    def __init__(
        self,
        spec: WorkerSpec,
        log: Path,
        timeouts: Timeouts | None = None,
        environment: Mapping[str, str] | None = None,
        home: Home | None = None,
    ) -> None:
        """Start the workers, each pinned to its part of the spec's CPUs.

        Raises:
            UsageError: too few CPUs.
            WorkerError: the system did not pin a worker to its CPUs.
        """
        self.spec = spec
        scenario = Scenario.parse(spec.scenarios[0])
        self._workers: list[WorkerHandle] = []
        self._pool: ThreadPoolExecutor | None = None
        try:
            for index, cpus in enumerate(matrix.split_cpus(spec.cpus, scenario)):
                # The first one judges the task; the others only calibrate on its text.
                judged_in = spec.judged_in if index == 0 else None
                own = replace(spec, cpus=cpus, judged_in=judged_in)
                path = log if index == 0 else log.with_name(f"{log.name}.{index}")
                self._workers.append(WorkerHandle(own, path, timeouts, environment, home))
            self._check_pinning()
        except BaseException:
            self.kill()
            raise
        self._pool = ThreadPoolExecutor(len(self._workers), thread_name_prefix="instance")

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of all instances."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def alive(self) -> bool:
        """True while every worker lives."""
        return all(worker.alive for worker in self._workers)

    def prepare(self, on_phase: Callable[[str], None] | None = None) -> dict[str, Any]:
        """As of a single worker; the phases are those of the first."""
        first = on_phase
        answers = self._at_once(lambda index, worker: worker.prepare(first if index == 0 else None))
        return {**answers[0], "memory": _memory(answers)}

    def request(self, name: str, *, on_phase: Callable[[str], None] | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request to every worker; what they answer becomes one answer. Raises as a single worker."""
        if name in _OF_THE_FIRST:
            return self._workers[0].request(name, on_phase=on_phase, **fields)
        if name == "compile":  # the first fills the compiler's cache for the others
            first = self._workers[0].request(name, on_phase=on_phase, **fields)
            rest = self._at_once(lambda index, worker: worker.request(name, **fields) if index else first)
            return _together(rest)
        return _together(self._at_once(lambda _, worker: worker.request(name, **fields)))

    def time(self, scenario: str, budget: Budget, slowdown: float = 0.0) -> list[dict[str, Any]]:
        """One slice that all instances start together: an answer of each, without what ran while another did not.

        Raises:
            WorkerError: an instance failed, or they did not run at the same time.
        """
        barrier = threading.Barrier(len(self._workers))
        fields: dict[str, Any] = {**slice_fields(budget), **({"slowdown": slowdown} if slowdown else {})}

        def one(_: int, worker: WorkerHandle) -> dict[str, Any]:
            def on_phase(phase: str) -> None:
                if phase == "barrier":
                    barrier.wait(BARRIER_S)
                    worker.go()

            try:
                return worker.request("time", on_phase=on_phase, scenario=scenario, barrier=True, **fields)
            except threading.BrokenBarrierError:
                worker.kill()  # it waits for a word that will not come
                raise WorkerError("another instance did not reach the barrier") from None
            except WorkerError:
                barrier.abort()
                raise

        answers = self._at_once(one)
        kept = overlapping([(float(a["t0"]), tuple(a["samples_s"])) for a in answers])
        if not all(samples for _, samples in kept):
            raise WorkerError(f"instances of {scenario} did not run at the same time; give slices more time")
        cpus = [worker.spec.cpus for worker in self._workers]
        return [
            {**answer, "t0": t0, "samples_s": list(samples), "cpus": list(own)}
            for answer, (t0, samples), own in zip(answers, kept, cpus, strict=True)
        ]

    def end(self) -> None:
        """End every worker. Harmless when repeated."""
        for worker in self._workers:
            worker.end()
        if self._pool is not None:
            self._pool.shutdown()

    def kill(self) -> None:
        """Kill every worker. Harmless when repeated."""
        for worker in self._workers:
            worker.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def log_text(self) -> str:
        """What all of them printed so far, one after the other."""
        return "".join(worker.log_text() for worker in self._workers)

    def _at_once(self, ask: Callable[[int, WorkerHandle], dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers of all workers; the first error once every one has answered, deaths before refusals."""
        assert self._pool is not None
        futures = [self._pool.submit(ask, index, worker) for index, worker in enumerate(self._workers)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise max(errors, key=lambda error: "another instance" not in str(error))
        return [future.result() for future in futures]

    def _check_pinning(self) -> None:
        taken: set[int] = set()
        for worker in self._workers:
            found = os.sched_getaffinity(worker.pid)
            if found != set(worker.spec.cpus) or found & taken:
                raise WorkerError(f"an instance runs on CPUs {sorted(found)} instead of {worker.spec.cpus} alone")
            taken |= found


def overlapping(slices: Sequence[tuple[float, tuple[float, ...]]]) -> list[tuple[float, tuple[float, ...]]]:
    """The iterations of each instance during which all instances were running.

    Args:
        slices: for each instance, Unix time in seconds of its first iteration, and the seconds of each iteration, which
            follow each other without a gap.

    Returns:
        The same for the iterations between the last start and the first end; an instance may be left with none.
    """
    begin = max(t0 for t0, _ in slices)
    end = min(t0 + sum(samples) for t0, samples in slices)
    kept = []
    for t0, samples in slices:
        inside, moment, first = [], t0, None
        for sample in samples:
            # A microsecond of grace: sums of floats that near 2 * 10**9 are no finer.
            if moment >= begin - 1e-6 and moment + sample <= end + 1e-6:
                first = moment if first is None else first
                inside.append(sample)
            moment += sample
        kept.append((t0 if first is None else first, tuple(inside)))
    return kept


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer for all: the slowest clock, the sum of memory, evidence that must be the same."""
    merged = dict(answers[0])
    for name in ("seconds", "iterations"):
        if isinstance(merged.get(name), (int, float)):
            merged[name] = max(answer[name] for answer in answers)
    if "steady" in merged:
        merged["steady"] = all(answer["steady"] for answer in answers)
    if "memory" in merged:
        merged["memory"] = _memory(answers)
    for name in _SAME if "evidence" in merged else ():
        found = {answer["evidence"].get(name) for answer in answers}
        if len(found) > 1:
            raise WorkerError(f"instances differ in {name}: {', '.join(map(str, found))}")
    return merged


def _memory(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The memory of all instances: each holds a model of its own."""
    names = answers[0]["memory"]
    values = {name: [answer["memory"][name] for answer in answers] for name in names}
    return {name: None if None in found else sum(found) for name, found in values.items()}
