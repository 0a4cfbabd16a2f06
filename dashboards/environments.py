"""The environments of all runs in few bytes, for the page that compares any two of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboards import wording
from harness.records import RunHeader

#: Letters of one value that the page compares.
LONGEST = 300


def script(headers: Sequence[RunHeader]) -> dict[str, Any]:
    """Fields of host, versions and command line by name: each distinct value once, and for each run which it is.

    A run without the field has -1.
    """
    columns: dict[str, tuple[dict[str, int], list[int]]] = {}
    for place, header in enumerate(headers):
        for name, value in _fields(header).items():
            values, which = columns.setdefault(name, ({}, []))
            which.extend([-1] * (place - len(which)))
            which.append(values.setdefault(value, len(values)))
    for _, which in columns.values():
        which.extend([-1] * (len(headers) - len(which)))
    return {name: {"values": list(values), "runs": which} for name, (values, which) in columns.items()}


def _fields(header: RunHeader) -> dict[str, str]:
    fields = {
        "commit": header.commit or "unknown",
        "local changes": wording.flat(header.dirty),
        "profile": header.profile or "none",
        "command": " ".join(("harness", *header.arguments)),
        "gated recipes": ", ".join(header.gated) or "none",
        "fingerprint": header.fingerprint,
    }
    fields.update({f"host: {name}": wording.flat(value) for name, value in header.host.items()})
    fields.update({f"version: {name}": value for name, value in header.versions.items()})
    return {name: value[:LONGEST] for name, value in fields.items()}
