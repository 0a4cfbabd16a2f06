"""Shows on stderr how a run goes on: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from harness.runner import Event

#: Kinds of events that stay readable above the bar. The others are what is going on at the moment.
_LASTING = frozenset({"notice", "plan", "record", "end"})
#: Slices come several times a second: no line of a log is spent on one.
_ONLY_BAR = frozenset({"slice"})


def say(line: str) -> None:
    """One line on stderr. Nobody reading it is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        print(" ".join(line.split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown() -> Iterator[Callable[[Event], None]]:
    """What a runner tells its events to, for as long as the ``with`` block lasts."""
    if sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _line


def estimated(tell: Callable[[Event], None]) -> Callable[[str, float, float], None]:
    """``tell`` for what knows a line and how many of how many estimated seconds are done, and no more."""
    from harness.runner import Event

    return lambda message, done, total: tell(Event("phase", message, done, total))


def _line(event: Event) -> None:
    if event.kind not in _ONLY_BAR:
        say(f"[{event.done / event.total:.0%}] {event.message}" if event.total > 0 else event.message)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Event], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("start", total=None)

        def tell(event: Event) -> None:
            if event.kind in _LASTING:
                progress.console.print(Text(" ".join(event.message.split())))
            else:
                progress.update(task, description=event.message)
            progress.update(task, completed=event.done, total=event.total or None)

        yield tell
