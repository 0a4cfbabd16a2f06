"""A scale damaged on purpose is caught on accuracy, live: real outputs, real predictions, the rules of the gate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from judged import record
from torch import nn

import int8
from harness import models, tasks, verdicts
from harness.records import Accuracy


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Accuracy, Accuracy]:
    """Accuracy of tiny-bert under ``sq-static`` as quantized, and with the last weight scale 1,000 times too large."""
    model = models.load("tiny-bert")
    task = tasks.load("tiny-reviews", model)
    cache: Path = tmp_path_factory.mktemp("cache")
    reference = tasks.reference(model, task, cache, seq=32)
    quantized = int8.quantize(model.module, "sq-static", task.calibration())

    def accuracy(module: nn.Module) -> Accuracy:
        return task.judge(tasks.evaluate(task, lambda **batch: module(**batch), 8, 32), reference)

    sound = accuracy(quantized)
    *_, module = int8.quantized_modules(quantized).values()
    module.weight.scale.mul_(1000)
    return sound, accuracy(quantized)


def outcomes(accuracy: Accuracy) -> dict[str, str]:
    return {v.metric: v.outcome for v in verdicts.judge_accuracy(record(accuracy=accuracy), gated=True)}


def test_the_sound_model_passes(judged: tuple[Accuracy, Accuracy]) -> None:
    assert outcomes(judged[0])["accuracy"] == "pass"


def test_the_damaged_scale_is_a_regression(judged: tuple[Accuracy, Accuracy]) -> None:
    sound, damaged = judged
    assert damaged.flips > sound.flips
    assert "regression" in outcomes(damaged).values()
    run_verdicts = verdicts.judge_accuracy(dataclasses.replace(record(), accuracy=damaged), gated=True)
    assert verdicts.exit_code(run_verdicts) == 1
