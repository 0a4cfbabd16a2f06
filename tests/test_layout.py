"""Who may import whom: dashboards and benchmarks -> harness -> int8, and no torch in what must load in milliseconds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each package, and those of this project that it may import.
MAY_IMPORT = {
    "int8": {"int8"},
    "harness": {"harness", "int8"},
    "dashboards": {"dashboards", "harness", "int8"},
    "benchmarks": {"benchmarks", "harness", "int8"},
}
#: The front door: it alone reaches up to the site's builder, when `report` is called.
FRONT_DOOR = "harness.cli"
PURE = (
    "int8",
    "int8.recipe",
    "int8.isa",
    "harness.stats",
    "harness.verdicts",
    "harness.roofline",
    "harness.matrix",
    "harness.metrics",
)
#: Third-party packages that a pure module must not bring in.
HEAVY = ("torch", "torchao", "transformers", "datasets", "pandas", "sklearn")


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


ALL = [found for package in MAY_IMPORT for found in _modules(package)]


def _imported(name: str, path: Path) -> set[str]:
    """Full names of all modules that a file imports, at its top or inside its functions."""
    found: set[str] = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name for name, _ in ALL])
def test_arrows_run_one_way(name: str, path: Path) -> None:
    allowed = MAY_IMPORT[name.split(".")[0]] | ({"dashboards"} if name == FRONT_DOOR else set())
    tops = {imported.split(".")[0] for imported in _imported(name, path)}
    assert tops & set(MAY_IMPORT) <= allowed


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name for name, _ in ALL])
def test_nobody_imports_the_front_door(name: str, path: Path) -> None:
    if name != "harness.__main__":
        assert FRONT_DOOR not in _imported(name, path)


def test_no_module_imports_another_in_a_circle() -> None:
    known = {name for name, _ in ALL}
    graph = {name: _imported_at_top(name, path) & known - {name} for name, path in ALL}
    assert _circle(graph) is None


def _imported_at_top(name: str, path: Path) -> set[str]:
    """Like ``_imported``, but only what is imported when the module is: neither in functions nor for type checks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    stripped = ast.unparse(tree)
    found: set[str] = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.parse(stripped).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            submodules = {f"{module}.{alias.name}" for alias in node.names}
            known = submodules & {other for other, _ in ALL}
            found |= known or {module}
    return found


def _circle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that returns to its start, or None."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            circle = visit(other, [*trail, name])
            if circle:
                return circle
        done.add(name)
        return None

    return next(filter(None, (visit(name, []) for name in sorted(graph))), None)


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_bring_in_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_no_module_is_named_after_nothing() -> None:
    assert not [path for _, path in ALL if path.stem in {"utils", "util", "helpers", "misc", "common"}]


def test_packages_are_listed_for_installation() -> None:
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    present = {name for name, path in ALL if path.name == "__init__.py" and not name.startswith("benchmarks")}
    # A folder without __init__.py would be left out silently.
    folders = {".".join(path.parent.relative_to(ROOT).parts) for _, path in ALL if path.parts[-2] != "benchmarks"}
    assert listed == present == folders
