"""`harness roofline`: measures a host's peaks and a model's cells, and sets the one against the other.

Written to ``<results>/analyses/roofline-<model>-<host id>.json``, whose sections are replaced one by one as they are
measured again. Its shape (numbers that were not measured are null):

    schema_version  1
    model, host     the model's name, the fingerprint's id
    cpu             the CPU's name
    sections        one an ISA and scenario:
      isa, scenario, threads, commit, measured_at (Unix time in seconds)
      shape         layers, hidden, intermediate, heads
      peaks         rates: {loop: {rate, spread}}, operations or bytes a second, and how far the median window stayed
                    below the best; operations: {int8, bf16, fp32: operations a second}, the roofs; bandwidth: {l2, l3,
                    memory: bytes a second}; capacity: {l2, l3: bytes}
      recipes       one a recipe:
        recipe, compute_dtype, status, reason
        seconds         median of one forward pass, as timed
        speedup, linear_speedup    over FP32: {value, ci95} as in a record
        time_split_s    {linear, attention, other} as in a record
        points          one a product: label, kind, m, n, k, batch, calls (in a pass), dtype, operations and bytes (of a
                        call), intensity, weights_from, activations_from (l2, l3, memory), bandwidth, peak, balance,
                        attainable, bound (compute, memory), seconds (of a call), ops_per_s, fraction
        ceiling         {linear_share, linear_gain, rest_gain, ceiling, at_roof, speedup, linear_speedup, reached};
                        null for FP32 itself
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table

from harness import analyses, peaks, roofline, runner
from harness.errors import UsageError
from harness.matrix import Budget, Overrides, Profile, Scenario
from harness.peaks import Peaks
from harness.records import Cell, Record, Store, to_json
from harness.roofline import Ceiling, Dtype, EncoderShape, Level, Machine, Point, Product
from harness.sources import Sources
from harness.time_split import Kernel
from int8 import isa as isas
from int8 import recipe as recipe_table

SCHEMA_VERSION = 1
BASELINE = "fp32"
DEFAULT_SCENARIO = "offline:b8:s128"
#: Long enough for a median to within a few per cent; the time goes into compiling anyway.
BUDGET = Budget(rounds=4, slice_s=0.5, min_iterations=3, warmup_s=5.0)

#: Median windows that stay further below the best than this were disturbed: a quiet host's differ by a few per cent.
QUIET_SPREAD = 0.1

OnEvent = Callable[[runner.Event], None]


@dataclass(frozen=True)
class Question:
    """What is asked. ``recipes`` None: FP32, SmoothQuant, and BF16 where the ISA has it natively."""

    model: str
    isas: tuple[str, ...] = ("native",)
    recipes: tuple[str, ...] | None = None
    scenario: str = DEFAULT_SCENARIO
    fresh: bool = False
    sources: Sources = dataclasses.field(default_factory=Sources)


@dataclass(frozen=True)
class RecipeReport:
    """One recipe: its record, its products under their roofs, and its ceiling over FP32."""

    record: Record
    points: tuple[Point, ...]
    ceiling: Ceiling | None


@dataclass(frozen=True)
class Section:
    """All recipes under one ISA. ``measured_at``: Unix time in seconds. ``shape`` is None where no cell ran."""

    peaks: Peaks
    scenario: str
    commit: str | None
    measured_at: float
    shape: EncoderShape | None
    recipes: tuple[RecipeReport, ...]


@dataclass(frozen=True)
class Report:
    """What was asked about one model on one host."""

    model: str
    host: str
    cpu: str
    sections: tuple[Section, ...]

    @property
    def exit_code(self) -> int:
        """2 if a cell failed, 3 if none did but the host was disturbed, else 0."""
        found = {one.record.status for section in self.sections for one in section.recipes}
        if "failed" in found:
            return 2
        return 3 if "invalid" in found else 0


# --- measuring --------------------------------------------------------------------------------------------------------


def plans(question: Question) -> dict[str, runner.RunOptions]:
    """What is run, by ISA.

    Raises:
        UsageError: a name that does not exist, an ISA that the host lacks, or a scenario of several instances.
    """
    if Scenario.parse(question.scenario).kind == "multi":
        raise UsageError(f"a roofline is of one process; write {DEFAULT_SCENARIO} instead of {question.scenario}")
    names = tuple(dict.fromkeys(isas.resolve(name) for name in question.isas))
    options = {name: _options(question, name) for name in names}
    for one in options.values():
        runner.plan(one)
    return options


def examine(question: Question, on_event: OnEvent = lambda event: None) -> Report:
    """Measure peaks (unless they are known) and cells, and compute roofs and ceilings.

    Raises:
        UsageError: as :func:`plans`.
        ToolchainMissing, PeaksError: the peaks cannot be measured.
    """
    options = plans(question)
    found = {}
    for name in options:
        on_event(runner.Event("phase", f"peaks under {name}"))
        found[name] = peaks.measure(name, fresh=question.fresh)
    sections = tuple(_section(question, options[name], found[name], on_event) for name in options)
    return Report(question.model, sections[0].peaks.host, isas.cpu_model(), sections)


def _options(question: Question, isa: str) -> runner.RunOptions:
    wanted = question.recipes or default_recipes(isa)
    profile = Profile(
        name="roofline",
        about="what `harness roofline` measures",
        models=(question.model,),
        recipes={"int8": tuple(dict.fromkeys((BASELINE, *wanted)))},
        isas=(isa,),
        scenarios=(Scenario.parse(question.scenario),),
        budget=BUDGET,
        split=True,
    )
    return runner.RunOptions(profile, Overrides(isas=(isa,)), sources=question.sources)


def default_recipes(isa: str) -> tuple[str, ...]:
    """FP32, SmoothQuant, and BF16 where ``isa`` has it natively: the rest of an INT8 model then runs in it."""
    bf16 = ("bf16",) if isa in recipe_table.NATIVE_BF16_ISAS else ()
    return (BASELINE, *bf16, "sq-static", "sq-dynamic")


def _section(question: Question, options: runner.RunOptions, found: Peaks, on_event: OnEvent) -> Section:
    kernels: dict[str, tuple[Kernel, ...]] = {}
    shapes: list[EncoderShape] = []

    def keep(cell: Cell, shape: Mapping[str, int], profiled: tuple[Kernel, ...]) -> None:
        kernels[cell.recipe] = profiled
        shapes.append(EncoderShape(**shape))

    started = time.time()
    with tempfile.TemporaryDirectory(prefix="harness-roofline-") as folder:
        store = Store(Path(folder))
        summary = runner.run(dataclasses.replace(options, on_kernels=keep), store, on_event)
        records = store.load(summary.run_id).records
    shape = shapes[0] if shapes else None
    return Section(
        peaks=found,
        scenario=question.scenario,
        commit=records[0].commit,
        measured_at=started,
        shape=shape,
        recipes=recipe_reports(records, kernels, shape, machine(found)),
    )


# --- setting measurements against roofs -------------------------------------------------------------------------------


def machine(found: Peaks) -> Machine:
    """The roofs in ``found``. BF16 that is emulated gets FP32's roof, which it cannot exceed."""
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16", "int8")
    operations = {dtype: found.operations(dtype) for dtype in dtypes}
    operations["bf16"] = operations["bf16"] or operations["fp32"]
    bandwidth = {level: found.bandwidth(level) for level in roofline.LEVELS}
    capacity: dict[Level, int | None] = {"l2": found.l2_bytes, "l3": found.l3_bytes}
    return Machine(
        operations={name: value for name, value in operations.items() if value is not None},
        bandwidth={level: value for level, value in bandwidth.items() if value is not None},
        capacity={level: value for level, value in capacity.items() if value is not None},
    )


