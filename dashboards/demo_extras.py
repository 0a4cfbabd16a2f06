"""What else a generated store holds for its newest run: examples of judged cells, chosen kernels, analyses.

Nothing here was measured; every part follows the shape of a real one, as :mod:`dashboards.demo` does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from harness import analyses, roofline
from harness.records import Accuracy, Cell, Evidence, Record, RunHeader, RunWriter, Store
from harness.roofline import EncoderShape, Machine, Point, Product
from harness.tasks.notable import GROUPS, margins

#: Roofs of the generated host by ISA, operations a second; bytes a second and bytes by level of memory.
PEAKS: dict[str, dict[Any, float]] = {
    "amx": {"int8": 11.8e12, "bf16": 5.8e12, "fp32": 0.39e12},
    "vnni": {"int8": 1.52e12, "fp32": 0.39e12},
}
BANDWIDTH: dict[Any, float] = {"l2": 180e9, "l3": 52e9, "memory": 21e9}
CAPACITY: dict[Any, int] = {"l2": 4 << 20, "l3": 480 << 20}
#: Seconds of one pass of FP32 in attention and the rest.
SPLIT = {"attention": 0.052, "other": 0.049}
#: recipe -> dtypes of products, share of the roof that linears reach, how much faster attention and the rest are.
RECIPES: dict[str, tuple[Any, float, float]] = {
    "fp32": ("fp32", 0.76, 1.0),
    "bf16": ("bf16", 0.42, 2.1),
    "sq-static": ("int8", 0.41, 2.3),
    "sq-dynamic": ("int8", 0.36, 2.0),
}
SHAPE = EncoderShape(layers=4, hidden=1024, intermediate=4096, heads=16)
TEXTS = (
    "a thriller that never once raises its voice, and is all the better for it",
    'two hours of <b>nothing</b> & a title that promises "more"',
    "the kind of comedy where one remembers the chairs",
    "it limps, it mumbles, and then in its last ten minutes it flies",
    "bold, bright and quite without a point",
)


def examples(accuracy: Accuracy, seed: int) -> dict[str, Any]:
    """The arrays of a judged cell's sidecar file, with about as many flips as ``accuracy`` says."""
    rng = np.random.default_rng(seed)
    fp32 = rng.normal(0, 2.0, (accuracy.n, 2)).astype(np.float32)
    chosen, sure = fp32.argmax(axis=1), margins(fp32)
    flipped = np.zeros(accuracy.n, dtype=bool)
    count = accuracy.flips_gained + accuracy.flips_lost
    flipped[np.argsort(sure + rng.exponential(0.4, accuracy.n))[:count]] = True
    own = fp32 + rng.normal(0, 0.05, fp32.shape).astype(np.float32)
    own[flipped] = own[flipped][:, ::-1]
    edges = np.quantile(sure, np.linspace(0, 1, GROUPS + 1))
    group = np.clip(np.searchsorted(edges, sure, side="right") - 1, 0, GROUPS - 1)
    worst = np.lexsort((sure, -np.where(flipped, sure, -1.0)))[:12]
    return {
        "logits": own,
        "labels": np.where(rng.random(accuracy.n) < accuracy.fp32_value, chosen, 1 - chosen).astype(np.int16),
        "worst": worst.astype(np.int32),
        "worst_texts": np.array([f"{TEXTS[place % len(TEXTS)]} (generated {place})" for place in worst]),
        "worst_fp32": fp32[worst],
        "margin_edges": edges.astype(np.float32),
        "margin_counts": np.bincount(group, minlength=GROUPS).astype(np.int32),
        "margin_flips": np.bincount(group[flipped], minlength=GROUPS).astype(np.int32),
    }


def completed(record: Record, writer: RunWriter, seen: dict[int, str]) -> Record:
    """``record`` with the file of its examples and its chosen kernels. ``seen``: files by accuracy object."""
    evidence = dataclasses.replace(record.evidence, selection=selection(record.cell, record.evidence))
    accuracy = record.accuracy
    if accuracy is None or record.cell.recipe == "fp32":
        return dataclasses.replace(record, evidence=evidence)
    if id(accuracy) not in seen:
        seen[id(accuracy)] = writer.write_outputs(record.cell.key, examples(accuracy, len(seen)))
    accuracy = dataclasses.replace(accuracy, outputs=seen[id(accuracy)])
    return dataclasses.replace(record, evidence=evidence, accuracy=accuracy)


