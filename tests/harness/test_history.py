"""The store's derived index: what it says, and that nothing done to it changes an answer."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from judged import accuracy, cell, keep, record, run

from harness import history, metrics, stats
from harness.records import Store

CELLS = (cell(), cell("sq-dynamic"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "results")
    for number in (1, 2, 3):
        keep(
            found,
            run([record(one, 0.1 * number) for one in CELLS], f"run-{number}", started_at=float(number), dirty=False),
        )
    return found


def index_files(store: Store) -> list[Path]:
    return sorted((store.root / "index").glob("*/*.json"))


def shape(found: history.History) -> list[object]:
    """Everything an answer is made of, as values that compare."""
    return [
        [
            entry.header,
            entry.finished,
            entry.problems,
            entry.cells,
            entry.statuses,
            entry.reasons,
            entry.blames,
            {name: [None if math.isnan(x) else x for x in column] for name, column in entry.columns.items()},
            [list(map(tuple, rounds)) for rounds in entry.rounds],
            entry.outputs,
        ]
        for entry in found.entries
    ]


def test_it_holds_what_the_records_hold(store: Store) -> None:
    found = history.read(store)
    assert [entry.run_id for entry in found.entries] == ["run-1", "run-2", "run-3"]
    for entry in found.entries:
        loaded = store.load(entry.run_id)
        assert (entry.header, entry.finished) == (loaded.header, True)
        for place, one in enumerate(loaded.records):
            assert entry.cells[place] == one.cell and entry.places[one.cell.key] == place
            for name, metric in metrics.METRICS.items():
                value = metric.extract(one)
                assert entry.columns[name][place] == pytest.approx(math.nan if value is None else value, nan_ok=True)
            assert entry.columns[history.ITERATION_S][place] == stats.typical_s(one.timing)
            assert [time_s for time_s, _ in entry.rounds[place]] == list(stats.round_times_s(one.timing))


def test_a_series_is_a_cell_over_the_runs_of_a_host(store: Store) -> None:
    keep(store, run([record(CELLS[0], 0.9)], "run-4", started_at=4.0, fingerprint="host-b"))
    keep(store, run([record(CELLS[1], 0.5)], "run-5", started_at=5.0))
    found = history.read(store)
    assert found.series(CELLS[0].key, "throughput").values.tolist() == pytest.approx([80, 40, 80 / 3, 80 / 9])
    mine = found.series(CELLS[0].key, "throughput", host="host-a")
    assert mine.run_ids == ("run-1", "run-2", "run-3") and set(mine.hosts) == {"host-a"}
    assert found.of_host("host-b").keys() == (CELLS[0].key,)
    assert found.until(found.entries[1].header).series(CELLS[0].key).run_ids == ("run-1", "run-2")


def test_numbers_that_must_not_be_used_are_marked(store: Store) -> None:
    keep(store, run([record(CELLS[0], 0.1, accuracy=accuracy(0.6))], "run-4", started_at=4.0))
    keep(store, run([record(CELLS[0], 0.1)], "run-5", started_at=5.0, invalid_reason="load 9"))
    keep(store, run([record(CELLS[0], 0.1, status="failed", reason="killed")], "run-6", started_at=6.0))
    series = history.read(store).series(CELLS[0].key)
    assert series.trusted.tolist() == [True, True, True, False, False, False]
    assert [math.isnan(value) for value in series.usable()] == [False] * 3 + [True] * 3
    assert "99 % is needed" in history.read(store).entries[3].blames[0]


def test_the_second_reading_opens_no_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shape(history.read(store))
    monkeypatch.setattr(Store, "load", lambda *_: pytest.fail("a run was read although its index is up to date"))
    assert shape(history.read(store)) == before


def test_a_run_that_grew_is_read_again(store: Store) -> None:
    with store.create_run(run([], "run-9", started_at=9.0).header) as writer:
        assert history.read(store).entries[-1].cells == ()
        writer.append(record(CELLS[0], run_id="run-9"))
        assert history.read(store).entries[-1].cells == CELLS[:1]
        assert not history.read(store).entries[-1].finished
        writer.finish()
    assert history.read(store).entries[-1].finished


DAMAGES = {
    "torn": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "binary": lambda text: "\x00\x01",
    "foreign": lambda text: '{"hello": [1, 2]}',
    "a list": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 100_000,
    "short column": lambda text: json.dumps({**json.loads(text), "statuses": ["ok"]}),
    "text for numbers": lambda text: text.replace('"throughput":[80.0', '"throughput":["many"'),
    "no header": lambda text: json.dumps({**json.loads(text), "header": {}}),
    "newer header": lambda text: text.replace('"schema_version":1', '"schema_version":99'),
    "cells of another shape": lambda text: json.dumps({**json.loads(text), "cells": [[1], [2]]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew(store: Store, damage: str) -> None:
    before = shape(history.read(store))
    for path in index_files(store):
        path.write_text(DAMAGES[damage](path.read_text()))
    assert shape(history.read(store)) == before
    assert shape(history.read(store)) == before


def test_it_can_be_deleted_and_left_half_deleted(store: Store) -> None:
    before = shape(history.read(store))
    index_files(store)[0].unlink()
    assert shape(history.read(store)) == before
    shutil.rmtree(store.root / "index")
    assert shape(history.read(store)) == before


def test_where_it_cannot_be_written_the_answers_are_the_same(store: Store) -> None:
    before = shape(history.read(store))
    shutil.rmtree(store.root / "index")
    (store.root / "index").write_text("a file where the folder should be")
    assert shape(history.read(store)) == before
    (store.root / "index").unlink()
    if os.geteuid() != 0:  # root may write everywhere
        store.root.chmod(0o555)
        try:
            assert shape(history.read(store)) == before
        finally:
            store.root.chmod(0o755)


def test_an_index_of_other_code_is_not_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shape(history.read(store))
    (old,) = (store.root / "index").iterdir()
    monkeypatch.setattr(history, "_version", lambda: "feedbeef0000")
    os.utime(old, (0, 0))
    assert shape(history.read(store)) == before
    assert [path.name for path in (store.root / "index").iterdir()] == ["feedbeef0000"], "what is long unused goes"


def test_runs_that_cannot_be_read_are_said_and_the_others_are_there(store: Store) -> None:
    (store.root / "runs" / "run-0.jsonl").write_bytes(b"\x00garbage\n")
    found = history.read(store)
    assert len(found.entries) == 3 and "run-0" in found.problems[0]
    assert "run-0" in history.read(store).problems[0], "each time"


def test_many_runs_at_once_give_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = shape(history.read(store))
    shutil.rmtree(store.root / "index")
    monkeypatch.setattr(history, "WORTH_WORKERS", 2)
    said: list[str] = []
    assert shape(history.read(store, said.append)) == one_by_one
    assert said == [f"indexing 3 runs of {store.root}"]
    assert len(index_files(store)) == 3


def test_two_processes_at_once_agree(store: Store) -> None:
    script = (
        "import sys; from pathlib import Path; from harness import history; from harness.records import Store\n"
        "print([entry.run_id for entry in history.read(Store(Path(sys.argv[1]))).entries])"
    )
    root = Path(__file__).resolve().parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(store.root)], cwd=root, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=120)[0] for one in started] == ["['run-1', 'run-2', 'run-3']\n"] * 2
    assert not list((store.root / "index").glob("*/.*")), "no temporary file is left"
