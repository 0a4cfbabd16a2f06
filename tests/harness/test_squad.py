"""SQuAD: scores by the official rules, windows, spans, and models that answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
import torch
from tiny_heads import TinyHeads

from harness import encoders, models, tasks
from harness.errors import AssetError, UsageError
from harness.tasks import scores, squad

# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("the Cat", ["cat"], 1, 1),  # articles and case
        ("A cat, an owl", ["cat owl"], 1, 1),
        ("another", ["other"], 0, 0),  # an article is a whole word
        ("cat.", ["  the\tcat! "], 1, 1),  # punctuation and white space
        ("U.S.", ["US"], 1, 1),
        ("the-end", ["the end"], 0, 0),  # punctuation goes first: "theend" and "end"
        ("$5,000", ["5000"], 1, 1),
        ("“cat”", ["cat"], 0, 0),  # only ASCII's punctuation is dropped
        ("b c", ["b c d"], 0, 0.8),  # 2 of 2 words, 2 of 3
        ("a b c", ["b c d"], 0, 0.8),  # "a" was an article
        ("to be to be", ["to be"], 0, 2 / 3),  # words count as often as they occur
        ("to be", ["to to be be"], 0, 2 / 3),
        ("new york city", ["nyc", "New York"], 0, 0.8),  # the best of several answers
        ("nyc", ["New York", "NYC"], 1, 1),
        ("york new", ["new york"], 0, 1),  # F1 knows no order
        ("", ["cat"], 0, 0),
        ("cat", [""], 0, 0),
        ("", ["the"], 1, 0),  # nothing is left of either: they match, and have no word in common
        ("", [""], 1, 0),
        ("dog", ["cat"], 0, 0),
    ],
)
def test_scores_are_those_of_the_official_script(prediction: str, answers: list[str], exact: float, f1: float) -> None:
    assert scores.exact_match(prediction, answers) == exact
    assert scores.f1(prediction, answers) == pytest.approx(f1)


def test_without_answers_there_is_no_score() -> None:
    with pytest.raises(ValueError):
        scores.f1("cat", [])


def test_the_metrics_need_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.tasks import metrics

    monkeypatch.setattr(models, "hub_answers", lambda: pytest.fail("asked the hub"))
    found = metrics.load("squad").compute(
        predictions=[{"id": "1", "prediction_text": "the cat"}, {"id": "2", "prediction_text": "b c"}],
        references=[
            {"id": "1", "answers": {"text": ["cat", "dog"], "answer_start": [0, 5]}},
            {"id": "2", "answers": {"text": ["b c d"], "answer_start": [3]}},
            {"id": "3", "answers": {"text": ["lost"], "answer_start": [0]}},
        ][:2],
    )
    assert found == {"exact_match": 50.0, "f1": pytest.approx(90.0)}
    assert metrics.load("accuracy").compute(predictions=[0, 1, 2], references=[0, 1, 1]) == {
        "accuracy": pytest.approx(2 / 3)
    }
    with pytest.raises(UsageError, match="did you mean squad"):
        metrics.load("squadd")


# --- windows ---------------------------------------------------------------------------------------------------------

CUT = squad.Cut(length=24, overlap=6, question=5, answer=4, n_best=5)
LONG = " ".join(tiny_heads.WORDS[:50])


@pytest.fixture(scope="module", params=tiny_heads.FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return encoders.word_tokenizer(request.param, tiny_heads.WORDS, 96)


def question(context: str, *answers: str, text: str = "who came ?") -> squad.Question:
    return squad.Question("q", text, context, answers or ("anna",))


def test_windows_cover_the_context_and_overlap(tokenizer: Any) -> None:
    windows = squad.cut_windows(tokenizer, [question("berlin"), question(LONG)], CUT, 7)
    assert windows[0].question == 7 and len(windows) > 3
    assert {window.question for window in windows[1:]} == {8}
    covered = []
    for window in windows[1:]:
        assert len(window.row["input_ids"]) == len(window.spans) <= CUT.length
        asked = tokenizer("who came ?", add_special_tokens=False)["input_ids"]
        assert window.row["input_ids"][1 : 1 + len(asked)] == asked
        spans = [tuple(span) for span in window.spans if span[0] >= 0]
        assert [LONG[a:b] for a, b in spans] == LONG[spans[0][0] : spans[-1][1]].split()
        covered.append(spans)
    assert len({span for spans in covered for span in spans}) == 50
    for one, following in itertools.pairwise(covered):
        assert one[-CUT.overlap :] == following[: CUT.overlap]


def test_a_long_question_is_cut_and_its_tokens_answer_nothing(tokenizer: Any) -> None:
    (window,) = squad.cut_windows(tokenizer, [question("anna came", text="who " * 9)], CUT, 0)
    who = tokenizer("who", add_special_tokens=False)["input_ids"]
    assert window.row["input_ids"].count(who[0]) == CUT.question
    assert int((window.spans[:, 0] >= 0).sum()) == 2


@pytest.mark.parametrize(
    ("seq", "length", "overlap", "longest"), [(512, 384, 128, 64), (384, 384, 128, 64), (128, 128, 42, 42)]
)
def test_short_sequences_have_smaller_windows(seq: int, length: int, overlap: int, longest: int) -> None:
    cut = squad.cut_for(seq, {"max_length": 384, "doc_stride": 128, "max_query": 64, "max_answer": 30, "n_best": 20})
    assert (cut.length, cut.overlap, cut.question) == (length, overlap, longest)


# --- spans -----------------------------------------------------------------------------------------------------------

#: [CLS] question [SEP] and five words of a context, 2 characters each.
SPANS = np.array([[-1, -1], [-1, -1], [-1, -1], [0, 2], [3, 5], [6, 8], [9, 11], [12, 14], [-1, -1]], dtype=np.int32)


def logits(**tokens: float) -> tasks.Floats:
    """(9, 2) logits: ``s3=2.0`` is the start at token 3, ``e4`` the end at token 4; the others are -9."""
    found = np.full((9, 2), -9.0, dtype=np.float32)
    for name, value in tokens.items():
        found[int(name[1:]), "se".index(name[0])] = value
    return found


def test_the_best_valid_span_wins() -> None:
    assert squad.best_spans(logits(s3=2.0, e4=1.0), SPANS, CUT)[0] == (3.0, 0, 5)
    # the end before the start is no answer, though both are the likeliest
    assert squad.best_spans(logits(s6=5.0, e3=5.0, e7=1.0), SPANS, CUT)[0] == (6.0, 9, 14)
    # one longer than four tokens is none either
    assert squad.best_spans(logits(s3=5.0, e7=5.0, e6=1.0), SPANS, CUT)[0] == (6.0, 0, 11)
    # nor is one in the question or on special tokens
    assert squad.best_spans(logits(s0=9.0, e1=9.0, s4=1.0, e4=1.0), SPANS, CUT)[0] == (2.0, 3, 5)


def test_no_valid_span_is_an_empty_answer() -> None:
    nothing = np.full((3, 2), -1, dtype=np.int32)
    assert squad.best_spans(np.zeros((3, 2), dtype=np.float32), nothing, CUT) == []
    assert squad._best_text("anna", []) == ""
    assert squad._best_text("  x", [(3.0, 0, 2), (1.0, 2, 3)]) == "x"  # white space alone is no answer


# --- data ------------------------------------------------------------------------------------------------------------


def test_files_that_are_no_squad_are_one_clear_line(tmp_path: Path) -> None:
    rows = [{"id": "1", "question": "who", "context": "anna", "answers": {"text": [], "answer_start": []}}]
    with pytest.raises(AssetError, match=r"question 1 has no answer; give SQuAD v1\.1"):
        squad.parse("squad", "here", rows)
    with pytest.raises(AssetError, match="row 1 has no id, question, context or answers"):
        squad.parse("squad", "here", [{"id": "1"}])
    with pytest.raises(AssetError, match="no questions"):
        squad.parse("squad", "here", [])


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tiny: TinyHeads) -> None:
    monkeypatch.setenv("INT8_ASSETS", str(tiny.root / "assets"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(
    tiny: TinyHeads, family: str, seq: int = 64, steps: int | None = None
) -> tuple[models.LoadedModel, squad.Squad]:
    folder = tiny.checkpoint(family, "squad", steps=steps)
    model = models.load("some-name", head="question-answering", source=str(folder))
    task = tasks.load("squad", model, data=str(tiny.data("squad")), seq=seq)
    assert isinstance(task, squad.Squad)
    return model, task


@pytest.mark.parametrize("family", tiny_heads.FAMILIES)
def test_a_head_that_learned_answers(tiny: TinyHeads, family: str) -> None:
    model, task = load(tiny, family)
    assert (model.name, model.family, model.weights) == ("some-name", family, "real")
    assert tasks.check_padding_invariance(model, task) < 1e-4
    reference = tasks.reference(model, task, seq=64)
    found = task.judge(reference, reference)
    assert found.metric == "f1" and found.n == 120 and found.value > 0.7 and not tasks.at_chance(found)
    assert 0.6 < found.others["exact_match"] == found.others["fp32_exact_match"] <= found.value
    assert (found.flips, found.delta, found.delta_ci95, found.chance) == (0.0, 0.0, (0.0, 0.0), 0.0)
    fixed = tasks.evaluate(task, model.module, 7, 64, 40)
    assert np.allclose(fixed, reference[: len(fixed)], atol=1e-4)
    assert {tuple(batch) for batch in task.calibration()} == {model.inputs}


def test_perfect_logits_score_full_marks_through_windows(tiny: TinyHeads) -> None:
    _, task = load(tiny, "bert", seq=30, steps=0)
    windows = task.windows()
    assert len(windows) > len(task.examples())  # some texts need several
    outputs = np.zeros((len(windows), task.cut.length, 2), dtype=np.float32)
    for window, output in zip(windows, outputs, strict=True):
        one = task.held_out[window.question]
        start = one.context.index(one.answers[0])
        end = start + len(one.answers[0])
        first, last = np.flatnonzero(window.spans[:, 0] == start), np.flatnonzero(window.spans[:, 1] == end)
        if len(first) and len(last):  # the answer is whole in this window
            output[first, 0] = output[last, 1] = 10.0
    found = task.judge(outputs, outputs)
    assert found.value == 1.0 and found.others["exact_match"] == 1.0
    worse = outputs.copy()
    worse[: len(worse) // 2] = 0.0
    lost = task.judge(worse, outputs)
    assert lost.delta < -0.2 and lost.flips_lost > 20 and lost.flips_gained == 0 and lost.flips > 0.2
    assert lost.delta_ci95 is not None and lost.delta_ci95[0] < lost.delta < lost.delta_ci95[1] < 0
    assert lost.delta == pytest.approx(lost.value - 1.0)
    kept = task.kept(worse)
    assert kept["f1"].mean() == pytest.approx(lost.value) and kept["answers"].shape == (120,)


def test_a_limit_counts_questions_not_windows(tiny: TinyHeads) -> None:
    model, task = load(tiny, "bert", seq=30, steps=0)
    outputs = tasks.evaluate(task, model.module, 4, 30, 25)
    assert len(outputs) == task.size(25) > 25
    assert task.judge(outputs, outputs).n == 25
    owners = [window.question for window in task.windows()]
    first_of_two = next(i for i in range(1, len(owners)) if owners[i] == owners[i - 1])
    with pytest.raises(tasks.TaskError, match="not those of all windows"):
        task.judge(outputs[:first_of_two], outputs[:first_of_two])
    broken = outputs.copy()
    broken[0, 0, 0] = np.nan
    with pytest.raises(tasks.TaskError, match="not finite"):
        task.judge(broken, outputs)


def test_a_head_that_learned_nothing_is_told_from_one_that_is_missing(tiny: TinyHeads, tmp_path: Path) -> None:
    _, task = load(tiny, "bert", steps=0)
    assert task.metric == "f1"
    bare = tmp_path / "bare"
    models.load("tiny-bert").module.backbone.save_pretrained(bare)
    with pytest.raises(UsageError, match=r"has no trained head for question-answering: .* qa_outputs"):
        models.load(str(bare), head="question-answering")
    with pytest.raises(UsageError, match=r"model minilm has no head .* --sources"):
        models.load("minilm", head="question-answering")


def test_a_model_that_ignores_its_mask_is_not_judged(tiny: TinyHeads, tmp_path: Path) -> None:
    model, task = load(tiny, "distilbert")

    class Unmasked(encoders.Headed):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
        ) -> torch.Tensor:
            return super().forward(input_ids, torch.ones_like(attention_mask), token_type_ids)

    unsound = replace(model, module=Unmasked(model.module.backbone).eval())
    with pytest.raises(tasks.TaskError, match="unsound"):
        tasks.reference(unsound, task, tmp_path, seq=64, limit=20)


def test_nested_and_flat_files_are_the_same_questions(tiny: TinyHeads, tmp_path: Path) -> None:
    from harness.tasks import files

    nested = files.read("squad", str(tiny.data("squad")), None, ["dev-v1.1"])
    (tmp_path / "validation.jsonl").write_text("\n".join(json.dumps(row) for row in nested), encoding="utf-8")
    flat = files.read("squad", str(tmp_path), None, ["dev-v1.1", "validation"])
    assert flat == nested and len(nested) == 120
    for row in nested:
        text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        assert row["context"][start : start + len(text)] == text
