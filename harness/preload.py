"""Libraries that workers are started with: an allocator, an OpenMP runtime. Missing ones are errors, never warnings.

The loader itself only prints a warning where a library of ``LD_PRELOAD`` is missing, and goes on without it: the run
would then be labelled with an allocator that it does not use.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import ToolchainMissing

VARIABLE = "LD_PRELOAD"


def find(name: str) -> Path:
    """The library called ``name``: a path, or a name such as ``libtcmalloc`` or ``libiomp5.so``.

    Names are looked for among this environment's own libraries first (wheels bring some), then where the loader looks.

    Raises:
        ToolchainMissing: there is no such library.
    """
    if "/" in name:
        if Path(name).is_file():
            return Path(name).resolve()
        raise ToolchainMissing(f"the library {name} that was asked for does not exist; name one that does")
    wanted = re.compile(rf"{re.escape(name.removesuffix('.so'))}(?:[-_]minimal)?(?:-[0-9a-f]+)?\.so(?:\.\d+)*")
    for path in (*_of_this_environment(name), *_of_the_loader()):
        if wanted.fullmatch(path.name):
            return path
    raise ToolchainMissing(
        f"the library {name} that was asked for is not installed; install it (Debian: libtcmalloc-minimal4, "
        "libjemalloc2 or libomp5; pip: intel-openmp), or name its file"
    )


def _of_this_environment(name: str) -> Iterator[Path]:
    stem = name.removesuffix(".so")
    packages = Path(sysconfig.get_paths()["platlib"])
    folders = (Path(sys.prefix) / "lib", packages / "torch" / "lib", packages / "torch.libs")
    for folder in folders:
        yield from sorted(folder.glob(f"{stem}*.so*"))


def _of_the_loader() -> list[Path]:
    try:
        command = next(path for path in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if Path(path).exists())
        text = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (StopIteration, OSError, subprocess.SubprocessError):
        return []
    found = (line.rpartition(" => ")[2].strip() for line in text.splitlines() if "x86-64" in line)
    return [Path(path) for path in found if Path(path).is_file()]


def asked_for() -> list[str]:
    """What ``LD_PRELOAD`` names."""
    return [name for name in re.split(r"[\s:]+", os.environ.get(VARIABLE, "")) if name]


def require() -> None:
    """Raise ToolchainMissing if ``LD_PRELOAD`` names a library that does not exist."""
    for name in asked_for():
        if "$" not in name:  # the loader replaces $LIB and $ORIGIN; the check of the worker's mappings catches the rest
            find(name)


@contextlib.contextmanager
def preloaded(names: Sequence[str]) -> Iterator[None]:
    """Have processes started inside the block load these libraries before all others, beside those already named.

    Raises:
        ToolchainMissing: one of them, or one that ``LD_PRELOAD`` names already, does not exist.
    """
    require()
    before = os.environ.get(VARIABLE)
    paths = [str(find(name)) for name in names]
    if paths:
        os.environ[VARIABLE] = ":".join([*paths, *asked_for()])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def missing_from(pid: int, root: Path = Path("/")) -> list[str]:
    """Libraries that ``LD_PRELOAD`` names and a running process has not loaded, by the mappings that it has."""
    wanted = {Path(name).name: name for name in asked_for()}
    if not wanted:
        return []
    text = (root / f"proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    mapped = {Path(path).name for path in re.findall(r"\s(/\S+)", text)}
    # A link such as libx.so.4 is mapped under the name of the file that it leads to.
    return [full for name, full in wanted.items() if not {name, Path(full).resolve().name} & mapped]
