"""Tasks: splitting, padding, heads, and what is said about accuracy; on generated texts, real ones under ``assets``."""

from __future__ import annotations

import bz2
import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import assets, encoders, models, tasks
from harness.errors import AssetError, UsageError

TINY = ("tiny-bert", "tiny-distilbert", "tiny-xlmr")
LABELS = ("rotten", "fresh")


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assets")


@pytest.fixture(autouse=True)
def own_root(request: pytest.FixtureRequest, shared_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and references of these tests stay out of the user's folder."""
    if not request.node.get_closest_marker("assets"):
        monkeypatch.setenv("INT8_ASSETS", str(shared_root))


@pytest.fixture
def model() -> models.LoadedModel:
    return models.load("tiny-bert")


@pytest.fixture
def task(model: models.LoadedModel) -> tasks.Task:
    return tasks.load("tiny-reviews", model)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny work is done sooner without threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- texts and splits ------------------------------------------------------------------------------------------------


def corpus(path: Path, rows: list[tuple[str, str]]) -> Path:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["category", "text", "movie_name"])
    writer.writerows([(category, line, "film") for category, line in rows])
    path.write_bytes(bz2.compress(text.getvalue().encode()))
    return path


ROWS = [
    ("fresh", "A joy, from start to end"),
    ("plot", "A man meets a dog"),
    ("rotten", "Dull"),
    ("rotten", "  dull "),
    ("fresh", ""),
    ("fresh", "   "),
    ("fresh", "One text, two opinions"),
    ("rotten", "one text, two opinions"),
    ("fresh", "A joy, from start\nto end"),
    ("", "no category"),
    ("rotten", "NA"),
]


def test_only_usable_rows_remain_once_each(tmp_path: Path) -> None:
    found = tasks.read_reviews(corpus(tmp_path / "c.bz2", ROWS), LABELS)
    assert {(one.text, one.label) for one in found} == {("A joy, from start to end", 1), ("Dull", 0), ("NA", 0)}


def test_the_split_does_not_depend_on_the_files_order(tmp_path: Path) -> None:
    rows = ROWS + [("fresh", f"line {index}") for index in range(40)]
    one = tasks.read_reviews(corpus(tmp_path / "a.bz2", rows), LABELS)
    two = tasks.read_reviews(corpus(tmp_path / "b.bz2", rows[::-1]), LABELS)
    assert tasks.ordered(one, seed=1) == tasks.ordered(two, seed=1)
    assert tasks.ordered(one, seed=1) != tasks.ordered(one, seed=2)


def test_what_is_no_corpus_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.bz2").write_bytes(b"not bz2")
    with pytest.raises(AssetError, match="is no reviews corpus"):
        tasks.read_reviews(tmp_path / "x.bz2", LABELS)
    (tmp_path / "y.bz2").write_bytes(bz2.compress(b"a,b\n1,2\n"))
    with pytest.raises(AssetError, match="is no reviews corpus"):
        tasks.read_reviews(tmp_path / "y.bz2", LABELS)


def test_train_and_held_out_share_no_text(model: models.LoadedModel) -> None:
    task = tasks.load("tiny-reviews", model)
    assert isinstance(task, tasks.Reviews)
    assert len(task.train) == 300 and len(task.held_out) == 400
    assert not {one.text for one in task.train} & {one.text for one in task.held_out}


def test_the_limit_cuts_the_same_order(task: tasks.Task) -> None:
    assert list(task.examples(7)) == list(task.examples())[:7]
    assert len(task.examples(10**9)) == 400
    with pytest.raises(UsageError, match="at least 1"):
        task.examples(0)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batches_have_exactly_the_asked_shape_and_every_example_once(task: tasks.Task) -> None:
    seen: list[int] = []
    for indices, batch in task.batches(8, 32, 21):
        assert all(tensor.shape == (8, 32) and tensor.dtype == torch.int64 for tensor in batch.values())
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids"}
        seen += indices.tolist()
    assert seen == list(range(21))


