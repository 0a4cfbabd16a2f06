"""Progress on stderr: lines in a log, a bar on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from harness import progress
from harness.runner import Event

EVENTS = """
from harness import progress
from harness.runner import Event
with progress.shown() as tell:
    tell(Event("plan", "run x: 2 cells", 0, 10))
    tell(Event("phase", "m: compile [bold]", 2, 10))
    tell(Event("slice", "m: slice 1", 5, 10))
    tell(Event("record", "m/int8/fp32/avx2/single:s8 ok\\nsecond [red]line", 10, 10))
"""


def test_a_log_gets_one_plain_line_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EVENTS, {})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[0%] run x: 2 cells",
        "[20%] m: compile [bold]",
        "[100%] m/int8/fp32/avx2/single:s8 ok second [red]line",
    ]


def test_an_event_without_an_estimate_is_told_without_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown() as tell:
        tell(Event("notice", "ISA amx left out"))
    assert capsys.readouterr().err == "ISA amx left out\n"


def test_nobody_reading_is_no_reason_to_stop() -> None:
    code = "import sys\nfrom harness.progress import say\nfor _ in range(3): say('x' * 100)\nprint('done')"
    reading, writing = os.pipe()
    os.close(reading)
    root = Path(__file__).parents[2]
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=writing, check=False
        )
    finally:
        os.close(writing)
    assert answer.stdout == b"done\n"


def test_a_terminal_gets_a_bar_and_lasting_lines() -> None:
    controller, terminal = pty.openpty()
    root = Path(__file__).parents[2]
    try:
        answer = subprocess.run(
            [sys.executable, "-c", EVENTS],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
            timeout=60,
            check=False,
        )
    finally:
        os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(controller, "rb", buffering=0) as screen:
        while chunk := screen.read(65536):
            shown += chunk
    assert answer.returncode == 0 and answer.stdout == b""
    assert b"run x: 2 cells" in shown and b"second [red]line" in shown
    assert b"m: compile [bold]" in shown or b"m: slice 1" in shown
    assert b"100%" in shown
