"""What stands on the overview, the frontier, the accuracy and the health page, as data."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest
from site_samples import HOSTILE, make_accuracy, make_header, make_record

from dashboards import accuracy, changes, feed, frontier, health, judging, overview
from dashboards.facts import Digest, digest, facts_of
from harness.records import Cell, Run

HEADER = make_header("run", 0.0)


def cell(recipe: str, engine: str = "int8", **rest) -> Cell:
    fields = {"isa": "amx", "scenario": "offline:b8:s128", "task": "reviews", "weights": "real", **rest}
    return Cell("m", engine, recipe, **fields)


def facts(one: Cell, seconds: float = 0.01, **rest):
    record = make_record("run", one, seconds, **rest)
    return facts_of(record, judging.trust(record, HEADER))


def digest_of(header, *records) -> Digest:
    return digest(Run(header, records, finished=True), judging.trust)


# --- overview


def panel_of(*found, header=HEADER, judgements=None, now=10.0):
    latest = {"host-a": {one.key: overview.Latest(header, one) for one in found}}
    (panel,) = overview.panels(latest, judgements or {}, now=now)
    return panel


def test_a_field_of_the_matrix_has_speed_and_accuracy_together() -> None:
    panel = panel_of(facts(cell("fp32"), 0.04), facts(cell("sq-static"), accuracy=make_accuracy(-0.002, 0.012)))
    baseline, ours = panel.matrices[0].rows[0].cells
    assert (baseline.state, baseline.headline) == ("baseline", "1.00×")
    assert (ours.state, ours.headline, ours.detail, ours.level) == ("pass", "4.00×", "3.90–4.10", 3)
    assert ours.accuracy.replace("\N{NO-BREAK SPACE}", " ") == "−0.20 pp, 1.2 % flips"
    assert panel.best is ours
    assert panel.peer is None


def test_a_field_whose_accuracy_fails_says_so_and_has_no_speed() -> None:
    bad = panel_of(facts(cell("sq-static"), accuracy=make_accuracy(-0.1, 0.2))).matrices[0].rows[0].cells[0]
    assert (bad.state, bad.headline, bad.bar) == ("fail", "withheld", None)
    assert bad.detail == "accuracy, its interval and flips fail"
    assert "4.00" not in bad.spoken


@pytest.mark.parametrize("status", ["failed", "skipped", "invalid"])
def test_a_field_that_was_not_measured_has_its_reason(status) -> None:
    found = facts(cell("sq-static"), status=status, reason="no compiler")
    assert panel_of(found).matrices[0].rows[0].cells[0].detail == "no compiler"


def test_the_peer_is_that_of_the_same_model_and_scenario() -> None:
    panel = panel_of(
        facts(cell("sq-static"), 0.01),
        facts(cell("sq-static", "torchao"), 0.02),
        facts(cell("sq-static", "openvino", scenario="single:s128"), 0.001),
        facts(cell("bf16"), 0.0001),
    )
    assert panel.best.facts.cell.engine == "int8"
    assert panel.peer.facts.cell.engine == "torchao"


def test_an_old_cell_is_kept_with_its_age_and_then_leaves() -> None:
    now = 20 * 86400.0
    fresh, old, gone = facts(cell("sq-static")), facts(cell("dynamic")), facts(cell("static"))
    latest = {
        fresh.key: overview.Latest(make_header("new", now), fresh),
        old.key: overview.Latest(make_header("old", now - 3 * 86400), old),
        gone.key: overview.Latest(make_header("gone", now - 15 * 86400), gone),
    }
    kept = overview.recent(latest)
    assert set(kept) == {fresh.key, old.key}
    (panel,) = overview.panels({"host-a": kept}, {}, now=now)
    ages = {one.facts.cell.recipe: one.age for one in panel.matrices[0].rows[0].cells}
    assert ages == {"sq-static": None, "dynamic": "3 days ago"}


def test_two_hosts_get_a_matrix_each() -> None:
    one = facts(cell("sq-static"))
    latest = {
        "host-a": {one.key: overview.Latest(HEADER, one)},
        "host-b": {one.key: overview.Latest(make_header("b", 0.0, host={"cpu_model": "B"}), one)},
    }
    (panel,) = overview.panels(latest, {}, now=0.0)
    assert [matrix.host for matrix in panel.matrices] == ["A CPU", "B"]


# --- changes


def test_changes_are_found_beyond_both_intervals_only() -> None:
    def run(name: str, seconds: float, **rest):
        return digest_of(make_header(name, 0.0), make_record(name, cell("sq-static"), seconds, **rest))

    slower = changes.compare("x", run("a", 0.010), run("b", 0.011))
    assert [(one.kind, one.what) for one in slower.changes] == [
        ("worse", "9.1 % slower (10.0 ms → 11.0 ms a batch)"),
    ]
    assert changes.compare("x", run("a", 0.010), run("b", 0.0101)).changes == ()
    broke = changes.compare("x", run("a", 0.01), run("b", 0.01, status="failed", reason="r"))
    assert [one.what for one in broke.changes] == ["ok → failed"]
    worse = changes.compare("x", run("a", 0.01), run("b", 0.01, accuracy=make_accuracy(-0.1)))
    assert [one.what for one in worse.changes] == ["accuracy verdict pass → fail"]


@pytest.mark.parametrize(
    ("hours", "baseline", "pinned", "expected"),
    [
        ([72, 48, 24, 0], None, [], [("Since yesterday", "run-2")]),
        ([72, 48, 24, 1, 0], None, [], [("Since yesterday", "run-2")]),
        ([200, 100, 0], None, [], [("Since the previous run", "run-1")]),
        ([72, 48, 24, 0], "run-0", ["run-1"], [
            ("Since yesterday", "run-2"), ("Since the pinned release", "run-1"), ("Since the baseline", "run-0"),
        ]),
        ([48, 24, 0], "run-1", ["run-0", "gone"], [
            ("Since yesterday, since the baseline", "run-1"), ("Since the pinned release", "run-0"),
        ]),
        ([0], "run-0", ["run-0"], []),
        ([], None, [], []),
    ],
)  # fmt: skip
def test_the_newest_run_is_compared_with_yesterday_and_the_pinned_release(hours, baseline, pinned, expected) -> None:
    headers = [make_header(f"run-{place}", -3600.0 * hour) for place, hour in enumerate(hours)]
    assert list(changes.earlier_runs(headers, baseline, pinned)) == expected


# --- frontier


def test_only_choices_that_nothing_beats_are_on_the_frontier() -> None:
    chart = frontier.chart(
        "m",
        "amx",
        "offline:b8:s128",
        [
            facts(cell("fp32"), 0.04, accuracy=make_accuracy(0.0, 0.0)),
            facts(cell("sq-static"), 0.005, accuracy=make_accuracy(-0.004)),
            facts(cell("sq-dynamic"), 0.01, accuracy=make_accuracy(-0.002)),
            facts(cell("dynamic"), 0.02, accuracy=make_accuracy(-0.003)),
            facts(cell("static"), 0.001, accuracy=make_accuracy(-0.2)),
            facts(cell("bf16"), status="failed", reason="it died"),
        ],
    )
    assert {dot.facts.cell.recipe for dot in chart.dots if dot.best} == {"fp32", "sq-static", "sq-dynamic"}
    assert {one.cell.recipe: why.split(":")[0] for one, why in chart.left_out} == {
        "static": "accuracy fails",
        "bf16": "failed",
    }
    fastest = next(dot for dot in chart.dots if dot.facts.cell.recipe == "sq-static")
    slowest = next(dot for dot in chart.dots if dot.facts.cell.recipe == "fp32")
    assert fastest.y < slowest.y, "up is faster"
    assert fastest.x > slowest.x, "right loses more accuracy"
    for dot in chart.dots:
        assert dot.y_high <= dot.y <= dot.y_low
        assert dot.x_low <= dot.x <= dot.x_high


def test_a_chart_of_nothing_is_none_and_one_of_one_cell_has_a_scale() -> None:
    assert frontier.chart("m", "amx", "s", [facts(cell("sq-static"), accuracy=make_accuracy(-0.5))]) is None
    alone = frontier.chart("m", "amx", "s", [facts(cell("sq-static"), accuracy=make_accuracy(0.0, 0.0))])
    assert len(alone.x_ticks) >= 2
    assert len(alone.y_ticks) >= 2


# --- accuracy


def test_flips_are_drawn_both_ways_on_one_scale() -> None:
    few = dataclasses.replace(make_accuracy(-0.004), flips_gained=2, flips_lost=6)
    many = dataclasses.replace(make_accuracy(-0.03), flips_gained=20, flips_lost=50)
    (group,) = accuracy.groups([facts(cell("sq-static"), accuracy=few), facts(cell("static"), accuracy=many)])
    rows = {row.facts.cell.recipe: row for row in group.rows}
    assert (rows["static"].lost, rows["static"].gained) == (50.0, 20.0)
    assert rows["sq-static"].lost == pytest.approx(6.0)
    assert rows["static"].at < rows["sq-static"].at < group.zero
    assert rows["static"].low < rows["static"].at < rows["static"].high


# --- health


def test_runs_that_are_ill_say_why() -> None:
    assert health.run_health(HEADER, "f", (), True, 0) is None
    assert health.run_health(HEADER, "f", (), False, 0).kind == "unfinished"
    assert health.run_health(HEADER, "f", ("line 3 is damaged",), True, 0).kind == "damaged"
    ill = health.run_health(make_header("x", 0.0, invalid_reason="load 3"), "f", (), True, 2)
    assert (ill.kind, ill.why) == ("invalid", ("load 3", "2 cells failed"))


# --- feed and badge


@pytest.mark.parametrize("word", HOSTILE)
def test_feed_and_badge_are_xml_whatever_they_are_told(word) -> None:
    word = word.encode("utf-8", "replace").decode()
    header = make_header("run-1", 0.0, commit=word)
    root = ET.fromstring(feed.atom([(header, "runs/x.html", word, word)], 0.0))
    (entry,) = root.findall("{http://www.w3.org/2005/Atom}entry")
    title = entry.find("{http://www.w3.org/2005/Atom}title").text
    assert title == feed.printable(word)
    badge = ET.fromstring(feed.badge(word, word))
    assert badge.get("aria-label") == f"INT8 gate: {feed.printable(word)}"