def test_long_texts_are_cut_and_keep_their_end_token(model: models.LoadedModel, task: tasks.Task) -> None:
    _indices, batch = next(task.batches(8, 5, 8))
    assert batch["attention_mask"].all()
    assert set(batch["input_ids"][:, -1].tolist()) == {model.tokenizer.sep_token_id}
    with pytest.raises(UsageError, match="at most 130 tokens"):
        next(task.batches(8, 131, 8))


def test_padding_uses_the_pad_token_and_is_masked(model: models.LoadedModel, task: tasks.Task) -> None:
    _indices, batch = next(task.batches(4, 60))
    padding = batch["attention_mask"] == 0
    assert padding.any() and (batch["input_ids"][padding] == model.tokenizer.pad_token_id).all()


@pytest.mark.parametrize("name", TINY)
def test_calibration_is_ragged_and_from_the_training_texts(name: str) -> None:
    model = models.load(name)
    task = tasks.load("tiny-reviews", model)
    assert isinstance(task, tasks.Reviews)
    batches = list(task.calibration())
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1
    assert all(tuple(batch) == model.inputs for batch in batches)
    texts = {
        model.tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    }
    assert texts == {one.text for one in task.train[:64]}


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_task_can_be_learned_by_every_tiny_model(name: str) -> None:
    model = models.load(name)
    task = tasks.load("tiny-reviews", model)
    reference = tasks.reference(model, task, seq=64)
    accuracy = task.judge(reference, reference)
    assert accuracy.value > 0.88 and not tasks.at_chance(accuracy)
    assert (accuracy.n, accuracy.flips, accuracy.delta, accuracy.delta_ci95) == (400, 0.0, 0.0, (0.0, 0.0))
    assert accuracy.sqnr_db is None and accuracy.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("seq", [64, 12])
def test_fixed_shapes_and_buckets_give_the_same_outputs(model: models.LoadedModel, task: tasks.Task, seq: int) -> None:
    fixed = tasks.evaluate(task, model.module, 8, seq, 45)
    assert np.allclose(fixed, tasks.reference(model, task, seq=seq, limit=45), atol=1e-5)


def test_outputs_are_means_over_real_tokens_only(task: tasks.Task) -> None:
    hidden = torch.arange(12, dtype=torch.bfloat16).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = task.outputs(hidden, {"attention_mask": mask})
    assert found.dtype == np.float32
    assert found.tolist() == [[1.0, 2.0], [8.0, 9.0]]


def test_the_reference_is_computed_once_for_each_truncation(
    model: models.LoadedModel, task: tasks.Task, tmp_path: Path
) -> None:
    first = tasks.reference(model, task, tmp_path, seq=64, limit=30)
    silent = replace(model, module=Exploding(model.module.backbone))
    assert np.array_equal(tasks.reference(silent, task, tmp_path, seq=64, limit=30), first)
    assert np.array_equal(tasks.reference(silent, task, tmp_path, seq=120, limit=30), first)  # nothing is that long
    with pytest.raises(RuntimeError, match="ran"):
        tasks.reference(silent, task, tmp_path, seq=8, limit=30)
    assert not np.array_equal(tasks.reference(model, task, tmp_path, seq=8, limit=30), first)


class Exploding(encoders.Encoder):
    """A module that must not run."""

    def forward(self, *_args: object, **_batch: object) -> torch.Tensor:
        raise RuntimeError("it ran")


