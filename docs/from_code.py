"""Reference pages written from the code: the command line, and every name that can be used on it.

The handbook's build calls :func:`write`; nothing of this is kept in the tree, so it cannot say what the code does not.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import typer

from harness import assets, engines, errors, metrics, records, verdicts
from harness.cli import app
from int8 import isa, recipe
from int8.__main__ import app as library_app

#: Where the pages go, below the handbook's source; ignored by git.
FOLDER = "generated"


def write(source: Path) -> list[Path]:
    """Write every page into ``source/generated``; returns their files. A page that has not changed keeps its time."""
    folder = source / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "command-line": command_line(),
        "names": names(),
        "record": record(),
        "exit-codes": exit_codes(),
        "paper": paper(),
        "measured": measured(source / "measured"),
    }
    made = []
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        made.append(path)
    return made


def command_line() -> str:
    """Every verb of ``harness`` and of ``python -m int8`` with its arguments and options, as ``--help`` has them."""
    parts = [
        "# The command line",
        "",
        "Written from the program itself. `harness VERB --help` prints the same.",
        "",
    ]
    for prefix, group in (("harness", app), ("python -m int8", library_app)):
        parts += [f"## {prefix}", ""]
        for name, command in _commands(group):
            parts += _verb(f"{prefix} {name}", command)
    return "\n".join(parts)


def _commands(group: typer.Typer) -> list[tuple[str, Any]]:
    """Verbs of a program, those of a sub-program with both words, in the order of its help."""
    found: list[tuple[str, Any]] = []

    def walk(command: Any, words: tuple[str, ...]) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found.append((" ".join(words), command))
            return
        for name, child in inner.items():
            walk(child, (*words, name))

    walk(typer.main.get_command(group), ())
    return found


def _verb(title: str, command: Any) -> list[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not getattr(one, "hidden", False)]
    usage = " ".join([title, *(_argument(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"### {title}", "", "```text", usage, "```", "", _prose(command.help), ""]
    if command.epilog:
        kind, _, text = command.epilog.partition(": ")
        parts += [f"{kind}:", "", "```bash", text, "```", ""]
    if arguments:
        rows = [(f"`{_argument(one)}`", getattr(one, "help", "") or "") for one in arguments]
        parts += [*table(("argument", "meaning"), rows), ""]
    if options:
        parts += [*table(("option", "meaning", "default"), [_option(one) for one in options]), ""]
    return parts


def _prose(text: str | None) -> str:
    """Paragraphs of a help text, each one line."""
    return "\n\n".join(_flat(part) for part in (text or "").strip().split("\n\n"))


def _argument(one: Any) -> str:
    return str(one.metavar or one.name.upper())


def _option(one: Any) -> tuple[str, str, str]:
    flags = ", ".join(f"`{flag}`" for flag in (*one.opts, *one.secondary_opts))
    value = f" `{one.metavar}`" if one.metavar and not getattr(one, "is_flag", False) else ""
    default = "required" if one.required else _default(one.default)
    return flags + value, one.help or "", default


def _default(value: Any) -> str:
    if value is None or value is False or callable(value):
        return ""
    return f"`{value}`"


def names() -> str:
    """What can be named on the command line: models, tasks, recipes, engines, ISAs, profiles, metrics."""
    models = {name: row for name, row in assets.catalog("models").items() if not row.get("hidden")}
    tasks = {name: row for name, row in assets.catalog("tasks").items() if not row.get("hidden")}
    profiles = assets.catalog("profiles")
    recipes = [recipe.get(name) for name in recipe.names()]
    sections: list[tuple[str, str, list[str]]] = [
        (
            "Models",
            "A folder that `save_pretrained` wrote, or a hub id, works as well.",
            table(("name", "family", "weights", "about"), ((f"`{n}`", *_model(r, models)) for n, r in models.items())),
        ),
        ("Tasks", "", table(("name", "about"), ((f"`{name}`", row["about"]) for name, row in tasks.items()))),
        (
            "Recipes",
            "Fields are those of {class}`int8.recipe.Recipe`.",
            table(
                ("name", "activation", "smoothing", "needs calibration", "differs from the defaults in"),
                (_recipe(one) for one in recipes),
            ),
        ),
        ("Engines", "", table(("name", "module"), ((f"`{n}`", f"`{_module(n)}`") for n in engines.names()))),
        (
            "ISAs",
            "Best first; `native` stands for the best that the host has. What is set to hold a process to one:",
            table(("name", "variables"), ((f"`{name}`", _variables(name)) for name in isa.NAMES)),
        ),
        ("Profiles", "", table(("name", "about"), ((f"`{name}`", row["about"]) for name, row in profiles.items()))),
        (
            "Metrics",
            "What the gate, the site and asv read out of a record. The margin is how much worse a number may get.",
            table(
                ("name", "what", "unit", "better", "margin"),
                (
                    (
                        f"`{one.name}`",
                        one.title,
                        one.unit,
                        one.direction,
                        "" if one.default_margin is None else f"{one.default_margin:g}",
                    )
                    for one in metrics.METRICS.values()
                ),
            ),
        ),
    ]
    parts = ["# Names", "", "Written from the catalog and the code of this version.", ""]
    for title, note, lines in sections:
        parts += [f"## {title}", "", *([note, ""] if note else []), *lines, ""]
    return "\n".join(parts)


def _model(row: dict[str, Any], models: dict[str, Any]) -> tuple[str, str, str]:
    origin = models[row["from"]] if "from" in row else row
    return row["family"], "real" if origin.get("asset") else "synthetic: for speed only", row["about"]


def _recipe(one: recipe.Recipe) -> tuple[str, str, str, str, str]:
    shown = {"name", "activation", "smoothing"}
    changed = [
        f"{item.name}={getattr(one, item.name)}"
        for item in dataclasses.fields(one)
        if item.name not in shown and getattr(one, item.name) != item.default
    ]
    return (
        f"`{one.name}`",
        one.activation,
        "yes" if one.smoothing else "no",
        "yes" if one.needs_calibration else "no",
        ", ".join(f"`{text}`" for text in changed),
    )


def _module(name: str) -> str:
    return type(engines.get(name)).__module__


def _variables(name: str) -> str:
    # The layers of an ISA that this host lacks are not asked of isa.environment, which would refuse.
    layers = isa._LAYERS[name].environment
    return ", ".join(f"`{key}={value}`" for key, value in layers)


def record() -> str:
    """The fields of a record and of a run's header, as ``harness show --format json`` prints them."""
    parts = [
        "# The record",
        "",
        "`harness show --format json` prints a list of these objects; a run's file holds the header's line and then a",
        "line a record. A number that was not measured is `null`, never zero or a guess.",
        "",
        f"This version writes schema version {records.SCHEMA_VERSION}, and reads older ones.",
        "",
    ]
    for kind in _dataclasses(records.Record, records.RunHeader):
        parts += [f"## {kind.__name__}", "", _flat(kind.__doc__ or ""), ""]
        hints = get_type_hints(kind)
        rows = [(f"`{item.name}`", f"`{_type(hints[item.name])}`") for item in dataclasses.fields(kind)]
        parts += [*table(("field", "type"), rows), ""]
    return "\n".join(parts)


