"""The metrics of a record, as a typed registry: one source for the gate, asv and the site. Pure.

A metric reads one number out of one record. A number that was not measured, or is no finite number, is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.records import Record

Direction = Literal["lower", "higher"]
Kind = Literal["speed", "accuracy", "memory", "preparation"]
Compare = Literal["ratio", "difference"]


@dataclass(frozen=True)
class Metric:
    """One number of a record, and how it is to be read.

    Attributes:
        name: unique; part of a series' name and of asv's benchmark names.
        unit: of the number; ``1`` for fractions and counts.
        direction: which way is better.
        kind: what it tells about.
        default_margin: how much worse it may get before that matters, as a positive number: a fraction of the baseline
            where ``compare`` is ``ratio``, in the metric's own unit where it is ``difference``. None: reported only.
        extract: the number of a record, or None.
        compare: whether two values are compared by their ratio or by their difference.
        noise_floor: the change, measured like ``default_margin``, that is taken for noise as long as a series is too
            short to have an estimate of its own; None where the number is exact.
        title: what it is, for people.
    """

    name: str
    unit: str
    direction: Direction
    kind: Kind
    default_margin: float | None
    extract: Callable[[Record], float | None]
    compare: Compare = "ratio"
    noise_floor: float | None = None
    title: str = ""

    def worsening(self, baseline: float, value: float) -> float | None:
        """How much worse ``value`` is than ``baseline``, measured like ``default_margin``; negative: better.

        None where a ratio is asked for and the baseline is not positive.
        """
        change = value - baseline if self.direction == "lower" else baseline - value
        if self.compare == "difference":
            return change
        return change / baseline if baseline > 0 else None


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _inverse(value: float | None) -> float | None:
    usable = _finite(value)
    return 1.0 / usable if usable is not None and usable > 0 else None


def _of_latency(name: Literal["p50", "p90", "p99"]) -> Callable[[Record], float | None]:
    return lambda record: _finite(getattr(record.timing.latency_s, name)) if record.timing.latency_s else None


def _of_timing(name: str) -> Callable[[Record], float | None]:
    return lambda record: _finite(getattr(record.timing, name))


def _of_memory(name: str) -> Callable[[Record], float | None]:
    return lambda record: _finite(getattr(record.memory, name))


def _of_accuracy(name: str) -> Callable[[Record], float | None]:
    return lambda record: _finite(getattr(record.accuracy, name)) if record.accuracy else None


def _accuracy_ratio(record: Record) -> float | None:
    value, reference = _of_accuracy("value")(record), _of_accuracy("fp32_value")(record)
    return value / reference if value is not None and reference is not None and reference > 0 else None


def _accuracy_drop(record: Record) -> float | None:
    value, reference = _of_accuracy("value")(record), _of_accuracy("fp32_value")(record)
    return reference - value if value is not None and reference is not None else None


_ALL = (
    Metric(
        "seconds_per_sequence",
        "s",
        "lower",
        "speed",
        0.10,
        lambda record: _inverse(record.timing.throughput),
        noise_floor=0.03,
        title="time a sequence",
    ),
    Metric(
        "throughput",
        "1/s",
        "higher",
        "speed",
        0.10,
        _of_timing("throughput"),
        noise_floor=0.03,
        title="sequences a second",
    ),
    Metric(
        "latency_p50", "s", "lower", "speed", 0.10, _of_latency("p50"), noise_floor=0.03, title="median time of a batch"
    ),
    Metric(
        "latency_p90", "s", "lower", "speed", None, _of_latency("p90"), noise_floor=0.10, title="90 % of batches within"
    ),
    Metric(
        "latency_p99", "s", "lower", "speed", None, _of_latency("p99"), noise_floor=0.20, title="99 % of batches within"
    ),
    Metric(
        "speedup",
        "1",
        "higher",
        "speed",
        None,
        lambda record: _finite(record.speedup.value) if record.speedup else None,
        noise_floor=0.03,
        title="speed-up over compiled FP32",
    ),
    Metric("accuracy", "1", "higher", "accuracy", None, _of_accuracy("value"), "difference", title="the task's metric"),
    Metric("accuracy_ratio", "1", "higher", "accuracy", 0.01, _accuracy_ratio, "difference", title="share of FP32's"),
    Metric("accuracy_drop", "1", "lower", "accuracy", None, _accuracy_drop, "difference", title="loss against FP32"),
    Metric("flips", "1", "lower", "accuracy", 0.03, _of_accuracy("flips"), "difference", title="changed predictions"),
    Metric("sqnr_db", "dB", "higher", "accuracy", None, _of_accuracy("sqnr_db"), "difference", title="SQNR of outputs"),
    Metric("cosine", "1", "higher", "accuracy", None, _of_accuracy("cosine"), "difference", title="cosine of outputs"),
    Metric("peak_rss_bytes", "B", "lower", "memory", None, _of_memory("peak_rss_bytes"), title="peak resident memory"),
    Metric("model_bytes", "B", "lower", "memory", None, _of_memory("model_bytes"), title="model size"),
    Metric("linear_weight_bytes", "B", "lower", "memory", None, _of_memory("linear_weight_bytes"), title="linear size"),
    Metric("load_s", "s", "lower", "preparation", None, _of_timing("load_s"), title="time to load"),
    Metric("calibrate_s", "s", "lower", "preparation", None, _of_timing("calibrate_s"), title="time to calibrate"),
    Metric("quantize_s", "s", "lower", "preparation", None, _of_timing("quantize_s"), title="time to quantize"),
    Metric("compile_s", "s", "lower", "preparation", None, _of_timing("compile_s"), title="time to compile"),
    Metric("warmup_s", "s", "lower", "preparation", None, _of_timing("warmup_s"), title="time to warm up"),
)

#: All metrics by name, in the order in which tables show them.
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def get(name: str) -> Metric:
    """The metric called ``name``.

    Raises:
        KeyError: there is none; the message lists those that exist.
    """
    try:
        return METRICS[name]
    except KeyError:
        raise KeyError(f"unknown metric {name!r}; known: {', '.join(METRICS)}") from None


def of_kind(kind: Kind) -> tuple[Metric, ...]:
    """The metrics of one kind, in the order of tables."""
    return tuple(metric for metric in _ALL if metric.kind == kind)


def headline(scenario: str) -> Metric:
    """The metric by which speed under ``scenario`` is quoted: latency where a single sequence is served, else time a
    sequence."""
    return METRICS["latency_p50" if scenario.startswith("single") else "seconds_per_sequence"]
