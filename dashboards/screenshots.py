"""Pictures of a built site: ``python -m dashboards.screenshots --site S --out DIR``; needs Chromium.

One picture of each page in light, dark and on a phone; of series and runs those with the most to show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from dashboards.browser import Browser, BrowserError

#: Name, width and height in CSS pixels, the system's theme.
LOOKS = (("light", 1360, 860, "light"), ("dark", 1360, 860, "dark"), ("phone", 400, 860, "light"))


def pages(site: Path) -> Iterator[tuple[str, str]]:
    """Name and path of each page worth a picture."""
    for path in sorted(site.glob("*.html")):
        yield path.stem, path.name
    for folder in ("series", "runs"):
        if (site / folder / "index.html").is_file():
            yield f"{folder}-list", f"{folder}/index.html"
    if (site / "runs" / "compare.html").is_file():
        yield "runs-compare", "runs/compare.html"
    series = sorted((site / "series").glob("*-int8-sq-static-*.html")) or sorted((site / "series").glob("*-*.html"))
    if series:
        data = {path: (site / "data" / "series" / f"{path.stem}.js") for path in series}
        largest = max(series, key=lambda path: data[path].stat().st_size if data[path].is_file() else 0)
        yield "series-one", f"series/{largest.name}"
    runs = sorted(path for path in (site / "runs").glob("*.html") if path.stem not in ("index", "compare"))
    if runs:
        yield "run-one", f"runs/{runs[-1].name}"


def take(site: Path, out: Path, looks: tuple[tuple[str, int, int, str], ...] = LOOKS) -> list[Path]:
    """Write the pictures into ``out``; returns their files. Raises BrowserError where there is no Chromium."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    with Browser() as browser:
        for look, width, height, theme in looks:
            with browser.page() as page:
                page.look(width, height, theme)
                for name, path in pages(site):
                    page.open((site / path).resolve().as_uri())
                    if name == "series-one":
                        page.wait_for(
                            "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))"
                        )
                    target = out / f"{name}-{look}.png"
                    page.screenshot(target)
                    made.append(target)
    return made


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.screenshots", description="Pictures of a built site, in light, dark and on a phone."
    )
    parser.add_argument("--site", type=Path, required=True, help="folder of a site that `harness report` built")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    names = [look[0] for look in LOOKS]
    parser.add_argument("--looks", nargs="+", choices=names, default=names, help="which of them (default: all)")
    chosen = parser.parse_args(arguments)
    if not (chosen.site / "index.html").is_file():
        parser.error(f"{chosen.site} holds no site; build one with `harness report --site {chosen.site}`")
    try:
        made = take(chosen.site, chosen.out, tuple(look for look in LOOKS if look[0] in chosen.looks))
    except BrowserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 69
    print("\n".join(str(path) for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
