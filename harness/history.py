"""The store's history at a glance: numbers of each cell over all runs, without reading the runs' files again.

A derived index keeps, for each run, what gates and pages ask of years of runs: every metric of ``harness.metrics``, the
medians of the rounds, statuses, and what the rules say of each record by itself. It lies in ``<results>/index/``, one
file a run, and is only a cache: delete it at any time. A file is used if it was made by this very code from a run file
of this size and time of change; anything else (torn, foreign, of a newer harness) is made anew. Where the folder cannot
be written, the answers are the same and only slower. Several processes may build it at once: each file appears whole.

    history = history.read(store)
    series = history.series("minilm/int8/sq-static/amx/offline:b8:s128@reviews", "throughput", host=fingerprint)
    series.values            # one number a run, NaN where it was not measured
    history.entries[-1]      # the newest run: header, cells, statuses, columns

"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import metrics, records, stats, verdicts
from harness.errors import HarnessError
from harness.records import Cell, Record, Run, RunHeader, Status, Store

Array = npt.NDArray[np.float64]

#: The cost that speed is judged by: seconds of an iteration, the median over processes of the median over rounds.
ITERATION_S = "iteration_s"
#: From how many runs without an index on it pays to share them out to processes, and to how many at the most.
WORTH_WORKERS = 24
MOST_WORKERS = 8
#: Indexes of other versions of this code are removed when they have not been touched for so long.
_KEEP_OTHERS_S = 7 * 86400.0
#: Modules whose text decides what an index holds.
_MAKERS = (records, metrics, stats, verdicts)


@dataclass(frozen=True)
class RunEntry:
    """What is kept of one run; the k-th item of each sequence belongs to its k-th cell.

    Attributes:
        header: as :meth:`Store.load` gives it, with the end's reason where the host was disturbed.
        finished, problems: as in :class:`Run`.
        cells: each once, in the order measured; of several records of a cell the last one counts.
        statuses, reasons: of these records.
        blames: what the rules say against a measured record by itself (evidence, accuracy, flips, chance), "" if
            nothing. Speed is not looked at.
        columns: metric -> (cells,) numbers, NaN where not measured: all of ``harness.metrics`` and ``iteration_s``.
        rounds: of each round the median time of an iteration, in seconds, and the number of its process.
        outputs: the sidecar file of each record's predictions, if it has one.
    """

    header: RunHeader
    finished: bool
    problems: tuple[str, ...]
    cells: tuple[Cell, ...]
    statuses: tuple[Status, ...]
    reasons: tuple[str | None, ...]
    blames: tuple[str, ...]
    columns: Mapping[str, Array]
    rounds: tuple[Sequence[Sequence[float]], ...]
    outputs: tuple[str | None, ...]
    places: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.header.run_id

    @property
    def disturbed(self) -> bool:
        """True if the host was disturbed, so that the run's times mean nothing."""
        return self.header.invalid_reason is not None


@dataclass(frozen=True)
class Series:
    """One cell's one metric over runs, oldest first; every sequence has one item a run that has the cell.

    ``values`` are NaN where the metric was not measured. ``trusted`` is False where the number must not be used: the
    host was disturbed, the cell was not measured, or its evidence or accuracy failed.
    """

    key: str
    metric: str
    run_ids: tuple[str, ...]
    started_at: Array
    commits: tuple[str | None, ...]
    hosts: tuple[str, ...]
    values: Array
    statuses: tuple[Status, ...]
    trusted: npt.NDArray[np.bool_]

    def usable(self) -> Array:
        """``values`` with NaN where they must not be used."""
        return np.where(self.trusted, self.values, math.nan)


