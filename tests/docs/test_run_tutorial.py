"""Which commands of the tutorial are run, and in what shell."""

from __future__ import annotations

import subprocess

import pytest
from test_handbook import load

tutorial = load("run_tutorial")


def test_the_page_has_steps_and_leaves_no_command_out() -> None:
    found = tutorial.steps(tutorial.PAGE.read_text(encoding="utf-8"))
    text = "\n".join(step.commands for step in found)
    for words in ("int8 quantize", "harness run", "harness gate", "harness report", "int8.compile"):
        assert words in text
    assert [step.commands.strip() for step in found if step.setup] == ["make fetch", "source .venv/bin/activate"]


def test_a_fence_that_nothing_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="line 3: a bash fence that nothing runs"):
        tutorial.steps("# Title\n\n```bash\nharness doctor\n```\n")


def test_steps_share_a_shell_and_stop_at_the_first_failure() -> None:
    page = "```bash run setup\nA=never\n```\n```bash run\nB=1\n```\n```bash run\necho $B\nfalse\necho never\n```\n"
    text = tutorial.script(tutorial.steps(page), setup=False)
    result = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "1\n")
    assert result.stderr == "== tutorial, line 4\n== tutorial, line 7\n"
