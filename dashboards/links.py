"""Checks a built site's links: ``python -m dashboards.links --site S``. The standard library alone, no request is made.

Each ``href`` and ``src`` of every page, feed and style sheet must lead to a file of the site, by a relative path (so
that the site works from disk and below any path of a host), each fragment to an id of its page, and nothing may be
loaded from another host.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

#: Elements whose address the browser loads by itself; the others are followed by people.
LOADING = frozenset({"script", "img", "link", "iframe", "source", "use", "image", "object", "embed", "video", "audio"})


#: Folders whose pages others write and check: asv's, and the handbook's.
OTHERS = ("asv", "docs")


@dataclass
class _Found(HTMLParser):
    """Addresses (element, address) and ids of a page."""

    links: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "data", "xlink:href") and value is not None:
                self.links.append((tag, value))
            elif name == "id" and value is not None:
                self.ids.append(value)


def _read(path: Path) -> _Found:
    found = _Found()
    found.feed(path.read_text(encoding="utf-8"))
    found.close()
    return found


def problems(site: Path) -> list[str]:
    """What is wrong with the links of the site in the folder ``site``, a sentence each. Others' pages are left out."""
    site = site.resolve()
    pages = {
        path: _read(path)
        for pattern in ("*.html", "*.atom", "*.svg")
        for path in sorted(site.rglob(pattern))
        if path.relative_to(site).parts[0] not in OTHERS
    }
    wrong: list[str] = []
    for path, found in pages.items():
        name = path.relative_to(site).as_posix()
        doubled = sorted({one for one in found.ids if found.ids.count(one) > 1})
        wrong += [f"{name}: id {one!r} stands there twice" for one in doubled]
        for tag, address in dict.fromkeys(found.links):
            problem = _problem(site, path, tag, address, pages)
            if problem:
                wrong.append(f"{name}: {problem}")
    return wrong


def _problem(site: Path, page: Path, tag: str, address: str, pages: dict[Path, _Found]) -> str | None:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https") or parts.netloc:
        return f"<{tag}> loads {address} from another host" if tag in LOADING else None
    if parts.scheme:
        return None if parts.scheme == "data" else f"<{tag}> leads to {address[:80]!r}"
    if PurePosixPath(parts.path).is_absolute():
        return f"<{tag}> leads to {address!r}, which breaks below another path: make it relative"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site):
        return f"<{tag}> leads out of the site: {address!r}"
    if not target.is_file():
        return f"<{tag}> leads to {address!r}, which does not exist"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return f"<{tag}> leads to {address!r}, but there is no such id"
    return None


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.links", description="Check the links of a built site.")
    parser.add_argument(
        "--site", type=Path, required=True, help="folder of a site that `harness report` built, or of the handbook"
    )
    chosen = parser.parse_args(arguments)
    wrong = problems(chosen.site)
    print("\n".join(wrong) if wrong else "every link leads somewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
