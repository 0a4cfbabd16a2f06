from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from harness import cli, encoders, outlier_report, rewrites


def test_a_tiny_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outliers.json"
    given = ["outliers", "tiny-bert", "--task", "tiny-reviews", "--limit", "32", "--json", str(file)]
    given += ["--results", str(tmp_path)]
    assert cli.main(given) == 0
    printed = capsys.readouterr()
    assert "tiny-bert: " in printed.out
    assert "of 64" in printed.out
    data = json.loads(file.read_text())
    assert data["model"] == "tiny-bert"
    assert (data["analysis"]["layers"], data["analysis"]["hidden_states"]) == (2, 6)
    assert (data["analysis"]["magnitude"], data["analysis"]["min_layer_share"]) == (6.0, 0.25)
    assert data["analysis"]["sequences"] == 32
    assert json.loads((tmp_path / "analyses" / "outliers-tiny-bert.json").read_text()) == data
    assert [one["layer"] for one in data["smoothing"]] == [0, 0, 0, 1, 1, 1]
    assert len(data["dimensions"]) == outlier_report.SHOWN
    assert all(len(one["before"]) == len(one["after"]) == outlier_report.SHOWN for one in data["smoothing"])


def test_planted_features_are_found_and_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has no outlier features of its own; planting some must bring exactly those."""
    plain = outlier_report.examine("tiny-bert", "tiny-reviews", 32)
    load = outlier_report.models.load

    def planted(name: str, **options: object) -> object:
        loaded = load(name, **options)  # type: ignore[arg-type]
        return dataclasses.replace(loaded, module=encoders.finish(rewrites.plant_outliers(loaded.module.backbone)))

    monkeypatch.setattr(outlier_report.models, "load", planted)
    report = outlier_report.examine("tiny-bert", "tiny-reviews", 32)
    assert plain.analysis.dimensions == ()
    assert plain.effects == ()
    assert report.analysis.dimensions == rewrites.outlier_channels(64)
    assert all(feature.one_sided and feature.layer_share == 1.0 for feature in report.analysis.features)
    outlier, *controls = report.effects
    assert outlier.dimensions == report.analysis.dimensions
    assert len(controls) == outlier_report.CONTROLS
    assert all(not set(effect.dimensions) & set(outlier.dimensions) for effect in controls)
    assert outlier.sqnr_db is not None
    assert all(effect.sqnr_db is not None and effect.sqnr_db > outlier.sqnr_db for effect in controls)
    assert report.attention_mass == pytest.approx(plain.attention_mass, abs=1e-4)
    # Planted behind LayerNorms: what reads the hidden state directly is shifted and smoothed back to the rest's size.
    assert report.dimensions[:6] == report.analysis.dimensions
    for one in report.smoothing:
        if "attention.output" not in one.input:
            assert one.shifted == 6
            assert max(one.before[:6]) > 9.0
            assert max(one.after[:6]) < 0.2 * max(one.before[:6])


def test_models_without_text_read_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    load, said = outlier_report.models.load, list[str]()

    def mute(name: str, **options: object) -> object:
        return dataclasses.replace(load(name, **options), tokenizer=None)  # type: ignore[arg-type]

    monkeypatch.setattr(outlier_report.models, "load", mute)
    report = outlier_report.examine("tiny-bert", "tiny-reviews", 8, progress=said.append)
    assert (report.task, report.value) == (None, None)
    assert report.analysis.sequences == outlier_report.RANDOM_TEXTS.batch
    assert report.attention_mass is not None
    assert any("random tokens" in line for line in said)


def test_unknown_names_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["outliers", "minilmm"]) == cli.EXIT_USAGE
    assert cli.main(["outliers", "minilm", "--task", "review"]) == cli.EXIT_USAGE
    assert "did you mean" in capsys.readouterr().err
