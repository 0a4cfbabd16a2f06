"""Errors of the harness: each is one clear line that says what to do, and knows the exit code that ends its command."""

from __future__ import annotations

from typing import ClassVar


class HarnessError(Exception):
    """Base of every error that the harness raises on purpose. ``exit_code`` is what ``harness`` exits with."""

    exit_code: ClassVar[int] = 70


class UsageError(HarnessError):
    """The command line asks for something that does not exist or does not fit together (EX_USAGE)."""

    exit_code = 64


class AssetError(HarnessError):
    """Something that must be read is missing or damaged: weights, a data set, a run (EX_NOINPUT)."""

    exit_code = 66


class ToolchainMissing(HarnessError):  # noqa: N818 - reads better as what is the matter
    """No C++ compiler that can build for this host was found (EX_UNAVAILABLE)."""

    exit_code = 69


class StoreError(HarnessError):
    """The store cannot be written or read: a full disk, a read-only folder, a lock, a damaged file (EX_IOERR)."""

    exit_code = 74


class HostError(HarnessError):
    """A measurement on this host would be meaningless."""

    exit_code = 3
