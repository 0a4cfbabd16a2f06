"""One measurement at a time on a host, whatever store it writes into: a locked file that all users share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import StoreError

#: Names another file: processes that use different ones do not see each other.
VARIABLE = "INT8_HOST_LOCK"


def path() -> Path:
    """The file that is locked: in the folder for temporary files, which lives as long as the host is up."""
    return Path(os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "int8-harness.lock")


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold this host's right to measure. The kernel drops it when the process ends, however that happens.

    Raises:
        StoreError: another process holds it (the message has its pid), or the file cannot be opened.
    """
    where = path()
    try:
        descriptor = _open(where)
    except OSError as error:
        raise StoreError(f"{where}: {error.strerror}: name another file in {VARIABLE}") from error
    try:
        _lock(descriptor, where)
        yield
    finally:
        os.close(descriptor)


def _open(where: Path) -> int:
    """The file, made where it is missing. Kernels may refuse O_CREAT for another user's file in a shared folder."""
    try:
        return os.open(where, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # whatever the umask: other users need it too
        return descriptor


def _lock(descriptor: int, where: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StoreError(f"{where} cannot be locked: {error.strerror}: name another file in {VARIABLE}") from error
        holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
        raise StoreError(
            f"another harness (pid {holder}) is measuring on this host; two at once would disturb each other: "
            "wait until it ends, or stop it"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
