"""Does a store of three years still load, gate and report in time? ``python -m benchmarks.scale``.

Generates a store (``dashboards.demo``; nothing in it was measured), then times what a user waits for, each in a process
of its own as a user starts it: indexing it for the first time, the gate on the indexed store, the gate after one more
night, and the site. Prints a table; exits 1 if a bound is broken.

    python -m benchmarks.scale --runs 1100 --cells 200 --store /tmp/three-years
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Seconds that each step may take on two cores; None: told, not judged.
BOUNDS_S = {"index": None, "gate": 10.0, "gate, one more run": 10.0, "report": 60.0}
#: What the gate may exit with: a generated night may well be a regression.
_JUDGED = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Step:
    """How long a step took, in seconds: ``wall_s`` by the clock, ``cpu_s`` of all its processes."""

    name: str
    wall_s: float
    cpu_s: float

    @property
    def bound_s(self) -> float | None:
        """What it may take."""
        return BOUNDS_S[self.name]

    @property
    def kept(self) -> bool:
        """Whether it did."""
        return self.bound_s is None or self.wall_s <= self.bound_s


def generate(store: Path, runs: int, cells: int) -> None:
    """Write a generated store; one run more is kept aside, to be added later."""
    command = ["-m", "dashboards.demo", "--results", str(store), "--runs", str(runs + 1), "--cells", str(cells)]
    _run(command, (0,))
    _newest(store / "runs").rename(store / _ASIDE)


#: Where the run that is added later waits.
_ASIDE = "later.jsonl"


def add_one(store: Path) -> None:
    """Add the run that was kept aside, as the next night would."""
    aside = store / _ASIDE
    header = aside.open("rb").readline().decode()
    run_id = header.split('"run_id":"', 1)[1].split('"', 1)[0]
    aside.rename(store / "runs" / f"{run_id}.jsonl")


def _newest(folder: Path) -> Path:
    return max(folder.glob("*.jsonl"), key=lambda path: path.name)


def measure(store: Path, site: Path, *, report: bool = True) -> list[Step]:
    """Time every step on the store."""
    steps = [
        timed("index", ["-m", "harness", "gate", "--results", str(store)], _JUDGED),
        timed("gate", ["-m", "harness", "gate", "--results", str(store)], _JUDGED),
    ]
    add_one(store)
    steps.append(timed("gate, one more run", ["-m", "harness", "gate", "--results", str(store)], _JUDGED))
    if report:
        steps.append(timed("report", ["-m", "harness", "report", "--results", str(store), "--site", str(site)], (0,)))
    return steps


def timed(name: str, command: Sequence[str], allowed: Sequence[int]) -> Step:
    """Run a Python command and time it."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _run(command, allowed)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Step(name, wall_s, cpu_s)


def _run(command: Sequence[str], allowed: Sequence[int]) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        raise SystemExit(f"error: python {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Times loading, gating and reporting a store of years.",
        epilog="Example: python -m benchmarks.scale --runs 1100 --cells 200",
    )
    parser.add_argument("--runs", type=int, default=1100, help="nights in the store (default 1100)")
    parser.add_argument("--cells", type=int, default=200, help="cells a night (default 200)")
    parser.add_argument("--store", type=Path, help="keep the generated store here; an existing one is used again")
    parser.add_argument("--no-report", action="store_true", help="leave the site out")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        store = options.store or Path(scratch) / "store"
        if not (store / "runs").is_dir():
            print(f"generating {options.runs} runs of {options.cells} cells", file=sys.stderr)
            generate(store, options.runs, options.cells)
        else:
            shutil.rmtree(store / "index", ignore_errors=True)
            if not (store / _ASIDE).exists():
                _newest(store / "runs").rename(store / _ASIDE)
        steps = measure(store, Path(scratch) / "site", report=not options.no_report)
    print(f"{'step':20} {'seconds':>8} {'of CPU':>8} {'bound':>6}")
    for step in steps:
        bound = "" if step.bound_s is None else f"{step.bound_s:g}"
        print(f"{step.name:20} {step.wall_s:8.1f} {step.cpu_s:8.1f} {bound:>6}" + ("" if step.kept else "  too slow"))
    return 0 if all(step.kept for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
