"""The runner: a real run on a tiny model, what happens when workers die or the user interrupts, and its pure parts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness import matrix, replay, runner
from harness.errors import UsageError
from harness.matrix import Budget, Overrides, PlannedCell, Profile, Scenario
from harness.records import Cell, Evidence, Record, Run, Store
from harness.runner import Event, RunOptions
from int8 import isa

NATIVE = isa.best()
TINY = Profile(
    name="tiny",
    about="a test's",
    models=("tiny-bert",),
    recipes={"int8": ("fp32", "sq-static")},
    isas=("native",),
    scenarios=(Scenario.parse("offline:b2:s16"), Scenario.parse("single:s16")),
    task="tiny-reviews",
    limit=64,
    gated=("sq-static",),
    budget=Budget(rounds=4, slice_s=0.02, min_iterations=3, max_iterations=20, warmup_s=0.5),
)
TINY_SCENARIOS = tuple(str(scenario) for scenario in TINY.scenarios)


def workers() -> list[psutil.Process]:
    """Live workers that this process started."""
    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "harness.worker" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def by_key(run: Run) -> dict[str, Record]:
    return {record.cell.key: record for record in run.records}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Run, list[Event]]:
    store = Store(tmp_path_factory.mktemp("results"))
    events: list[Event] = []
    # torchao has no fp32: those cells are skipped.
    profile = dataclasses.replace(TINY, recipes={**TINY.recipes, "torchao": ("fp32",)}, split=True)
    summary = runner.run(RunOptions(profile, run_id="tiny-run", arguments=("run",)), store, events.append)
    assert summary == runner.Summary("tiny-run", {"ok": 4, "failed": 0, "skipped": 2, "invalid": 0})
    return store, store.load("tiny-run"), events


def test_a_run_records_every_cell_and_leaves_no_worker(measured: tuple[Store, Run, list[Event]]) -> None:
    _, run, _ = measured
    assert run.finished and not run.problems
    assert run.header.profile == "tiny"
    assert run.header.gated == ("sq-static",)
    assert run.header.arguments == ("run",)
    assert set(run.host_at_end or {}) >= {"load_1min", "steal_s"}
    cells = {f"tiny-bert/int8/{r}/{NATIVE}/{s}@tiny-reviews" for r in ("fp32", "sq-static") for s in TINY_SCENARIOS}
    assert {key for key, record in by_key(run).items() if record.status == "ok"} == cells
    assert not workers()


def test_skipped_cells_say_why(measured: tuple[Store, Run, list[Event]]) -> None:
    skipped = [record for record in measured[1].records if record.status == "skipped"]
    assert {record.cell.engine for record in skipped} == {"torchao"}
    assert all(record.reason for record in skipped)


def test_clocks_rounds_and_percentiles_are_filled(measured: tuple[Store, Run, list[Event]]) -> None:
    for record in measured[1].records:
        if record.status != "ok":
            continue
        timing = record.timing
        assert len(timing.rounds) == 4
        assert all(len(one.samples_s) >= 3 for one in timing.rounds)
        assert timing.load_s and timing.compile_s and timing.warmup_s
        assert (timing.quantize_s is not None) == (record.cell.recipe == "sq-static")
        assert (timing.calibrate_s is not None) == (record.cell.recipe == "sq-static")
        assert timing.latency_s is not None and timing.throughput is not None
        sequences = Scenario.parse(record.cell.scenario).batch
        assert timing.throughput == pytest.approx(sequences / timing.latency_s.p50)
        assert timing.latency_s.p50 <= timing.latency_s.p90 <= timing.latency_s.p99


def test_compared_cells_take_turns_in_processes_of_their_own(measured: tuple[Store, Run, list[Event]]) -> None:
    for scenario in TINY_SCENARIOS:
        turns = sorted(
            (one.t0, record.cell.recipe, one.process)
            for record in measured[1].records
            if record.cell.scenario == scenario
            for one in record.timing.rounds
        )
        assert [recipe for _, recipe, _ in turns] == ["fp32", "sq-static", "sq-static", "fp32"] * 2
        assert len({process for _, _, process in turns}) == 2


def test_speedup_is_over_the_baseline_of_the_same_scenario(measured: tuple[Store, Run, list[Event]]) -> None:
    for record in measured[1].records:
        if record.status == "ok":
            assert record.speedup is not None and record.speedup.value > 0
            if record.cell.recipe == "fp32":
                assert record.speedup.value == 1.0


def test_a_pass_is_split_and_the_linears_have_a_speedup_of_their_own(measured: tuple[Store, Run, list[Event]]) -> None:
    for record in measured[1].records:
        if record.status != "ok":
            assert record.time_split_s is None and record.linear_speedup is None
            continue
        split = record.time_split_s
        assert split is not None
        assert split.linear > 0 and split.attention > 0 and split.other > 0
        assert record.linear_speedup is not None and record.linear_speedup.value > 0
        if record.cell.recipe == "fp32":
            assert record.linear_speedup.value == 1.0


def test_accuracy_is_judged_once_and_its_outputs_are_kept(measured: tuple[Store, Run, list[Event]]) -> None:
    store, run, _ = measured
    for record in run.records:
        if record.status != "ok":
            continue
        accuracy = record.accuracy
        assert accuracy is not None and accuracy.outputs is not None
        assert (accuracy.n, accuracy.scenario) == (64, "offline:b2:s16")
        outputs = store.outputs(accuracy.outputs)
        assert outputs["logits"].shape == (64, 2)
        assert (outputs["logits"].argmax(1) == outputs["labels"]).mean() == pytest.approx(accuracy.value)
        if record.cell.recipe == "fp32":
            assert accuracy.flips == 0


def test_evidence_proves_the_recipe_and_the_isa(measured: tuple[Store, Run, list[Event]]) -> None:
    for record in measured[1].records:
        if record.status == "ok":
            evidence = record.evidence
            expected = 12 if record.cell.recipe == "sq-static" else 0
            assert evidence.quantized_linears == evidence.fused_linears == expected
            assert evidence.isa_effective == record.cell.isa == NATIVE
            assert evidence.threads
            assert record.cell.family == "bert" and record.cell.weights == "synthetic"
            assert record.memory.peak_rss_bytes and record.memory.model_bytes and record.memory.linear_weight_bytes


def test_progress_never_runs_backwards_and_names_every_record(measured: tuple[Store, Run, list[Event]]) -> None:
    events = measured[2]
    assert all(a.done <= b.done <= b.total for a, b in itertools.pairwise(events))
    assert {event.cell for event in events if event.kind == "record"} == set(by_key(measured[1]))


def test_a_worker_that_dies_fails_its_own_cells_only(tmp_path: Path) -> None:
    def kill_one(event: Event) -> None:
        if event.kind == "phase" and event.message.endswith("sq-static/" + NATIVE + ": quantize"):
            newest = max(workers(), key=lambda child: child.create_time())
            os.kill(newest.pid, signal.SIGKILL)

    store = Store(tmp_path)
    profile = dataclasses.replace(TINY, scenarios=TINY.scenarios[:1], task=None)
    summary = runner.run(RunOptions(profile), store, kill_one)
    assert (summary.counts["ok"], summary.counts["failed"], summary.exit_code) == (1, 1, 2)
    run = store.load()
    failed = next(record for record in run.records if record.status == "failed")
    assert failed.cell.recipe == "sq-static"
    assert failed.reason is not None
    assert "SIGKILL" in failed.reason
    assert f"harness replay {failed.cell.key}" in failed.reason
    assert run.finished
    assert not workers()


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_interrupt_ends_the_workers_and_keeps_the_run_readable(tmp_path: Path, at_once: int) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "phase":
            assert workers()
            raise KeyboardInterrupt

    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runner.run(RunOptions(dataclasses.replace(TINY, prepare_at_once=at_once), run_id="stopped"), store, interrupt)
    assert not workers()
    run = store.load("stopped")
    assert not run.finished
    assert run.records == ()


def test_workers_can_be_made_ready_at_the_same_time_and_are_timed_in_turns(tmp_path: Path) -> None:
    events: list[Event] = []
    profile = dataclasses.replace(TINY, scenarios=TINY.scenarios[:1], prepare_at_once=2, limit=16)
    store = Store(tmp_path)
    assert runner.run(RunOptions(profile), store, events.append).counts["ok"] == 2
    told = [event.message.rsplit(": ", 1)[-1] for event in events if event.kind in ("worker", "phase")]
    assert told.index("start") < len(told) - 1 - told[::-1].index("start") < told.index("compile")
    records = store.load().records
    assert all(record.accuracy is not None and record.accuracy.n == 16 for record in records)
    turns = sorted((one.t0, one.process) for record in records for one in record.timing.rounds)
    processes = [process for _, process in turns]
    assert [processes[0], processes[3]] == [processes[3], processes[0]]  # A B B A
    assert processes[0] != processes[1] == processes[2]


def test_a_model_that_cannot_be_loaded_fails_all_its_cells_with_a_log(tmp_path: Path) -> None:
    store = Store(tmp_path)
    empty = tmp_path / "empty-model"
    empty.mkdir()
    options = RunOptions(TINY, Overrides(models=(str(empty),), recipes=("fp32",)))
    summary = runner.run(options, store)
    assert summary.counts == {"ok": 0, "failed": 2, "skipped": 0, "invalid": 0}
    reason = store.load().records[0].reason
    assert reason is not None and "config.json" in reason
    log = reason.rpartition("log: ")[2]
    assert "Traceback" in store.log(log)


@pytest.mark.slow
def test_chunks_keep_the_baseline_and_lose_no_cell(tmp_path: Path) -> None:
    recipes = ("fp32", "sq-static", "sq-dynamic", "dynamic")
    profile = dataclasses.replace(TINY, recipes={"int8": recipes}, scenarios=TINY.scenarios[:1], task=None)
    store = Store(tmp_path)
    most = 0

    def count(_: Event) -> None:
        nonlocal most
        most = max(most, len(workers()))

    summary = runner.run(RunOptions(profile, max_workers=2), store, count)
    assert summary.counts["ok"] == 4
    assert most == 2
    records = store.load().records
    assert [record.cell.recipe for record in records] == list(recipes)
    assert all(record.speedup is not None for record in records)
    assert all(record.time_split_s is None for record in records)  # not asked for


@pytest.mark.slow
def test_a_cell_is_replayed_by_its_name(tmp_path: Path) -> None:
    record = replay.replay(f"tiny-bert/int8/dynamic/{NATIVE}/single:s16")
    assert record.status == "ok"
    table = replay.profile(f"tiny-bert/int8/dynamic/{NATIVE}/single:s16", rows=10)
    assert "Self CPU" in table


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("tiny-bert/torchao/fp32/native/single:s16", "int8/fp32"),
        ("tiny-bert/int8/fp32", "is not a cell"),
        ("bert-large/int8/fp32/native/single:s16@squad", "squad cannot judge bert-large; name its checkpoint"),
    ],
)
def test_replay_refuses_what_is_not_measured(key: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replay.checked(key)


def test_replay_refuses_an_isa_that_the_host_lacks() -> None:
    lacking = [name for name in isa.NAMES if name not in isa.supported()]
    if not lacking:
        pytest.skip("this host has every ISA")
    with pytest.raises(UsageError, match=f"lacks ISA {lacking[0]}; it has"):
        replay.checked(f"tiny-bert/int8/fp32/{lacking[0]}/single:s16")


def test_an_unknown_model_is_refused_before_the_store_is_touched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean minilm"):
        runner.run(RunOptions(TINY, Overrides(models=("minilmm",))), Store(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


def cell(recipe: str, name: str, engine: str = "int8") -> Cell:
    return Cell("m", engine, recipe, name, "single:s8")


def evidence(name: str, amx: bool | None, quantized: int | None = 12, fused: int | None = 12) -> Evidence:
    return Evidence(12, quantized, fused, isa_effective=name, amx_permission=amx)


@pytest.mark.parametrize(
    ("what", "found", "says"),
    [
        (cell("sq-static", "vnni"), evidence("vnni", False), None),
        (cell("sq-static", "amx"), evidence("amx", True), None),
        (cell("fp32", "avx2"), evidence("avx2", None, 0, 0), None),
        (cell("sq-static", "vnni"), evidence("amx", False), "ran under ISA amx, not vnni"),
        (cell("fp32", "vnni"), evidence("vnni", True, 0, 0), "mask vnni is not proven"),
        (cell("sq-static", "amx"), evidence("amx", False), "never got Linux's permission"),
        (cell("sq-static", "amx"), evidence("amx", None), "never got Linux's permission"),
        (cell("sq-static", "vnni"), evidence("vnni", False, 12, 11), "only 11 of 12"),
        (cell("sq-static", "vnni"), evidence("vnni", False, 12, None), "only None of 12"),
        (cell("sq-static", "vnni"), evidence("vnni", False, 0, 0), "no linear was quantized"),
        (cell("sq-static", "vnni", "torchao"), evidence("vnni", False, 12, 11), None),
        (cell("sq-static", "vnni", "torchao"), evidence("vnni", False, 0, 0), "no linear was quantized"),
        (cell("fp32", "vnni"), evidence("vnni", False, 0, 0), None),
    ],
)
def test_a_label_that_is_not_what_ran_is_disproved(what: Cell, found: Evidence, says: str | None) -> None:
    reason = runner.disproof(what, found)
    assert reason is None if says is None else reason is not None and says in reason


def test_limits_of_judged_examples() -> None:
    profile = dataclasses.replace(TINY, limit=4000, float_limit=1000)

    def limit(recipe: str, name: str, asked: int | None = None) -> int | None:
        return runner._limit(cell(recipe, name), RunOptions(profile, Overrides(limit=asked)))

    assert limit("sq-static", "vnni") == 4000
    assert limit("fp32", "vnni") == 1000
    assert limit("bf16", "amx") == 1000
    assert limit("bf16", "vnni") == matrix.BRIEF_LIMIT
    assert limit("fp32", "vnni", 2000) == limit("sq-static", "vnni", 2000) == 2000
    assert limit("bf16", "vnni", 100) == matrix.BRIEF_LIMIT, "an emulated cell stays brief whatever was asked"
    assert limit("bf16", "vnni", 10) == 10


def test_accuracy_is_judged_in_the_first_offline_graph() -> None:
    scenarios = ("single:s8", "offline:b2:s8", "offline:b4:s8")
    cells = [dataclasses.replace(cell("fp32", "amx"), scenario=scenario) for scenario in scenarios]
    assert runner._judged_in(cells) == "offline:b2:s8"
    assert runner._judged_in(cells[:1]) == "single:s8"


def test_groups_hold_what_is_compared() -> None:
    planned = [
        PlannedCell(dataclasses.replace(cell("fp32", name), model=model))
        for model in ("a", "b")
        for name in ("amx", "vnni")
    ]
    planned.append(PlannedCell(cell("bf16", "amx"), "no"))
    assert [[c.model + c.isa for c in group] for group in runner._groups(planned)] == [
        ["aamx"],
        ["avnni"],
        ["bamx"],
        ["bvnni"],
    ]


def test_memory_bounds_how_many_workers_live() -> None:
    gib = 1 << 30
    need = runner.PROCESS_BYTES + runner.MODEL_COPIES * gib
    enough = int(need / runner.MEMORY_SHARE) + 1
    assert runner.memory_holds(gib, [], enough, None)
    assert not runner.memory_holds(gib, [], enough - gib, None)
    assert runner.memory_holds(gib, [gib], enough, enough + 2 * gib)
    assert not runner.memory_holds(gib, [gib, gib], enough, enough + gib)
