"""The benchmarks: their parameters, and what they hand to asv."""

from __future__ import annotations

from typing import Any

import pytest
from asv_runner.benchmarks.mark import SkipNotImplemented

from benchmarks import cells
from int8.isa import NAMES

KEY = ("minilm", "sq-static", "vnni", "offline:b8:s128")


def _cell(**changes: Any) -> cells.Cell:
    summary = {"status": "ok", "reason": None, "batch": 8, "batch_s": [0.8, 1.6], "accuracy_drop": -0.01}
    summary |= {"model_bytes": 100, "quantize_s": None, **changes}
    benchmark = cells.Cell()
    benchmark.setup({"/".join(KEY): summary}, *KEY)
    return benchmark


def test_parameters_do_not_depend_on_the_host() -> None:
    assert cells.Cell.param_names == ["model", "recipe", "isa", "scenario"]
    models, recipes, isas, scenarios = cells.Cell.params
    assert isas == list(NAMES)
    assert (models, scenarios) == (["minilm"], ["offline:b8:s128", "single:s128"])
    assert {"fp32", "bf16", "sq-static", "sq-dynamic"} <= set(recipes)


def test_speed_is_given_by_its_samples() -> None:
    cell = _cell()
    assert cell.track_latency_p50() == {"samples": [0.8, 1.6], "number": 1}
    assert cell.track_seconds_per_sequence() == {"samples": [0.1, 0.2], "number": 1}


def test_lower_is_better_everywhere() -> None:
    assert _cell().track_accuracy_drop() == -0.01  # a gain in accuracy is a negative drop


def test_what_is_not_measured_is_not_available() -> None:
    with pytest.raises(SkipNotImplemented):
        _cell().track_quantize_s()


def test_what_the_host_lacks_is_not_available() -> None:
    lacking = cells.Cell()
    lacking.setup({}, "minilm", "sq-static", "amx", "single:s128")
    for cell in (lacking, _cell(status="skipped", reason="not part of this version"), _cell(batch_s=[])):
        with pytest.raises(SkipNotImplemented):
            cell.track_seconds_per_sequence()


@pytest.mark.parametrize("status", ["failed", "invalid"])
def test_what_failed_fails(status: str) -> None:
    with pytest.raises(RuntimeError, match="linear 3 is not fused"):
        _cell(status=status, reason="linear 3 is not fused")


def test_every_benchmark_has_a_version_a_unit_and_time_enough() -> None:
    tracked = [getattr(cells.Cell, name) for name in dir(cells.Cell) if name.startswith("track_")]
    assert len(tracked) == 5
    assert all(function.unit for function in tracked)
    assert cells.Cell.version == "1"  # raise it together with this line when a number changes its meaning
    assert cells.Cell.timeout >= 60
    assert cells.Cell.setup_cache.timeout >= 3600
