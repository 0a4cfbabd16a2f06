"""Text and data on their way into pages and scripts."""

from __future__ import annotations

import json
import re

import pytest
from site_samples import HOSTILE

from dashboards.render import environment, script_json
from dashboards.series import csv_text


@pytest.mark.parametrize("word", HOSTILE)
def test_data_in_a_script_is_inert_and_whole(word) -> None:
    text = script_json({"word": word, word: [1, None, 2.5]})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert text.isascii()
    assert json.loads(text) == {"word": word, word: [1, None, 2.5]}


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        script_json([float("nan")])


def test_every_template_escapes() -> None:
    made = environment()
    assert made.autoescape is True
    for name in made.list_templates():
        source = (made.loader.get_source(made, name))[0]
        assert "|safe" not in source.replace(" ", "")
        assert "<script>" not in source, f"{name}: inline scripts are forbidden by the pages' policy"
        assert not re.search(r"\son\w+=", source), f"{name}: inline handlers are forbidden by the pages' policy"


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    rows = iter([("=1+1", None, 2.5), ("@x", "-3", "plain")])
    assert csv_text(("a", "b", "c"), rows) == "a,b,c\n'=1+1,,2.5\n'@x,'-3,plain\n"
