"""The handbook: it builds without a warning, every link leads somewhere, and what it names exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dashboards import links
from harness.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "generated")
#: Files and folders that the handbook names without their being in the tree: results, examples, what a reader makes.
NOT_IN_TREE = re.compile(r"^(results/|build/|site/|\.venv|checkpoints/|data/|int8/schemes/NAME|harness/engines/NAME)")


def load(name: str) -> Any:
    """A script of ``docs``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handbook, built as `make docs` does; the sources' own folder is not written to."""
    folder = tmp_path_factory.mktemp("handbook")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "trees"), "-b", "html"]
    result = subprocess.run(
        [*command, str(DOCS), str(folder / "html")], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder / "html"


def test_it_builds_and_every_link_and_anchor_leads_somewhere(built: Path) -> None:
    assert links.problems(built) == []
    names = {path.relative_to(built).as_posix() for path in built.rglob("*.html")}
    for path in PAGES:
        assert path.relative_to(DOCS).with_suffix(".html").as_posix() in names


def test_it_asks_no_other_host(built: Path) -> None:
    for path in built.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:)?//', path.read_text("utf-8"))
        assert (path.name, loaded) == (path.name, [])
    for path in built.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", path.read_text("utf-8"))


def test_a_link_that_leads_nowhere_is_found(built: Path, tmp_path: Path) -> None:
    page = (built / "tutorial.html").read_text("utf-8")
    (tmp_path / "tutorial.html").write_text(page, "utf-8")
    assert any("which does not exist" in problem for problem in links.problems(tmp_path))


def test_the_reference_has_every_verb_and_option() -> None:
    text = load("from_code").command_line()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"### harness {name}" in text
        for parameter in getattr(command, "params", ()):
            for flag in parameter.opts if parameter.param_type_name == "option" else ():
                assert f"`{flag}`" in text


def test_a_cell_of_a_table_cannot_break_it() -> None:
    assert load("from_code").table(("a",), [("x | y\nz",)])[2] == "| x \\| y z |"


def fences(text: str) -> Iterator[str]:
    yield from re.findall(r"^ *```(?:bash|text|python)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    quoted = [*fences(text), *re.findall(r"`([^`\n]+)`", text)]
    for one in quoted:
        joined = one.replace("\\\n", " ")
        for verb, rest in re.findall(r"(?:^|\s|/|\()harness ([a-z]+)\b([^\n;|&]*)", joined):
            assert verb in commands, f"harness {verb}"
            known = {flag for item in _parameters(commands[verb]) for flag in item.opts}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - {"--help"} <= known, f"harness {verb}{rest}"
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z-]+)", " ".join(one for one in quoted if "make " in one)):
        assert target in targets, f"make {target}"


def _parameters(command: Any) -> list[Any]:
    """Of a verb, and of the verbs below it."""
    inner = [one for child in getattr(command, "commands", {}).values() for one in _parameters(child)]
    return [*command.params, *inner]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_file_that_is_named_exists(path: Path) -> None:
    named = re.findall(
        r"`((?:harness|int8|dashboards|benchmarks|docs|tests|\.github|\.ci)/[\w./-]+)`", path.read_text()
    )
    assert [one for one in named if not (ROOT / one).exists() and not NOT_IN_TREE.match(one)] == []
