"""The registry: what is read out of a record, and how changes are measured."""

from __future__ import annotations

import dataclasses
import math

import judged
import pytest

from harness import metrics
from harness.records import Record, Timing


def test_names_are_unique_and_every_metric_reads_an_empty_record_as_none() -> None:
    assert len(metrics.METRICS) == len({metric.name for metric in metrics.METRICS.values()})
    empty = Record("r", None, "failed", "it broke", judged.cell())
    assert {metric.extract(empty) for metric in metrics.METRICS.values()} == {None}


def test_values_of_a_record() -> None:
    record = judged.record(time_s=0.1)
    read = {name: metric.extract(record) for name, metric in metrics.METRICS.items()}
    assert read["throughput"] == pytest.approx(80.0)
    assert read["seconds_per_sequence"] == pytest.approx(1 / 80)
    assert read["latency_p50"] == pytest.approx(0.1)
    assert read["speedup"] == 4.0
    assert read["accuracy_ratio"] == pytest.approx(0.731 / 0.732)
    assert read["accuracy_drop"] == pytest.approx(0.001)
    assert read["flips"] == 0.02
    assert read["model_bytes"] is None, "was not measured"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_none(bad: float) -> None:
    record = judged.record(timing=Timing(throughput=bad), accuracy=judged.accuracy(value=bad, flips=bad, delta=0.0))
    for name in ("throughput", "seconds_per_sequence", "accuracy", "accuracy_ratio", "accuracy_drop", "flips"):
        assert metrics.get(name).extract(record) is None, name


def test_throughput_of_zero_has_no_time() -> None:
    record = dataclasses.replace(judged.record(), timing=Timing(throughput=0.0))
    assert metrics.get("seconds_per_sequence").extract(record) is None


@pytest.mark.parametrize(
    ("name", "baseline", "value", "worse"),
    [
        ("seconds_per_sequence", 0.10, 0.12, 0.2),
        ("throughput", 100.0, 80.0, 0.2),
        ("throughput", 100.0, 120.0, -0.2),
        ("flips", 0.0, 0.02, 0.02),
        ("accuracy", 0.73, 0.70, 0.03),
    ],
)
def test_worsening_is_positive_when_it_got_worse(name: str, baseline: float, value: float, worse: float) -> None:
    assert metrics.get(name).worsening(baseline, value) == pytest.approx(worse)


def test_no_ratio_to_nothing() -> None:
    assert metrics.get("throughput").worsening(0.0, 1.0) is None


def test_headline_follows_the_scenario() -> None:
    assert metrics.headline("single:s128").name == "latency_p50"
    assert metrics.headline("offline:b8:s128").name == "seconds_per_sequence"
    assert metrics.headline("multi:2x1:b8:s128").name == "seconds_per_sequence"


def test_unknown_metric_lists_the_known() -> None:
    with pytest.raises(KeyError, match="latency_p50"):
        metrics.get("latency")


def test_kinds() -> None:
    assert [metric.name for metric in metrics.of_kind("memory")] == [
        "peak_rss_bytes",
        "model_bytes",
        "linear_weight_bytes",
    ]