@dataclass(frozen=True)
class History:
    """All runs that can be read, oldest first, and why the others cannot."""

    entries: tuple[RunEntry, ...]
    problems: tuple[str, ...] = ()

    def of_host(self, fingerprint: str) -> History:
        """The runs of one comparable host."""
        mine = tuple(entry for entry in self.entries if entry.header.fingerprint == fingerprint)
        return History(mine, self.problems)

    def until(self, header: RunHeader) -> History:
        """The runs that are not newer than the one with ``header``, that one included."""
        last = (header.started_at, header.run_id)
        kept = tuple(entry for entry in self.entries if (entry.header.started_at, entry.run_id) <= last)
        return History(kept, self.problems)

    def keys(self) -> tuple[str, ...]:
        """Keys of all cells, in the order in which they first appeared."""
        return tuple(dict.fromkeys(key for entry in self.entries for key in entry.places))

    def series(self, key: str, metric: str = ITERATION_S, host: str | None = None) -> Series:
        """The cell ``key``'s ``metric`` over the runs that have it; of one comparable host if ``host`` names it."""
        found = [
            (entry, entry.header, entry.places[key])
            for entry in self.entries
            if key in entry.places and host in (None, entry.header.fingerprint)
        ]
        return Series(
            key,
            metric,
            tuple([header.run_id for _, header, _ in found]),
            np.array([header.started_at for _, header, _ in found]),
            tuple([header.commit for _, header, _ in found]),
            tuple([header.fingerprint for _, header, _ in found]),
            np.array([entry.columns[metric].item(place) for entry, _, place in found]),
            tuple([entry.statuses[place] for entry, _, place in found]),
            np.array([trusted(entry, place) for entry, _, place in found], dtype=bool),
        )


def trusted(entry: RunEntry, place: int) -> bool:
    """True if the numbers of that cell may be used: measured on a quiet host, with nothing against the record."""
    return not entry.disturbed and entry.statuses[place] == "ok" and not entry.blames[place]


# --- reading ----------------------------------------------------------------------------------------------------------


def read(store: Store, tell: Callable[[str], None] = lambda line: None) -> History:
    """The history of ``store``, from its index as far as that is up to date. ``tell`` hears of long work in words.

    What cannot be read of the store is in ``problems``; a run that vanished while reading is left out.
    """
    folder = _folder(store)
    known: _Known = {}
    entries: list[RunEntry] = []
    missing: list[Path] = []
    problems: list[str] = []
    for path in store.run_files():
        kept = _kept(folder, path, known)
        if kept is None:
            missing.append(path)
        else:
            entries.append(kept)
    if len(missing) >= WORTH_WORKERS:
        tell(f"indexing {len(missing)} runs of {store.root}")
    for made in _made(store, folder, missing):
        if isinstance(made, str):
            problems.append(made)
        else:
            entries.append(_entry(made, known))
    entries.sort(key=lambda entry: (entry.header.started_at, entry.run_id))
    return History(tuple(entries), tuple(problems))


def stamp(store: Store, run_id: str) -> list[int] | None:
    """What :func:`keep` wants to know of a run's file before it is read; None if it is indexed already, or is gone."""
    path = store.root / "runs" / f"{run_id}.jsonl"
    if (_folder(store) / f"{run_id}.json").is_file():
        return None
    try:
        return _stamp(path)
    except OSError:
        return None


def keep(store: Store, run: Run, source: Sequence[int] | None) -> None:
    """Index a run that was loaded for another purpose, so that :func:`read` need not load it again.

    ``source`` is what :func:`stamp` gave before it was loaded. Does nothing where that is None, or where the disk
    refuses.
    """
    folder = _folder(store)
    if source is None or not _prepare(folder):
        return
    data = {"source": list(source), **_digest(run)}
    with contextlib.suppress(OSError):
        _write(folder / f"{run.header.run_id}.json", json.dumps(data, separators=(",", ":")))


#: Cells that were met before with their keys, by their fields, so that each exists once.
_Known = dict[tuple[Any, ...], tuple[Cell, str]]


def _folder(store: Store) -> Path:
    return store.root / "index" / _version()


