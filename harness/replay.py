"""One cell again, alone in one worker: to see whether a failure repeats, and where the time goes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import matrix, runner, team
from harness.errors import UsageError
from harness.processes import worker_cpus
from harness.records import Cell, Record, Store
from harness.sources import Sources
from int8 import isa as isas

#: Rows of the profiler's table.
PROFILE_ROWS = 25


def replay(key: str, on_event: runner.OnEvent = lambda event: None, sources: Sources | None = None) -> Record:
    """Measure the cell written ``key`` again, by itself: speed-up and history need a run.

    The record is returned and kept nowhere. Accuracy is judged in the cell's own graph, on as many examples as the
    profile ``quick`` judges.

    Raises:
        UsageError: not a cell, a name that does not exist, an ISA that this host lacks, or a combination that this
            version does not measure.
    """
    cell = checked(key, sources)
    quick = matrix.get_profile("quick")
    overrides = matrix.Overrides(
        models=(cell.model,),
        engines=(cell.engine,),
        recipes=(cell.recipe,),
        isas=(cell.isa,),
        scenarios=(cell.scenario,),
        deploys=(cell.deploy,),
        tasks=None if cell.task is None else (cell.task,),
        no_task=cell.task is None,
    )
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as folder:
        store = Store(Path(folder))
        summary = runner.run(runner.RunOptions(quick, overrides, sources=sources or Sources()), store, on_event)
        record = store.load(summary.run_id).records[0]
    # The sidecar went with the folder.
    accuracy = None if record.accuracy is None else dataclasses.replace(record.accuracy, outputs=None)
    return dataclasses.replace(record, accuracy=accuracy)


def profile(
    key: str,
    on_phase: Callable[[str], None] = lambda phase: None,
    rows: int = PROFILE_ROWS,
    sources: Sources | None = None,
) -> str:
    """The operators of one forward pass of the cell written ``key``, by their own time: torch's profiler's table.

    Raises:
        UsageError: as :func:`replay`.
        WorkerError: the cell cannot be made ready.
    """
    cell = checked(key, sources)
    spec = runner.worker_spec((cell,), worker_cpus(), None, None, sources or Sources())
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as folder:
        handle = team.start(spec, Path(folder) / "log")
        try:
            handle.prepare(on_phase)
            handle.request("compile", on_phase=on_phase, scenario=cell.scenario)
            handle.request("warm_up", on_phase=on_phase, scenario=cell.scenario, cap_s=matrix.BRIEF_BUDGET.warmup_s)
            table: str = handle.request("profile", scenario=cell.scenario, rows=rows)["table"]
            handle.end()
        finally:
            handle.kill()
    return table


def checked(key: str, sources: Sources | None = None) -> Cell:
    """The cell written ``key``, if this host and this version can measure it; its ISA resolved."""
    cell = matrix.parse_cell(key)
    cell = dataclasses.replace(cell, isa=isas.best() if cell.isa == "native" else cell.isa)
    if cell.isa not in isas.supported():
        raise UsageError(f"this host lacks ISA {cell.isa}; it has {', '.join(isas.supported())}")
    reason = matrix.skip_reason(cell, len(worker_cpus()))
    if reason is not None:
        raise UsageError(f"{cell.key} is not measured: {reason}")
    if cell.task is not None and (cell.model, cell.task) in runner.catalog(sources).unjudged:
        raise UsageError(f"task {cell.task} cannot judge {cell.model}; name its checkpoint in a file: --sources FILE")
    return cell
