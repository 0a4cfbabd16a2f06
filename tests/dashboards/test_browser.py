"""The site in headless Chromium, from disk: charts draw, tabs and filters work, nothing is asked of another host."""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import screenshots
from dashboards.browser import Browser, Page, find

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="no chromium on this machine (Debian's package chromium)"),
]


#: True in a series page when every chart is there.
DRAWN = "((all) => all.length && all.every(p => p.layout && p.querySelector('.main-svg')))"
DRAWN += "([...document.querySelectorAll('.plot')])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.page() as made:
        made.look(1280, 900, "light")
        yield made


def address(path: Path) -> str:
    return path.resolve().as_uri()


def series_page(site: Path) -> Path:
    return next((site / "series").glob("minilm-int8-sq-static-amx-offline*.html"))


def test_no_page_has_an_error_or_asks_another_host(site: Path, page: Page) -> None:
    for _, name in screenshots.pages(site):
        page.open(address(site / name))
        foreign = [one for one in page.requests if not one.startswith(("file://", "data:", "blob:"))]
        assert (name, page.errors, foreign) == (name, [], [])


def test_charts_draw_and_zoom_together(site: Path, page: Page) -> None:
    page.open(address(series_page(site)))
    page.wait_for(DRAWN)
    drawn = page.run(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.scatterlayer .trace').length)"
    )
    assert len(drawn) == 5
    assert min(drawn) >= 1
    box = page.run("(() => { const b = document.querySelector('.plot .bg').getBBox(); return [b.width, b.height]; })()")
    assert min(box) > 100
    page.run("document.querySelector('[data-days=\"30\"]').click()")
    page.wait_for("[...document.querySelectorAll('.plot')].every(p => p.layout.xaxis.autorange === false)")
    ranges = page.run("[...document.querySelectorAll('.plot')].map(p => p.layout.xaxis.range.join())")
    assert len(set(ranges)) == 1
    assert page.errors == []


def test_a_click_on_a_point_leads_to_its_run(site: Path, page: Page) -> None:
    page.open(address(series_page(site)))
    page.wait_for(DRAWN)
    files = page.run("document.querySelector('.plot').data.flatMap(t => t.customdata || [])")
    assert files
    for name in files:
        assert (site / name).is_file()


def test_tabs_switch_by_click_by_key_and_by_address(site: Path, page: Page) -> None:
    page.open(address(site / "index.html"))
    shown = "[...document.querySelectorAll('[role=tabpanel]')].filter(p => !p.hidden).map(p => p.id).join()"
    assert page.run(shown) == "isa-0"
    page.run("document.getElementById('tab-isa-1').click()")
    assert page.run(shown) == "isa-1"
    page.run("document.getElementById('tab-isa-1').focus()")
    page.press("ArrowRight")
    assert page.run(shown) == "isa-0"
    assert page.run("document.activeElement.id") == "tab-isa-0"
    assert page.run("location.hash") == "#isa-0", "what is shown can be passed on"
    page.open(address(site / "index.html") + "#isa-1")
    page.wait_for(f"{shown} === 'isa-1'")


def test_filters_filter(site: Path, page: Page) -> None:
    page.open(address(site / "index.html"))
    rows = "[...document.querySelectorAll('#isa-0 tr[data-words]')].filter(r => r.offsetParent).length"
    everything = page.run(rows)
    assert everything >= 2
    typed = (
        "(words => {{ const i = document.querySelector('#matrices').parentNode.querySelector('input[type=search]'); "
    )
    typed += "i.value = words; i.dispatchEvent(new Event('input', {{bubbles: true}})); }})({!r})"
    page.run(typed.format("latency"))
    assert 0 < page.run(rows) < everything
    page.run(typed.format("no such model"))
    assert page.run(rows) == 0
    page.run(typed.format(""))
    assert page.run(rows) == everything
    cells = "[...document.querySelectorAll('#isa-0 [data-engine=torchao]')].filter(c => c.offsetParent).length"
    assert page.run(cells) > 0
    page.run("document.querySelector('input[value=torchao]').click()")
    assert page.run(cells) == 0


