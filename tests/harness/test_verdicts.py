"""The gate's rules (docs/gates.md), one damaged record at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from judged import accuracy, cell, record, run, timing

from harness import stats, verdicts
from harness.records import Accuracy, Evidence, Latency, Record, Round, Run, Speedup, Timing
from harness.verdicts import Baseline, Verdict


def codes(now: Run, baseline: Run | Baseline | None = None) -> int:
    return verdicts.exit_code(verdicts.judge(now, baseline), now)


def bad(now: Run, baseline: Run | Baseline | None = None) -> list[Verdict]:
    return [one for one in verdicts.judge(now, baseline) if not one.good]


def the(found: list[Verdict], metric: str) -> Verdict:
    matching = [one for one in found if one.metric == metric]
    assert len(matching) == 1, found
    return matching[0]


def evidence(**changes: Any) -> Evidence:
    return dataclasses.replace(record().evidence, **changes)


# --- a run that is in order -------------------------------------------------------------------------------------------


def test_everything_in_order_passes() -> None:
    now = run([record(), record(cell("sq-dynamic", "vnni")), record(cell("fp32"), accuracy=None)])
    assert codes(now) == 0
    assert bad(now) == []


def test_an_untouched_copy_passes_against_its_original() -> None:
    records = [record(), record(cell("sq-dynamic"))]
    now, before = run(records, "copy", started_at=2000.0), run(records, "original")
    assert codes(now, before) == 0
    speed = [one for one in verdicts.judge(now, before) if one.metric == "speed"]
    assert [one.value for one in speed] == [pytest.approx(1.0)] * 2
    assert {one.baseline_run for one in speed} == {"original"}


def test_without_a_baseline_speed_passes_and_says_so() -> None:
    speed = the(verdicts.judge(run([record()])), "speed")
    assert (speed.outcome, speed.reason, speed.value) == ("pass", "no baseline", None)


def test_a_new_cell_is_not_in_the_baseline() -> None:
    found = verdicts.judge(run([record(cell("sq-dynamic"))]), run([record(cell("fp32"), accuracy=None)], "before"))
    assert the(found, "speed").reason == "not in the baseline"
    assert the(found, "speed").outcome == "pass"


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_cell_20_percent_slower_is_a_regression_and_is_named() -> None:
    now = run([record(time_s=0.1 / 0.8), record(cell("sq-dynamic"))])
    before = run([record(), record(cell("sq-dynamic"))], "before")
    assert codes(now, before) == 1
    (found,) = bad(now, before)
    assert (found.cell_key, found.metric, found.outcome) == (cell().key, "speed", "regression")
    assert found.value == pytest.approx(0.8)
    assert found.limit == 0.9
    assert found.baseline == pytest.approx(0.1)
    assert found.interval is not None and found.interval[0] <= 0.8 <= found.interval[1]
    assert "80.0 %" in found.reason and "before" in found.reason and "rounds of one process" in found.reason
    assert found.command == f"harness replay {cell().key} --profile"


@pytest.mark.parametrize(
    ("speed", "outcome"), [(0.91, "pass"), (0.9, "pass"), (0.89, "regression"), (1.2, "improvement")]
)
def test_the_limit_of_speed(speed: float, outcome: str) -> None:
    found = the(verdicts.judge(run([record(time_s=0.1 / speed)]), run([record()], "before")), "speed")
    assert found.outcome == outcome


def test_an_improvement_passes() -> None:
    assert codes(run([record(time_s=0.05)]), run([record()], "before")) == 0


@pytest.mark.parametrize("which", ["rounds", "throughput", "latency"])
def test_the_worst_of_the_published_numbers_is_judged(which: str) -> None:
    usual, slow = timing(0.1), timing(0.125)
    field = {"rounds": "rounds", "throughput": "throughput", "latency": "latency_s"}[which]
    mixed = dataclasses.replace(usual, **{field: getattr(slow, field)})
    now, before = run([record(timing=mixed)]), run([record()], "before")
    assert codes(now, before) == 1
    assert the(bad(now, before), "speed").value == pytest.approx(0.8)


def test_an_interval_that_says_nothing_is_inconclusive_on_either_side_of_the_limit() -> None:
    wild = Timing(rounds=tuple(Round(float(i), 1, (t,)) for i, t in enumerate((0.05, 0.2, 0.06, 0.25, 0.1, 0.12))))
    for middle in (0.1, 0.125):
        now = run([record(timing=wild)])
        before = run([record(timing=timing(middle))], "before")
        assert codes(now, before) == 4
        assert the(bad(now, before), "speed").outcome == "inconclusive"


def test_a_wide_interval_that_excludes_no_change_is_conclusive() -> None:
    wild = Timing(rounds=tuple(Round(float(i), 1, (t,)) for i, t in enumerate((0.3, 0.9, 0.35, 0.8, 0.5, 0.6))))
    now, before = run([record(timing=wild)]), run([record()], "before")
    found = the(bad(now, before), "speed")
    assert found.interval is not None and found.interval[1] > 2 * found.interval[0]
    assert found.outcome == "regression"


def test_noise_of_a_few_percent_is_conclusive() -> None:
    now, before = run([record(timing=timing(0.13, noise=0.1))]), run([record(timing=timing(noise=0.1))], "before")
    assert codes(now, before) == 1
    assert codes(before, now) == 0


def test_a_single_round_is_judged_by_its_point() -> None:
    now, before = run([record(timing=timing(0.13, rounds=1))]), run([record(timing=timing(rounds=1))], "before")
    found = the(bad(now, before), "speed")
    assert found.outcome == "regression" and found.interval is None and "no interval" in found.reason


@pytest.mark.parametrize(
    "broken",
    [
        Timing(),
        Timing(rounds=(Round(0.0, 1, ()),)),
        Timing(rounds=(Round(0.0, 1, (0.1, math.nan)),)),
        dataclasses.replace(timing(), throughput=math.nan),
        dataclasses.replace(timing(), throughput=0.0),
        dataclasses.replace(timing(), latency_s=Latency(math.inf, 1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("with_baseline", [True, False])
def test_a_time_that_is_missing_or_no_number_has_failed(broken: Timing, with_baseline: bool) -> None:
    now = run([record(timing=broken), record(cell("sq-dynamic"))])
    before = run([record()], "before") if with_baseline else None
    assert codes(now, before) == 2
    assert the(bad(now, before), "speed").outcome == "failed"


def test_a_baseline_without_usable_time_is_no_baseline_for_the_cell() -> None:
    found = the(verdicts.judge(run([record()]), run([record(timing=Timing())], "before")), "speed")
    assert found.outcome == "pass" and "not in the baseline" in found.reason


# --- accuracy ---------------------------------------------------------------------------------------------------------


def test_damaged_accuracy_is_a_regression() -> None:
    now = run([record(accuracy=accuracy(0.70, flips=0.08))])
    assert codes(now, run([record()], "before")) == 1
    assert {one.metric for one in bad(now)} == {"accuracy", "noninferiority", "flips"}
    found = the(bad(now), "accuracy")
    assert (found.value, found.baseline) == (pytest.approx(0.70), 0.732)
    assert found.limit == pytest.approx(0.99 * 0.732)
    assert found.command == f"harness replay {cell().key}"


@pytest.mark.parametrize(("value", "code"), [(0.99 * 0.732, 0), (0.99 * 0.732 - 1e-6, 1), (0.75, 0)])
def test_the_limit_of_accuracy(value: float, code: int) -> None:
    assert codes(run([record(accuracy=accuracy(value))])) == code


@pytest.mark.parametrize(("flips", "code"), [(0.03, 0), (0.0301, 1), (0.0, 0), (1.0, 1)])
def test_the_limit_of_flips(flips: float, code: int) -> None:
    assert codes(run([record(accuracy=accuracy(flips=flips))])) == code


def test_a_contradiction_cannot_hide_a_loss() -> None:
    assert codes(run([record(accuracy=accuracy(delta=-0.05))])) == 1


@pytest.mark.parametrize("name", ["value", "fp32_value", "chance", "delta", "flips"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_an_accuracy_that_is_no_number_has_failed(name: str, broken: float) -> None:
    damaged = dataclasses.replace(accuracy(), **{name: broken})
    assert codes(run([record(accuracy=damaged)])) == 2


@pytest.mark.parametrize(
    "damaged", [accuracy(n=0), accuracy(fp32=0.0, delta=0.0), accuracy(flips=1.5), accuracy(flips=-0.1)]
)
def test_an_accuracy_that_cannot_be_has_failed(damaged: Accuracy) -> None:
    assert codes(run([record(accuracy=damaged)])) == 2


def test_a_quantized_cell_that_names_a_task_and_has_no_accuracy_has_failed() -> None:
    now = run([record(accuracy=None)])
    assert codes(now) == 2
    assert "reviews" in the(bad(now), "accuracy").reason


def test_a_float_cell_needs_no_accuracy_but_its_accuracy_counts() -> None:
    now = run([record(cell("bf16"), accuracy=None)], gated=("bf16",))
    assert codes(now) == 0
    assert codes(run([record(cell("bf16"), accuracy=accuracy(0.6, flips=0.2))], gated=("bf16",))) == 1


def test_a_cell_without_a_task_is_judged_on_speed_alone() -> None:
    synthetic = record(cell(task=None, weights="synthetic", model="bert-large"))
    assert codes(run([synthetic])) == 0
    assert all(one.metric != "accuracy" for one in verdicts.judge(run([synthetic])))


def test_a_cell_at_chance_is_said_apart_from_a_regression() -> None:
    now = run([record(accuracy=accuracy(0.585, flips=0.4))])
    assert codes(now) == 1
    found = the(bad(now), "chance")
    assert found.outcome == "regression" and "chance" in found.reason
    assert all(one.metric != "chance" for one in bad(run([record(accuracy=accuracy(0.70))])))


def test_fp32_at_chance_makes_the_comparison_void() -> None:
    now = run([record(accuracy=accuracy(0.58, fp32=0.58))])
    assert codes(now) == 2
    assert "label order" in the(bad(now), "chance").reason


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fused_linears": 35}, "35 of 36"),
        ({"fused_linears": 0}, "0 of 36"),
        ({"fused_linears": None}, "not recorded"),
        ({"quantized_linears": 0, "fused_linears": 0}, "no linear was quantized"),
        ({"quantized_linears": None}, "not recorded"),
        ({"isa_effective": "vnni"}, "ran on ISA vnni"),
        ({"isa_effective": None}, "unknown"),
        ({"amx_permission": False}, "no AMX permission"),
        ({"amx_permission": None}, "not recorded"),
        ({"kernels": {"ref_int8:any": 3}}, "ref_int8:any"),
    ],
)
def test_evidence_against_the_label_fails_the_cell(changes: dict[str, Any], words: str) -> None:
    now = run([record(evidence=evidence(**changes))])
    assert codes(now) == 2
    assert words in the(bad(now), "evidence").reason


@pytest.mark.parametrize("isa", ["vnni", "avx512", "avx2"])
def test_amx_permission_under_another_isa_fails_the_cell(isa: str) -> None:
    masked = record(cell(isa=isa))
    assert codes(run([masked])) == 0
    leaky = dataclasses.replace(masked, evidence=dataclasses.replace(masked.evidence, amx_permission=True))
    now = run([leaky])
    assert codes(now) == 2
    assert "mask did not hold" in the(bad(now), "evidence").reason


def test_other_engines_fail_on_a_contradiction_only() -> None:
    silent = record(cell(engine="torchao"), evidence=Evidence())
    assert bad(run([record(), silent])) == []
    found = bad(run([record(), record(cell(engine="torchao"), evidence=Evidence(isa_effective="avx2"))]))
    assert [(one.metric, one.outcome, one.gated) for one in found] == [("evidence", "failed", False)]


def test_float_cells_prove_their_isa_but_have_nothing_to_fuse() -> None:
    plain = record(cell("fp32", "vnni"), accuracy=None)
    assert codes(run([plain], gated=("fp32",))) == 0
    leaky = dataclasses.replace(plain, evidence=dataclasses.replace(plain.evidence, amx_permission=True))
    assert codes(run([leaky], gated=("fp32",))) == 2


def test_a_reference_copy_is_no_reference_product() -> None:
    assert codes(run([record(evidence=evidence(kernels={"ref:any": 2, "brg_matmul:avx512_core_vnni": 36}))])) == 0


# --- what decides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [cell(engine="torchao"), cell("static"), cell("bf16")])
def test_cells_that_are_not_gated_are_judged_and_decide_nothing(where: Any) -> None:
    slow = record(where, time_s=0.2, accuracy=accuracy(0.6, flips=0.3))
    now, before = run([record(), slow]), run([record(), record(where)], "before")
    assert codes(now, before) == 0
    found = bad(now, before)
    assert {"speed", "accuracy", "flips"} <= {one.metric for one in found}
    assert {one.gated for one in found} == {False}


def broken(status: str, **other: Any) -> Record:
    return record(status=status, reason="it broke", timing=Timing(), accuracy=None, evidence=Evidence(), **other)


def test_a_failed_cell_exits_2_and_names_the_command() -> None:
    now = run([broken("failed"), record(cell("sq-dynamic"))])
    assert codes(now) == 2
    found = the(bad(now), "status")
    assert (found.reason, found.command) == ("it broke", f"harness replay {cell().key}")


def test_an_invalid_cell_exits_3_and_a_skipped_one_is_not_judged() -> None:
    good = record(cell("sq-dynamic"))
    assert codes(run([broken("invalid"), good])) == 3
    skipped = run([broken("skipped"), good])
    assert codes(skipped) == 0
    assert all(one.cell_key != cell().key for one in verdicts.judge(skipped))


def test_an_invalid_host_comes_first_and_speed_is_not_judged() -> None:
    now = run([record(time_s=0.5), broken("failed", where=cell("sq-dynamic"))], invalid_reason="load 7.2 on 2 cores")
    before = run([record()], "before")
    assert codes(now, before) == 3
    assert the(bad(now, before), "speed").outcome == "invalid"
    assert "load 7.2" in the(bad(now, before), "host").reason


def test_of_several_outcomes_the_first_named_wins() -> None:
    def verdict(outcome: Any, gated: bool = True) -> Verdict:
        return Verdict("c", "speed", outcome, gated)

    kinds = ("inconclusive", "regression", "failed", "invalid")
    for count, code in enumerate((4, 1, 2, 3), start=1):
        assert verdicts.exit_code([verdict(kind) for kind in kinds[:count]]) == code
    assert verdicts.exit_code([verdict(kind, gated=False) for kind in kinds]) == 0
    assert verdicts.exit_code([verdict("improvement"), verdict("pass")]) == 0


@pytest.mark.parametrize(
    "now",
    [
        run([]),
        run([record(status="skipped", reason="no AMX here")]),
        run([record(), record(cell("sq-dynamic"))], finished=False),
        dataclasses.replace(run([record()]), problems=("run now: line 3 is damaged",)),
    ],
)
def test_a_run_with_holes_is_no_pass(now: Run) -> None:
    assert codes(now) == 2
    assert verdicts.exit_code([], now) == 2, "even if nobody passes the verdicts on the run"
    assert verdicts.WHOLE_RUN in {one.cell_key for one in bad(now)}


def test_a_run_without_gated_cells_decides_nothing() -> None:
    assert (
        codes(run([record(cell(engine="torchao"), time_s=9.0)]), run([record(cell(engine="torchao"))], "before")) == 0
    )


def test_the_last_record_of_a_cell_counts() -> None:
    assert codes(run([broken("failed"), record()])) == 0
    assert codes(run([record(), broken("failed")])) == 2


# --- cells that are gone ----------------------------------------------------------------------------------------------

FULL = [record(), record(cell("sq-dynamic")), record(cell(isa="vnni")), record(cell("fp32"), accuracy=None)]


def gone(now: Run, before: Run) -> list[str]:
    return [one.cell_key for one in verdicts.judge(now, before) if "missing" in one.reason]


def test_a_gated_cell_that_vanished_from_the_same_profile_has_failed() -> None:
    before = run(FULL, "before")
    now = run([one for one in FULL if one.cell.recipe != "sq-dynamic"])
    assert gone(now, before) == [cell("sq-dynamic").key]
    assert codes(now, before) == 2


def test_a_cell_that_is_not_gated_may_vanish() -> None:
    assert gone(run(FULL[:3]), run(FULL, "before")) == []


@pytest.mark.parametrize(
    "arguments", [("run", "--profile", "quick", "--recipes", "sq-static"), ("run", "--recipes=sq-static")]
)
def test_a_narrower_run_is_legitimate(arguments: tuple[str, ...]) -> None:
    now = run([record(), record(cell(isa="vnni"))], arguments=arguments)
    assert gone(now, run(FULL, "before")) == []
    assert codes(now, run(FULL, "before")) == 0


def test_a_narrower_run_that_lost_what_it_was_asked_for_has_failed() -> None:
    now = run([record()], arguments=("run", "--recipes", "sq-static"))
    assert gone(now, run(FULL, "before")) == [cell(isa="vnni").key]


def test_another_profile_is_held_against_the_values_that_it_shows() -> None:
    now = run([record(), record(cell("sq-dynamic", "vnni"))], profile="smoke", arguments=("run", "--profile", "smoke"))
    assert gone(now, run(FULL, "before")) == [cell("sq-dynamic").key, cell(isa="vnni").key]
    assert gone(run([record()], profile="smoke"), run(FULL, "before")) == []


def test_a_baseline_that_asked_for_more_demands_nothing() -> None:
    extra = record(cell(model="another"))
    before = run([*FULL, extra], "before", arguments=("run", "--profile", "quick", "--models", "minilm,another"))
    assert gone(run(FULL), before) == []


def test_a_shard_is_held_against_the_same_shard_only() -> None:
    one, other = (("run", "--profile", "quick", "--shard", shard) for shard in ("1/2", "2/2"))
    assert gone(run(FULL[:1], arguments=one), run(FULL, "before")) == []
    assert gone(run(FULL[:1], arguments=one), run(FULL, "before", arguments=other)) == []
    assert len(gone(run(FULL[:1], arguments=one), run(FULL, "before", arguments=one))) == 2


def test_native_means_the_isas_that_were_measured() -> None:
    now = run([record(), record(cell("sq-dynamic"))], arguments=("run", "--profile", "quick", "--isa", "native"))
    assert gone(now, run(FULL, "before")) == []


def test_synthetic_cells_are_asked_for_whatever_the_task() -> None:
    shape = record(cell(model="bert-large", task=None, weights="synthetic"))
    now = run(FULL, arguments=("run", "--profile", "quick", "--task", "reviews"))
    assert gone(now, run([*FULL, shape], "before")) == [shape.cell.key]


def test_a_cell_that_was_measured_and_is_now_skipped_has_failed() -> None:
    now = run([broken("skipped"), *FULL[1:]])
    assert codes(now, run(FULL, "before")) == 2
    assert "now skipped" in the(bad(now, run(FULL, "before")), "status").reason


# --- baselines, commands, publication ---------------------------------------------------------------------------------


def test_a_baseline_holds_measured_cells_of_valid_runs_the_first_given_first() -> None:
    new, old = run([record(), broken("failed", where=cell("sq-dynamic"))], "new"), run(FULL, "old")
    held = Baseline.of(new, old).records
    assert held[cell().key].run_id == "new"
    assert held[cell("sq-dynamic").key].run_id == "old"
    assert Baseline.of(run(FULL, "bad", invalid_reason="load")).records == {}


def test_commands_reproduce_profile_and_accept() -> None:
    slow = the(bad(run([record(time_s=0.2)]), run([record()], "before")), "speed")
    assert verdicts.commands(slow, "now") == (
        ("reproduce", "harness replay minilm/int8/sq-static/amx/offline:b8:s128@reviews"),
        ("profile", "harness replay minilm/int8/sq-static/amx/offline:b8:s128@reviews --profile"),
        ("accept", "harness accept now"),
    )
    worse = the(bad(run([record(accuracy=accuracy(0.6))])), "accuracy")
    assert [purpose for purpose, _ in verdicts.commands(worse, "now")] == ["reproduce"], "accuracy cannot be accepted"
    unfinished = the(bad(run([record()], finished=False)), "complete")
    assert verdicts.commands(unfinished, "now") == (("repeat", "harness run --profile quick"),)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ((), "harness run"),
        (("run", "--run-id", "x", "--isa", "amx"), "harness run --isa amx"),
        (("run", "--run-id=x", "--results", "my results"), "harness run --results 'my results'"),
    ],
)
def test_a_run_is_repeated_without_its_id(arguments: tuple[str, ...], command: str) -> None:
    assert verdicts.repeat_command(arguments) == command


def published(one: Record) -> Speedup | None:
    return verdicts.published_speedup(one, verdicts.judge(run([one])))


def test_speed_without_accuracy_is_not_published() -> None:
    assert published(record()) == Speedup(4.0, (3.9, 4.1))
    unpublished = [
        record(accuracy=accuracy(0.70)),
        record(accuracy=accuracy(flips=0.1)),
        record(accuracy=None),
        record(cell(task=None), accuracy=None),
        record(evidence=evidence(fused_linears=3)),
        broken("failed", speedup=Speedup(4.0)),
        record(cell(engine="torchao"), accuracy=accuracy(0.70)),
    ]
    assert [published(one) for one in unpublished] == [None] * len(unpublished)


def test_float_recipes_and_synthetic_shapes_show_their_speed() -> None:
    assert published(record(cell("bf16"), accuracy=None)) is not None
    assert published(record(cell(task=None, weights="synthetic"))) is not None


def test_a_slower_cell_still_shows_its_speed_up() -> None:
    slow, before = record(time_s=0.2), run([record()], "before")
    assert verdicts.published_speedup(slow, verdicts.judge(run([slow]), before)) is not None


def test_verdicts_are_the_same_each_time() -> None:
    now, before = run([record(time_s=0.104)]), run([record()], "before")
    assert verdicts.judge(now, before) == verdicts.judge(now, before)


# --- whole intervals against a margin ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((-0.004, 0.002), "pass"),
        ((-0.012, -0.002), "inconclusive"),
        ((-0.03, -0.011), "regression"),
        ((0.02, 0.03), "pass"),
        ((math.nan, 0.0), "failed"),
    ],
)
def test_noninferiority_needs_the_whole_interval(interval: tuple[float, float], outcome: str) -> None:
    assert verdicts.noninferiority(interval, 0.01) == outcome


@pytest.mark.parametrize(
    ("interval", "floor", "outcome"),
    [
        ((0.90, 0.94), 0.0, "regression"),
        ((0.90, 0.94), 0.08, "inconclusive"),
        ((0.90, 0.96), 0.0, "inconclusive"),
        ((0.96, 1.02), 0.0, "pass"),
        ((1.06, 1.10), 0.0, "improvement"),
        (None, 0.0, "inconclusive"),
    ],
)
def test_speed_regresses_only_beyond_margin_and_noise(interval: Any, floor: float, outcome: str) -> None:
    ratio = stats.Ratio(1.0, interval, "process", 8)
    assert verdicts.speed_beyond_margin(ratio, 0.05, floor) == outcome


# --- what else is asked of accuracy -----------------------------------------------------------------------------------


def test_the_strict_floor_is_a_tenth_of_the_loss() -> None:
    narrow = {"delta_ci95": (-0.0011, -0.0009)}
    now = run([record(accuracy=accuracy(0.731, 0.732, **narrow))])
    assert codes(now, None) == 0
    assert verdicts.exit_code(verdicts.judge(now, None, verdicts.STRICT), now) == 1


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [((-0.004, 0.002), "pass"), ((-0.03, 0.02), "inconclusive"), ((-0.05, -0.02), "regression")],
)
def test_the_interval_must_exclude_a_loss_of_twice_the_floors(interval: tuple[float, float], outcome: str) -> None:
    found = verdicts.judge(run([record(accuracy=accuracy(delta_ci95=interval))]))
    (one,) = [each for each in found if each.metric == "noninferiority"]
    assert one.outcome == outcome and one.limit == pytest.approx(-0.02 * 0.732)


def test_mcnemars_test_is_reported_beside_accuracy() -> None:
    found = verdicts.judge(run([record(accuracy=accuracy(flips_gained=5, flips_lost=5))]))
    (one,) = [each for each in found if each.metric == "accuracy"]
    assert "McNemar p 1 (5 gained, 5 lost)" in one.reason


def test_a_model_that_fails_in_one_scenario_shows_no_speed_up_in_any() -> None:
    good, bad, other = cell(), cell(scenario="single:s128"), cell("sq-dynamic")
    now = run([record(good), record(bad, accuracy=accuracy(0.6)), record(other)])
    shown = verdicts.published(now, verdicts.judge(now))
    assert [one.speedup is None for one in shown] == [True, True, False]
