"""A plugin of asv, named in asv.conf.json: makes ``asv run`` keep samples, and fail when it saved nothing.

Without samples two commits can only be compared by their intervals, and asv offers no setting but the option
``--record-samples``. That a run saved nothing shows in no exit code of asv's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.check import result_files, saved


def setup() -> None:
    """Called by asv when it has read its configuration, before the command starts."""
    from asv.commands.run import Run

    if getattr(Run, "keeps_samples", False):
        return
    run = Run.run_from_conf_args.__func__

    def run_and_check(cls: Any, conf: Any, args: Any, **kwargs: Any) -> int:
        args.record_samples = True
        started = time.time()
        code: int = run(cls, conf, args, **kwargs) or 0
        if code == 0 and not args.dry_run and args.bench != ["just-discover"]:
            return _check(Path(conf.results_dir), started)
        return code

    Run.run_from_conf_args = classmethod(run_and_check)
    Run.keeps_samples = True


def _check(results_dir: Path, started: float) -> int:
    # Half a second of grace for file systems that round times.
    if saved(result_files(results_dir, since=started - 0.5)).numbers:
        return 0
    print(
        "error: no number was saved; in an existing environment asv saves only with --set-commit-hash, "
        "and benchmarks that failed or that this host lacks count for nothing",
        file=sys.stderr,
    )
    return 1
