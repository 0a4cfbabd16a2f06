"""The accuracy page: each judged cell with its change against FP32, and its flips both ways. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dashboards import wording
from dashboards.facts import Facts
from harness.records import Accuracy, slug


@dataclass(frozen=True, slots=True)
class Judged:
    """One cell. Positions are percent of the picture's width: the change with its interval, and the two flip bars."""

    facts: Facts
    accuracy: Accuracy
    href: str
    at: float
    low: float
    high: float
    gained: float
    lost: float


@dataclass(frozen=True, slots=True)
class Group:
    """The cells of one model and task, on one scale from ``low`` to ``high``; ``zero``: where 0 lies, in percent."""

    model: str
    task: str
    accuracy: Accuracy
    rows: tuple[Judged, ...]
    zero: float
    low: float
    high: float


def _group(model: str, task: str, members: list[tuple[Facts, Accuracy]]) -> Group:
    ends = [end for _, accuracy in members for end in (accuracy.delta, *(accuracy.delta_ci95 or ()))]
    low, high = float(min(-0.001, *ends)), float(max(0.001, *ends))
    most = max(max(accuracy.flips_gained, accuracy.flips_lost) for _, accuracy in members) or 1

    def place(value: float) -> float:
        return float(2.0 + 96.0 * (value - low) / (high - low))

    rows = [
        Judged(
            facts,
            accuracy,
            f"series/{slug(facts.key)}.html",
            place(accuracy.delta),
            place((accuracy.delta_ci95 or (accuracy.delta,) * 2)[0]),
            place((accuracy.delta_ci95 or (accuracy.delta,) * 2)[1]),
            50.0 * accuracy.flips_gained / most,
            50.0 * accuracy.flips_lost / most,
        )
        for facts, accuracy in members
    ]
    rows.sort(
        key=lambda row: (
            wording.rank(row.facts.cell.isa, wording.ISA_ORDER),
            wording.rank(row.facts.cell.engine, wording.ENGINE_ORDER),
            wording.rank(row.facts.cell.recipe, wording.RECIPE_ORDER),
            row.facts.key,
        )
    )
    return Group(model, task, members[0][1], tuple(rows), place(0.0), low, high)


def groups(facts: Iterable[Facts]) -> tuple[Group, ...]:
    """Judged cells by model and task. One prepared model judged once and served under several scenarios is one row."""
    found: dict[tuple[str, str], list[tuple[Facts, Accuracy]]] = {}
    seen: set[tuple[object, ...]] = set()
    for one in facts:
        if one.accuracy is None:
            continue
        cell, accuracy = one.cell, one.accuracy
        name = (
            cell.model,
            cell.engine,
            cell.recipe,
            cell.isa,
            cell.deploy,
            cell.task,
            accuracy.scenario,
            accuracy.delta,
            accuracy.flips,
        )
        if name in seen and accuracy.scenario is not None:
            continue
        seen.add(name)
        found.setdefault((cell.model, cell.task or "task not named"), []).append((one, accuracy))
    return tuple(_group(model, task, members) for (model, task), members in sorted(found.items()))