def test_the_reference_is_fp32_whatever_the_caller_switched_on(
    model: models.LoadedModel, task: tasks.Task, tmp_path: Path
) -> None:
    plain = tasks.reference(model, task, tmp_path / "a", seq=64, limit=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = tasks.reference(model, task, tmp_path / "b", seq=64, limit=20)
    assert np.array_equal(plain, inside)


def test_the_head_is_trained_once_and_repeatable(
    model: models.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def head(root: str) -> tasks.Head:
        monkeypatch.setenv("INT8_ASSETS", str(tmp_path / root))
        task = tasks.load("tiny-reviews", model)
        assert isinstance(task, tasks.Reviews)
        return task.head

    first, again = head("a"), head("b")
    assert np.array_equal(first.weight, again.weight) and np.array_equal(first.bias, again.bias)
    assert first.weight.shape == (2, 64)
    monkeypatch.setattr(tasks.Reviews, "_train_head", lambda _self: pytest.fail("trained again"))
    assert np.array_equal(head("a").weight, first.weight)
    (stored,) = (tmp_path / "a" / "cache").glob("head-tiny-reviews-tiny-bert-*.npz")
    about = str(np.load(stored)["about"])
    assert '"seed"' in about and '"data_sha256"' in about


def test_other_weights_get_another_fingerprint(model: models.LoadedModel, task: tasks.Task) -> None:
    other = models.load("tiny-bert")
    with torch.no_grad():
        next(other.module.parameters()).add_(1e-3)
    changed = tasks.load("tiny-reviews", other)
    same = tasks.load("tiny-reviews", models.load("tiny-bert"))
    assert task.fingerprint == same.fingerprint != changed.fingerprint


def test_a_model_that_ignores_its_mask_is_not_judged(
    model: models.LoadedModel, task: tasks.Task, tmp_path: Path
) -> None:
    assert tasks.check_padding_invariance(model, task) < 1e-5

    class Unmasked(encoders.Encoder):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
        ) -> torch.Tensor:
            return super().forward(input_ids, torch.ones_like(attention_mask), token_type_ids)

    unsound = replace(model, module=Unmasked(model.module.backbone).eval())
    with pytest.raises(tasks.TaskError, match=r"unsound in FP32: padding changes .* attention_mask"):
        tasks.check_padding_invariance(unsound, task)
    with pytest.raises(tasks.TaskError, match="unsound"):
        tasks.reference(unsound, task, tmp_path, seq=64)
    assert not list(tmp_path.glob("*.npz"))


# --- judging ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def reference(model: models.LoadedModel, task: tasks.Task) -> tasks.Floats:
    return tasks.reference(model, task, seq=64)


def noisy(reference: tasks.Floats, snr_db: float) -> tasks.Floats:
    noise = np.random.default_rng(0).standard_normal(reference.shape)
    noise *= np.sqrt((reference.astype(np.float64) ** 2).sum() / (noise**2).sum() / 10 ** (snr_db / 10))
    return (reference + noise).astype(np.float32)


def test_noise_is_rated_as_what_it_is(task: tasks.Task, reference: tasks.Floats) -> None:
    accuracy = task.judge(noisy(reference, 5.0), reference)
    assert accuracy.sqnr_db == pytest.approx(5.0, abs=0.01)
    assert accuracy.flips_lost > accuracy.flips_gained > 0
    assert accuracy.flips == pytest.approx((accuracy.flips_gained + accuracy.flips_lost) / 400)  # two classes
    assert accuracy.delta == pytest.approx(accuracy.value - accuracy.fp32_value)
    assert accuracy.delta_ci95 is not None
    assert accuracy.delta_ci95[0] < accuracy.delta < accuracy.delta_ci95[1] < 0
    assert accuracy.cosine is not None and 0.5 < accuracy.cosine < 0.95


def test_a_wrong_scale_of_outputs_shows(task: tasks.Task, reference: tasks.Floats) -> None:
    damaged = reference.copy()
    damaged[:, ::3] *= -1
    accuracy = task.judge(damaged, reference)
    assert accuracy.value < 0.99 * accuracy.fp32_value and accuracy.flips > 0.03


def test_outputs_that_cannot_be_judged_are_refused(task: tasks.Task, reference: tasks.Floats) -> None:
    broken = reference.copy()
    broken[3:5, 0] = np.nan
    with pytest.raises(tasks.TaskError, match="2 of 400 examples are not finite"):
        task.judge(broken, reference)
    with pytest.raises(tasks.TaskError, match="same examples"):
        task.judge(reference[:10], reference)


def test_a_limited_judgement_uses_the_first_labels(task: tasks.Task, reference: tasks.Floats) -> None:
    part = task.judge(reference[:50], reference[:50])
    labels = [one.label for one in task.examples(50)]
    assert part.n == 50 and part.chance == max(sum(labels), 50 - sum(labels)) / 50


def test_guessing_is_told_from_being_worse(task: tasks.Task, reference: tasks.Floats) -> None:
    guessing = task.judge(np.roll(reference, 1, axis=0), reference)  # each example gets another one's output
    assert tasks.at_chance(guessing)
    worse = task.judge(noisy(reference, 5.0), reference)
    assert worse.value < worse.fp32_value and not tasks.at_chance(worse)


def test_paired_numbers_by_hand() -> None:
    labels, expected, predicted = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1]), np.array([0, 0, 1, 1, 1])
    outputs = np.array([[1.0, 0.0]] * 5, dtype=np.float32)
    reference = np.array([[1.0, 1.0]] * 5, dtype=np.float32)
    found = tasks.paired_classes(predicted, expected, labels, outputs, reference)
    assert (found.value, found.fp32_value, found.chance, found.delta) == (0.6, 0.6, 0.6, 0.0)
    assert (found.flips, found.flips_gained, found.flips_lost, found.n) == (0.4, 1, 1, 5)
    assert found.sqnr_db == pytest.approx(10 * np.log10(2.0)) and found.cosine == pytest.approx(2**-0.5)