def selection(cell: Cell, evidence: Evidence) -> tuple[dict[str, Any], ...]:
    """What selection would have chosen for the products of a cell of ours."""
    if cell.engine != "int8" or not evidence.quantized_linears:
        return ()
    rows = 8 * 128 if cell.scenario.startswith("offline") else 128
    kernels = ("int8:amx_stream", "int8:amx", "onednn") if cell.isa == "amx" else ("int8:vnni", "onednn")
    rate = 0.4 * PEAKS.get(cell.isa, PEAKS["vnni"])["int8"]
    found = []
    for n, k, epilogue in ((3072, 1024, "bias"), (1024, 1024, "bias, residual"), (4096, 1024, "bias, gelu, quantize")):
        best = 2 * rows * n * k / rate
        times = {name: best * (1 + 0.17 * place + 0.03 * (n == 1024)) for place, name in enumerate(kernels)}
        chosen = min(times, key=lambda name: times[name])
        item = {
            "m": rows,
            "n": n,
            "k": k,
            "epilogue": epilogue,
            "out_dtype": "int8" if "quantize" in epilogue else "bf16",
        }
        found.append({**item, "kernel": chosen, "times_s": times})
    return tuple(found)


def write_analyses(store: Store, header: RunHeader) -> None:
    """A roofline, an outlier analysis and a selftest, each labelled as generated."""
    host = header.fingerprint
    analyses.write(store.root, "roofline", f"bert-large-4l-{host}", _roofline(header))
    analyses.write(store.root, "outliers", "minilm", _outliers())
    analyses.write(store.root, "selftest", host, _selftest(header))


def _roofline(header: RunHeader) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": "bert-large-4l",
        "host": header.fingerprint,
        "cpu": "Generated host, 2 cores (not a real machine)",
        "sections": [_section(isa, header) for isa in PEAKS],
    }


def _section(isa: str, header: RunHeader) -> dict[str, Any]:
    names = [name for name in RECIPES if name != "bf16" or "bf16" in PEAKS[isa]]
    return {
        "isa": isa,
        "scenario": "offline:b8:s128",
        "threads": 2,
        "commit": header.commit,
        "measured_at": header.started_at,
        "shape": dataclasses.asdict(SHAPE),
        "peaks": {"rates": {}, "operations": PEAKS[isa], "bandwidth": BANDWIDTH, "capacity": CAPACITY},
        "recipes": [_recipe(name, isa) for name in names],
    }


def _recipe(name: str, isa: str) -> dict[str, Any]:
    dtype, reached, rest_gain = RECIPES[name]
    host = Machine(PEAKS[isa], BANDWIDTH, CAPACITY)
    products = roofline.linears(SHAPE, 8, 128, joint=True)
    size = sum(one.calls * one.weight_elements for one in products) * roofline.BYTES[dtype]
    points = [
        _point(
            one,
            roofline.place(
                one, roofline.precision("linear", dtype == "int8", "fp32" if dtype == "int8" else dtype), host, size
            ),
            reached,
        )
        for one in products
    ]
    linear = sum(one["seconds"] * one["calls"] for one in points)
    fp32 = sum(one.calls * one.operations for one in products) / (RECIPES["fp32"][1] * PEAKS[isa]["fp32"])
    split = {"linear": linear, **{part: seconds / rest_gain for part, seconds in SPLIT.items()}}
    rest = sum(SPLIT.values())
    total, base, gain = sum(split.values()), fp32 + rest, PEAKS[isa][dtype] / PEAKS[isa]["fp32"]
    ceiling = base / (fp32 / gain + rest / rest_gain)
    return {
        "recipe": name,
        "compute_dtype": "bf16" if isa == "amx" and name != "fp32" else "fp32",
        "status": "ok",
        "reason": None,
        "seconds": total,
        "speedup": {"value": base / total, "ci95": None},
        "linear_speedup": {"value": fp32 / linear, "ci95": None},
        "time_split_s": split,
        "points": points,
        "ceiling": None
        if name == "fp32"
        else {
            "linear_share": fp32 / base,
            "linear_gain": gain,
            "rest_gain": rest_gain,
            "ceiling": ceiling,
            "at_roof": ceiling,
            "speedup": base / total,
            "linear_speedup": fp32 / linear,
            "reached": base / total / ceiling,
        },
    }


