"""Measures a profile once with the harness, for all benchmarks together.

A worker of the harness prepares a model once and then answers every scenario, while asv starts a process for each
combination of parameters: measuring here, in asv's ``setup_cache``, saves most of the time. The harness is called by
its command line, so that this process, and every one that only reads a number, stays free of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import metrics
from harness.matrix import Profile, Scenario, get_profile
from harness.records import Record, Store

PROFILE_VARIABLE = "INT8_ASV_PROFILE"
#: asv draws an interval from a few hundred samples as well as from thousands, and keeps them all in one JSON file.
SAMPLES_A_ROUND = 50
#: Exit codes of ``harness run`` after which there are records: all measured, a cell failed, or the host was disturbed.
_RECORDED = (0, 2, 3)


def profile() -> Profile:
    """The profile that the environment variable ``INT8_ASV_PROFILE`` names; ``quick`` where it is not set."""
    return get_profile(os.environ.get(PROFILE_VARIABLE) or "quick")


def measure(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Runs the cells of engine ``int8`` of a profile into a store at ``folder``.

    Returns:
        What :func:`summary` makes of each record, by ``key(model, recipe, isa, scenario)``.

    Raises:
        RuntimeError: the harness ended without a run; the message holds the end of what it said.
    """
    command = [sys.executable, "-m", "harness", "run", "--profile", name, "--engines", "int8", "--results", str(folder)]
    result = subprocess.run(command, env=_environment(), stderr=subprocess.PIPE, text=True, check=False)
    print(result.stderr, file=sys.stderr)
    if result.returncode not in _RECORDED:
        said = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"harness run ended with exit code {result.returncode}: {said}")
    return {
        key(record.cell.model, record.cell.recipe, record.cell.isa, record.cell.scenario): summary(record)
        for record in Store(folder).load("latest").records
    }


def key(model: str, recipe: str, isa: str, scenario: str) -> str:
    """A combination of asv's parameters as one string."""
    return "/".join((model, recipe, isa, scenario))


def summary(record: Record) -> dict[str, Any]:
    """What the benchmarks need of a record, in plain types: a benchmark's process then imports nothing to read it.

    ``batch_s`` holds samples of the seconds a batch takes, ``batch`` its sequences; the rest are registered metrics.
    """
    scenario = Scenario.parse(record.cell.scenario)
    return {
        "status": record.status,
        "reason": record.reason,
        "batch": scenario.batch * scenario.instances,
        "batch_s": [sample for round_ in record.timing.rounds for sample in _thinned(round_.samples_s)],
        **{name: metrics.get(name).extract(record) for name in ("accuracy_drop", "model_bytes", "quantize_s")},
    }


def _thinned(samples: tuple[float, ...]) -> tuple[float, ...]:
    """At most ``SAMPLES_A_ROUND`` samples, spread evenly over the round."""
    step = -(-len(samples) // SAMPLES_A_ROUND)
    return samples[:: max(step, 1)]


def _environment() -> dict[str, str]:
    """This process's variables, with the assets of the work tree: an environment that asv builds has none beside it."""
    assets = Path(__file__).resolve().parents[1] / ".assets"
    return {"INT8_ASSETS": str(assets), **os.environ}
