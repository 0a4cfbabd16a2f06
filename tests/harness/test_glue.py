"""SST-2 and MNLI: files, the order of classes, and models that classify."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
import torch
from judged import cell, record
from tiny_heads import TinyHeads

from harness import assets, models, tasks, verdicts
from harness.errors import AssetError, UsageError
from harness.tasks import files, glue

MNLI = tiny_heads.MNLI
ROW = {**assets.catalog("tasks")["mnli"]}


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch, tiny: TinyHeads) -> None:
    monkeypatch.setenv("INT8_ASSETS", str(tiny.root / "assets"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- order of classes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("entailment", "neutral", "contradiction"), (0, 1, 2)),
        (("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), (2, 1, 0)),
        (("contradiction", "entailment", "neutral"), (1, 2, 0)),
        (("Entail", "Contradict", "Neutral"), (0, 2, 1)),
    ],
)
def test_classes_are_matched_by_name(names: tuple[str, ...], order: tuple[int, ...]) -> None:
    assert glue.label_order("m", names, MNLI) == order


@pytest.mark.parametrize(
    "names",
    [
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        ("entailment", "not_entailment"),
        ("entailment", "neutral"),
        ("entailment", "entail", "contradiction"),
        ("entailment", "neutral", "contradiction", "other"),
        ("e", "n", "c"),
    ],
)
def test_names_that_leave_a_doubt_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"names do not tell .* labels = \[\.\.\.\]"):
        glue.label_order("m", names, MNLI)


def test_a_permutation_is_found_only_where_it_is_certain() -> None:
    labels = np.arange(300) % 3
    assert glue.permuted(labels, labels, MNLI) is None
    swapped = np.array([2, 1, 0])[labels]
    problem = glue.permuted(swapped, labels, MNLI)
    assert problem is not None and "entailment means contradiction" in problem and "0.333" in problem
    assert glue.permuted(np.roll(labels, 1)[:6], labels[:6], MNLI) is None  # six examples prove nothing
    guesses = np.random.default_rng(0).integers(3, size=300)
    assert glue.permuted(guesses, labels, MNLI) is None  # chance is not an order


# --- data ------------------------------------------------------------------------------------------------------------


def test_rows_without_agreed_label_are_left_out(tiny: TinyHeads) -> None:
    found = files.read("mnli", str(tiny.data("mnli")), "mnli", ROW["held_out"])
    assert len(found) == 161 and found[-1]["sentence1"] == 'the film was "'  # a lone quotation mark means itself
    parsed = glue.parse("mnli", "here", ROW, found)
    assert len(parsed) == 160
    assert parsed[0].texts == (found[0]["sentence1"], found[0]["sentence2"])
    assert MNLI[parsed[0].label] == found[0]["gold_label"]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_other_formats_give_the_same_rows(tiny: TinyHeads, tmp_path: Path, form: str) -> None:
    import datasets

    rows = tiny_heads.premises(20, seed=9)
    flat = [{"premise": one, "hypothesis": two, "label": MNLI.index(label)} for one, two, label in rows]
    flat.append({"premise": "a", "hypothesis": "b", "label": -1})
    if form == "jsonl":
        (tmp_path / "validation_matched.jsonl").write_text("\n".join(map(json.dumps, flat)), encoding="utf-8")
    elif form == "parquet":
        (tmp_path / "mnli").mkdir()
        datasets.Dataset.from_list(flat).to_parquet(
            str(tmp_path / "mnli" / "validation_matched-00000-of-00001.parquet")
        )
    else:
        datasets.DatasetDict({"validation_matched": datasets.Dataset.from_list(flat)}).save_to_disk(str(tmp_path))
    found = glue.parse("mnli", "here", ROW, files.read("mnli", str(tmp_path), "mnli", ROW["held_out"]))
    assert [(*one.texts, MNLI[one.label]) for one in found] == rows
    if form == "saved":
        with pytest.raises(AssetError, match=r"has no split train .*; it has validation_matched"):
            files.read("mnli", str(tmp_path), "mnli", ROW["train"])


def test_damaged_data_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t1\nbroken\n", encoding="utf-8")
    with pytest.raises(AssetError, match=r"train\.tsv cannot be read .*line 3 has 1 values under 2 names"):
        files.read("sst2", str(tmp_path), "sst2", ["train"])
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a"\n', encoding="utf-8")
    with pytest.raises(AssetError, match="line 2 is no JSON"):
        files.read("sst2", str(tmp_path), "sst2", ["x"])
    with pytest.raises(AssetError, match=r"has no file called dev or validation \(\.tsv"):
        files.read("sst2", str(tmp_path), "sst2", ["dev", "validation"])
    monkeypatch.setattr(models, "hub_answers", lambda: False)
    with pytest.raises(AssetError, match=r"hub cannot be reached; give a local folder as sst2 under \[tasks\]"):
        files.read("sst2", "nyu-mll/glue", "sst2", ["train"])
    with pytest.raises(AssetError, match="row 1 has the label 'maybe'; known: entailment"):
        glue.parse("mnli", "here", ROW, [{"premise": "a", "hypothesis": "b", "label": "maybe"}])
    with pytest.raises(AssetError, match="has no column sentence2 or hypothesis; it has premise, label"):
        glue.parse("mnli", "here", ROW, [{"premise": "a", "label": 0}])
    with pytest.raises(AssetError, match="no labelled rows"):
        glue.parse("mnli", "here", ROW, [{"premise": "a", "hypothesis": "b", "label": -1}])


# --- models ----------------------------------------------------------------------------------------------------------


def load(
    tiny: TinyHeads, folder: Path, task: str = "mnli", **options: Any
) -> tuple[models.LoadedModel, glue.Classification]:
    model = models.load(str(folder), head="sequence-classification")
    found = tasks.load(task, model, data=str(tiny.data(task)), seq=64, **options)
    assert isinstance(found, glue.Classification)
    return model, found


@pytest.mark.parametrize("family", tiny_heads.FAMILIES)
def test_an_nli_head_that_learned_is_above_chance(tiny: TinyHeads, family: str) -> None:
    model, task = load(tiny, tiny.checkpoint(family, "mnli"))
    assert tasks.check_padding_invariance(model, task) < 1e-4
    reference = tasks.reference(model, task, seq=64)
    found = task.judge(reference, reference)
    assert found.n == 160 and found.value > 0.7 and not tasks.at_chance(found)
    assert np.allclose(tasks.evaluate(task, model.module, 8, 64, 21), reference[:21], atol=1e-4)
    kept = task.kept(reference)
    assert (kept["logits"].argmax(1) == kept["labels"]).mean() == pytest.approx(found.value)
    held_out = {one.texts for one in task.held_out}
    assert len(held_out) > 100 and sum(len(batch["input_ids"]) for batch in task.calibration()) == 256


def test_sentences_alone_are_classified(tiny: TinyHeads) -> None:
    model, task = load(tiny, tiny.checkpoint("bert", "sst2"), "sst2")
    reference = tasks.reference(model, task, seq=64)
    found = task.judge(reference, reference)
    assert (found.n, found.metric) == (120, "accuracy") and found.value > 0.75 and not tasks.at_chance(found)


REVERSED = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


def test_another_order_of_classes_is_the_same_task(tiny: TinyHeads) -> None:
    model, task = load(tiny, tiny.checkpoint("distilbert", "mnli", REVERSED))
    assert task.order == (2, 1, 0)
    reference = tasks.reference(model, task, seq=64)
    assert task.judge(reference, reference).value > 0.7


def test_permuted_ids_are_caught_and_can_be_corrected(tiny: TinyHeads, tmp_path: Path) -> None:
    folder = tmp_path / "lying"
    shutil.copytree(tiny.checkpoint("distilbert", "mnli", REVERSED), folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = dict(enumerate(MNLI))  # the logits are in the reverse order
    config["label2id"] = {name: index for index, name in enumerate(MNLI)}
    (folder / "config.json").write_text(json.dumps(config))
    model, task = load(tiny, folder)
    reference = tasks.reference(model, task, seq=64)
    with pytest.raises(tasks.TaskError, match=r"label order looks permuted: FP32 is right in .* correct id2label"):
        task.judge(reference, reference)
    model, task = load(tiny, folder, labels=REVERSED)
    reference = tasks.reference(model, task, seq=64)
    assert task.judge(reference, reference).value > 0.7


def test_a_model_without_names_of_its_classes_needs_them(tiny: TinyHeads) -> None:
    folder = tiny.checkpoint("bert", "mnli", ("LABEL_0", "LABEL_1", "LABEL_2"), steps=0)
    with pytest.raises(UsageError, match="LABEL_0, LABEL_1, LABEL_2"):
        load(tiny, folder)
    _, task = load(tiny, folder, labels=MNLI)
    assert task.order == (0, 1, 2)


def test_a_model_that_learned_nothing_is_at_chance_not_regressed(tiny: TinyHeads) -> None:
    model, task = load(tiny, tiny.checkpoint("bert", "mnli", steps=0))
    reference = tasks.reference(model, task, seq=64)
    found = task.judge(reference, reference)
    assert tasks.at_chance(found)
    judged = verdicts.judge_accuracy(record(cell(task="mnli"), accuracy=found), True)
    (chance,) = [one for one in judged if one.metric == "chance"]
    assert chance.outcome == "failed" and "label order" in (chance.reason or "")