def _point(product: Product, placed: Point, reached: float) -> dict[str, Any]:
    rate = placed.attainable * reached
    return {
        **{name: getattr(product, name) for name in ("label", "kind", "m", "n", "k", "batch", "calls", "operations")},
        **{name: getattr(placed, name) for name in ("dtype", "intensity", "weights_from", "activations_from")},
        **{name: getattr(placed, name) for name in ("bandwidth", "peak", "balance", "attainable", "bound")},
        "bytes": placed.bytes_moved,
        "seconds": product.operations / rate,
        "ops_per_s": rate,
        "fraction": rate / placed.attainable,
    }


def _outliers() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    features = [
        {
            "dimension": dimension,
            "layers": layers,
            "layer_share": layers / 6,
            "position_share": share,
            "values_per_sequence": 40 * share,
            "quartiles": [low * 0.5, low * 0.6, low * 0.8],
            "low": min(low, 1.5),
            "high": max(low, 1.5),
            "one_sided": True,
        }
        for dimension, layers, share, low in ((92, 6, 0.61, -14.2), (217, 4, 0.33, 11.8), (301, 2, 0.09, -7.4))
    ]
    smoothing = []
    for layer in range(6):
        for kind, alpha in (("attention", 0.85), ("attention.output", 0.5), ("intermediate", 0.9)):
            before = np.abs(rng.normal(2, 1, 12)) + np.array([14.0, 11.0, 7.0] + 9 * [0.0]) * rng.uniform(0.5, 1.0)
            smoothing.append(
                {
                    "input": f"encoder.layer.{layer}.{kind}",
                    "layer": layer,
                    "alpha": alpha,
                    "before": [float(value) for value in before],
                    "after": [float(value ** (1 - alpha)) for value in before],
                }
            )
    effects = [
        {"zeroed": "outlier features", "dimensions": [92, 217, 301], "attention_mass": 0.21, "value": 0.611,
         "flips": 0.24, "sqnr_db": 3.1},
        {"zeroed": "random features", "dimensions": [5, 100, 250], "attention_mass": 0.405, "value": 0.731,
         "flips": 0.008, "sqnr_db": 31.0},
    ]  # fmt: skip
    return {
        "generated": True,
        "model": "minilm",
        "task": "reviews",
        "metric": "accuracy",
        "attention_mass": 0.41,
        "value": 0.7325,
        "effects": effects,
        "dimensions": [92, 217, 301, 12, 45, 77, 130, 181, 240, 266, 333, 360],
        "smoothing": smoothing,
        "analysis": {
            "magnitude": 6.0,
            "min_layer_share": 0.25,
            "min_position_share": 0.06,
            "layers": 6,
            "hidden_states": 12,
            "hidden_size": 384,
            "sequences": 512,
            "tokens": 14_802,
            "features": features,
            "reached": 5,
            "largest_other": 6.8,
        },
    }


def _selftest(header: RunHeader) -> dict[str, Any]:
    series = [
        {"name": "compare", "about": "interleaved pairs of processes", "margin": 0.03, "nominal": 0.025,
         "false_alarms": 9, "splits": 500, "rate": 0.018, "rate_ci95": [0.008, 0.034], "floor": 0.011,
         "smallest_effect": 0.03, "sees_margin": True},
        {"name": "gate", "about": "one run against another", "margin": 0.1, "nominal": 0.025, "false_alarms": 4,
         "splits": 500, "rate": 0.008, "rate_ci95": [0.002, 0.02], "floor": 0.031, "smallest_effect": 0.12,
         "sees_margin": False},
    ]  # fmt: skip
    faults = [
        {"name": "slower by 20 %", "how": "live", "caught": True, "by": "speed", "detail": "0.81 of the baseline"},
        {"name": "a damaged scale", "how": "live", "caught": True, "by": "accuracy", "detail": "11.2 % flips"},
        {"name": "a mask that did not hold", "how": "recorded", "caught": True, "by": "evidence", "detail": ""},
    ]
    return {
        "schema_version": 1,
        "host": "Generated host, 2 cores (not a real machine)",
        "fingerprint": header.fingerprint,
        "commit": header.commit,
        "measured_at": header.started_at,
        "seconds": 512.0,
        "quick": False,
        "cell": "minilm/int8/sq-static/vnni/offline:b8:s128",
        "processes": 24,
        "series": series,
        "faults": faults,
        "notes": ["Generated: nothing of this was measured."],
        "passed": True,
    }
