"""The README tells of what there is: names, commands and exit codes are those of the code, its example compiles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import int8
from harness import assets, engines, errors, matrix
from harness.cli import app
from int8 import isa, recipe

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = [name for name, row in assets.catalog("models").items() if not row.get("hidden")]
TASKS = [name for name in assets.catalog("tasks") if not name.startswith("tiny-")]
NAMES = [*recipe.names(), *engines.names(), *isa.NAMES, *matrix.load_profiles(), *MODELS, *TASKS]
VERBS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
VERBS += [str(group.name) for group in app.registered_groups]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_mentioned(name: str) -> None:
    assert f"`{name}`" in TEXT or f" {name}`" in TEXT


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_table(verb: str) -> None:
    assert re.search(rf"^\| `harness {verb}\b", TEXT, re.MULTILINE)


def test_no_verb_is_made_up() -> None:
    assert set(re.findall(r"^\| `harness (\w+)", TEXT, re.MULTILINE)) <= set(VERBS)


def test_every_exit_code_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HarnessError)]
    cells = re.findall(r"^\| ([\d, ]+) \|", TEXT, re.MULTILINE)
    explained = {int(code) for codes in cells for code in codes.split(",")}
    assert {kind.exit_code for kind in kinds} | {0, 1, 2, 3, 4, 130, 143} <= explained


def test_the_example_calls_what_exists() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    used = {
        node.attr
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "int8"
    }
    assert {"quantize", "compile"} <= used <= set(int8.__all__)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^    make ([a-z-]+)", TEXT, re.MULTILINE)) <= targets


def test_links_into_the_tree_resolve() -> None:
    links = [link for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]+)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
