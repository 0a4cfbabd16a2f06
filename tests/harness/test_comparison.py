"""What pairs of processes say: drawn noise with and without an effect, predictions, many cells, and what is printed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from harness import comparison
from harness.comparison import Comparison, Failure, Pairs, Side

KEY = "minilm/int8/sq-static/vnni/offline:b8:s128"
A, B = Side("HEAD~1", "a" * 40), Side("HEAD", "b" * 40)


def drawn(pairs: int, slowdown: float = 0.0, noise: float = 0.01, seed: int = 0, drift: float = 0.2) -> Pairs:
    """Pairs whose processes differ by ``noise``, on a host that drifts by far more between pairs."""
    rng = np.random.default_rng(seed)
    found = Pairs()
    for _ in range(pairs):
        host = 0.1 * np.exp(rng.normal(0, drift))
        a, b = (
            host * np.exp(rng.normal(0, noise)) * np.exp(rng.normal(0, noise, 6)) * (1 + slow) for slow in (0, slowdown)
        )
        found = found.and_one(a, b)
    return found


def outcome(pairs: Pairs, margin: float = comparison.MARGIN, floor: float = 0.0) -> str:
    return comparison.decide({KEY: pairs}, margin, {KEY: floor})[0].outcome


def after_more_pairs(slowdown: float, seed: int) -> str:
    """The outcome of a comparison that measures on while it is inconclusive."""
    found = "inconclusive"
    for pairs in range(comparison.MIN_PAIRS, comparison.MAX_PAIRS + 1):
        found = outcome(drawn(pairs, slowdown, seed=seed))
        if found != "inconclusive":
            break
    return found


@pytest.mark.parametrize("seed", range(5))
def test_linears_that_lost_8_percent_are_caught_and_a_comment_passes(seed: int) -> None:
    # Linears are half of a cell's time or more.
    assert after_more_pairs(0.05, seed) == "regression"
    assert after_more_pairs(0.0, seed) == "pass"


def test_too_few_pairs_decide_nothing() -> None:
    verdict = comparison.decide({KEY: drawn(comparison.MIN_PAIRS - 1, 0.5)})[0]
    assert verdict.outcome == "inconclusive"
    assert verdict.ratio is None
    assert "5 are needed" in verdict.reason


def test_an_interval_that_covers_the_limit_is_inconclusive() -> None:
    verdict = comparison.decide({KEY: drawn(5, 0.02, noise=0.03)})[0]
    assert verdict.outcome == "inconclusive"
    assert verdict.interval is not None and verdict.interval[0] < verdict.limit < verdict.interval[1]


def test_the_noise_floor_of_a_series_raises_its_limit() -> None:
    pairs = drawn(8, 0.06)
    assert outcome(pairs) == "regression"
    verdict = comparison.decide({KEY: pairs}, floors={KEY: 0.12})[0]
    assert verdict.outcome == "pass"
    assert verdict.limit == pytest.approx(0.88)
    assert "noise" in verdict.reason


def test_a_speedup_is_an_improvement() -> None:
    assert outcome(drawn(6, -0.2)) == "improvement"


def test_many_cells_need_more_pairs_before_one_of_them_is_called() -> None:
    many = {f"{KEY}{n}": drawn(5, seed=n) for n in range(30)} | {KEY: drawn(5, 0.2)}
    assert comparison.decide({KEY: many[KEY]})[0].outcome == "regression"
    among = next(one for one in comparison.decide(many) if one.cell_key == KEY)
    assert among.outcome == "inconclusive"
    assert among.p_value is not None and among.p_value > comparison.FALSE_DISCOVERIES
    many[KEY] = drawn(12, 0.2)
    assert next(one for one in comparison.decide(many) if one.cell_key == KEY).outcome == "regression"


def test_groups_are_geometric_means_of_what_the_same_pairs_measured() -> None:
    cells = {"m/r/1": drawn(6, 0.10, noise=0.001), "m/r/2": drawn(6, 0.0, noise=0.001), "m/s/1": drawn(6)}
    groups = {one.name: one for one in comparison.group(cells, lambda key: key.rpartition("/")[0])}
    assert set(groups) == {"m/r", "m/s"}
    assert groups["m/r"].ratio == pytest.approx(1 / 1.1**0.5, rel=0.01)


def kept(logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    return {"logits": logits, "labels": labels}


def test_equal_predictions_pass_and_changed_ones_are_a_regression() -> None:
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(400, 2)), rng.integers(0, 2, 400)
    same = comparison.judge_predictions(KEY, kept(logits, labels), kept(logits * 1.001, labels))
    assert (same.outcome, same.flips, same.gained, same.lost, same.n) == ("pass", 0.0, 0, 0, 400)
    other = logits.copy()
    other[:20] = other[:20, ::-1]
    changed = comparison.judge_predictions(KEY, kept(logits, labels), kept(other, labels))
    assert changed.outcome == "regression"
    assert changed.flips == pytest.approx(0.05)
    assert changed.gained + changed.lost == 20


def test_answers_are_compared_as_texts() -> None:
    f1 = np.ones(200)
    one = {"answers": np.array(["a"] * 200), "f1": f1, "exact_match": f1}
    other = {"answers": np.array(["a"] * 190 + ["b"] * 10), "f1": np.r_[f1[:190], f1[190:] * 0.5], "exact_match": f1}
    assert comparison.judge_predictions(KEY, one, one).outcome == "pass"
    assert comparison.judge_predictions(KEY, one, other).lost == 10


def test_different_examples_are_refused() -> None:
    one = kept(np.zeros((4, 2)), np.zeros(4))
    with pytest.raises(ValueError, match="4 and 3 examples"):
        comparison.judge_predictions(KEY, one, kept(np.zeros((3, 2)), np.zeros(3)))


@pytest.mark.parametrize(
    ("slowdown", "failures", "invalid", "code"),
    [
        (0.0, (), None, 0),
        (-0.3, (), None, 0),
        (0.3, (), None, 1),
        (0.3, (Failure("x", "HEAD", "it died"),), None, 2),
        (0.3, (Failure("x", "HEAD", "it died"),), "others kept it busy", 3),
    ],
)
def test_exit_codes_by_the_gravest(
    slowdown: float, failures: tuple[Failure, ...], invalid: str | None, code: int
) -> None:
    speed = tuple(comparison.decide({KEY: drawn(12, slowdown)}))
    found = Comparison(A, B, speed, failures=failures, invalid_reason=invalid)
    assert found.exit_code == code
    assert f"exit {code}" in comparison.headline(found)


def test_undecided_is_4_and_nothing_measured_is_a_failure() -> None:
    assert Comparison(A, B, tuple(comparison.decide({KEY: drawn(3)}))).exit_code == 4
    assert Comparison(A, B, ()).exit_code == 2


def test_markdown_and_json_hold_verdicts_marker_and_the_command_that_repeats() -> None:
    speed = tuple(comparison.decide({KEY: drawn(6, 0.3)}))
    found = Comparison(A, B, speed, host="Some | CPU", notes=("a note",))
    text = comparison.to_markdown(found)
    assert text.startswith(comparison.MARKDOWN_MARKER)
    assert f"`{KEY}` | speed | regression" in text
    assert "Some \\| CPU" in text
    assert f"harness compare {'a' * 40} {'b' * 40} --models minilm" in text
    data = json.loads(json.dumps(comparison.to_json(found), allow_nan=False))
    assert (data["schema_version"], data["outcome"], data["exit_code"]) == (1, "regression", 1)
    assert data["speed"][0]["cell_key"] == KEY
