"""Upgrades: what changed, lock files in between, which packages are to blame, and the whole with a made-up judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import upgrade
from harness.upgrade import Change

BEFORE = "# header\na==1\nb==1\nc==1\nd==1\n"
AFTER = "# header\na==2\nb==1\nc==2\nd==2\ne==1\n"
ALL = upgrade.changes(BEFORE, AFTER)


def test_changes_are_what_differs() -> None:
    assert [str(one) for one in ALL] == ["a 1 -> 2", "c 1 -> 2", "d 1 -> 2", "e none -> 1"]
    assert upgrade.changes(BEFORE, BEFORE) == ()


def test_a_lock_file_in_between_has_the_chosen_changes_alone() -> None:
    chosen = [one for one in ALL if one.name in ("c", "e")]
    assert upgrade.with_changes(BEFORE, chosen) == "# header\na==1\nb==1\nc==2\nd==1\ne==1\n"
    assert upgrade.with_changes(BEFORE, ALL) == AFTER
    assert upgrade.with_changes(BEFORE, ()) == BEFORE
    assert upgrade.with_changes(BEFORE, [Change("a", "1", None)]) == BEFORE.replace("a==1\n", "")


def test_pins_of_the_project_follow_the_lock() -> None:
    text = '["torch==2.13.0", "numpy", "asv==0.6.6", "transformers>=5.24"]'
    wanted = '["torch==2.14.0", "numpy", "asv==0.6.6", "transformers>=5.24"]'
    assert upgrade.with_pins(text, "torch==2.14.0\nnumpy==3\nasv==0.6.6\n") == wanted


@given(st.integers(1, 24), st.data())
def test_exactly_the_guilty_ones_are_found(count: int, data: st.DataObject) -> None:
    suspects = tuple(Change(f"p{n}", "1", "2") for n in range(count))
    guilty = set(data.draw(st.lists(st.sampled_from(suspects), min_size=1, max_size=3, unique=True)))
    found = upgrade.culprits(suspects, lambda chosen: guilty <= set(chosen), most=10_000)
    assert set(found) == guilty


def test_one_guilty_package_among_many_takes_few_trials() -> None:
    suspects = tuple(Change(f"p{n:02}", "1", "2") for n in range(32))
    trials: list[Sequence[Change]] = []

    def is_bad(chosen: Sequence[Change]) -> bool:
        trials.append(chosen)
        return suspects[21] in chosen

    assert upgrade.culprits(suspects, is_bad) == (suspects[21],)
    assert len(trials) <= 10


def test_changes_that_cannot_be_installed_apart_stay_together() -> None:
    torch, torchao, other = (Change(name, "1", "2") for name in ("torch", "torchao", "other"))

    def is_bad(chosen: Sequence[Change]) -> bool | None:
        if (torch in chosen) != (torchao in chosen):
            return None  # they do not fit
        return torch in chosen

    assert upgrade.culprits((torch, torchao, other), is_bad) == (torch, torchao)


def test_the_number_of_trials_is_bounded() -> None:
    suspects = tuple(Change(f"p{n}", "1", "2") for n in range(64))
    trials: list[Sequence[Change]] = []

    def is_bad(chosen: Sequence[Change]) -> bool:
        trials.append(chosen)
        return {suspects[0], suspects[33], suspects[63]} <= set(chosen)

    found = upgrade.culprits(suspects, is_bad, most=5)
    assert len(trials) == 5
    assert {suspects[0], suspects[33], suspects[63]} <= set(found)


class Judged(upgrade._Project):
    """Commits are lock files; the comparison says what ``codes`` say of the packages that a commit upgrades."""

    guilty: str | None = "c"
    newest = AFTER

    def __init__(self, root: Path, scratch: Path) -> None:
        self.lock = BEFORE
        self.commits: list[str] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def text(self, name: str) -> str:
        return self.lock

    def resolve(self) -> None:
        self.lock = self.newest

    def commit(self, lock: str, message: str) -> str:
        self.commits.append(lock)
        return str(len(self.commits) - 1)

    def patch(self, commit: str) -> str:
        return f"patch of {self.commits[int(commit)]}"

    def compare(self, commit: str, markdown: Path) -> int:
        markdown.write_text(f"judged {commit}\n")
        upgraded = {one.name for one in upgrade.changes(BEFORE, self.commits[int(commit)])}
        return 1 if self.guilty in upgraded else 0


def test_a_failing_upgrade_names_the_package(tmp_path: Path) -> None:
    assert upgrade.upgrade(tmp_path, tmp_path / "out", Judged) == 1
    text = (tmp_path / "out" / "upgrade.md").read_text()
    assert "Upgrade of 4 packages: fails (exit 1)" in text
    assert [line for line in text.splitlines() if line.startswith("* **")] == ["* **c 1 -> 2**"]
    assert "judged 0" in text  # the report is the whole upgrade's, not a trial's
    assert AFTER in (tmp_path / "out" / "upgrade.patch").read_text()


def test_a_passing_upgrade_is_not_narrowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judged, "guilty", None)
    assert upgrade.upgrade(tmp_path, tmp_path / "out", Judged) == 0
    assert "passes" in (tmp_path / "out" / "upgrade.md").read_text()


def test_nothing_new_is_no_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judged, "newest", BEFORE)
    assert upgrade.upgrade(tmp_path, tmp_path / "out", Judged) == 0
    assert not (tmp_path / "out" / "upgrade.md").exists()