def recipe_reports(
    records: Sequence[Record],
    kernels: Mapping[str, tuple[Kernel, ...]],
    shape: EncoderShape | None,
    host: Machine,
) -> tuple[RecipeReport, ...]:
    """Points and ceilings of ``records``, the recipes of one model under one ISA in one scenario.

    Args:
        kernels: profiled kernels by recipe.
        shape: the model's sizes; None leaves the points out.
        host: the roofs.
    """
    points = {r.cell.recipe: _points(r.cell, kernels.get(r.cell.recipe, ()), shape, host) for r in records}
    return tuple(
        RecipeReport(record, points[record.cell.recipe], _ceiling(record, records, points)) for record in records
    )


def _points(cell: Cell, profiled: Sequence[Kernel], shape: EncoderShape | None, host: Machine) -> tuple[Point, ...]:
    if shape is None:
        return ()
    load = Scenario.parse(cell.scenario)
    joint = roofline.joint_layers(shape, profiled)
    linears = roofline.linears(shape, load.batch, load.seq, joint)
    products = (*linears, *roofline.attention(shape, load.batch, load.seq))
    seconds = roofline.seconds_of(products, profiled)
    quantized = recipe_table.get(cell.recipe).quantized
    dtype = _compute_dtype(cell)
    operands = roofline.precision("linear", quantized, dtype).operands
    weights = sum(p.calls * p.weight_elements for p in linears) * roofline.BYTES[operands]

    def place(product: Product) -> Point:
        found = roofline.place(product, roofline.precision(product.kind, quantized, dtype), host, weights)
        return dataclasses.replace(found, seconds=seconds.get(product.label))

    return tuple(place(product) for product in products)


