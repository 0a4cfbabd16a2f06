"""Which runs a run is compared with: docs/gates.md, "Which baseline". Walks the history and opens few runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness import verdicts
from harness.errors import UsageError
from harness.history import ITERATION_S, History, RunEntry
from harness.records import Latency, Record, Round, Run, RunHeader, Store, Timing
from harness.verdicts import Baseline, Rules


@dataclass(frozen=True)
class Chosen:
    """What a run is compared with where the caller names nothing.

    ``run_id`` is the run that it starts from. ``where`` says for each cell that some baseline has measured which one
    counts, and its place there. Both are empty where there is no baseline.
    """

    run_id: str | None
    where: Mapping[str, tuple[RunEntry, int]]

    def baseline(self, store: Store, full: Collection[str]) -> Baseline | None:
        """The baseline's records: those of the cells ``full`` as they were stored, of the others what tells that they
        were measured. None where there is none. Raises as :meth:`Store.load`."""
        if not self.where and self.run_id is None:
            return None
        runs = {entry.run_id: entry for entry, _ in self.where.values()}
        opened = {self.where[key][0].run_id for key in full if key in self.where}
        loaded = {run_id: verdicts.latest(store.load(run_id)) for run_id in sorted(opened)}
        records = {
            key: loaded[entry.run_id][key] if key in full else _outline(entry, place)
            for key, (entry, place) in self.where.items()
        }
        return Baseline(records, {run_id: entry.header for run_id, entry in runs.items()})


def choose(store: Store, history: History, rules: Rules | None = None) -> Chosen:
    """What the newest run of ``history`` is compared with; it holds the runs of one comparable host up to that one.

    The run accepted last; else the newest earlier one that passed; cells which that lacks are taken from the newest run
    that passed and has them.
    """
    *earlier, _ = history.entries
    return _walked(earlier, _accepted(store.accepted(), history), rules or Rules())


def _accepted(run_ids: list[str], history: History) -> RunEntry | None:
    """The run accepted last among those of ``history`` whose host was not disturbed, or that are the judged one."""
    entries = {entry.run_id: entry for entry in history.entries}
    for run_id in reversed(run_ids):
        found = entries.get(run_id)
        if found is not None and (found is history.entries[-1] or not found.disturbed):
            return found
    return None


def _walked(earlier: Sequence[RunEntry], accepted: RunEntry | None, rules: Rules) -> Chosen:
    """Cell by cell the newest of the ``earlier`` runs (oldest first) that passed; what ``accepted`` has stays.

    Each run is judged against the ones before it, as the gate did.
    """
    fixed = {} if accepted is None else _measured(accepted)
    where = dict(fixed)
    newest = None if accepted is None else accepted.run_id
    for entry in earlier:
        if accepted is not None and not _is_before(accepted.header, entry.header):
            continue
        if passed(entry, where, rules):
            where |= {key: found for key, found in _measured(entry).items() if key not in fixed}
            newest = newest if accepted is not None else entry.run_id
    return Chosen(newest, where)


def _is_before(one: RunHeader, other: RunHeader) -> bool:
    return (one.started_at, one.run_id) < (other.started_at, other.run_id)


def _measured(entry: RunEntry) -> dict[str, tuple[RunEntry, int]]:
    if entry.disturbed:
        return {}
    return {key: (entry, place) for key, place in entry.places.items() if entry.statuses[place] == "ok"}


# --- did a run pass? --------------------------------------------------------------------------------------------------


def passed(entry: RunEntry, where: Mapping[str, tuple[RunEntry, int]], rules: Rules | None = None) -> bool:
    """True if the rules judge the run 0 against the cells ``where``, each compared with one night, told by its history.

    The same word as :func:`harness.verdicts.judge` on the stored run, without reading it.
    """
    rules = rules or Rules()
    if not entry.finished or entry.disturbed or entry.problems or "ok" not in entry.statuses:
        return False
    for key, place in entry.places.items():
        if not verdicts.is_gated(entry.cells[place], entry.header):
            continue
        status = entry.statuses[place]
        if status == "skipped":
            if key in where:
                return False
        elif status != "ok" or entry.blames[place] or not _fast(entry, place, where.get(key), rules):
            return False
    return not any(_lost(key, found, entry) for key, found in where.items() if key not in entry.places)


def _lost(key: str, found: tuple[RunEntry, int], entry: RunEntry) -> bool:
    """True if the run has no record of a gated cell that it was asked for."""
    holder, place = found
    cell = holder.cells[place]
    if not verdicts.is_gated(cell, entry.header):
        return False
    outline = Run(entry.header, tuple(_outline(entry, at) for at in range(len(entry.cells))))
    return verdicts.was_asked_for(cell, outline, holder.header)


def _fast(entry: RunEntry, place: int, before: tuple[RunEntry, int] | None, rules: Rules) -> bool:
    """True if the verdict ``speed`` is a pass or an improvement."""
    now = _speeds(entry, place)
    if not all(value > 0 for value in now.values()):
        return False
    if before is None:
        return True
    old = _speeds(*before)
    ratios = [now[name] / value for name, value in old.items() if name in now and value > 0]
    if ITERATION_S in old and ITERATION_S in now and _narrow(entry, place, before, rules):
        return min(ratios) >= rules.speed_floor
    record, reference = _outline(entry, place), _outline(*before)
    return verdicts.judge_speed(record, reference, True, rules).good


def _speeds(entry: RunEntry, place: int) -> dict[str, float]:
    """The record's numbers of speed, larger is faster; those that were not measured are left out."""
    iteration, throughput, p50 = (float(entry.columns[name][place]) for name in _SPEEDS)
    found = {ITERATION_S: 1.0 / iteration if iteration > 0 else 0.0, "throughput": throughput}
    found["latency_p50"] = 1.0 / p50 if p50 > 0 else p50
    return {name: value for name, value in found.items() if not math.isnan(value)}