# --- names -----------------------------------------------------------------------------------------------------------


def test_unknown_tasks_give_the_nearest(model: models.LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"unknown task 'review'; did you mean reviews\?"):
        tasks.load("review", model)
    assert "reviews" in tasks.known() and "tiny-reviews" not in tasks.known()


def test_a_model_without_tokenizer_cannot_be_judged(model: models.LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer and synthetic weights \(speed only\)"):
        tasks.load("tiny-reviews", replace(model, tokenizer=None))
    assert (
        tasks.unsupported("reviews", "bert-large")
        == "model bert-large has synthetic weights: it is measured for speed only"
    )
    assert tasks.unsupported("reviews", "minilm") is None and tasks.unsupported("tiny-reviews", "tiny-xlmr") is None


# --- real texts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def reviews() -> Iterator[tasks.Reviews]:
    for name in ("all-minilm-l6-v2", "rotten-tomatoes"):
        if not (assets.root() / assets.get(name).folder).exists():
            pytest.skip(f"asset {name} is not here: run `harness fetch`")
    task = tasks.load("reviews", models.load("minilm", offline=True), offline=True)
    assert isinstance(task, tasks.Reviews)
    yield task


@pytest.mark.assets
def test_the_reviews_are_split_as_documented(reviews: tasks.Reviews) -> None:
    texts = [one.text for one in (*reviews.train, *reviews.held_out)]
    assert len(texts) == len({text.casefold() for text in texts}) == 12_751
    assert len(reviews.train) == 3000 and len(reviews.held_out) >= 4000 and len(reviews.examples()) == 4000
    assert np.mean([one.label for one in reviews.examples()]) == pytest.approx(0.578, abs=0.01)
    shapes = [batch["input_ids"].shape for batch in reviews.calibration()]
    assert sum(shape[0] for shape in shapes) == 256 and len({shape[1] for shape in shapes}) > 4


@pytest.mark.assets
@pytest.mark.slow
def test_minilm_reads_reviews_better_than_chance(reviews: tasks.Reviews) -> None:
    model = models.load("minilm", offline=True)
    reference = tasks.reference(model, reviews, seq=128)
    accuracy = reviews.judge(reference, reference)
    assert accuracy.n == 4000 and accuracy.value == pytest.approx(0.745, abs=0.01)
    assert not tasks.at_chance(accuracy)
