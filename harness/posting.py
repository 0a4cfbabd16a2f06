"""Tells people on GitHub what a night or a comparison found: one issue and one comment, changed in place.

    python -m harness.posting night FOLDER [--resolved]     an issue with the verdicts in FOLDER/*.md
    python -m harness.posting comment PULL FOLDER           a comment on a pull request with what is in FOLDER/*.md
    python -m harness.posting upgrade FOLDER                an issue with the report of an upgrade

Repeating a command changes nothing further: what was posted before is found by its marker and replaced. Needs the
command ``gh`` and what it asks for (``GH_TOKEN``); imports nothing beyond Python, so that a hosted runner can do it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NIGHT, COMPARE, UPGRADE = "<!-- harness night -->", "<!-- harness compare -->", "<!-- harness upgrade -->"
_TITLES = {NIGHT: "The nightly gate fails", UPGRADE: "An upgrade of the lock file fails the gate"}
#: GitHub takes no body longer than this.
MOST_CHARACTERS = 65_000

#: Runs ``gh`` with arguments and returns what it prints.
Gh = Callable[[Sequence[str]], str]


class PostingError(Exception):
    """GitHub refused; one line."""


@dataclass(frozen=True)
class Action:
    """What is to be done with an issue: nothing, a new one, another body for ``number``, or its end."""

    kind: Literal["nothing", "create", "update", "close"]
    number: int | None = None


def body_of(marker: str, parts: Mapping[str, str]) -> str:
    """One text out of the parts, a heading each; markers inside them are left out, and what is too long is cut."""
    lines = [marker]
    for name, text in sorted(parts.items()):
        kept = [line for line in text.strip().splitlines() if not line.startswith("<!-- harness ")]
        lines += ["", f"## {name}", "", *kept]
    text = "\n".join(lines) + "\n"
    if len(text) <= MOST_CHARACTERS:
        return text
    return text[: MOST_CHARACTERS - 100].rpartition("\n")[0] + "\n\nThe rest is too long for GitHub; see the run.\n"


def decide(existing: Sequence[Mapping[str, object]], marker: str, body: str | None, resolved: bool) -> Action:
    """What to do, given the open issues (``number``, ``body``), the new body (None: nothing to report), and whether
    that means that all is well."""
    ours = [issue for issue in existing if str(issue.get("body", "")).startswith(marker)]
    number = min((int(str(issue["number"])) for issue in ours), default=None)
    if body is not None:
        if number is None:
            return Action("create")
        same = any(str(one["body"]).strip() == body.strip() for one in ours if int(str(one["number"])) == number)
        return Action("nothing" if same else "update", number)
    return Action("close", number) if resolved and number is not None else Action("nothing", number)


def post_issue(gh: Gh, marker: str, parts: Mapping[str, str], resolved: bool) -> Action:
    """Open, change or close the one issue that has ``marker``."""
    listed = json.loads(gh(["issue", "list", "--state", "open", "--limit", "500", "--json", "number,body"]))
    body = body_of(marker, parts) if parts else None
    action = decide(listed, marker, body, resolved)
    number = str(action.number)
    if body is not None and action.kind in ("create", "update"):
        with tempfile.NamedTemporaryFile("w", suffix=".md", encoding="utf-8") as file:
            file.write(body)
            file.flush()
            if action.kind == "create":
                gh(["issue", "create", "--title", _TITLES[marker], "--body-file", file.name])
            else:
                gh(["issue", "edit", number, "--body-file", file.name])
    elif action.kind == "close":
        gh(["issue", "close", number, "--comment", "The last night passed."])
    return action


def post_comment(gh: Gh, pull: int, parts: Mapping[str, str]) -> Action:
    """Write the one comment on a pull request that has the marker, or change it."""
    if not parts:
        return Action("nothing")
    path = f"repos/{{owner}}/{{repo}}/issues/{pull}/comments"
    # One object a line: pages of lists would not be one JSON value.
    listed = gh(["api", "--paginate", path, "--jq", ".[] | {number: .id, body: .body}"])
    existing = [json.loads(line) for line in listed.splitlines() if line.strip()]
    body = body_of(COMPARE, parts)
    action = decide(existing, COMPARE, body, False)
    if action.kind == "create":
        gh(["api", "--method", "POST", path, "--raw-field", f"body={body}"])
    elif action.kind == "update":
        own = f"repos/{{owner}}/{{repo}}/issues/comments/{action.number}"
        gh(["api", "--method", "PATCH", own, "--raw-field", f"body={body}"])
    return action


def read_parts(folder: Path) -> dict[str, str]:
    """The texts of ``folder``'s Markdown files, by their names; a folder that is missing has none."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}


def run_gh(arguments: Sequence[str]) -> str:
    """Run ``gh``.

    Raises:
        PostingError: it is missing or was refused.
    """
    try:
        answer = subprocess.run(["gh", *arguments], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise PostingError(f"gh cannot be run: {error}") from error
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PostingError(f"gh {' '.join(arguments[:2])} failed: {last}")
    return answer.stdout


def main(arguments: Sequence[str]) -> int:
    """0 if what there is to post is posted, 64 for wrong use, 74 if GitHub refused."""
    given = [one for one in arguments if one != "--resolved"]
    try:
        if given[:1] == ["night"] and len(given) == 2:
            action = post_issue(run_gh, NIGHT, read_parts(Path(given[1])), "--resolved" in arguments)
        elif given[:1] == ["upgrade"] and len(given) == 2:
            action = post_issue(run_gh, UPGRADE, read_parts(Path(given[1])), False)
        elif given[:1] == ["comment"] and len(given) == 3 and given[1].isdigit():
            action = post_comment(run_gh, int(given[1]), read_parts(Path(given[2])))
        else:
            print(__doc__, file=sys.stderr)
            return 64
    except PostingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 74
    print(f"{action.kind} {action.number or ''}".strip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
