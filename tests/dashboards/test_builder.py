"""The site as files: complete, linked, small, replaced as a whole, and helpful where there is nothing to show."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from site_samples import NOW, PLAN, make_accuracy, make_header, make_record, write_run

import dashboards
from dashboards import links
from dashboards.builder import MARKER
from harness.errors import StoreError, UsageError
from harness.records import Cell, Store

CELL = Cell("m", "int8", "sq-static", "amx", "offline:b8:s128", task="reviews", weights="real")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_page_is_there_and_every_link_leads_somewhere(site: Path, store: Store) -> None:
    assert links.problems(site) == []
    for name in (
        "index",
        "frontier",
        "roofline",
        "outliers",
        "accuracy",
        "kernels",
        "health",
        "series/index",
        "runs/index",
    ):
        assert (site / f"{name}.html").is_file()
    assert len(list((site / "runs").glob("*.html"))) == PLAN.runs + 2, "a list, and a page that compares two"
    assert len(list((site / "series").glob("*.html"))) == PLAN.cells + 1
    assert len(list((site / "data" / "series").glob("*.csv"))) == PLAN.cells


def test_the_navigation_names_what_exists_only(site: Path, tmp_path: Path, store: Store) -> None:
    names = re.findall(r'<li><a href="([^"]+)"', text(site / "index.html"))
    assert names == [
        "index.html",
        "frontier.html",
        "roofline.html",
        "outliers.html",
        "accuracy.html",
        "kernels.html",
        "series/index.html",
        "runs/index.html",
        "health.html",
        "asv/index.html",
    ]
    assert (site / "asv" / "index.html").is_file(), "asv's own pages survive the swap"
    dashboards.build(Store(tmp_path / "none"), tmp_path / "bare", now=NOW)
    assert "asv/index.html" not in text(tmp_path / "bare" / "index.html")


def test_the_overview_is_small_and_needs_no_library(site: Path) -> None:
    page = text(site / "index.html")
    scripts = re.findall(r'<script src="([^"]+)"', page)
    assert scripts == ["static/theme.js", "static/site.js"]
    loaded = ["index.html", *scripts, "static/site.css", "static/fonts.css", "static/favicon.svg"]
    assert sum((site / name).stat().st_size for name in loaded) < 1_000_000
    assert (site / "static" / "plotly.min.js").stat().st_size > 1_000_000
    for path in site.rglob("*.html"):
        if "plotly" in text(path):
            assert path.parent.name == "series"


def test_the_overview_shows_the_gates_word_and_both_halves_of_a_cell(site: Path) -> None:
    page = text(site / "index.html")
    assert 'class="hero is-regression"' in page
    assert re.search(r"minilm/int8/sq-static/amx/offline:b8:s128@reviews: \d\.\d\d×, [^\"]*accuracy verdict pass", page)
    withheld = re.findall(r'aria-label="(minilm/torchao/sq-static/[^"]+)"', page)
    assert len(withheld) == 3, "offline and single on AMX, offline on VNNI"
    assert all("withheld" in one and "×" not in one for one in withheld)


def test_speed_of_a_cell_that_fails_is_on_no_page_and_in_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    header = make_header("run", NOW - 60)
    telltale = 0.0123456
    baseline = Cell("m", "int8", "fp32", "amx", "offline:b8:s128", weights="real")
    bad = make_record("run", CELL, telltale, accuracy=make_accuracy(-0.3, 0.4))
    write_run(store, header, [make_record("run", baseline, 0.04), bad])
    site = dashboards.build(store, tmp_path / "site", now=NOW).parent
    speed = [f"{8 / telltale:.4g}", f"{0.04 / telltale:.2f}×", "12.3 ms", "0.0123456"]
    for path in [*site.rglob("*.html"), *site.rglob("data/**/*"), site / "feed.atom"]:
        if path.is_file():
            for number in speed:
                assert number not in text(path), f"{number} in {path.name}"
    assert "withheld" in text(site / "index.html")


def test_failed_skipped_and_invalid_cells_have_their_reasons(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    cells = {status: Cell("m", "torchao", f"{status}-recipe", "amx", "single:s128") for status in ("failed", "skipped")}
    header = make_header("run", NOW - 60)
    records = [
        make_record("run", CELL),
        make_record("run", cells["failed"], status="failed", reason="ld returned 1"),
        make_record("run", cells["skipped"], status="skipped", reason="cannot be masked"),
    ]
    with store.create_run(header) as writer:
        for record in records:
            writer.append(record)
        writer.write_log(cells["failed"].key, "first line\nundefined symbol: foo")
        writer.finish(invalid_reason="load was 9 on 2 cores")
    site = dashboards.build(store, tmp_path / "site", now=NOW).parent
    assert "ld returned 1" in text(site / "index.html")
    assert "cannot be masked" in text(site / "index.html")
    page = text(site / "runs" / "run.html")
    for words in ("ld returned 1", "cannot be masked", "undefined symbol: foo", "load was 9 on 2 cores", "Invalid"):
        assert words in page
    assert "load was 9 on 2 cores" in text(site / "health.html")


def test_a_torn_record_file_is_reported_and_the_rest_is_shown(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    path = store.root / "runs" / "run.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: -(len(whole.splitlines()[-1]) + 20)])
    (store.root / "runs" / "headless.jsonl").write_bytes(b'{"head')
    site = dashboards.build(store, tmp_path / "site", now=NOW).parent
    assert "cut short" in text(site / "runs" / "run.html")
    assert "headless" in text(site / "index.html")
    assert links.problems(site) == []


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    index = dashboards.build(Store(tmp_path / "missing"), tmp_path / "site", now=NOW)
    assert "harness run --profile smoke" in text(index)
    assert links.problems(index.parent) == []
    ET.parse(index.parent / "feed.atom")


@pytest.mark.parametrize(("hours", "stale"), [(30, False), (40, True)])
def test_a_missed_night_is_announced(tmp_path: Path, hours: int, stale: bool) -> None:
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - hours * 3600), [make_record("run", CELL)])
    page = text(dashboards.build(store, tmp_path / "site", now=NOW))
    banner = re.search(r'<div class="notice stale"[^>]*>', page).group()
    assert ("hidden" not in banner) == stale
    assert f'data-stale-since="{NOW - hours * 3600}"' in banner, "the browser decides again, when it is looked at"


def test_a_build_that_fails_leaves_the_old_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    index = dashboards.build(store, tmp_path / "site", now=NOW)
    before = text(index)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dashboards.builder._write_others", full)
    with pytest.raises(StoreError, match="No space left on device"):
        dashboards.build(store, tmp_path / "site", now=NOW + 1)
    assert text(index) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "nothing is left beside it"


def test_a_rebuild_replaces_everything(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    site = dashboards.build(store, tmp_path / "site", now=NOW).parent
    (site / "runs" / "left-over.html").write_text("old", encoding="utf-8")
    dashboards.build(store, site, now=NOW)
    assert not (site / "runs" / "left-over.html").exists()
    assert (site / "runs" / "run.html").is_file()


def test_a_folder_that_is_no_site_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="something else than a site"):
        dashboards.build(Store(tmp_path / "none"), tmp_path / "home", now=NOW)
    assert (tmp_path / "home" / "thesis.tex").is_file()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="is a file"):
        dashboards.build(Store(tmp_path / "none"), tmp_path / "file", now=NOW)


def test_a_known_change_is_marked_in_the_series_that_it_names(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    other = Cell("m", "int8", "sq-dynamic", "amx", "offline:b8:s128", task="reviews", weights="real")
    for number in range(3):
        header = make_header(f"run-{number}", NOW - 86400 * (3 - number), commit=f"{number}" * 40)
        write_run(store, header, [make_record(header.run_id, one) for one in (CELL, other)])
    (tmp_path / "known_changes.toml").write_text(
        '[[change]]\nseries = "m/int8/sq-static/*"\ncommit = "1111111"\nreason = "exact <GELU>"\nwho = "A. Author"\n',
        encoding="utf-8",
    )
    site = dashboards.build(store, tmp_path / "site", now=NOW, root=tmp_path).parent
    marked = {path.stem[:16]: "exact &lt;GELU&gt;" in text(path) for path in (site / "series").glob("m-*.html")}
    assert marked == {"m-int8-sq-static": True, "m-int8-sq-dynami": False}


def test_the_handbook_is_linked_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "site" / "docs").mkdir(parents=True)
    (tmp_path / "site" / "docs" / "index.html").write_text("<!doctype html><title>docs</title>", encoding="utf-8")
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    page = dashboards.build(store, tmp_path / "site", now=NOW)
    assert '<a href="docs/index.html">Handbook</a>' in text(page)
    assert links.problems(page.parent) == []


def test_what_other_tools_read(site: Path) -> None:
    index = json.loads(text(site / "data" / "index.json"))
    assert len(index["runs"]) == PLAN.runs
    assert index["newest"][0]["verdict"] == "regression"
    for name in [*index["pages"], *(one["page"] for one in index["runs"]), *(one["csv"] for one in index["series"])]:
        assert (site / name).is_file()
    root = ET.parse(site / "feed.atom").getroot()
    entries = root.findall("{http://www.w3.org/2005/Atom}entry")
    assert len(entries) == PLAN.runs
    assert all((site / entry.find("{http://www.w3.org/2005/Atom}link").get("href")).is_file() for entry in entries)
    assert "regression" in ET.parse(site / "badge.svg").getroot().get("aria-label")


def test_generated_runs_are_labelled_on_every_page(site: Path, tmp_path: Path) -> None:
    for path in site.rglob("*.html"):
        if "asv" not in path.parts:
            assert "Generated data." in text(path)
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    assert "Generated data." not in text(dashboards.build(store, tmp_path / "site", now=NOW))


def test_hostile_words_stay_inside_the_site_and_inside_their_quotes(hostile_site: Path) -> None:
    assert links.problems(hostile_site) == []
    assert (hostile_site / MARKER).is_file()
    for path in hostile_site.rglob("*.html"):
        page = text(path)
        assert "<img src=x" not in page
        assert not re.search(r"<script(?! src=\"[^\"<>]+\"( defer)?></script>)", page)
        assert "javascript:" not in "".join(re.findall(r'(?:href|src)="([^"]*)"', page))
        assert "{{ 7*7 }}" in page or "49" not in re.findall(r"<h1[^>]*>(.*?)</h1>", page)[0]
    for path in hostile_site.rglob("data/**/*.js"):
        assert not re.search(r"[<>\u2028]", text(path))


def test_a_commit_links_to_the_repository_that_the_caller_names(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    write_run(store, make_header("run", NOW - 60), [make_record("run", CELL)])
    page = text(dashboards.build(store, tmp_path / "site", now=NOW, repository="https://example.org/x"))
    assert f'href="https://example.org/x/commit/{"c" * 40}"' in page


def test_several_processes_write_what_one_writes(
    store: Store, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboards.builder.WORTH_WORKERS", 2)
    monkeypatch.setattr("harness.fingerprint.usable_threads", lambda: 2)
    other = dashboards.build(store, tmp_path / "site", now=NOW).parent
    asv = '        <li><a href="{}asv/index.html">asv</a></li>\n'
    for name in ("index.html", *(f"runs/{path.name}" for path in (site / "runs").glob("*.html"))):
        without_asv = text(site / name).replace(asv.format("../" if "/" in name else ""), "")
        assert text(other / name) == without_asv
