"""Small records and hostile words for the tests of the dashboards."""

from __future__ import annotations

from dashboards import demo
from harness.records import Accuracy, Cell, Evidence, Latency, Record, Round, RunHeader, Speedup, Store, Timing

NOW = 1_790_000_000.0
PLAN = demo.Plan(runs=16, cells=36, end=NOW - 3600, rounds=3, samples=5)

#: Words that would do something if a page took them for markup, for a script, for a path or for a formula.
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=2">',
    "${window.hacked=3}\u2028window.hacked=3//",
    "{{ 7*7 }}{% raw %}",
    "../../../../etc/passwd",
    "=HYPERLINK(1)",
    "<b>bold</b><a href='javascript:window.hacked=4'>x</a>",
    "\x00\x1b[31m\ud800",
)


def make_header(run_id: str, started_at: float, **changes: object) -> RunHeader:
    fields: dict[str, object] = {
        "run_id": run_id,
        "started_at": started_at,
        "commit": "c" * 40,
        "fingerprint": "host-a",
        "host": {"cpu_model": "A CPU"},
        "versions": {"torch": "2.13.0"},
        "profile": "quick",
        "gated": ("sq-static",),
    }
    return RunHeader(**{**fields, **changes})  # type: ignore[arg-type]


def make_timing(seconds: float, rounds: int = 3) -> Timing:
    samples = tuple(seconds * (1 + 0.001 * step) for step in range(5))
    made = tuple(Round(0.0, 1, samples) for _ in range(rounds))
    return Timing(rounds=made, throughput=8 / seconds, latency_s=Latency(seconds, seconds * 1.1, seconds * 1.2))


def make_accuracy(delta: float = 0.0, flips: float = 0.01) -> Accuracy:
    return Accuracy(
        "accuracy", 0.8 + delta, 0.8, 0.5, delta, (delta - 0.01, delta + 0.01), 1000, flips, 5, 5, 20.0, 0.99
    )


def make_record(run_id: str, cell: Cell, seconds: float = 0.01, **changes: object) -> Record:
    quantized = cell.recipe not in ("fp32", "bf16")
    fields: dict[str, object] = {
        "run_id": run_id,
        "commit": None,
        "status": "ok",
        "reason": None,
        "cell": cell,
        "timing": make_timing(seconds),
        "speedup": Speedup(0.04 / seconds, (0.039 / seconds, 0.041 / seconds)),
        "accuracy": make_accuracy() if cell.task else None,
        "evidence": Evidence(
            linears=4,
            quantized_linears=4 if quantized else 0,
            fused_linears=4 if quantized else 0,
            isa_effective=cell.isa,
            amx_permission=cell.isa == "amx",
        ),
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def write_run(store: Store, header: RunHeader, records: list[Record], invalid: str | None = None) -> None:
    with store.create_run(header) as writer:
        for record in records:
            writer.append(record)
        writer.finish(invalid_reason=invalid)
