"""How numbers read."""

from __future__ import annotations

import math

import pytest

from dashboards import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0"),
        (0.012345, "0.0123"),
        (4.567, "4.57"),
        (1239.6, "1,240"),
        (-3.14159, "−3.14"),
        (99.96, "100.0"),
    ],
)
def test_significant(value, text) -> None:
    assert wording.significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (-1.0, "–"),
        (8.12e-4, "812 µs"),
        (0.0417, "41.7 ms"),
        (3.2, "3.20 s"),
        (125, "2 min 5 s"),
        (7300, "2 h 1 min"),
    ],
)
def test_duration(seconds, text) -> None:
    assert wording.duration(seconds) == text


def test_signs_and_units() -> None:
    assert wording.points(-0.0035) == "−0.35 pp"
    assert wording.points(0.001) == "+0.10 pp"
    assert wording.percent(0.0123) == "1.2 %"
    assert wording.ratio(0.873) == "0.87×"
    assert wording.ratio(12.44) == "12.4×"
    assert wording.ratio_interval((3.306, 3.524)) == "3.31–3.52"
    assert wording.size(90_900_000) == "86.7 MiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "just now"), (600, "10 minutes ago"), (3600 * 5, "5 hours ago"), (86400 * 3, "3 days ago")],
)
def test_age(seconds, text) -> None:
    assert wording.age(seconds) == text


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e30, -1e30])
def test_a_time_that_no_calendar_has_spoils_nothing(seconds) -> None:
    assert wording.date(seconds) == "1970-01-01 00:00 UTC"


def test_scenarios_in_words() -> None:
    assert wording.scenario_title("offline:b8:s128") == ("Throughput", "batch 8, 128 tokens")
    assert wording.scenario_title("single:s128") == ("Latency, batch 1", "128 tokens")
    assert wording.scenario_title("multi:2x1:b8:s128") == ("Instances", "2 × 1 threads, batch 8, 128 tokens")
    assert wording.scenario_title("<odd>") == ("<odd>", "")
