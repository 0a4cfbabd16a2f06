"""Benchmarks of the cells of engine ``int8``: model, recipe, ISA and scenario are their parameters.

The ISA is a parameter and not part of asv's matrix: the harness starts masked workers itself, and so all ISAs are
measured in an existing environment as well. The lists are the profile's and every ISA there is, whatever this host has,
so that results of several hosts share one graph; what a host lacks is n/a. To asv lower is always better, hence seconds
and not throughput, loss and not accuracy. Raise ``version`` when a number changes its meaning: asv then starts anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from asv_runner.benchmarks.mark import SkipNotImplemented

from benchmarks.measure import key, measure, profile
from int8.isa import NAMES as ISAS

_PROFILE = profile()


class Cell:
    """One cell of engine ``int8``, read from the records that ``setup_cache`` measured."""

    version = "1"
    timeout = 120
    param_names: ClassVar = ["model", "recipe", "isa", "scenario"]
    params: ClassVar = [
        list(_PROFILE.models),
        list(_PROFILE.recipes.get("int8", ())),
        list(ISAS),
        [str(scenario) for scenario in _PROFILE.scenarios],
    ]

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        """Measures the whole profile; asv calls it once for all benchmarks of this class and keeps what it returns."""
        return measure(_PROFILE.name, Path(os.getcwd(), "store"))  # noqa: PTH109 - asv's folder, removed by asv

    setup_cache.timeout = 4 * 3600.0  # type: ignore[attr-defined] # cold compiles of large models, under every mask

    def setup(self, cache: dict[str, dict[str, Any]], model: str, recipe: str, isa: str, scenario: str) -> None:
        """Finds the cell: None where this host does not measure it, an error where measuring it failed."""
        cell = cache.get(key(model, recipe, isa, scenario))
        if cell is not None and cell["status"] not in ("ok", "skipped"):
            raise RuntimeError(f"{cell['status']}: {cell['reason']}")
        self.cell = cell if cell is not None and cell["status"] == "ok" else None

    def track_seconds_per_sequence(self, *_: object) -> dict[str, Any]:
        """Samples, which asv treats like those of a timing: it stores a median with its interval."""
        batch = self._measured("batch")
        return {"samples": [seconds / batch for seconds in self._measured("batch_s")], "number": 1}

    def track_latency_p50(self, *_: object) -> dict[str, Any]:
        """Seconds from a batch's start to its result; asv's median of the samples is the 50th percentile."""
        return {"samples": self._measured("batch_s"), "number": 1}

    def track_accuracy_drop(self, *_: object) -> float:
        """Eager FP32's accuracy minus the cell's, on the same examples; negative where the cell is better."""
        return float(self._measured("accuracy_drop"))

    def track_model_bytes(self, *_: object) -> float:
        """Bytes of parameters and buffers."""
        return float(self._measured("model_bytes"))

    def track_quantize_s(self, *_: object) -> float:
        """Seconds to quantize, calibration left out."""
        return float(self._measured("quantize_s"))

    track_seconds_per_sequence.unit = "seconds"  # type: ignore[attr-defined]
    track_latency_p50.unit = "seconds"  # type: ignore[attr-defined]
    track_accuracy_drop.unit = "fraction"  # type: ignore[attr-defined]
    track_model_bytes.unit = "bytes"  # type: ignore[attr-defined]
    track_quantize_s.unit = "seconds"  # type: ignore[attr-defined]

    def _measured(self, name: str) -> Any:
        """The number, or n/a. Said here and not in ``setup``, where asv would print a line for each combination."""
        if self.cell is None or self.cell[name] is None or self.cell[name] == []:
            raise SkipNotImplemented(f"{name} is not measured on this host")
        return self.cell[name]
