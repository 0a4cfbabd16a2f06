"""What happened to a series: steps, accepted runs, known changes, versions."""

from __future__ import annotations

import numpy as np
from site_samples import make_header, make_record

from dashboards import judging, marks, series
from dashboards.facts import facts_of
from harness.records import Cell, RunHeader

CELL = Cell("m", "int8", "sq-static", "amx", "offline:b8:s128", weights="synthetic")


def history(seconds: list[float | None], hosts: str = "", versions: dict[int, str] | None = None):
    made, headers = series.Series(CELL, CELL.key), []
    torch = "2.12"
    for number, value in enumerate(seconds):
        torch = (versions or {}).get(number, torch)
        header: RunHeader = make_header(
            f"run-{number}",
            86400.0 * number,
            commit=f"{number:040x}",
            versions={"torch": torch},
            fingerprint=f"host-{hosts[number] if hosts else 'a'}",
        )
        changes = {"status": "failed", "reason": "x"} if value is None else {"seconds": value}
        record = make_record(header.run_id, CELL, accuracy=None, **changes)
        headers.append(header)
        made.add(number, facts_of(record, judging.trust(record, header)))
    return made, headers


def quiet(count: int, level: float = 0.01, seed: int = 5) -> list[float]:
    return list(level * np.exp(np.random.default_rng(seed).normal(0, 0.005, count)))


def test_a_step_is_marked_where_it_began_and_says_whether_it_lasts() -> None:
    made, headers = history([*quiet(30), *quiet(10, 0.0112, 6)])
    (found,) = marks.marks(made, headers, ())
    assert (found.kind, found.run, found.before, found.lasts) == ("slower", 30, 29, True)
    assert found.title.startswith(("11.", "12."))
    back, headers = history([*quiet(30), *quiet(10, 0.0112, 6), *quiet(10, 0.01, 7)])
    assert [one.lasts for one in marks.marks(back, headers, ()) if one.kind == "slower"] == [False]


def test_noise_and_gaps_are_no_step() -> None:
    values: list[float | None] = [*quiet(60)]
    values[20] = values[21] = None
    made, headers = history(values)
    assert marks.marks(made, headers, ()) == ()


def test_each_host_has_its_own_level() -> None:
    values = [value for pair in zip(quiet(30), quiet(30, 0.02), strict=True) for value in pair]
    made, headers = history(values, hosts="ab" * 30)
    assert marks.marks(made, headers, ()) == ()


def test_accepted_runs_known_changes_and_versions_are_marked() -> None:
    made, headers = history(quiet(20), versions={12: "2.13"})
    found = marks.marks(made, headers, ("run-4",), (marks.Known("run-15", "exact GELU", "A. Author"),))
    assert [(one.kind, one.run) for one in found] == [("accepted", 4), ("versions", 12), ("known", 15)]
    assert found[1].title == "torch 2.13"
    assert found[1].detail == "torch 2.12 → 2.13"
    assert "exact GELU" in found[2].title
    drawn = marks.script_marks(found)
    assert [one["kind"] for one in drawn] == ["accepted", "known"], "versions are in the runs' own script"
    listed = marks.listed(found, headers, [f"runs/{number}.html" for number in range(20)])
    assert listed[0]["mark"].kind == "known"
    assert listed[0]["before"].run_id == "run-14"
