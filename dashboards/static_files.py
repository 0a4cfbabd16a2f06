"""The site's static files: our style sheet, scripts and fonts, and the library that draws the charts.

Charts are drawn by Plotly, out of the installed package ``plotly`` (MIT), which ships the minified library in one file:
no request to another host, one version for all pages, upgraded with the lock file. It is large (about 5 MB), so only
pages of series load it, deferred, below text and tables that are readable without it; it earns its size there with
bands, zoom, hover and linked axes over thousands of points. Everything else is HTML and inline SVG. Smaller libraries
(uPlot, 50 kB) are not on the Python package index and would have to be vendored and upgraded by hand.

The fonts are Inter and JetBrains Mono (SIL Open Font License, their texts lie beside them), their Latin letters only.
"""

from __future__ import annotations

import base64
import importlib.resources
import shutil
from pathlib import Path

#: Family, file, weights. Inlined into a style sheet: Firefox loads no font from a parent folder under ``file://``.
FONTS = (
    ("Inter Site", "inter-latin.woff2", "100 900"),
    ("JetBrains Mono Site", "jetbrains-mono-latin.woff2", "100 800"),
)
PLAIN = (
    "site.css",
    "theme.js",
    "site.js",
    "series.js",
    "compare.js",
    "OFL-inter.txt",
    "OFL-jetbrains-mono.txt",
    "favicon.svg",
)


def copy(target: Path) -> None:
    """Write the static files into the folder ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    own = importlib.resources.files("dashboards") / "static"
    for name in PLAIN:
        (target / name).write_bytes((own / name).read_bytes())
    faces = []
    for family, name, weights in FONTS:
        data = base64.b64encode((own / name).read_bytes()).decode("ascii")
        faces.append(
            f'@font-face{{font-family:"{family}";font-style:normal;font-weight:{weights};font-display:swap;'
            f"src:url(data:font/woff2;base64,{data}) format('woff2')}}\n"
        )
    (target / "fonts.css").write_text("".join(faces), encoding="ascii")
    library = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    with importlib.resources.as_file(library) as path:
        shutil.copyfile(path, target / "plotly.min.js")