def shown_after(page: Page, rows: str, words: str) -> int:
    """How many rows a filter leaves."""
    page.run(
        f"(() => {{ const i = document.querySelector('[data-filter] input[type=search]'); i.value = {words!r};"
        " i.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    return int(page.run(f"[...document.querySelectorAll({rows!r})].filter(r => r.offsetParent).length"))


@pytest.mark.parametrize(
    ("name", "rows", "some"),
    [
        ("kernels.html", "#choices-1 tr[data-words]", "4096"),
        ("roofline.html", "#products-1 tr[data-words]", "sq-static"),
    ],
)
def test_filters_of_long_tables_filter(site: Path, page: Page, name: str, rows: str, some: str) -> None:
    page.open(address(site / name))
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    everything = shown_after(page, rows, "")
    assert 0 < shown_after(page, rows, some) < everything
    assert shown_after(page, rows, "no such thing") == 0


def test_the_roofline_draws_its_roofs_and_products(site: Path, page: Page) -> None:
    page.open(address(site / "roofline.html"))
    inside = page.run(
        "(() => { const svg = document.querySelector('.roofline'), box = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('.roof, .mark')].map(m => m.getBoundingClientRect())"
        ".map(m => m.left >= box.left - 1 && m.right <= box.right + 1 && m.top >= box.top - 1"
        " && m.bottom <= box.bottom + 1)"
        "; })()"
    )
    assert len(inside) > 10
    assert all(inside)
    widths = page.run("[...document.querySelectorAll('.stack .part')].map(p => p.getBoundingClientRect().width)")
    assert len(widths) >= 12
    assert min(widths) > 0


def test_steps_are_drawn_in_the_charts_and_told_in_the_table(site: Path, page: Page) -> None:
    path = next((site / "series").glob("minilm-int8-sq-dynamic-vnni-offline*.html"))
    page.open(address(path))
    page.wait_for(DRAWN)
    texts = page.run("document.querySelector('.plot').layout.annotations.map(a => a.text).join(' | ')")
    assert "% slower" in texts
    told = page.run("document.querySelector('.happened tbody').textContent")
    assert "% slower" in told
    assert "it stands" in told
    assert "accepted" in told


def test_any_two_environments_are_compared(site: Path, page: Page) -> None:
    page.open(address(site / "runs" / "compare.html"))
    options = page.run("[...document.querySelector('[name=before]').options].map(o => o.value)")
    assert len(options) > 10
    rows = "[...document.querySelectorAll('[data-compare-rows] tr')].map(r => [...r.children].map(c => c.textContent))"
    page.run(
        "(() => { const s = document.querySelector('[name=before]'); s.value = '0';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    changed = {row[0]: row[1:] for row in page.run(rows)}
    assert changed["version: torch"] == ["2.11.0", "2.13.0"]
    assert all(before != after for before, after in changed.values())
    page.run("document.querySelector('[name=all]').click()")
    assert len(page.run(rows)) > len(changed)
    runs = page.run("INT8.runs.id")
    page.open(address(site / "runs" / "compare.html") + f"?before={runs[2]}&after={runs[5]}")
    assert page.run(
        "[document.querySelector('[name=before]').value, document.querySelector('[name=after]').value]"
    ) == [
        "2",
        "5",
    ]
    assert page.errors == []


def test_worst_examples_are_text(site: Path, page: Page) -> None:
    page.open(address(site / "accuracy.html"))
    quotes = page.run("[...document.querySelectorAll('.worst blockquote')].map(q => q.textContent)")
    assert any("<b>nothing</b>" in quote for quote in quotes)
    assert page.run("document.querySelectorAll('.worst b').length") == 0
    bars = page.run("[...document.querySelectorAll('.told[open] .bar')].map(b => b.getBBox().height)")
    assert len(bars) == 10
    assert max(bars) > 50


def test_the_theme_follows_the_system_and_then_the_reader(site: Path, page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.open(address(site / "index.html"))
    light = page.run(ground)
    page.look(1280, 900, "dark")
    dark = page.run(ground)
    assert light != dark
    page.run("document.querySelector('[data-theme-toggle]').click()")
    assert page.run(ground) == light
    page.open(address(site / "health.html"))
    assert page.run(ground) == light, "the choice lasts"
    page.run("localStorage.clear()")


def test_the_keyboard_reaches_content_and_sees_where_it_is(site: Path, page: Page) -> None:
    page.open(address(site / "index.html"))
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(25):
        page.press("Tab")
        seen.add(page.run("document.activeElement.getAttribute('role') || document.activeElement.tagName"))
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"A", "BUTTON"} <= seen


@pytest.mark.parametrize(
    "name",
    [
        *(
            "index.html",
            "frontier.html",
            "roofline.html",
            "outliers.html",
            "accuracy.html",
            "kernels.html",
            "health.html",
        ),
        "runs/compare.html",
    ],
)
def test_a_phone_scrolls_down_only(site: Path, page: Page, name: str) -> None:
    page.look(400, 860, "light")
    page.open(address(site / name))
    assert page.run("document.documentElement.scrollWidth") <= 400


def test_staleness_is_decided_when_the_page_is_looked_at(site: Path, page: Page) -> None:
    # The newest generated run lies in the past or the future of whoever runs this test.
    page.open(address(site / "index.html"))
    since = page.run("Number(document.querySelector('[data-stale-since]').dataset.staleSince)")
    after = page.run("Number(document.querySelector('[data-stale-since]').dataset.staleAfter)")
    expected = page.run("Date.now() / 1000") - since > after
    assert page.run("document.querySelector('[data-stale-since]').hidden") is not expected


def test_hostile_words_do_nothing(hostile_site: Path, page: Page) -> None:
    pages = sorted(hostile_site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        page.errors.clear()
        page.open(address(path))
        if path.parent.name == "series" and path.stem != "index":
            page.wait_for("document.getElementById('charts').children.length > 0")
        assert page.run("typeof window.hacked") == "undefined"
        assert page.run("document.querySelectorAll('img, iframe, b').length") == 0
        assert (path.name, page.errors) == (path.name, [])
    foreign = [one for one in page.requests if not one.startswith(("file://", "data:", "blob:"))]
    assert foreign == []


@pytest.mark.skipif(
    importlib.util.find_spec("axe_core_python") is None, reason="the package axe-core-python is not installed"
)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing_serious(site: Path, page: Page, theme: str) -> None:
    checker = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    page.look(1280, 900, theme)
    for _, name in screenshots.pages(site):
        page.open(address(site / name))
        page.run(f"{checker};0")
        found = page.run(
            "axe.run().then(r => r.violations.filter(v => ['serious', 'critical'].includes(v.impact))"
            ".map(v => v.id + ': ' + v.nodes.map(n => n.html.slice(0, 120)).join(' | ')))"
        )
        assert (name, found) == (name, [])


def test_screenshots_are_made_by_a_command(site: Path, tmp_path: Path) -> None:
    assert screenshots.main(["--site", str(site), "--out", str(tmp_path), "--looks", "dark", "phone"]) == 0
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert {"index-dark", "index-phone", "series-one-dark", "run-one-phone"} <= names
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 5000