@functools.cache
def _version() -> str:
    """Names what an index holds: a hash of the code that makes it, so that no edit can leave an old one in use."""
    texts = [Path(str(module.__file__)).read_bytes() for module in _MAKERS] + [Path(__file__).read_bytes()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def _stamp(path: Path) -> list[int]:
    """Size and time of change of a run's file: an index made from others is out of date."""
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def _kept(folder: Path, path: Path, known: _Known) -> RunEntry | None:
    """What the index holds of the run in ``path``; None if nothing that can be used."""
    try:
        data = json.loads((folder / f"{path.stem}.json").read_bytes())
        if data["source"] != _stamp(path) or not _fits(data):
            return None
        return _entry(data, known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # torn, foreign, or damaged and still JSON


def _fits(data: Mapping[str, Any]) -> bool:
    """True if every list has an item for each cell, which a file that was damaged and is still JSON may lack."""
    count = len(data["cells"])
    lists = (data["statuses"], data["reasons"], data["blames"], data["rounds"], data["outputs"])
    named = set(data["columns"]) == {*metrics.METRICS, ITERATION_S} and "header" in data
    return named and all(len(one) == count for one in (*lists, *data["columns"].values()))


def _made(store: Store, folder: Path, paths: Sequence[Path]) -> Iterator[dict[str, Any] | str]:
    """What the index should hold of each run, written down where that is possible; or why the run cannot be read."""
    writable = bool(paths) and _prepare(folder)
    make = functools.partial(_make, store, folder if writable else None)
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    if len(paths) < WORTH_WORKERS or workers < 2:
        yield from map(make, paths)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(make, paths, chunksize=8)


def _make(store: Store, folder: Path | None, path: Path) -> dict[str, Any] | str:
    try:
        source = _stamp(path)  # before reading: a run that grows meanwhile is indexed again
        data = {"source": source, **_digest(store.load(path.stem))}
    except HarnessError as error:
        return str(error)
    except OSError as error:  # removed since it was listed
        return f"run {path.stem} cannot be read: {error.strerror}"
    if folder is not None:
        with contextlib.suppress(OSError):
            _write(folder / f"{path.stem}.json", json.dumps(data, separators=(",", ":")))
    return data


def _prepare(folder: Path) -> bool:
    """Make the index's folder and remove what other versions of this code left long ago. False if nothing can be
    written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and time.time() - other.stat().st_mtime > _KEEP_OTHERS_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _write(path: Path, text: str) -> None:
    """Write a file that appears whole. Not synced: an index that a crash cuts short is made again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="ascii")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# --- what is kept of a run --------------------------------------------------------------------------------------------


def _digest(run: Run) -> dict[str, Any]:
    """The run as the index keeps it: JSON values."""
    latest = list(verdicts.latest(run).values())
    return {
        "header": records.to_json(run.header),
        "finished": run.finished,
        "problems": list(run.problems),
        "cells": [_cell_fields(record.cell) for record in latest],
        "statuses": [record.status for record in latest],
        "reasons": [record.reason for record in latest],
        "blames": [blame(record, run.header) for record in latest],
        "columns": {name: [extract(record) for record in latest] for name, extract in _extractors().items()},
        "rounds": [_rounds(record) for record in latest],
        "outputs": [record.accuracy.outputs if record.accuracy else None for record in latest],
    }


def _cell_fields(cell: Cell) -> list[str | None]:
    return [
        cell.model,
        cell.engine,
        cell.recipe,
        cell.isa,
        cell.scenario,
        cell.deploy,
        cell.task,
        cell.family,
        cell.weights,
        cell.compute_dtype,
    ]


def blame(record: Record, header: RunHeader) -> str:
    """What the rules say against a measured record by itself, speed left out; "" if nothing."""
    if record.status != "ok":
        return ""
    return "; ".join(one.reason for one in verdicts.judge_itself(record, header) if not one.good)


def _extractors() -> dict[str, Callable[[Record], float | None]]:
    return {ITERATION_S: lambda record: stats.typical_s(record.timing), **{m.name: m.extract for m in _metrics()}}


def _metrics() -> Sequence[metrics.Metric]:
    return tuple(metrics.METRICS.values())


def _rounds(record: Record) -> list[list[float]]:
    times = stats.round_times_s(record.timing)
    if times is None:
        return []
    return [[float(time_s), one.process] for time_s, one in zip(times, record.timing.rounds, strict=True)]


def _entry(data: Mapping[str, Any], known: _Known) -> RunEntry:
    """The entry in ``data``."""
    mine = [_interned(tuple(fields), known) for fields in data["cells"]]
    return RunEntry(
        header=records.header_from_json(data["header"]),
        finished=data["finished"],
        problems=tuple(data["problems"]),
        cells=tuple(cell for cell, _ in mine),
        statuses=tuple(data["statuses"]),
        reasons=tuple(data["reasons"]),
        blames=tuple(data["blames"]),
        columns={name: np.array(column, dtype=np.float64) for name, column in data["columns"].items()},
        rounds=tuple(data["rounds"]),
        outputs=tuple(data["outputs"]),
        places={key: place for place, (_, key) in enumerate(mine)},
    )


def _interned(fields: tuple[Any, ...], known: _Known) -> tuple[Cell, str]:
    if fields not in known:
        cell = Cell(*fields)
        known[fields] = cell, cell.key
    return known[fields]
