"""Colours: each pair of text and ground that the style sheet uses is readable, in both themes."""

from __future__ import annotations

import importlib.resources
import re

import pytest

SHEET = (importlib.resources.files("dashboards") / "static" / "site.css").read_text(encoding="utf-8")
TOKENS = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", SHEET)
}
PAIRS = [
    *(("ink", ground) for ground in ("ground", "paper", "sunk", "pass-0", "pass-1", "pass-2", "pass-3", "pass-4")),
    *(("soft", ground) for ground in ("ground", "paper", "sunk", "none")),
    *(("link", ground) for ground in ("ground", "paper", "sunk")),
    *(("fail-ink", ground) for ground in ("fail", "fail-stripe", "paper", "ground")),
    ("pass-ink", "pass-1"),
    ("pass-ink", "paper"),
    ("pass-ink", "ground"),
    ("warn-ink", "warn"),
    ("none-ink", "none"),
]


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_reaches_aa(theme, text, ground) -> None:
    assert contrast(TOKENS[text][theme], TOKENS[ground][theme]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("seal", ["pass-seal", "fail-seal", "warn-seal"])
def test_white_reads_on_seals(theme, seal) -> None:
    assert contrast("#ffffff", TOKENS[seal][theme]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("series", [f"c{place}" for place in range(8)])
def test_marks_of_charts_reach_three_to_one(theme, series) -> None:
    assert contrast(TOKENS[series][theme], TOKENS["paper"][theme]) >= 3.0