_SPEEDS = (ITERATION_S, "throughput", "latency_p50")


def _narrow(entry: RunEntry, place: int, before: tuple[RunEntry, int], rules: Rules) -> bool:
    """True if no interval of the ratio can be hopelessly wide: a bootstrap's ends lie between its data's."""
    spans = [[time_s for time_s, _ in one.rounds[at]] for one, at in ((entry, place), before)]
    return all(spans) and math.prod(max(span) / min(span) for span in spans) < rules.hopeless_span


def _outline(entry: RunEntry, place: int) -> Record:
    """The record as far as the index keeps it: every round is its median."""
    columns = {name: float(entry.columns[name][place]) for name in ("throughput", "latency_p50")}
    known = {name: None if math.isnan(value) else value for name, value in columns.items()}
    p50 = known["latency_p50"]
    timing = Timing(
        rounds=tuple(Round(0.0, int(process), (time_s,)) for time_s, process in entry.rounds[place]),
        throughput=known["throughput"],
        latency_s=None if p50 is None else Latency(p50, p50, p50),
    )
    status, reason = entry.statuses[place], entry.reasons[place]
    return Record(entry.run_id, entry.header.commit, status, reason, entry.cells[place], timing)


# --- a baseline that the caller names ---------------------------------------------------------------------------------


def explicit(store: Store, run: Run, baseline_id: str) -> Baseline:
    """The measured cells of the run called ``baseline_id``.

    Raises:
        UsageError: its host is not comparable with the run's, or was disturbed.
        AssetError, StoreError: as :meth:`Store.load`.
    """
    other = store.load(baseline_id)
    if other.header.fingerprint != run.header.fingerprint:
        raise UsageError(
            f"run {other.header.run_id} is no baseline for run {run.header.run_id}: it was measured on another host "
            f"({_host_difference(other.header, run.header)}); choose a run of the same host, or leave --baseline out"
        )
    if other.header.invalid_reason is not None:
        raise UsageError(
            f"run {other.header.run_id} is no baseline: its host was disturbed ({other.header.invalid_reason}); "
            "choose another run, or leave --baseline out"
        )
    return Baseline.of(other)


def _host_difference(one: RunHeader, other: RunHeader) -> str:
    """Which host fields tell two hosts apart, in a few words."""
    for name in ("cpu_model", "cpu", *sorted(one.host)):
        if name in one.host and name in other.host and one.host[name] != other.host[name]:
            return f"{name}: {one.host[name]} against {other.host[name]}"
    return f"fingerprint {one.fingerprint} against {other.fingerprint}"
