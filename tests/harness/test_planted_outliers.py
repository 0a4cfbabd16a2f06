"""Real weights with planted outliers: without smoothing static scales fail the gate, with it they pass.

Judged through the eager operators, whose arithmetic is exact and the same on every ISA, with 8-bit weights.
"""

from __future__ import annotations

import judged
import pytest

from harness import models, rewrites, tasks, verdicts
from harness.records import Accuracy
from int8 import outliers, quantization, recipe

TEXTS = 300
SEQ = 64


@pytest.fixture(scope="module", params=["minilm-outliers", "minilm-distilbert-outliers", "minilm-xlmr-outliers"])
def accuracies(request: pytest.FixtureRequest) -> dict[str, Accuracy]:
    """Accuracy of each recipe on the first held-out reviews."""
    model = models.load(request.param)
    task = tasks.load("reviews", model, seq=SEQ)
    reference = tasks.reference(model, task, seq=SEQ, limit=TEXTS)
    seen = quantization.statistics(model.module, task.calibration())
    found = {}
    for name in ("static", "sq-static"):
        quantized = quantization.quantize(model.module, recipe.get(name).replace(weight_bits=8), seen)
        outputs = tasks.base.collect(task, quantized, task.ragged(SEQ, TEXTS), task.size(TEXTS))
        found[name] = task.judge(outputs, reference)
    return found


def flips_verdict(name: str, accuracy: Accuracy) -> verdicts.Verdict:
    record = judged.record(judged.cell(recipe=name), accuracy=accuracy)
    header = judged.header(gated=("static", "sq-static"))
    return next(one for one in verdicts.judge_record(record, header) if one.metric == "flips")


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.timeout(1800)
def test_static_scales_fail_the_gate_and_smoothing_passes_it(accuracies: dict[str, Accuracy]) -> None:
    static, smoothed = accuracies["static"], accuracies["sq-static"]
    assert static.sqnr_db is not None and smoothed.sqnr_db is not None
    assert static.flips > 0.05
    failed = flips_verdict("static", static)
    assert failed.gated and not failed.good
    assert smoothed.sqnr_db > 22.0 > static.sqnr_db + 8.0
    assert smoothed.flips <= 0.025
    assert flips_verdict("sq-static", smoothed).good


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["minilm", "minilm-distilbert", "minilm-xlmr"])
def test_the_analysis_finds_what_is_planted_and_what_was_there_and_no_more(name: str) -> None:
    found = {}
    for one in (name, f"{name}-outliers"):
        model = models.load(one)
        texts = (batch for _, batch in tasks.load("reviews", model, seq=SEQ).ragged(SEQ, 96))
        found[one] = set(outliers.analyse(model.module, texts).dimensions)
    planted = set(rewrites.outlier_channels(384))
    assert planted and not planted & found[name]
    assert found[f"{name}-outliers"] == planted | found[name]