def _compute_dtype(cell: Cell) -> Dtype:
    return cell.compute_dtype or recipe_table.get(cell.recipe).resolve_compute_dtype(cell.isa)


def _ceiling(record: Record, records: Sequence[Record], points: Mapping[str, tuple[Point, ...]]) -> Ceiling | None:
    """The ceiling of a record's recipe over FP32; None for FP32 itself, and where FP32 was not split."""
    baseline = next((one for one in records if one.cell.recipe == BASELINE), None)
    if baseline is None or baseline.time_split_s is None or record is baseline:
        return None
    own, reference = _linear_points(points[record.cell.recipe]), _linear_points(points[BASELINE])
    if not own or not reference:
        return None
    split = baseline.time_split_s
    return roofline.ceiling(
        linear_s=split.linear,
        rest_s=split.attention + split.other,
        baseline_roof_s=roofline.roof_seconds(reference),
        roof_s=roofline.roof_seconds(own),
        rest_gain=rest_gain(record, baseline, records),
        speedup=None if record.speedup is None else record.speedup.value,
        linear_speedup=None if record.linear_speedup is None else record.linear_speedup.value,
    )


def rest_gain(record: Record, baseline: Record, records: Sequence[Record]) -> float:
    """How much faster than FP32's the rest can be: the most that any recipe with the same compute dtype reached, and at
    least 1. The paper takes BF16's alone; a recipe whose own kernels do better must not pass its ceiling for that."""
    slow = _rest(baseline)
    same = [_rest(one) for one in records if _compute_dtype(one.cell) == _compute_dtype(record.cell)]
    return max([1.0, *(slow / rest for rest in same if slow and rest)])


def _rest(record: Record) -> float | None:
    split = record.time_split_s
    return None if split is None else split.attention + split.other


def _linear_points(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.product.kind == "linear"]


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report as the file's JSON; see the module's docstring."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": report.model,
        "host": report.host,
        "cpu": report.cpu,
        "sections": [_section_json(section) for section in report.sections],
    }


def _section_json(section: Section) -> dict[str, Any]:
    roofs = machine(section.peaks)
    native = {name: rate for name, rate in roofs.operations.items() if section.peaks.operations(name) is not None}
    return {
        "isa": section.peaks.isa,
        "scenario": section.scenario,
        "threads": section.peaks.threads,
        "commit": section.commit,
        "measured_at": section.measured_at,
        "shape": None if section.shape is None else dataclasses.asdict(section.shape),
        "peaks": {
            "measured_at": section.peaks.measured_at,
            "rates": {name: dataclasses.asdict(rate) for name, rate in section.peaks.rates.items()},
            "operations": native,
            "bandwidth": dict(roofs.bandwidth),
            "capacity": dict(roofs.capacity),
        },
        "recipes": [_recipe_json(one) for one in section.recipes],
    }


def _recipe_json(one: RecipeReport) -> dict[str, Any]:
    record = one.record
    latency = record.timing.latency_s
    ceiling = None if one.ceiling is None else {**dataclasses.asdict(one.ceiling), "reached": one.ceiling.reached}
    return {
        "recipe": record.cell.recipe,
        "compute_dtype": record.cell.compute_dtype,
        "status": record.status,
        "reason": record.reason,
        "seconds": None if latency is None else latency.p50,
        "speedup": to_json(record.speedup),
        "linear_speedup": to_json(record.linear_speedup),
        "time_split_s": to_json(record.time_split_s),
        "points": [_point_json(point) for point in one.points],
        "ceiling": ceiling,
    }


def _point_json(point: Point) -> dict[str, Any]:
    product = point.product
    return {
        **{name: getattr(product, name) for name in ("label", "kind", "m", "n", "k", "batch", "calls", "operations")},
        **{name: getattr(point, name) for name in ("dtype", "intensity", "weights_from", "activations_from")},
        **{name: getattr(point, name) for name in ("bandwidth", "peak", "balance", "attainable", "bound", "seconds")},
        "bytes": point.bytes_moved,
        "ops_per_s": point.measured,
        "fraction": point.fraction,
    }


def save(report: Report, results: Path) -> Path:
    """Write the report below ``results``; sections of other ISAs and scenarios that are there stay. Returns the file.

    Raises:
        StoreError: the disk refuses.
    """
    name, data = f"{report.model}-{report.host}", as_json(report)
    fresh = {(section["isa"], section["scenario"]) for section in data["sections"]}
    before = _sections(analyses.path_of(results, "roofline", name))
    data["sections"] = [*(s for s in before if (s["isa"], s["scenario"]) not in fresh), *data["sections"]]
    return analyses.write(results, "roofline", name, data)


