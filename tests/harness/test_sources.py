"""Where checkpoints and data lie: the file of ``--sources``, and what a plan makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import matrix, runner, sources
from harness.errors import UsageError
from harness.matrix import Overrides, Scenario
from harness.records import Cell
from harness.sources import Checkpoint, Sources

EXAMPLE = Path(sources.__file__).parent / "catalog" / "paper.example.toml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_folders_are_relative_to_the_file_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    text = (
        '[tasks]\nsquad = "data"\nmnli = "nyu-mll/glue"\n[models.m]\nsquad = { checkpoint = "a/b", labels = ["x"] }\n'
    )
    found = sources.read(written(tmp_path, text))
    assert found.data == {"squad": str(tmp_path / "data"), "mnli": "nyu-mll/glue"}
    assert found.checkpoint("m", "squad") == Checkpoint("a/b", ("x",))
    assert found.models == ("m",) and found.checkpoint("m", "mnli") is None and found.checkpoint("m", None) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task]\nsquad = 'a/b'", r"unknown table 'task'; there are \[tasks\] and \[models.NAME\]"),
        ("tasks = 3", "tasks must be a table"),
        ("[models]\nm = 'a/b'", r"m must be a table: write \[models\.m\]"),
        ("[models.m]\nsquad = 3", "models.m.squad must be LOCATION or"),
        ("[models.m]\nsquad = { labels = ['x'] }", "must be a folder or a hub id"),
        ("[models.m]\nsquad = { checkpoint = 'a/b', label = ['x'] }", "must be LOCATION or"),
        ("[models.m]\nsquad = './nowhere'", "there is no .*nowhere, and './nowhere' is no hub id"),
        ("[tasks\n", "is not TOML"),
    ],
)
def test_what_is_wrong_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sources.read(written(tmp_path, text))
    with pytest.raises(UsageError, match=r"cannot read .*; --sources names a TOML file"):
        sources.read(tmp_path / "none.toml")


def test_the_example_names_every_pair_of_the_profile(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for name in ("data/squad", *(f"checkpoints/{one}" for one in ("bert-large-mnli", "distilbert-mnli"))):
        (tmp_path / name).mkdir(parents=True)
    for name in ("xlmr-squad", "xlmr-mnli"):
        (tmp_path / "checkpoints" / name).mkdir()
    found = sources.read(written(tmp_path, text))
    profile = matrix.get_profile("paper")
    assert set(found.checkpoints) == {(model, task) for model in profile.models for task in ("squad", "mnli")}
    assert set(profile.tasks) == {"squad", "mnli"}


# --- plans -----------------------------------------------------------------------------------------------------------

PAPER = matrix.get_profile("paper")
XEON = ("amx", "vnni", "avx512", "avx2")


def plan(found: Sources, **overrides: object) -> matrix.Plan:
    return matrix.plan(PAPER, Overrides(**overrides), XEON, runner.catalog(found))  # type: ignore[arg-type]


def both(*models: str) -> Sources:
    return Sources({(model, task): Checkpoint("a/b") for model in models for task in ("squad", "mnli")})


def test_without_sources_the_paper_is_measured_for_speed_alone() -> None:
    found = plan(Sources())
    assert {one.cell.task for one in found.cells} == {None}
    assert {one.cell.scenario for one in found.cells} == {str(one) for one in PAPER.scenarios}
    assert any(
        "bert-large, distilbert-base, xlmr-base: no weights that squad, mnli can judge" in n for n in found.notices
    )


def test_each_task_has_its_scenario() -> None:
    found = plan(both(*PAPER.models))
    assert {(one.cell.task, one.cell.scenario) for one in found.cells} == {
        ("squad", "offline:b8:s384"),
        ("mnli", "offline:b8:s128"),
    }
    pairs = {(one.cell.model, one.cell.engine, one.cell.recipe, one.cell.task) for one in found.cells}
    assert {
        (m, "int8", r, t) for m in PAPER.models for r in ("fp32", "sq-static", "sq-dynamic") for t in ("squad", "mnli")
    } <= pairs
    assert not found.notices
    shorter = plan(both(*PAPER.models), scenarios=("single:s64",), tasks=("mnli",))
    assert {(one.cell.task, one.cell.scenario) for one in shorter.cells} == {("mnli", "single:s64")}


def test_a_model_with_one_checkpoint_is_judged_there_alone() -> None:
    found = plan(Sources({("bert-large", "squad"): Checkpoint("a/b")}), models=("bert-large", "xlmr-base"))
    assert {(one.cell.model, one.cell.task) for one in found.cells} == {("bert-large", "squad"), ("xlmr-base", None)}
    assert any("bert-large is left out on mnli" in notice for notice in found.notices)


def test_a_new_name_and_a_folder_are_models_too() -> None:
    found = plan(both("my-bert"), models=("my-bert", "some/folder"), tasks=("squad",))
    assert {(one.cell.model, one.cell.task) for one in found.cells} == {("my-bert", "squad"), ("some/folder", "squad")}
    with pytest.raises(UsageError, match="unknown model"):
        plan(Sources(), models=("my-bert",))


def test_a_task_that_does_not_exist_is_not_passed_over() -> None:
    with pytest.raises(UsageError, match="unknown task 'squadd'; did you mean squad"):
        plan(Sources({("bert-large", "squadd"): Checkpoint("a/b")}))
    with pytest.raises(UsageError, match="unknown task 'mnly'"):
        plan(Sources({}, {"mnly": "a/b"}))


def test_cells_of_two_tasks_share_no_worker() -> None:
    cells = plan(both("bert-large"), models=("bert-large",), isas=("vnni",)).cells
    groups = runner._groups(cells)
    assert [{cell.task for cell in group} for group in groups] == [{"squad"}, {"mnli"}]
    assert len({runner._worker_key(cell) for group in groups for cell in group}) == sum(map(len, groups))


def test_a_worker_is_told_where_its_model_and_data_lie() -> None:
    cells = [Cell("bert-large", "int8", "fp32", "vnni", str(Scenario.parse("single:s64")), task="mnli")]
    checkpoints = {("bert-large", "mnli"): Checkpoint("a/b", ("x", "y"))}
    spec = runner.worker_spec(cells, (0,), "single:s64", 5, Sources(checkpoints, {"mnli": "c/d", "squad": "e/f"}))
    assert (spec.checkpoint, spec.labels, spec.data, spec.limit) == ("a/b", ("x", "y"), "c/d", 5)
