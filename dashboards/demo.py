"""Stores of generated runs, for tests, pictures and load tests: ``python -m dashboards.demo --results DIR``.

Nothing here was measured. Every generated run says so in its host's fields (``generated``) and in its arguments, and
the site prints it on every page. The numbers follow the shape of real ones: run-to-run noise of one percent with heavy
tails, a machine that drifts within a run, upgrades that move some series, a recipe whose accuracy fails, nights that
were disturbed, cells that failed, a run that was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dashboards import demo_extras
from dashboards.wording import moment
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
from harness.stats import speedup

DAY_S = 86400.0

#: name, family, weights, encoder linears, eager FP32 sequences a second at batch 8 and 128 tokens, bytes of its weights
MODELS = (
    ("minilm", "bert", "real", 36, 172.0, 90_900_000),
    ("bert-large", "bert", "synthetic", 144, 3.4, 1_336_000_000),
    ("distilbert-base", "distilbert", "synthetic", 36, 20.5, 265_000_000),
    ("xlmr-base", "xlm-roberta", "synthetic", 72, 10.4, 1_112_000_000),
    ("bert-large-4l", "bert", "synthetic", 24, 20.0, 330_000_000),
)

#: engine, recipe, speed over compiled FP32 on AMX and on VNNI, accuracy change and share of flips against FP32
WAYS = (
    ("int8", "fp32", 1.00, 1.00, 0.0000, 0.0000),
    ("int8", "bf16", 3.85, 0.23, 0.0000, 0.0015),
    ("int8", "sq-static", 6.40, 2.55, -0.0030, 0.0195),
    ("int8", "sq-dynamic", 5.30, 2.30, -0.0012, 0.0105),
    ("torchao", "sq-static", 5.45, 2.15, -0.0260, 0.1070),
    ("torchao", "sq-dynamic", 4.55, 2.20, -0.0028, 0.0102),
    ("openvino", "sq-static", 6.85, 3.05, -0.0042, 0.0205),
    ("onnxruntime", "dynamic", 3.75, 1.60, -0.0041, 0.0205),
    ("ctranslate2", "dynamic", 3.60, 1.55, -0.0035, 0.0185),
    ("int8", "static", 6.45, 2.60, -0.0190, 0.0560),
    ("int8", "dynamic", 5.35, 2.32, -0.0026, 0.0200),
)

SCENARIOS = (("offline:b8:s128", 8, 1.0), ("single:s128", 1, 0.72))
ISAS = ("amx", "vnni")
EXAMPLES = 4000
FP32_ACCURACY = 0.7325
BAD_NIGHT_EVERY = 37
#: Nights between the accepted run, as after a release, and the newest one.
ACCEPTED_AGE = 9


@dataclass(frozen=True)
class Plan:
    """What a generated store holds. ``end``: Unix time in seconds of the newest run; one run a night before it."""

    runs: int
    cells: int
    end: float
    seed: int = 2211
    rounds: int = 4
    samples: int = 10


def cells(limit: int) -> Iterator[tuple[Cell, int, int]]:
    """The first ``limit`` cells, the most interesting first, each with the places of its model and its way.

    Every cell of one model, ISA and scenario follows its FP32 baseline, and the first 24 are a small real matrix.
    """
    count = 0
    for repeat in range(1 + limit // (len(MODELS) * len(WAYS) * 4)):
        for model_place, model in enumerate(MODELS):
            for isa in ISAS:
                for scenario, _, _ in SCENARIOS:
                    for way_place, way in enumerate(WAYS):
                        if count == limit:
                            return
                        name = model[0] if repeat == 0 else f"{model[0]}-v{repeat + 1}"
                        task = "reviews" if model[2] == "real" else None
                        dtype = "fp32" if way[1] == "fp32" or isa != "amx" else "bf16"
                        yield (
                            Cell(
                                name,
                                way[0],
                                way[1],
                                isa,
                                scenario,
                                task=task,
                                family=model[1],
                                weights="real" if model[2] == "real" else "synthetic",
                                compute_dtype="fp32" if dtype == "fp32" else "bf16",
                            ),
                            model_place,
                            way_place,
                        )
                        count += 1


def versions(night: int, nights: int) -> dict[str, str]:
    """Versions of one night: three upgrades of torch and two of torchao over the whole time."""
    place = night / max(nights, 1)
    return {
        "python": "3.11.2",
        "torch": ("2.11.0", "2.12.0", "2.13.0")[(place >= 0.3) + (place >= 0.7)],
        "torchao": ("0.17.0", "0.18.0")[int(place >= 0.55)],
        "transformers": "5.24.0",
    }


def drift(cell: Cell, night: int, nights: int) -> float:
    """How the truth moves: an upgrade that helps, one that hurts for a while, one last step that a gate should see."""
    place = night / max(nights, 1)
    factor = 1.0
    if cell.recipe.startswith("sq-") and place >= 0.3:
        factor *= 1.06
    if cell.engine == "torchao" and 0.55 <= place < 0.7:
        factor *= 0.93
    if cell.engine == "int8" and cell.recipe == "sq-dynamic" and cell.isa == "vnni" and night >= nights - 3:
        factor *= 0.8
    return factor


def header(plan: Plan, night: int, commit: str, disturbed: bool) -> RunHeader:
    """The header of one generated run, labelled as what it is."""
    started = plan.end - (plan.runs - 1 - night) * DAY_S
    tag = hashlib.sha256(f"{plan.seed}/{night}".encode()).hexdigest()[:6]
    return RunHeader(
        run_id=f"{moment(started):%Y%m%dT%H%M%S}.000Z-{tag}",
        started_at=started,
        commit=commit,
        fingerprint="generated0000",
        host={
            "generated": True,
            "cpu_model": "Generated host, 2 cores (not a real machine)",
            "microcode": "0x2b000603" if night < 0.8 * plan.runs else "0x2b000620",
            "usable_threads": 2,
            "isa_supported": ["amx", "vnni", "avx512", "avx2"],
            "l2_bytes": 2 << 20,
            "governor": None,
            "kernel": "6.1.0-generated",
            "load_1m": 2.9 if disturbed else 0.1,
        },
        versions=versions(night, plan.runs),
        profile="nightly",
        gated=("sq-static", "sq-dynamic"),
        arguments=("run", "--profile", "nightly", "(generated)"),
        dirty=False,
    )


def timing(seconds: float, batch: int, rng: np.random.Generator, plan: Plan, t0: float, noise: float) -> Timing:
    """Rounds of samples around ``seconds`` an iteration, with a drift that all cells of a round share."""
    rounds = []
    for place in range(plan.rounds):
        level = seconds * (1 + noise * rng.standard_t(5) / 2)
        skewed = rng.gamma(2.0, 0.004, plan.samples)
        samples = tuple(float(f"{value:.5g}") for value in level * (1 + skewed))
        rounds.append(Round(t0 + 40.0 * place, place % 2, samples))
    everything = np.sort(np.concatenate([one.samples_s for one in rounds]))
    p50, p90, p99 = (float(value) for value in np.quantile(everything, (0.5, 0.9, 0.99)))
    return Timing(
        rounds=tuple(rounds),
        throughput=batch / p50,
        latency_s=Latency(p50, p90, p99),
        load_s=0.41,
        calibrate_s=1.9,
        quantize_s=0.35,
        compile_s=float(18 + 4 * rng.random()),
        warmup_s=3.2,
        steady=True,
    )


def accuracy(change: float, flips: float, rng: np.random.Generator) -> Accuracy:
    """Accuracy on the generated task: flips both ways that add up to ``change``."""
    total = int(rng.poisson(flips * EXAMPLES))
    net = round((change + rng.normal(0, 0.0006)) * EXAMPLES)
    net = max(-total, min(total, net))
    gained = (total + net) // 2
    lost = total - gained
    delta = (gained - lost) / EXAMPLES
    half = 1.96 * math.sqrt(max(total, 1) - (gained - lost) ** 2 / EXAMPLES) / EXAMPLES
    return Accuracy(
        metric="accuracy",
        value=FP32_ACCURACY + delta,
        fp32_value=FP32_ACCURACY,
        chance=0.578,
        delta=delta,
        delta_ci95=(delta - half, delta + half),
        n=EXAMPLES,
        flips=total / EXAMPLES,
        flips_gained=gained,
        flips_lost=lost,
        sqnr_db=118.0 if flips == 0 else 9.5 - 13.5 * math.log10(flips / 0.107) + float(rng.normal(0, 0.05)),
        cosine=1 - 0.02 * flips,
        scenario="offline:b8:s128",
    )


def evidence(cell: Cell, linears: int) -> Evidence:
    """What a worker would have proved."""
    quantized = cell.recipe not in ("fp32", "bf16")
    ours = cell.engine in ("int8", "torchao")
    kernel = {"amx": "brg_matmul:avx10_1_512_amx", "vnni": "brg_matmul:avx512_core_vnni"}.get(cell.isa, "gemm:jit")
    return Evidence(
        linears=linears if ours else None,
        quantized_linears=(linears if quantized else 0) if ours else None,
        fused_linears=(linears if quantized else 0) if ours else None,
        kernels={kernel: linears} if ours else {},
        isa_effective=cell.isa,
        amx_permission=cell.isa == "amx",
        weight_bits=8 if quantized else None,
        threads=2,
    )


def night(plan: Plan, number: int, commit: str) -> tuple[RunHeader, list[Record], str | None]:
    """One generated run: its header, its records, and why it is invalid where it is."""
    disturbed = number % BAD_NIGHT_EVERY == BAD_NIGHT_EVERY - 5
    made = header(plan, number, commit, disturbed)
    rng = np.random.default_rng((plan.seed, number))
    records: list[Record] = []
    baselines: dict[tuple[str, str, str], Timing] = {}
    judged: dict[tuple[str, str, str], Accuracy] = {}
    for cell, model_place, way_place in cells(plan.cells):
        records.append(_record(plan, number, made, cell, model_place, way_place, rng, baselines, judged, disturbed))
    return made, records, "load was 2.9 on 2 cores while measuring (another process ran)" if disturbed else None


def _record(
    plan: Plan,
    number: int,
    made: RunHeader,
    cell: Cell,
    model_place: int,
    way_place: int,
    rng: np.random.Generator,
    baselines: dict[tuple[str, str, str], Timing],
    judged: dict[tuple[str, str, str], Accuracy],
    disturbed: bool,
) -> Record:
    _, _, weights, linears, pace, model_bytes = MODELS[model_place]
    _, _, on_amx, on_vnni, change, flips = WAYS[way_place]
    _, batch, gain = next(one for one in SCENARIOS if one[0] == cell.scenario)
    common = {"run_id": made.run_id, "commit": made.commit, "cell": cell, "fingerprint": made.fingerprint}
    if cell.engine == "ctranslate2" and cell.isa == "vnni":
        reason = "ctranslate2 cannot be held to one ISA; run it with --isa native"
        return Record(status="skipped", reason=reason, **common)  # type: ignore[arg-type]
    if cell.engine == "onnxruntime" and cell.scenario.startswith("single") and number % 9 == plan.runs % 9:
        reason = "worker died with SIGKILL after 41 s in compile (memory cap 6.0 GiB); replay the cell to see its log"
        return Record(status="failed", reason=reason, **common)  # type: ignore[arg-type]
    factor = (on_amx if cell.isa == "amx" else on_vnni) ** (1.0 if batch > 1 else gain)
    factor *= drift(cell, number, plan.runs) * (0.8 if disturbed else 1.0)
    factor *= 1 + 0.01 * rng.standard_t(4) / math.sqrt(2)
    seconds = batch / (pace * factor * (1.0 if batch > 1 else 0.8))
    timed = timing(seconds, batch, rng, plan, made.started_at + 60, 0.03 if disturbed else 0.006)
    name = (cell.model, cell.isa, cell.scenario)
    if way_place == 0:
        baselines[name] = timed
    ratio = Speedup(1.0, None) if way_place == 0 else speedup_of(baselines.get(name), timed)
    quantized = cell.recipe not in ("fp32", "bf16")
    served = (f"{cell.model}/{cell.engine}", cell.recipe, cell.isa)
    if weights == "real" and served not in judged:  # judged once, and served under each scenario
        judged[served] = accuracy(change, flips, rng)
    return Record(
        status="invalid" if disturbed else "ok",
        reason="the host was disturbed" if disturbed else None,
        timing=timed,
        speedup=ratio,
        memory=Memory(
            int(model_bytes * 2.4) + (600 << 20),
            int(model_bytes * (0.31 if quantized else 1.0)),
            int(model_bytes * 0.6 * (0.25 if quantized else 1.0)),
        ),
        accuracy=judged.get(served),
        evidence=evidence(cell, linears),
        **common,  # type: ignore[arg-type]
    )


def speedup_of(baseline: Timing | None, timed: Timing) -> Speedup | None:
    """As the runner computes it; None without a baseline."""
    return None if baseline is None else speedup(baseline, timed)


def generate(store: Store, plan: Plan) -> list[str]:
    """Write the plan's runs into ``store``; returns their ids, oldest first. Same plan, same bytes."""
    made = []
    for number in range(plan.runs):
        commit = hashlib.sha1(f"{plan.seed}/{number // 3}".encode(), usedforsecurity=False).hexdigest()
        head, records, invalid = night(plan, number, commit)
        killed = number == plan.runs // 2 and plan.runs >= 8
        newest, seen = number == plan.runs - 1, dict[int, str]()
        with store.create_run(head) as writer:
            for record in records[: len(records) // 3] if killed else records:
                writer.append(demo_extras.completed(record, writer, seen) if newest else record)
                if record.status == "failed":
                    text = "worker: compiling\nworker: resident set 6.0 GiB\nkilled: memory cap\n(generated)\n"
                    writer.write_log(record.cell.key, text)
            if not killed:
                writer.finish(invalid_reason=invalid, host={"load_1m": 0.2})
        if newest:
            demo_extras.write_analyses(store, head)
        made.append(head.run_id)
    if plan.runs > ACCEPTED_AGE:
        store.accept(made[-1 - ACCEPTED_AGE], now=plan.end - ACCEPTED_AGE * DAY_S)
    return made


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of the store to write; must be empty")
    parser.add_argument("--runs", type=int, default=60, help="how many nights (default 60)")
    parser.add_argument("--cells", type=int, default=60, help="how many cells a night (default 60)")
    parser.add_argument("--end", type=float, default=None, help="Unix time of the newest run (default: an hour ago)")
    chosen = parser.parse_args(arguments)
    if chosen.runs < 1 or chosen.cells < 1:
        parser.error("--runs and --cells must be at least 1")
    if chosen.results.exists() and any(chosen.results.iterdir()):
        parser.error(f"{chosen.results} is not empty; generated runs never mix with measured ones: choose a new folder")
    import time

    end = time.time() - 3600 if chosen.end is None else chosen.end
    made = generate(Store(chosen.results), Plan(chosen.runs, chosen.cells, end))
    print(f"{len(made)} generated runs of {chosen.cells} cells in {chosen.results} (not measured)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
