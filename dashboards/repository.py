"""Where the repository's pages are on the web: for links from a commit, or from a range of commits, to its text."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_SSH = re.compile(r"(?:ssh://)?(?:[\w.-]+@)(?P<host>[\w.-]+)(?::\d+)?[:/](?P<path>[\w./~-]+)")
_HTTP = re.compile(r"https?://(?:[^@/\s]+@)?(?P<host>[\w.-]+(?::\d+)?)/(?P<path>[\w./~-]+)")


def web_address(remote: str) -> str | None:
    """The web address that belongs to a git remote: ``git@host:owner/name.git`` is ``https://host/owner/name``.

    None for a remote that is no host's (a folder). What stands before an ``@`` (a name, a token) is left out.
    """
    match = _HTTP.fullmatch(remote.strip()) or _SSH.fullmatch(remote.strip())
    if match is None:
        return None
    return f"https://{match['host']}/{match['path'].strip('/').removesuffix('.git')}"


def of_checkout(root: Path) -> str | None:
    """The web address of the remote ``origin`` of the checkout at ``root``; None where there is none, or no git."""
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return web_address(result.stdout) if result.returncode == 0 else None
