"""How Sphinx builds the handbook: `make docs`. Any warning is an error there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import from_code  # noqa: E402 - lies beside this file
from sphinx.util import logging  # noqa: E402

import int8  # noqa: E402

project = "INT8 harness"
author = "the authors of int8-harness"
copyright = "the authors of int8-harness, Apache-2.0"
version = release = int8.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["images", "generated/paper.md", "generated/measured.md"]
myst_enable_extensions = ["fieldlist", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_use_rtype = False

html_theme = "furo"
html_title = "INT8 harness: handbook"
html_static_path = ["images"]
html_favicon = "../dashboards/static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options: dict[str, Any] = {
    "navigation_with_keys": False,
    "light_css_variables": {"color-brand-primary": "#0b57a4", "color-brand-content": "#0b57a4"},
    "dark_css_variables": {"color-brand-primary": "#84bcff", "color-brand-content": "#84bcff"},
}
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"


def _warn_of_missing(app: Any, env: Any, node: Any, contnode: Any) -> None:
    """A page that names a function which is not in the reference is an error; docstrings may name what they like."""
    if node.get("refdoc") != "reference/python" and node.get("refdomain") == "py":
        logging.getLogger(__name__).warning("%s: nothing is documented as %s", node["refdoc"], node["reftarget"])


def setup(app: Any) -> dict[str, bool]:
    """Write the pages that come from the code before any page is read."""
    app.connect("builder-inited", lambda sphinx: from_code.write(Path(sphinx.srcdir)))
    app.connect("missing-reference", _warn_of_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