def _dataclasses(*roots: Any) -> Iterator[Any]:
    """Each dataclass that the roots hold, themselves first, in the order in which they are met."""
    seen: list[Any] = []
    queue = list(roots)
    while queue:
        kind = queue.pop(0)
        if kind in seen:
            continue
        seen.append(kind)
        yield kind
        for hint in get_type_hints(kind).values():
            queue += [one for one in _inside(hint) if dataclasses.is_dataclass(one)]


def _inside(hint: Any) -> Iterator[Any]:
    yield hint
    for one in getattr(hint, "__args__", ()):
        yield from _inside(one)


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", None) else str(hint)
    for noise in ("harness.records.", "typing.", "<class '", "'>"):
        text = text.replace(noise, "")
    return text


def exit_codes() -> str:
    """The exit codes of the errors that the code raises on purpose."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HarnessError)]
    rows = [(str(kind.exit_code), f"`{kind.__name__}`", _flat(kind.__doc__ or "")) for kind in kinds]
    return "\n".join(
        [
            "# Errors and exit codes",
            "",
            "Each error is one line on stderr that says what to do. These end a command; the codes of `harness gate`",
            "are in [](../gates.md).",
            "",
            *table(("code", "error", "when"), sorted(rows, key=lambda row: int(row[0]))),
            "",
        ]
    )


def paper() -> str:
    """What the paper's text states: part of the page of results."""
    values = assets.catalog("paper")
    machines = values["platforms"]
    rows = [
        (one["model"], f"`{one['recipe']}`", f"{machines[one['isa']]} (`{one['isa']}`)", f"{one['value']:.2f}x")
        for one in values["speedups"]
    ]
    for name, (low, high) in values["ranges"].items():
        rows.append(("all its models", "both methods", f"{machines[name]} (`{name}`)", f"{low:g}-{high:g}x"))
    loss = f"The loss of accuracy is below {values['max_loss']:g} point for each of its models, tasks and methods."
    return "\n".join([*table(("model", "recipe", "machine", "over FP32"), rows), "", loss, ""])


def measured(folder: Path) -> str:
    """Runs that were kept for the page of results, each a file that ``harness show --format json`` printed.

    A speed-up is shown only where the rules publish it: its accuracy and evidence passed.
    """
    parts: list[str] = []
    for path in sorted(folder.glob("*.json")):
        found = [records.from_json(item) for item in json.loads(path.read_text(encoding="utf-8"))]
        parts += [f"### {path.stem}", ""]
        rows = [row for one in found if (row := _measured(one)) is not None]
        parts += [*table(("cell", "over FP32", "95 % interval", "accuracy", "change", "flips", "SQNR"), rows), ""]
    return "\n".join(parts)


def _measured(one: records.Record) -> tuple[str, ...] | None:
    """A line of the table for a quantized or BF16 cell that was measured; None for others."""
    if one.status != "ok" or one.cell.recipe == "fp32":
        return None
    judged = [verdicts.judge_evidence(one, False)]
    if one.accuracy is not None:
        judged += verdicts.judge_accuracy(one, False)
    bad = [verdict.reason for verdict in judged if not verdict.good]
    speed = one.speedup if not bad else None
    interval = speed.ci95 if speed is not None else None
    accuracy = one.accuracy
    return (
        f"`{one.cell.key}`",
        "withheld: " + "; ".join(bad) if bad else ("" if speed is None else f"{speed.value:.2f}x"),
        "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        "" if accuracy is None else f"{100 * accuracy.value:.2f} % (FP32 {100 * accuracy.fp32_value:.2f} %)",
        "" if accuracy is None else f"{100 * accuracy.delta:+.2f}",
        "" if accuracy is None else f"{100 * accuracy.flips:.2f} %",
        "" if accuracy is None or accuracy.sqnr_db is None else f"{accuracy.sqnr_db:.1f} dB",
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; bars inside a cell are escaped, line ends become spaces."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(_flat(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def _flat(text: str) -> str:
    """One line, docstrings' own markup as Markdown's."""
    return " ".join(re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").split())
