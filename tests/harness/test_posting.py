"""Issues and comments changed in place: decisions, and the real commands against a `gh` that keeps them in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import posting
from harness.posting import NIGHT, Action

#: Stands in for GitHub: keeps issues and comments as JSON beside itself, as `gh` would list them.
FAKE = """#!{python}
import json, pathlib, sys
state = pathlib.Path(__file__).with_name("state.json")
data = json.loads(state.read_text()) if state.exists() else {{"issues": [], "comments": [], "calls": 0}}
data["calls"] += 1
args = sys.argv[1:]
option = lambda name: args[args.index(name) + 1]
if args[:2] == ["issue", "list"]:
    print(json.dumps([one for one in data["issues"] if one["open"]]))
elif args[:2] == ["issue", "create"]:
    body = pathlib.Path(option("--body-file")).read_text()
    data["issues"].append({{"number": len(data["issues"]) + 1, "body": body, "title": option("--title"), "open": True}})
elif args[:2] == ["issue", "edit"]:
    data["issues"][int(args[2]) - 1]["body"] = pathlib.Path(option("--body-file")).read_text()
elif args[:2] == ["issue", "close"]:
    data["issues"][int(args[2]) - 1]["open"] = False
elif args[0] == "api" and "--paginate" in args:
    assert args[2].endswith("issues/7/comments")
    print("\\n".join(json.dumps({{"number": one["id"], "body": one["body"]}}) for one in data["comments"]))
elif args[0] == "api" and option("--method") == "POST":
    data["comments"].append({{"id": 100 + len(data["comments"]), "body": option("--raw-field").partition("=")[2]}})
elif args[0] == "api" and option("--method") == "PATCH":
    number = int(args[3].rpartition("/")[2])
    next(c for c in data["comments"] if c["id"] == number)["body"] = option("--raw-field").partition("=")[2]
else:
    sys.exit("unknown: " + " ".join(args))
state.write_text(json.dumps(data))
"""


class Fake:
    """A `gh` on the PATH, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gh").write_text(FAKE.format(python=sys.executable))
        (folder / "gh").chmod(0o755)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return found

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "harness.posting", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def github(tmp_path: Path) -> Fake:
    (tmp_path / "bin").mkdir()
    return Fake(tmp_path / "bin")


@pytest.fixture
def alarms(tmp_path: Path) -> Path:
    folder = tmp_path / "alarms"
    folder.mkdir()
    text = "<!-- harness gate -->\n### gate: regression\n\n    harness replay CELL --profile\n"
    (folder / "amx-0.md").write_text(text)
    return folder


def test_a_night_opens_one_issue_changes_it_and_closes_it(github: Fake, alarms: Path) -> None:
    assert github.run("night", str(alarms)).stdout == "create\n"
    first = github.state["issues"]
    assert len(first) == 1 and first[0]["body"].startswith(NIGHT)
    assert "harness replay CELL --profile" in first[0]["body"] and "<!-- harness gate" not in first[0]["body"]
    assert github.run("night", str(alarms)).stdout == "nothing 1\n"  # the same again
    (alarms / "vnni-1.md").write_text("another")
    assert github.run("night", str(alarms)).stdout == "update 1\n"
    assert [("another" in one["body"], one["open"]) for one in github.state["issues"]] == [(True, True)]
    assert github.run("night", str(alarms / "none")).stdout == "nothing 1\n"  # no word of a night is no good news
    assert github.run("night", str(alarms / "none"), "--resolved").stdout == "close 1\n"
    assert not github.state["issues"][0]["open"]
    assert github.run("night", str(alarms / "none"), "--resolved").stdout == "nothing\n"


def test_a_comment_is_updated_in_place(github: Fake, alarms: Path) -> None:
    assert github.run("comment", "7", str(alarms)).stdout == "create\n"
    (alarms / "amx-0.md").write_text("### compare: pass\n")
    assert github.run("comment", "7", str(alarms)).stdout == "update 100\n"
    assert [one["body"].count("compare: pass") for one in github.state["comments"]] == [1]
    assert github.run("comment", "7", str(alarms / "none")).stdout == "nothing\n"


def test_refusals_and_wrong_use_have_codes_of_their_own(github: Fake, alarms: Path) -> None:
    assert github.run("sing").returncode == 64
    assert github.run("comment", "not-a-number", str(alarms)).returncode == 64
    (github.folder / "gh").write_text("#!/bin/sh\necho 'no token' >&2; exit 4\n")
    result = github.run("night", str(alarms))
    assert (result.returncode, result.stderr) == (74, "error: gh issue list failed: no token\n")


def test_somebody_elses_issue_is_left_alone() -> None:
    others = [{"number": 3, "body": f"quoting {NIGHT}"}, {"number": 4, "body": None}]
    assert posting.decide(others, NIGHT, "body", False) == Action("create")
    assert posting.decide(others, NIGHT, None, True) == Action("nothing")


def test_a_body_that_github_would_refuse_is_cut() -> None:
    text = posting.body_of(NIGHT, {"a": "line\n" * 50_000})
    assert len(text) <= posting.MOST_CHARACTERS
    assert text.endswith("see the run.\n")
