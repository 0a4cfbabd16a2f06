"""Records of runs that went well, for tests of the gate to damage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.records import (
    Accuracy,
    Cell,
    Evidence,
    Latency,
    Record,
    Round,
    Run,
    RunHeader,
    Speedup,
    Store,
    Timing,
)

BATCH = 8


def timing(time_s: float = 0.1, rounds: int = 6, noise: float = 0.01, process: int = 1) -> Timing:
    """Rounds that differ by up to ``noise`` around ``time_s``, always in the same pattern."""
    pattern = (0.0, 1.0, -1.0, 0.5, -0.5, 0.0, 0.8, -0.8)
    found = tuple(
        Round(float(index), process, tuple(time_s * (1 + noise * pattern[index % 8]) * f for f in (0.99, 1.0, 1.02)))
        for index in range(rounds)
    )
    return Timing(rounds=found, throughput=BATCH / time_s, latency_s=Latency(time_s, time_s * 1.01, time_s * 1.02))


def accuracy(value: float = 0.731, fp32: float = 0.732, flips: float = 0.02, n: int = 4000, **other: Any) -> Accuracy:
    changes = {"chance": 0.578, "delta": value - fp32, "delta_ci95": (value - fp32 - 0.004, value - fp32 + 0.004)}
    fields: dict[str, Any] = {"flips_gained": 38, "flips_lost": 42, "sqnr_db": 21.0, "cosine": 0.99, **changes, **other}
    return Accuracy(**{"metric": "accuracy", **fields}, value=value, fp32_value=fp32, n=n, flips=flips)


def cell(recipe: str = "sq-static", isa: str = "amx", scenario: str = "offline:b8:s128", **other: Any) -> Cell:
    fields: dict[str, Any] = {"model": "minilm", "engine": "int8", "task": "reviews", "weights": "real", **other}
    return Cell(recipe=recipe, isa=isa, scenario=scenario, family="bert", **fields)


def record(where: Cell | None = None, time_s: float = 0.1, **other: Any) -> Record:
    """A record with everything in order; ``other`` replaces fields."""
    where = where or cell()
    quantized = where.recipe not in ("fp32", "bf16")
    evidence = Evidence(
        linears=36,
        quantized_linears=36 if quantized else 0,
        fused_linears=36 if quantized else 0,
        kernels={"brg_matmul:avx10_1_512_amx": 36},
        isa_effective=where.isa,
        amx_permission=where.isa == "amx",
        weight_bits=8,
    )
    fields: dict[str, Any] = {
        "run_id": "now",
        "commit": "c0ffee",
        "status": "ok",
        "reason": None,
        "timing": timing(time_s),
        "speedup": Speedup(4.0, (3.9, 4.1)),
        "accuracy": accuracy() if where.task else None,
        "evidence": evidence,
        **other,
    }
    return Record(cell=where, **fields)


def header(run_id: str = "now", started_at: float = 1000.0, **other: Any) -> RunHeader:
    fields: dict[str, Any] = {
        "commit": "c0ffee",
        "fingerprint": "host-a",
        "host": {"cpu_model": "A"},
        "versions": {"torch": "2.13.0"},
        "profile": "quick",
        "gated": ("sq-static", "sq-dynamic"),
        "arguments": ("run", "--profile", "quick"),
        **other,
    }
    return RunHeader(run_id=run_id, started_at=started_at, **fields)


def run(records: Sequence[Record], run_id: str = "now", finished: bool = True, **other: Any) -> Run:
    """A finished run; ``other`` goes into its header."""
    own = tuple(dataclasses.replace(one, run_id=run_id) for one in records)
    return Run(header(run_id, **other), own, finished=finished)


def keep(store: Store, kept: Run) -> None:
    """Write ``kept`` into ``store`` as a real run is written."""
    with store.create_run(kept.header) as writer:
        for one in kept.records:
            writer.append(one)
        if kept.finished:
            writer.finish()
