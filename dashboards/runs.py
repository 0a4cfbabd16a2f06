"""A page a run: what it ran on, what it found, what really ran, and why what failed failed."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards import wording
from dashboards.changes import version_changes
from dashboards.facts import Digest, Facts
from harness.errors import HarnessError
from harness.records import RunHeader, Store, slug

#: Letters of a log that a page shows: its end, where the error stands.
LOG_TAIL = 6000

CLOCKS = ("load", "calibrate", "quantize", "compile", "warmup")


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell without a number, and what its worker said last. ``cut``: whether the log is longer than what is shown."""

    facts: Facts
    log: str
    cut: bool


@dataclass(frozen=True, slots=True)
class Group:
    """The measured cells of one model and ISA."""

    title: str
    facts: tuple[Facts, ...]


def file_of(header: RunHeader) -> str:
    """The page of a run, relative to the site's root. Run ids are file names already (the store checks them)."""
    taken = header.run_id.lower() in ("index", "compare")
    return f"runs/{slug(header.run_id) if taken else header.run_id}.html"


def failures(store: Store, digest: Digest) -> tuple[Failure, ...]:
    """Failed and invalid cells with the end of their logs. A log that is missing or unreadable is an empty one."""
    found = []
    for one in digest.facts:
        if one.status not in ("failed", "invalid"):
            continue
        try:
            log = store.log(f"logs/{digest.header.run_id}/{slug(one.key)}.txt")
        except HarnessError:
            log = ""
        if one.status == "failed" or log:
            found.append(Failure(one, log[-LOG_TAIL:], len(log) > LOG_TAIL))
    return tuple(found)


def groups(digest: Digest) -> tuple[Group, ...]:
    """Measured cells by model and ISA, in the order of the overview."""
    found: dict[tuple[str, str], list[Facts]] = {}
    for one in digest.facts:
        if one.status in ("ok", "invalid"):
            found.setdefault((one.cell.model, one.cell.isa), []).append(one)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], wording.rank(item[0][1], wording.ISA_ORDER)))
    return tuple(
        Group(f"{model}, {wording.isa_title(isa)}", tuple(sorted(members, key=_place)))
        for (model, isa), members in ordered
    )


def _place(one: Facts) -> tuple[str, tuple[int, str], tuple[int, str], str]:
    return (
        one.cell.scenario,
        wording.rank(one.cell.engine, wording.ENGINE_ORDER),
        wording.rank(one.cell.recipe, wording.RECIPE_ORDER),
        one.key,
    )


def environment_changes(before: RunHeader | None, after: RunHeader) -> tuple[tuple[str, str, str], ...]:
    """Fields of the host and versions that differ between two runs, with both values in words."""
    if before is None:
        return ()
    one = {name: wording.flat(value) for name, value in before.host.items()}
    other = {name: wording.flat(value) for name, value in after.host.items()}
    return version_changes({**one, **before.versions}, {**other, **after.versions})
