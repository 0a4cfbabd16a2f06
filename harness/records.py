"""Records of measured cells: their shape, and the store that keeps them. The only file that knows the JSON.

A *cell* is what is measured; a *record* is everything known about one cell in one run; a *run* is the records of one
invocation plus the host's fingerprint, the commit and the versions. A value that was not measured is None, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Status = Literal["ok", "failed", "skipped", "invalid"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "invalid")


@dataclass(frozen=True)
class Cell:
    """What is measured. ``key`` is how it is written: ``model/engine/recipe/isa/scenario[/aoti][@task]``."""

    model: str
    engine: str
    recipe: str
    isa: str
    scenario: str
    deploy: str = "jit"
    task: str | None = None
    family: str | None = None
    weights: Literal["real", "synthetic"] | None = None
    compute_dtype: Literal["fp32", "bf16"] | None = None

    @property
    def key(self) -> str:
        """The cell's name; family, weights and compute dtype follow from it and are not part of it."""
        parts = [self.model, self.engine, self.recipe, self.isa, self.scenario]
        if self.deploy != "jit":
            parts.append(self.deploy)
        return "/".join(parts) + (f"@{self.task}" if self.task else "")


@dataclass(frozen=True)
class Round:
    """One slice of steady-state timing in one process. ``t0``: Unix time in seconds of its first iteration."""

    t0: float
    process: int
    samples_s: tuple[float, ...]


@dataclass(frozen=True)
class Latency:
    """Percentiles of the time of one iteration, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Timing:
    """The clocks of a cell, in seconds, and what follows from its samples. ``throughput``: sequences a second."""

    rounds: tuple[Round, ...] = ()
    throughput: float | None = None
    latency_s: Latency | None = None
    load_s: float | None = None
    calibrate_s: float | None = None
    quantize_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    steady: bool | None = None
    brief: bool = False


@dataclass(frozen=True)
class Speedup:
    """Ratio of median times, ``int8/fp32`` of the same model, ISA, scenario and run over this cell."""

    value: float
    ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one forward pass spent in linears, attention and the rest."""

    linear: float
    attention: float
    other: float


@dataclass(frozen=True)
class Memory:
    """Bytes: the worker's peak resident set, the model's parameters and buffers, and those of the linears' weights."""

    peak_rss_bytes: int | None = None
    model_bytes: int | None = None
    linear_weight_bytes: int | None = None


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over paired examples against eager FP32.

    ``delta`` is value - fp32_value (negative: worse). ``flips`` is the fraction of examples whose prediction differs,
    ``flips_gained`` and ``flips_lost`` count those that became right and wrong. ``scenario`` names the scenario in
    whose compiled graph the examples were judged. ``outputs`` is the sidecar file, relative to the store's root.
    """

    metric: str
    value: float
    fp32_value: float
    chance: float
    delta: float
    delta_ci95: tuple[float, float] | None
    n: int
    flips: float
    flips_gained: int
    flips_lost: int
    sqnr_db: float | None
    cosine: float | None
    outputs: str | None = None
    scenario: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What really ran. Counts are of original ``nn.Linear`` modules; ``kernels`` maps a kernel's name to its calls in
    one forward pass; ``amx_permission`` is the process's AMX bit when the cell ended. ``weight_bits`` is 7 where the
    ISA's kernels would saturate with 8."""

    linears: int | None = None
    quantized_linears: int | None = None
    fused_linears: int | None = None
    kernels: dict[str, int] = field(default_factory=dict)
    isa_effective: str | None = None
    amx_permission: bool | None = None
    weight_bits: int | None = None
    threads: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """Everything known about one cell in one run."""

    run_id: str
    commit: str | None
    status: Status
    reason: str | None
    cell: Cell
    timing: Timing = Timing()
    speedup: Speedup | None = None
    time_split_s: TimeSplit | None = None
    memory: Memory = Memory()
    accuracy: Accuracy | None = None
    evidence: Evidence = Evidence()
    fingerprint: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RunHeader:
    """First line of a run's file.

    ``fingerprint`` is the id of the host's comparable fields, ``host`` spells all fields out (a flat mapping), ``versions``
    maps a distribution to its version. ``started_at`` is Unix time in seconds. ``gated`` lists the recipes whose ``int8``
    cells decide the gate. ``arguments`` is the command line after ``harness``.
    """

    run_id: str
    started_at: float
    commit: str | None
    fingerprint: str
    host: dict[str, Any]
    versions: dict[str, str]
    profile: str | None
    gated: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    dirty: bool | None = None
    invalid_reason: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Run:
    """A run as read back. ``problems`` says in words what could not be read (a torn tail, a damaged line)."""

    header: RunHeader
    records: tuple[Record, ...]
    problems: tuple[str, ...] = ()
    finished: bool = False
