"""Tells whether asv saved numbers. ``python -m benchmarks.check`` fails where it saved none for HEAD.

asv itself ends well when nothing was saved: with an existing environment and no ``--set-commit-hash`` it drops all it
measured, and where a benchmark does not run on a host its results are n/a.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Saved:
    """``numbers``: results that are neither failed nor n/a; ``sampled``: those of them whose samples are kept too."""

    numbers: int
    sampled: int


def saved(files: Iterable[Path]) -> Saved:
    """Counts what is in asv's result files."""
    from asv.results import Results

    numbers = sampled = 0
    for file in files:
        results = Results.load(str(file))
        for name in results.get_all_result_keys():
            params = results.get_result_params(name)
            samples = results.get_result_samples(name, params)
            for value, kept in zip(results.get_result_value(name, params), samples, strict=True):
                if _is_number(value):
                    numbers += 1
                    sampled += bool(kept)
    return Saved(numbers, sampled)


def result_files(results_dir: Path, *, commit: str | None = None, since: float = 0.0) -> list[Path]:
    """asv's result files: of all machines and environments, of one commit where given, written since a Unix time."""
    prefix = commit[:8] if commit else ""
    found = (file for file in results_dir.glob(f"*/{prefix}*-*.json") if file.name != "machine.json")
    return sorted(file for file in found if file.stat().st_mtime >= since)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def main() -> int:
    """Exit code 0 if asv saved numbers for HEAD, 1 if not."""
    from asv.config import Config

    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    folder = ROOT / Config.load(str(ROOT / "asv.conf.json")).results_dir
    counts = saved(result_files(folder, commit=commit))
    print(f"asv: {counts.numbers} numbers saved for {commit[:8]}, {counts.sampled} of them with samples")
    if counts.numbers:
        return 0
    print("error: asv saved no number for HEAD; run `make asv` and see which benchmarks failed", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
