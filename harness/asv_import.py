"""Results of asv as runs of the store, so that history made either way is one history: `harness import asv`.

One result file of asv (a commit on a machine in an environment) becomes one run, with a record for each combination of
parameters that has a time. Samples come back in seconds an iteration; what asv does not keep (which kernels ran,
predictions) stays unknown, so that imported runs are points of a history that the gate never decides on.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import fingerprint, stats, timing
from harness.errors import AssetError, HarnessError
from harness.matrix import Scenario
from harness.records import Cell, Memory, Record, Round, RunHeader, Store, Timing

#: Profile of imported runs.
PROFILE = "asv"
#: The benchmarks that are read, by the end of their names, and the unit that each must have.
TIME, BYTES, QUANTIZE = "track_seconds_per_sequence", "track_model_bytes", "track_quantize_s"
UNITS = {TIME: "seconds", BYTES: "bytes", QUANTIZE: "seconds"}
_PARAMETERS = ("model", "recipe", "isa", "scenario")
_MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Imported:
    """What came of it: ids of new runs, how many were there already, how many results they hold in all, and
    ``problems``: why files were left out."""

    new: tuple[str, ...]
    known: int
    results: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    """One result file of asv, and what its folder says about the machine."""

    results: Any
    machine: Mapping[str, str]


def import_asv(folder: Path, store: Store) -> Imported:
    """Write every result of asv below ``folder`` into ``store`` that is not there yet.

    Raises:
        AssetError: ``folder`` holds no result of ours: a failure, since somebody expected some.
        StoreError: the store cannot be written.
    """
    stored = store.runs()
    there = {header.run_id for header in stored}
    hosts = _hosts(stored)
    new: list[str] = []
    problems: list[str] = []
    known = results = 0
    units = _units(folder)
    for path in sorted(folder.glob("*/*.json")):
        if path.name == "machine.json":
            continue
        try:
            file = _read(path)
            header, records = _run(file, hosts, units)
        except (HarnessError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name} is left out: {error}")
            continue
        results += len(records)
        if not records:
            continue
        if header.run_id in there:
            known += 1
            continue
        with store.create_run(header) as writer:
            for record in records:
                writer.append(record)
            writer.finish()
        there.add(header.run_id)
        new.append(header.run_id)
    if not results:
        why = f" ({problems[0]})" if problems else ""
        raise AssetError(
            f"no result of asv in {folder}{why}; measure some with `make asv`, or name asv's results folder"
        )
    return Imported(tuple(new), known, results, tuple(problems))


def _read(path: Path) -> _File:
    from asv.results import Results
    from asv.util import UserError

    machine = path.parent / "machine.json"
    try:
        return _File(Results.load(str(path)), json.loads(machine.read_text(encoding="utf-8")))
    except UserError as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"{machine}: {error.strerror}") from None


def _run(file: _File, hosts: Sequence[Mapping[str, Any]], units: Mapping[str, str]) -> tuple[RunHeader, list[Record]]:
    found = file.results
    started_ms = [int(found.started_at[name]) for name in found.get_all_result_keys() if found.started_at.get(name)]
    started_at = max(started_ms, default=int(found.date)) / _MILLISECONDS
    machine = str(file.machine.get("machine", "unknown"))
    identity = json.dumps([machine, found.env_name, found.commit_hash, started_at])
    run_id = f"asv-{found.commit_hash[:8]}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
    host = _host(file.machine, hosts)
    header = RunHeader(
        run_id=run_id,
        started_at=started_at,
        commit=found.commit_hash,
        fingerprint=fingerprint.comparable_id(host),
        host={**host, "asv_machine": machine, "asv_environment": found.env_name},
        versions={"python": str(found.params.get("python", ""))},
        profile=PROFILE,
        gated=(),
        arguments=("import", "asv"),
    )
    return header, _with_speedups(list(_records(found, header, units)))


def _records(found: Any, header: RunHeader, units: Mapping[str, str]) -> Iterator[Record]:
    """A record for each combination of parameters that has a time."""
    columns = {name.rpartition(".")[2]: name for name in found.get_all_result_keys()}
    if TIME not in columns:
        return
    for short in set(UNITS) & set(columns):
        unit = units.get(columns[short], UNITS[short])
        if unit != UNITS[short]:
            raise ValueError(f"{columns[short]} is in {unit}, not in {UNITS[short]}")
    values = {short: _by_parameters(found, columns[short]) for short in set(UNITS) & set(columns)}
    for key, (value, samples) in values[TIME].items():
        if not _is_number(value):
            continue
        model, recipe, isa, scenario = key
        shape = Scenario.parse(scenario)
        each = shape.batch * shape.instances
        seconds = [sample * each for sample in samples or [value]]
        size, quantize = (values.get(short, {}).get(key, (None, None))[0] for short in (BYTES, QUANTIZE))
        yield Record(
            header.run_id,
            header.commit,
            "ok",
            None,
            Cell(model, "int8", recipe, isa, scenario),
            timing=Timing(
                rounds=(Round(header.started_at, 0, tuple(seconds)),),
                throughput=each / timing.percentile(seconds, 50),
                latency_s=timing.latency(seconds),
                quantize_s=float(quantize) if _is_number(quantize) else None,
            ),
            memory=Memory(model_bytes=int(size) if _is_number(size) else None),
            fingerprint=header.fingerprint,
        )


def _by_parameters(found: Any, name: str) -> dict[tuple[str, ...], tuple[Any, list[float] | None]]:
    """Value and samples of a benchmark by its parameters. asv writes each parameter as Python would."""
    listed: Sequence[Sequence[str]] = found.get_result_params(name)
    if len(listed) != len(_PARAMETERS):
        raise ValueError(f"{name} has {len(listed)} parameters, not {', '.join(_PARAMETERS)}")
    values = found.get_result_value(name, listed)
    samples = found.get_result_samples(name, listed)
    keys = (tuple(str(ast.literal_eval(text)) for text in one) for one in itertools.product(*listed))
    return dict(zip(keys, zip(values, samples, strict=True), strict=True))


def _with_speedups(records: list[Record]) -> list[Record]:
    """Records beside FP32 of the same model, ISA and scenario, which one and the same run measured."""
    base = {(r.cell.model, r.cell.isa, r.cell.scenario): r.timing for r in records if r.cell.recipe == "fp32"}
    found = []
    for record in records:
        reference = base.get((record.cell.model, record.cell.isa, record.cell.scenario))
        speedup = None if reference is None else stats.speedup(reference, record.timing)
        found.append(dataclasses.replace(record, speedup=speedup))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _units(folder: Path) -> dict[str, str]:
    """The unit of each benchmark, as asv's list of benchmarks says; empty where there is no such list."""
    try:
        listed = json.loads((folder / "benchmarks.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: str(one["unit"]) for name, one in listed.items() if isinstance(one, dict) and one.get("unit")}


# --- hosts ------------------------------------------------------------------------------------------------------------


def _hosts(stored: Sequence[RunHeader]) -> list[Mapping[str, Any]]:
    """Hosts that are known in full, newest first: those of the store's own runs."""
    return [header.host for header in reversed(stored) if header.profile != PROFILE]


def _host(machine: Mapping[str, str], known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The host's fields: this host's or a stored one's where it is that, else what asv knows, and None for the rest.

    asv tells a machine's name, its CPU and how many it has. Hosts of one CPU model and count that a store holds are the
    machine as far as that goes.
    """
    cpu, count = str(machine.get("cpu", "")), str(machine.get("num_cpu", ""))
    cores = int(count) if count.isdigit() else None
    candidates = [fingerprint.collect()] if machine.get("machine") == platform.node() else []
    for host in (*candidates, *known):
        if host.get("cpu_model") == cpu and host.get("cores_online") == cores:
            return dict(host)
    return {
        **dict.fromkeys(fingerprint.COMPARABLE),
        "cpu_model": cpu or None,
        "cores_online": cores,
        "kernel": str(machine.get("os", "")) or None,
    }
