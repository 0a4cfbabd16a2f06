"""The record's JSON and the store on a healthy disk."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import RUN_ID, header, record, write_run

from harness.errors import AssetError, StoreError, UsageError
from harness.records import (
    Accuracy,
    Cell,
    DamagedError,
    Evidence,
    Latency,
    Memory,
    Record,
    Round,
    Speedup,
    Store,
    TimeSplit,
    Timing,
    from_json,
    new_run_id,
    slug,
    to_json,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 2**53)
TEXTS = st.text(max_size=20)
PAIRS = st.tuples(NUMBERS, NUMBERS)


def perhaps(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


CELLS = st.builds(
    Cell, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, perhaps(TEXTS), perhaps(TEXTS), st.sampled_from([None, "real"])
)
TIMINGS = st.builds(
    Timing,
    rounds=st.lists(st.builds(Round, NUMBERS, COUNTS, st.lists(NUMBERS, max_size=4).map(tuple)), max_size=3).map(tuple),
    throughput=perhaps(NUMBERS),
    latency_s=perhaps(st.builds(Latency, NUMBERS, NUMBERS, NUMBERS)),
    load_s=perhaps(NUMBERS),
    steady=perhaps(st.booleans()),
    brief=st.booleans(),
)
ACCURACIES = st.builds(
    Accuracy,
    metric=TEXTS,
    value=NUMBERS,
    fp32_value=NUMBERS,
    chance=NUMBERS,
    delta=NUMBERS,
    delta_ci95=perhaps(PAIRS),
    n=COUNTS,
    flips=NUMBERS,
    flips_gained=COUNTS,
    flips_lost=COUNTS,
    sqnr_db=perhaps(NUMBERS),
    cosine=perhaps(NUMBERS),
    outputs=perhaps(TEXTS),
    scenario=perhaps(TEXTS),
)
EVIDENCES = st.builds(
    Evidence,
    linears=perhaps(COUNTS),
    kernels=st.dictionaries(TEXTS, COUNTS, max_size=3),
    isa_effective=perhaps(TEXTS),
    amx_permission=perhaps(st.booleans()),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
)
RECORDS = st.builds(
    Record,
    run_id=st.just(RUN_ID),
    commit=perhaps(TEXTS),
    status=st.sampled_from(["ok", "failed", "skipped", "invalid"]),
    reason=perhaps(TEXTS),
    cell=CELLS,
    timing=TIMINGS,
    speedup=perhaps(st.builds(Speedup, NUMBERS, perhaps(PAIRS))),
    time_split_s=perhaps(st.builds(TimeSplit, NUMBERS, NUMBERS, NUMBERS)),
    linear_speedup=perhaps(st.builds(Speedup, NUMBERS, perhaps(PAIRS))),
    memory=st.builds(Memory, perhaps(COUNTS), perhaps(COUNTS), perhaps(COUNTS)),
    accuracy=perhaps(ACCURACIES),
    evidence=EVIDENCES,
    fingerprint=perhaps(TEXTS),
)


@given(RECORDS)
@settings(max_examples=150, deadline=None)
def test_a_record_survives_json(made: Record) -> None:
    text = json.dumps(to_json(made), allow_nan=False)
    assert from_json(json.loads(text)) == made


@given(st.lists(RECORDS, max_size=3))
@settings(max_examples=25, deadline=None)
def test_records_survive_the_store(tmp_path_factory: pytest.TempPathFactory, made: list[Record]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    write_run(store, *made)
    run = store.load(RUN_ID)
    assert run.records == tuple(made)
    assert run.problems == ()
    assert run.finished


def test_the_names_of_the_contract_are_there() -> None:
    data = to_json(record())
    names = {"schema_version", "run_id", "commit", "status", "reason", "cell", "timing", "speedup", "time_split_s"}
    assert names | {"linear_speedup", "memory", "accuracy", "evidence", "fingerprint"} <= data.keys()
    cell = "model family weights engine recipe isa scenario deploy task compute_dtype"
    assert set(cell.split()) <= data["cell"].keys()
    timing = "rounds throughput latency_s load_s calibrate_s quantize_s compile_s warmup_s"
    assert set(timing.split()) <= data["timing"].keys()
    assert data["timing"]["rounds"][0].keys() == {"t0", "process", "samples_s"}
    assert data["timing"]["latency_s"].keys() == {"p50", "p90", "p99"}
    assert data["speedup"] == {"value": 2.0, "ci95": [1.9, 2.1]}
    accuracy = "metric value fp32_value chance delta delta_ci95 n flips flips_gained flips_lost sqnr_db cosine outputs"
    assert set(accuracy.split()) <= data["accuracy"].keys()
    evidence = "linears quantized_linears fused_linears kernels isa_effective amx_permission"
    assert set(evidence.split()) <= data["evidence"].keys()
    assert data["memory"].keys() == {"peak_rss_bytes", "model_bytes", "linear_weight_bytes"}
    assert data["time_split_s"] is None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path: Path, number: float) -> None:
    store = Store(tmp_path)
    write_run(store, record(timing=Timing(throughput=number), speedup=Speedup(number)), host={"x": number})
    content = (tmp_path / "runs" / f"{RUN_ID}.jsonl").read_text()
    assert "NaN" not in content and "Infinity" not in content
    found = store.load(RUN_ID)
    assert found.records[0].timing.throughput is None
    assert found.records[0].speedup is not None and math.isnan(found.records[0].speedup.value)
    assert found.header.host == {"x": None}


def test_numpy_scalars_are_numbers() -> None:
    made = record(timing=Timing(throughput=np.float32(2.5)), memory=Memory(np.int64(7)))  # type: ignore[arg-type]
    assert from_json(json.loads(json.dumps(to_json(made)))).timing.throughput == 2.5
    assert to_json(made)["memory"]["peak_rss_bytes"] == 7


def test_unknown_fields_are_ignored() -> None:
    data = to_json(record())
    data["energy_j"] = 3
    data["cell"]["colour"] = "red"
    assert from_json(data) == record()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("status",), "fine", "status: expected one of ok, failed"),
        (("cell",), None, "cell: expected an object"),
        (("cell", "model"), 3, "cell: model: expected a text"),
        (("timing", "throughput"), "fast", "timing: throughput: expected a number"),
        (("timing", "throughput"), True, "timing: throughput: expected a number"),
        (("accuracy", "n"), 2.5, "accuracy: n: expected a whole number"),
        (("speedup", "ci95"), [1.0], "speedup: ci95: expected a list of 2"),
        (("schema_version",), "1", "schema_version is '1'"),
        (("schema_version",), 2, "newer harness"),
    ],
)
def test_a_wrong_type_names_its_field(path: tuple[str, ...], value: object, words: str) -> None:
    data = json.loads(json.dumps(to_json(record())))
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(DamagedError, match=words):
        from_json(data)


def test_a_missing_field_is_named() -> None:
    data = to_json(record())
    del data["cell"]["scenario"]
    with pytest.raises(DamagedError, match="cell: scenario is missing"):
        from_json(data)


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        with pytest.raises(ValueError, match="peak_rss_bytes"):
            writer.append(record(memory=Memory(1.5)))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="another"):
            writer.append(record(run_id="another"))
        writer.append(record())
    assert store.load(RUN_ID).records == (record(),)


def test_run_ids_sort_by_time_and_differ() -> None:
    made = [new_run_id(moment) for moment in (0.0, 1.0, 1.001, 1e9, 1.7e9)]
    assert made == sorted(made)
    assert new_run_id(5.0) != new_run_id(5.0)


@pytest.mark.parametrize("run_id", ["", "latest", "../x", "a/b", ".hidden", "a b", "x" * 121, "a\n", "ä"])
def test_a_run_id_that_is_no_file_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        Store(tmp_path).create_run(header(run_id))
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_oldest_first_and_latest_is_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run_id, started in (("b", 30.0), ("a", 10.0), ("c", 20.0)):
        write_run(store, run_id=run_id, started_at=started)
    assert [item.run_id for item in store.runs()] == ["a", "c", "b"]
    assert store.load("latest").header.run_id == "b"
    assert store.load().header.run_id == "b"


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "nothing")
    assert store.runs() == []
    assert store.accepted() == []
    with pytest.raises(AssetError, match="harness run"):
        store.load("latest")
    with pytest.raises(AssetError, match="harness run"):
        store.load("some-run")
    assert not (tmp_path / "nothing").exists(), "reading must not create anything"


def test_an_unknown_run_names_the_nearest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store)
    with pytest.raises(AssetError, match=f"did you mean {RUN_ID}"):
        store.load(RUN_ID[:-1])
    with pytest.raises(AssetError):
        store.load("../../etc/passwd")


def test_accepted_runs_come_in_the_order_of_acceptance(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run_id in ("a", "b", "c"):
        write_run(store, run_id=run_id)
    store.accept("c", now=1.0)
    store.accept("a", now=2.0)
    assert store.accepted() == ["c", "a"]
    store.accept("c", now=3.0)
    assert store.accepted() == ["a", "c"]
    with pytest.raises(AssetError):
        store.accept("d")
    assert store.accepted() == ["a", "c"]


def test_a_damaged_marker_counts_as_accepted_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run_id in ("a", "b"):
        write_run(store, run_id=run_id)
        store.accept(run_id, now=5.0)
    (tmp_path / "accepted" / "b.json").write_text("{")
    assert store.accepted() == ["b", "a"]


def test_outputs_and_logs_are_kept_beside_the_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        arrays = {"logits": np.arange(6, dtype=np.float32).reshape(3, 2), "flipped": np.array([True, False, True])}
        outputs = writer.write_outputs("a/b@c", arrays)
        log = writer.write_log("a/b@c", "line\nlone surrogate \ud800")
    assert outputs.startswith(f"outputs/{RUN_ID}/") and log.startswith(f"logs/{RUN_ID}/")
    read = store.outputs(outputs)
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)
    assert store.log(log).startswith("line\nlone surrogate")
    with pytest.raises(AssetError, match="missing"):
        store.outputs("outputs/none.npz")


@pytest.mark.parametrize("relative", ["../secret.npz", "/etc/passwd", "outputs/../../x", "a\0b"])
def test_a_sidecar_outside_the_store_is_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(StoreError, match="outside"):
        Store(tmp_path / "store").outputs(relative)


def test_slugs_are_file_names_and_differ() -> None:
    keys = ["m/e/r/i/s", "m/e/r/i/s@t", "m/e/r/i-s", "/a/" + "x" * 400, "/a/" + "x" * 401, "..", "ä/ö"]
    made = [slug(key) for key in keys]
    assert len(set(made)) == len(keys)
    assert all(len(item) < 150 and "/" not in item and item.isascii() and item[0] != "." for item in made)


def test_the_end_can_make_a_run_invalid(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        writer.append(record())
        writer.finish(invalid_reason="load rose to 9", host={"load_1min": 9.0})
    run = store.load(RUN_ID)
    assert run.header == dataclasses.replace(header(), invalid_reason="load rose to 9")
    assert run.host_at_end == {"load_1min": 9.0}


def test_stores_merge_by_the_union_of_their_files(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    write_run(one, record("a"), run_id="a")
    write_run(two, record("b"), run_id="b")
    two.accept("b")
    for path in [item for item in two.root.rglob("*") if item.is_file()]:
        target = one.root / path.relative_to(two.root)
        assert not target.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert {item.run_id for item in one.runs()} == {"a", "b"}
    assert one.accepted() == ["b"]
    assert one.load("b").records == (record("b"),)