def _sections(path: Path) -> list[dict[str, Any]]:
    """Sections of a file that this version can read; none of any other."""
    try:
        data = json.loads(path.read_bytes())
        return cast(list[dict[str, Any]], data["sections"]) if data["schema_version"] == SCHEMA_VERSION else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


# --- tables -----------------------------------------------------------------------------------------------------------


def as_table(report: Report) -> RenderableType:
    """The report for people."""
    return Group(*(part for section in report.sections for part in _section_tables(report, section)))


def _section_tables(report: Report, section: Section) -> list[RenderableType]:
    title = (
        f"{report.model}, {section.scenario}, ISA {section.peaks.isa}, {section.peaks.threads} threads, "
        f"{report.cpu}, host {report.host}"
    )
    failures = [
        f"{one.record.status}: {one.record.cell.key}: {one.record.reason}"
        for one in section.recipes
        if one.record.status != "ok"
    ]
    tables = [_peaks_table(section.peaks), _points_table(section), _splits_table(section), _ceilings_table(section)]
    return [title, *_disturbed(section.peaks), *tables, *failures]


def _disturbed(found: Peaks) -> list[str]:
    """A warning where the peaks' own windows disagree: then they are too low, and fractions of them too high."""
    worst = max(rate.spread for rate in found.rates.values())
    if worst <= QUIET_SPREAD:
        return []
    return [
        f"note: something else ran while peaks were measured (their windows differ by up to {worst:.0%}), so they may "
        "be too low: measure them again on a quiet host with --fresh"
    ]


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _peaks_table(found: Peaks) -> Table:
    table = _table("Peaks, all threads (spread: how far the median window stayed below)", ["loop"], ["rate", "spread"])
    for name, title in peaks.TITLES.items():
        rate = found.rates.get(name)
        if rate is not None:
            unit = "GB/s" if name.endswith(("_read", "_triad")) else "GOP/s"
            table.add_row(title, f"{rate.rate / 1e9:,.1f} {unit}", f"{rate.spread:.0%}")
    return table


def _points_table(section: Section) -> Table:
    right = ("M x N x K", "calls", "ops/byte", "balance", "roof GOP/s", "measured", "of roof")
    left = ("recipe", "product", "dtype", "bound by", "weights, activations from")
    table = _table("Products of the model under their roofs", left, right)
    for one in section.recipes:
        for point in one.points:
            product = point.product
            times = f"{product.batch} of " if product.batch > 1 else ""
            table.add_row(
                one.record.cell.recipe,
                product.label,
                point.dtype,
                point.bound,
                f"{point.weights_from}, {point.activations_from}",
                f"{times}{product.m} x {product.n} x {product.k}",
                str(product.calls),
                f"{point.intensity:.0f}",
                f"{point.balance:.0f}",
                f"{point.attainable / 1e9:,.1f}",
                "-" if point.measured is None else f"{point.measured / 1e9:,.1f}",
                _percent(point.fraction),
            )
    return table


def _splits_table(section: Section) -> Table:
    right = ("pass ms", "linear", "attention", "rest", "speed-up", "linears alone")
    title = "Time of one forward pass (linear: the operator with all that is fused into it)"
    table = _table(title, ["recipe"], right)
    for one in section.recipes:
        record, split = one.record, one.record.time_split_s
        latency = record.timing.latency_s
        parts = [""] * 3
        if split is not None:
            total = split.linear + split.attention + split.other
            parts = [f"{p * 1e3:.2f} ms ({p / total:.0%})" for p in (split.linear, split.attention, split.other)]
        table.add_row(
            record.cell.recipe,
            "" if latency is None else f"{latency.p50 * 1e3:.2f}",
            *parts,
            "" if record.speedup is None else f"{record.speedup.value:.2f}x",
            "" if record.linear_speedup is None else f"{record.linear_speedup.value:.2f}x",
        )
    return table


def _ceilings_table(section: Section) -> Table:
    right = (
        "linear share f",
        "linear gain g",
        "rest gain h",
        "ceiling",
        "speed-up",
        "reached",
        "linears at their roof",
    )
    table = _table("Amdahl's ceiling over FP32: 1 / (f / g + (1 - f) / h)", ["recipe"], right)
    for one in section.recipes:
        found = one.ceiling
        if found is not None:
            table.add_row(
                one.record.cell.recipe,
                f"{found.linear_share:.1%}",
                f"{found.linear_gain:.2f}",
                f"{found.rest_gain:.2f}",
                f"{found.ceiling:.2f}x",
                "-" if found.speedup is None else f"{found.speedup:.2f}x",
                _percent(found.reached),
                f"{found.at_roof:.2f}x",
            )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
