"""The file of known changes: what it may say, and which runs have an entry's commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from judged import cell, keep, record, run

from harness import history, known_changes
from harness.errors import UsageError
from harness.records import Store

GOOD = '[[change]]\nseries = "minilm/*"\ncommit = "aaaaaaa1"\nreason = "exact GELU"\nwho = "A. Author"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / known_changes.FILE
    path.write_text(text)
    return path


def test_no_file_and_an_empty_file_know_nothing(tmp_path: Path) -> None:
    assert known_changes.read(tmp_path / known_changes.FILE) == ()
    assert known_changes.read(written(tmp_path, "# nothing yet\n")) == ()


def test_an_entry_is_read(tmp_path: Path) -> None:
    (found,) = known_changes.read(written(tmp_path, GOOD))
    assert found == known_changes.KnownChange("minilm/*", "speed", "aaaaaaa1", "exact GELU", "A. Author")
    assert found.matches("minilm/int8/sq-static/amx/offline:b8:s128@reviews")
    assert not found.matches("bert-large/int8/sq-static/amx/offline:b8:s128")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[change]\n", "not TOML"),
        ("\x00", "not TOML"),
        ("[changes]\na = 1\n", "unknown table 'changes'"),
        ("change = 3\n", r"begins with \[\[change\]\]"),
        ("[change]\nseries = 'x'\n", "two pairs of brackets"),
        ("change = [1]\n", "change 1 must be a table"),
        (GOOD + "color = 'red'\n", "unknown field 'color'"),
        (GOOD.replace('reason = "exact GELU"\n', ""), "reason must be a text"),
        (GOOD.replace('"A. Author"', '" "'), "who must be a text"),
        (GOOD.replace('"aaaaaaa1"', "7"), "commit must be a text"),
        (GOOD.replace("aaaaaaa1", "HEAD"), "hexadecimal"),
        (GOOD + "metric = 'accuracy'\n", "cannot be excused"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_to_correct(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        known_changes.read(written(tmp_path, text))
    assert "\n" not in str(caught.value) and known_changes.FILE in str(caught.value)


def test_a_folder_in_its_place_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / known_changes.FILE).mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        known_changes.read(tmp_path / known_changes.FILE)


def test_each_host_has_its_own_first_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    for number, (commit, host) in enumerate(
        [("bbbbbbb", "host-a"), ("aaaaaaa1ffff", "host-b"), ("aaaaaaa1ffff", "host-a"), ("ccccccc", "host-a")]
    ):
        keep(store, run([record(cell())], f"run-{number}", started_at=float(number), commit=commit, fingerprint=host))
    changes = known_changes.read(written(tmp_path, GOOD + GOOD.replace("minilm/*", "other/*")))
    found = known_changes.applying(changes, history.read(store))
    assert [(one.host, one.first_run, one.keys) for one in found] == [
        ("host-a", "run-2", (cell().key,)),
        ("host-b", "run-1", (cell().key,)),
    ]
    older = known_changes.applying(changes, history.read(store), descends=lambda commit, other: True)
    assert [(one.host, one.first_run) for one in older] == [("host-a", "run-0"), ("host-b", "run-1")]


def test_git_knows_what_descends(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    commits = []
    for word in ("one", "two", "three"):
        git("commit", "-q", "--allow-empty", "-m", word)
        commits.append(git("rev-parse", "HEAD"))
    has = known_changes.descendants(tmp_path)
    assert [has(commits[1][:9], other) for other in commits] == [False, True, True]
    nowhere = known_changes.descendants(tmp_path.parent)
    assert [nowhere(commits[1], other) for other in commits] == [False, True, False]
