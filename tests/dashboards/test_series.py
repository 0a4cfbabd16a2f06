"""Series: their columns, their noise, their files."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
from site_samples import make_accuracy, make_header, make_record

from dashboards import judging, series
from dashboards.facts import facts_of
from harness.records import Cell

CELL = Cell("m", "int8", "sq-static", "amx", "offline:b8:s128", task="reviews", weights="real")


def history(*changes: dict) -> tuple[series.Series, list]:
    made = series.Series(CELL, CELL.key)
    headers = []
    for number, change in enumerate(changes):
        header = make_header(f"run-{number}", 86400.0 * number)
        record = make_record(header.run_id, CELL, **change)
        headers.append(header)
        made.add(number, facts_of(record, judging.trust(record, header)))
    return made, headers


def test_points_keep_their_numbers_and_gaps_their_reasons() -> None:
    made, headers = history(
        {"seconds": 0.01}, {"status": "failed", "reason": "it died"}, {"accuracy": make_accuracy(delta=-0.2)}
    )
    assert made.at("p50_s", 0) == 0.01
    assert [made.at("throughput", 1), made.at("throughput", 2)] == [None, None]
    assert made.at("delta", 2) == -0.2
    assert made.reasons[1] == "it died"
    assert "is needed" in made.withheld()
    data = series.script_data(made, series.rounded(made))
    assert (data["status"], data["verdict"]) == ("ofo", "pux")
    assert data["columns"]["throughput"][1:] == [None, None]
    assert "compile_s" not in data["columns"]
    rows = list(csv.DictReader(io.StringIO(series.series_csv(made, series.rounded(made), headers))))
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert [row["throughput"] for row in rows] == ["800", "", ""]
    assert [row["accuracy_verdict"] for row in rows] == ["pass", "unjudged", "fail"]


def test_noise_is_found_and_a_step_is_not_noise() -> None:
    rng = np.random.default_rng(1)
    quiet = 100 * np.exp(rng.normal(0, 0.01, 400))
    assert series.noise(quiet) == pytest.approx(0.01, rel=0.15)
    stepped = np.concatenate([quiet[:200], 0.7 * quiet[200:]])
    assert series.noise(stepped) == pytest.approx(series.noise(quiet), rel=0.05)
    assert series.noise([1.0] * 5) is None


def test_sparkline_breaks_where_nothing_was_measured() -> None:
    path = series.sparkline([1.0, 2.0, None, 3.0])
    assert path.count("M") == 2
    assert series.sparkline([None, 1.0]) == ""
    assert "nan" not in series.sparkline([0.0, 0.0, 0.0])


def test_runs_name_each_set_of_versions_once() -> None:
    headers = [make_header(f"r{n}", float(n), versions={"torch": "2" if n < 2 else "3"}) for n in range(4)]
    found = series.runs_script(headers, ["f"] * 4)
    assert found["versions"] == [0, 0, 1, 1]
    assert found["version_sets"] == [{"torch": "2"}, {"torch": "3"}]
    assert found["hosts"] == [{"fingerprint": "host-a", "title": "A CPU"}]


def test_numbers_are_short_and_never_nan() -> None:
    assert series._rounded(math.nan) is None
    assert series._rounded(1234.56789) == 1234.57
    assert series._rounded(800.0) == 800
