"""What other tools read: the Atom feed, the badge, and the JSON index. Pure: text out of facts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from dashboards import wording
from dashboards.judging import Judgement
from harness.records import RunHeader

#: How many runs the feed names.
ENTRIES = 40
#: State to the badge's colour; white text on each has a contrast of at least 4.5.
BADGE_COLOURS = {
    "pass": "#0b66a8",
    "regression": "#b3410a",
    "failed": "#9c2f1a",
    "invalid": "#5b6472",
    "inconclusive": "#8a5a00",
    "none": "#5b6472",
}


#: Characters that XML 1.0 cannot hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """``text`` with a question mark for each character that XML cannot hold."""
    return _NOT_XML.sub("?", text)


def badge(state: str, title: str) -> str:
    """A small SVG picture of the newest verdict, with its words as text and as its accessible name."""
    left, right = "INT8 gate", printable(title)
    split = 8 + 6.6 * len(left)
    rest = 14 + 6.8 * len(right)
    width = f"{split + rest:.0f}"
    name = escape(f"{left}: {right}", {'"': "&quot;"})
    colour = BADGE_COLOURS.get(state, BADGE_COLOURS["none"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}">'
        f'<title>{name}</title><clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{split:.0f}" height="20" fill="#2b323c"/>'
        f'<rect x="{split:.0f}" width="{rest:.0f}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{split / 2:.1f}" y="14">{escape(left)}</text>'
        f'<text x="{split + rest / 2:.1f}" y="14">{escape(right)}</text></g></svg>\n'
    )


def atom(runs: Sequence[tuple[RunHeader, str, str, str]], now: float) -> str:
    """An Atom feed of runs, newest first. Each: header, page, title, summary. Links are relative to the feed."""
    entries = []
    for header, page, title, summary in runs[:ENTRIES]:
        when = wording.iso(header.started_at)
        entries.append(
            f"<entry><id>urn:int8-harness:run:{escape(printable(header.run_id))}</id>"
            f"<title>{escape(printable(title))}</title><updated>{when}</updated>"
            f"<link href={quoteattr(printable(page))}/><summary>{escape(printable(summary))}</summary></entry>"
        )
    updated = wording.iso(runs[0][0].started_at if runs else now)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<feed xmlns="http://www.w3.org/2005/Atom">'
        "<id>urn:int8-harness:runs</id><title>INT8 harness: runs</title>"
        f'<updated>{updated}</updated><author><name>harness report</name></author><link rel="self" href="feed.atom"/>'
        f'<link rel="alternate" href="index.html"/>{"".join(entries)}</feed>\n'
    )


def index_json(
    *,
    now: float,
    headers: Sequence[RunHeader],
    files: Sequence[str],
    series: Iterable[dict[str, Any]],
    judgements: Iterable[Judgement],
    pages: Sequence[str],
) -> str:
    """The index for other tools: what the site holds and where. Paths are relative to the site's root."""
    body = {
        "schema_version": 1,
        "generated_at": wording.iso(now),
        "pages": list(pages),
        "newest": [
            {
                "run_id": one.header.run_id,
                "fingerprint": one.header.fingerprint,
                "verdict": one.state,
                "exit_code": one.exit_code,
                "baseline": one.baseline,
            }
            for one in judgements
        ],
        "runs": [
            {
                "run_id": header.run_id,
                "started_at": wording.iso(header.started_at),
                "commit": header.commit,
                "fingerprint": header.fingerprint,
                "profile": header.profile,
                "page": page,
            }
            for header, page in zip(headers, files, strict=True)
        ],
        "series": list(series),
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
