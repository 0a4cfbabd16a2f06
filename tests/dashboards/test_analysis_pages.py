"""Pages of analyses: what fits is shown, what does not is said, and nothing is drawn from a part."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_samples import HOSTILE, NOW, make_accuracy, make_header, make_record, write_run

import dashboards
from dashboards import analyses, demo_extras, environments, examples, kernels, links, outliers, repository, rooflines
from dashboards.analyses import Analysis
from dashboards.facts import Trust, facts_of
from harness.records import Cell, Evidence, Store

HEADER = make_header("run", NOW - 60)


def written(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    demo_extras.write_analyses(store, HEADER)
    return store


# --- reading


def test_a_damaged_file_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    store = written(tmp_path)
    (tmp_path / "analyses" / "roofline-broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "analyses" / "roofline-list.json").write_text("[1]", encoding="utf-8")
    found, problems = analyses.read(store, "roofline")
    assert len(found) == 1
    assert [problem.split(" ")[0] for problem in problems] == [
        "analyses/roofline-broken.json",
        "analyses/roofline-list.json",
    ]
    assert analyses.read(Store(tmp_path / "none"), "roofline") == ((), ())


@pytest.mark.parametrize(
    ("data", "path", "value"),
    [
        ({"a": {"b": 2}}, ("a", "b"), 2.0),
        ({"a": [1, 2.5]}, ("a", 1), 2.5),
        ({"a": [1]}, ("a", 3), None),
        ({"a": True}, ("a",), None),
        ({"a": "12"}, ("a",), None),
        ({"a": float("inf")}, ("a",), None),
        ([], ("a",), None),
    ],
)
def test_a_number_is_found_or_missing(data: Any, path: tuple[Any, ...], value: float | None) -> None:
    assert analyses.number(data, *path) == value


# --- roofline


def test_products_lie_under_their_roofs_and_bars_end_before_their_ceiling(tmp_path: Path) -> None:
    found, _ = analyses.read(written(tmp_path), "roofline")
    amx, vnni = rooflines.sections(found)
    assert (amx.isa, vnni.isa) == ("amx", "vnni")
    assert amx.chart is not None
    for point in amx.chart.points:
        assert point.y is not None
        assert point.y >= point.roof_y, "down is slower"
        assert rooflines.LEFT <= point.x <= rooflines.WIDTH - rooflines.RIGHT
    for bar in amx.bars:
        assert sum(part.length for part in bar.parts) <= 100.0 + 1e-9
        if bar.limit is not None:
            assert bar.limit <= sum(part.length for part in bar.parts)
    assert {bar.recipe for bar in amx.bars if bar.ceiling} == {"bf16", "sq-static", "sq-dynamic"}


def test_speed_of_a_recipe_whose_accuracy_fails_is_on_no_roofline(tmp_path: Path) -> None:
    found, _ = analyses.read(written(tmp_path), "roofline")
    amx, _ = rooflines.sections(found, {("bert-large-4l", "sq-static", "amx")})
    (bar,) = [one for one in amx.bars if one.recipe == "sq-static"]
    assert (bar.parts, bar.speedup, bar.ceiling) == ((), None, None)
    assert "withheld" in bar.why
    assert amx.chart is not None
    assert "sq-static" not in {point.recipe for point in amx.chart.points}
    assert "sq-static" not in {recipe for recipe, _ in amx.rows}


@pytest.mark.parametrize("kind", ["roofline", "outliers", "selftest"])
def test_no_part_of_an_analysis_is_needed_and_none_is_trusted(tmp_path: Path, kind: str) -> None:
    """Each field in turn is gone, null, negative, a hostile text or a list; the site is built and does nothing."""
    store = Store(tmp_path / "results")
    write_run(store, HEADER, [make_record("run", Cell("m", "int8", "fp32", "amx", "single:s8", weights="synthetic"))])
    demo_extras.write_analyses(store, HEADER)
    (path,) = (store.root / "analyses").glob(f"{kind}-*.json")
    whole = json.loads(path.read_text(encoding="utf-8"))
    places = list(_places(whole))
    spoiled = [_GONE, None, -1, 0, 1e308, HOSTILE[0], [], {}]
    rng = np.random.default_rng(11)
    for number, value in enumerate(spoiled):
        data = json.loads(json.dumps(whole))
        for place in rng.choice(len(places), size=max(3, len(places) // 6), replace=False):
            _spoil(data, places[int(place)], value)
        (path.parent / f"{kind}-spoiled-{number}.json").write_text(json.dumps(data), encoding="utf-8")
    site = dashboards.build(store, tmp_path / "site", now=NOW).parent
    assert links.problems(site) == []
    name = {"selftest": "health"}.get(kind, kind)
    page = (site / f"{name}.html").read_text(encoding="utf-8")
    assert "<script>window" not in page
    assert not re.search(r'"[^"]*\bnan\b', page)


_GONE = object()


def _places(data: Any, path: tuple[Any, ...] = ()) -> Any:
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


def _spoil(data: Any, path: tuple[Any, ...], value: Any) -> None:
    try:
        for step in path[:-1]:
            data = data[step]
        if value is not _GONE:
            data[path[-1]] = copy.deepcopy(value)
        elif isinstance(data, dict):
            data.pop(path[-1], None)
    except (KeyError, IndexError, TypeError):  # an earlier turn has spoiled what led there
        return


# --- outliers


def test_magnitudes_get_levels_and_features_their_range(tmp_path: Path) -> None:
    found, _ = analyses.read(written(tmp_path), "outliers")
    (report,) = outliers.reports(found)
    assert report.summary.startswith("3 outlier features of 384: a magnitude of at least 6 in 25 % of 6 layers")
    assert report.features[0].bar is not None
    start, length, zero = report.features[0].bar
    assert start == 0.0 and zero == 50.0 and 50 < start + length < 60
    assert report.heat is not None
    first = report.heat.rows[0]
    assert first.before[0][0] == outliers.STEPS
    assert first.largest_after is not None and first.largest_before is not None
    assert first.largest_after < first.largest_before


# --- kernels


def facts(cell: Cell, **changes: Any) -> Any:
    return facts_of(make_record("run", cell, **changes), Trust("pass", ""))


def test_the_same_choice_of_two_cells_is_one_line_and_losers_have_their_times() -> None:
    item = {"m": 8, "n": 16, "k": 32, "epilogue": "bias", "out_dtype": "fp32", "kernel": "int8:vnni"}
    chosen = {**item, "times_s": {"onednn": 2e-5, "int8:vnni": 1e-5}}
    evidence = Evidence(4, 4, 4, {"int8:vnni": 3, "brg": 1}, "vnni", False, selection=(chosen, {"m": "many"}))
    cells = [Cell("m", "int8", recipe, "vnni", "offline:b8:s128") for recipe in ("sq-static", "static")]
    (panel,) = kernels.panels([facts(cell, evidence=evidence, accuracy=None) for cell in cells])
    (choice,) = panel.choices
    assert len(choice.cells) == 2
    assert [(one.name, one.chosen, one.behind) for one in choice.candidates] == [
        ("int8:vnni", True, 1.0),
        ("onednn", False, 2.0),
    ]
    assert choice.candidates[0].rate == pytest.approx(2 * 8 * 16 * 32 / 1e-5)
    assert [(ran.ours, ran.calls) for ran in panel.ran] == [(3, 4), (3, 4)]


# --- examples


def test_examples_are_told_in_words_and_a_part_of_them_is_nothing() -> None:
    arrays = demo_extras.examples(make_accuracy(flips=0.02), 3)
    told = examples.told(arrays, ("rotten", "fresh"))
    assert told is not None
    assert told.flips == 10
    assert told.unsure is not None and told.unsure > 0.5
    assert {one.fp32 for one in told.worst} <= {"rotten", "fresh"}
    assert told.worst[0].changed and told.worst[0].right in (True, False)
    assert examples.told({"logits": arrays["logits"]}) is None
    assert examples.told({**arrays, "worst_texts": arrays["worst_texts"][:1]}) is None


def test_a_missing_or_damaged_sidecar_is_no_picture(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = Cell("m", "int8", "sq-static", "amx", "s", task="reviews")
    accuracy = make_accuracy()
    assert examples.read(store, cell, accuracy) is None
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "x.npz").write_bytes(b"PK\x03\x04 no")
    assert examples.read(store, cell, dataclasses.replace(accuracy, outputs="outputs/x.npz")) is None
    assert examples.read(store, cell, dataclasses.replace(accuracy, outputs="../../etc/passwd")) is None


# --- environments and links to commits


def test_each_value_of_an_environment_is_written_once() -> None:
    headers = [make_header(f"r{n}", float(n), versions={"torch": "2" if n < 2 else "3"}) for n in range(4)]
    headers.append(make_header("r4", 4.0, versions={}))
    found = environments.script(headers)
    assert found["version: torch"] == {"values": ["2", "3"], "runs": [0, 0, 1, 1, -1]}
    assert found["host: cpu_model"]["runs"] == [0] * 5


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/a/b.git", "https://example.org/a/b"),
        ("https://user:secret@example.org/a/b\n", "https://example.org/a/b"),
        ("git@example.org:a/b.git", "https://example.org/a/b"),
        ("ssh://git@example.org:2222/a/b", "https://example.org/a/b"),
        ("/srv/git/b.git", None),
        ("javascript:alert(1)", None),
        ("", None),
    ],
)
def test_a_remote_has_a_web_address_without_its_secrets(remote: str, address: str | None) -> None:
    assert repository.web_address(remote) == address


def test_an_analysis_without_sections_is_an_empty_page() -> None:
    assert rooflines.sections([Analysis("x", {})]) == ()
