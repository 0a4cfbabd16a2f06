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


@pytest.mark.parametrize("name", ["index.html", "frontier.html", "accuracy.html", "health.html"])
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
