"""Runs the commands of the tutorial as they are written: ``python docs/run_tutorial.py`` (``make tutorial``).

Every fence of ``docs/tutorial.md`` that is marked ``bash run`` goes into one shell, in order, which stops at the first
command that fails. With ``--no-setup`` those marked ``run setup`` are left out, where the environment is there already.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
#: What the tutorial writes, all of it.
SCRATCH = ROOT / "build" / "tutorial"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One fence: its commands, the line of the page it stands on, and whether it belongs to the setting up."""

    commands: str
    line: int
    setup: bool


def steps(text: str) -> list[Step]:
    """The fences of a page that are marked to be run. Raises ValueError where a bash fence is not marked."""
    found = []
    for match in _FENCE.finditer(text):
        words = match["info"].split()
        line = text.count("\n", 0, match.start()) + 1
        if words[:1] == ["bash"] and "run" not in words:
            raise ValueError(f"line {line}: a bash fence that nothing runs; mark it `bash run`, or make it `text`")
        if "run" in words:
            found.append(Step(match["body"], line, "setup" in words))
    return found


def script(found: list[Step], *, setup: bool) -> str:
    """The steps as one shell script that says each line of the page it comes to."""
    parts = ["set -euo pipefail"]
    for step in found:
        if setup or not step.setup:
            parts += [f"echo '== tutorial, line {step.line}' >&2", step.commands]
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code is that of the command that failed, 0 if none did."""
    parser = argparse.ArgumentParser(description="Run the commands of the tutorial as they are written.")
    parser.add_argument("--no-setup", action="store_true", help="leave out what makes the environment")
    chosen = parser.parse_args(arguments)
    if SCRATCH.exists():
        shutil.rmtree(SCRATCH)
    text = script(steps(PAGE.read_text(encoding="utf-8")), setup=not chosen.no_setup)
    # Read from stdin the way somebody types it, but whole: a command that reads stdin itself must not eat the rest.
    return subprocess.run(["bash", "-c", text], cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
