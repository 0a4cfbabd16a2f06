from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness import analyses
from harness.errors import StoreError


def test_an_analysis_is_written_whole_and_replaced(tmp_path: Path) -> None:
    first = analyses.write(tmp_path / "results", "outliers", "minilm", {"a": [1.0, math.inf, {"b": math.nan}]})
    assert first == tmp_path / "results" / "analyses" / "outliers-minilm.json"
    assert json.loads(first.read_text()) == {"a": [1.0, None, {"b": None}]}
    analyses.write(tmp_path / "results", "outliers", "minilm", {"a": 2})
    assert json.loads(first.read_text()) == {"a": 2}
    assert [path.name for path in first.parent.iterdir()] == ["outliers-minilm.json"]


def test_names_of_folders_and_hub_ids_stay_in_the_folder(tmp_path: Path) -> None:
    for name in ("owner/name", "../../etc/passwd", "C:\\x"):
        assert analyses.path_of(tmp_path, "outliers", name).parent == tmp_path / "analyses"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--results"):
        analyses.write(tmp_path / "file", "outliers", "minilm", {})
