"""Records and headers for the tests of the store and of the command line. Plain values, no measurement."""

from __future__ import annotations

from typing import Any

from harness.records import (
    Accuracy,
    Cell,
    Evidence,
    Latency,
    Memory,
    Record,
    Round,
    RunHeader,
    Speedup,
    Store,
    Timing,
)

RUN_ID = "20260102T030405.000Z-abc123"


def header(run_id: str = RUN_ID, **changes: Any) -> RunHeader:
    """A header of a run that started at second 1000."""
    values: dict[str, Any] = {
        "run_id": run_id,
        "started_at": 1000.0,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "fingerprint": "aaaaaaaaaaaa",
        "host": {"cpu_model": "test", "usable_threads": 2},
        "versions": {"torch": "2.13.0"},
        "profile": "smoke",
        "gated": ("sq-static",),
    }
    return RunHeader(**values | changes)


def record(run_id: str = RUN_ID, recipe: str = "sq-static", seconds: float = 0.1, **changes: Any) -> Record:
    """A complete record of one cell, eight sequences in ``seconds``."""
    values: dict[str, Any] = {
        "run_id": run_id,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "status": "ok",
        "reason": None,
        "cell": Cell(
            "minilm", "int8", recipe, "vnni", "offline:b8:s128", task="reviews", family="bert", weights="real"
        ),
        "timing": Timing(
            rounds=tuple(Round(1000.0 + n, 7, tuple(seconds * f for f in (0.99, 1.0, 1.0, 1.01))) for n in range(4)),
            throughput=8 / seconds,
            latency_s=Latency(seconds, seconds * 1.1, seconds * 1.2),
            load_s=1.0,
            compile_s=2.5,
            steady=True,
        ),
        "speedup": Speedup(2.0, (1.9, 2.1)),
        "memory": Memory(10**9, 10**8, 10**7),
        "accuracy": Accuracy(
            metric="accuracy",
            value=0.73,
            fp32_value=0.732,
            chance=0.58,
            delta=-0.002,
            delta_ci95=(-0.006, 0.002),
            n=4000,
            flips=0.012,
            flips_gained=20,
            flips_lost=28,
            sqnr_db=21.5,
            cosine=0.998,
        ),
        "evidence": Evidence(36, 36, 36, {"qlinear": 36}, "vnni", False, 8, 2),
        "fingerprint": "aaaaaaaaaaaa",
    }
    return Record(**values | changes)


def write_run(store: Store, *records: Record, finish: bool = True, **changes: Any) -> str:
    """Write one run whose records get its id; returns the id."""
    made = header(**changes)
    with store.create_run(made) as writer:
        for item in records:
            writer.append(item)
        if finish:
            writer.finish()
    return made.run_id
