"""Templates to files: the Jinja environment, and the one way in which data gets into a script.

Everything a record holds may be hostile (a model's name, a task's text, an error): HTML is escaped by Jinja, always;
data for scripts is JSON in which no letter can end the script or the line; file names come from
:func:`harness.records.slug` alone; and each page forbids itself other hosts and inline scripts by its policy.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from dashboards import wording
from harness.records import slug

#: What would end a script element, open an HTML comment in one, or end a line of JavaScript inside a string.
_UNSAFE = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def script_json(value: Any) -> str:
    """``value`` as JSON that is also a JavaScript expression, inert wherever a script may stand.

    Raises:
        ValueError: a number that JSON does not have; what is not measured must be None by now.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def environment() -> jinja2.Environment:
    """The templates' environment: autoescape on for every template, undefined names are errors."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("dashboards", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "significant",
        "giga",
        "ratio",
        "ratio_interval",
        "percent",
        "points",
        "points_interval",
        "duration",
        "size",
        "date",
        "day",
        "iso",
        "short_commit",
        "isa_title",
        "flat",
    ):
        made.filters[name] = getattr(wording, name)
    made.filters["slug"] = functools.lru_cache(4096)(slug)
    made.globals["MISSING"] = wording.MISSING
    return made


class Pages:
    """Writes pages into ``root``; remembers each, so that the navigation can name only what exists.

    Args:
        root: the folder being built.
        shared: what every template may use (the navigation, the time of the build).
    """

    def __init__(self, root: Path, shared: dict[str, Any]) -> None:
        self.root = root
        self.shared = shared
        self._environment = environment()

    def write(self, name: str, template: str, /, **context: Any) -> None:
        """Render ``template`` to ``name`` (a POSIX path below the root); ``up`` leads from the page to the root."""
        up = "../" * (len(PurePosixPath(name).parts) - 1)
        text = self._environment.get_template(template).render(**self.shared, **context, up=up, page=name)
        self.write_text(name, text)

    def write_text(self, name: str, text: str) -> None:
        """Write ``text`` to ``name``. Lone surrogates, which UTF-8 cannot hold, become question marks."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode("utf-8", "replace"))

    def write_script(self, name: str, variable: str, value: Any) -> None:
        """Write data as a classic script that sets ``INT8[variable]``: fetch and modules do not work from disk."""
        body = f"window.INT8=window.INT8||{{}};window.INT8[{script_json(variable)}]={script_json(value)};\n"
        self.write_text(name, body)
