"""Builds the C++ operators on first use and loads them; the library is cached by what it was made from.

Sources lie in ``csrc``. A file named ``*_<isa>.cpp`` is compiled with that ISA's instructions and includes no header of
torch; everything else is plain x86-64, so loading the library never executes an instruction that the CPU lacks.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from int8.errors import ToolchainError

SOURCES = Path(__file__).parent / "csrc"

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")

#: ISA -> compiler flags of the files named after it.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "vnni": (*_AVX512, "-mavx512vnni"),
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}

#: Of every file. -Wno-psabi: vectors of 64 bytes are passed between inlined functions only.
COMMON_FLAGS = ("-O3", "-fPIC", "-fopenmp-simd", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall", "-Wno-psabi")

#: Seconds after which a compiler is given up.
_TIMEOUT_S = 600


def isa_of(source: Path) -> str | None:
    """The ISA in a source's name, None for plain ones."""
    suffix = source.stem.rpartition("_")[2]
    return suffix if suffix in ISA_FLAGS else None


def compiler() -> str:
    """The C++ compiler: ``CXX``, else g++, else clang++.

    Raises:
        ToolchainError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise ToolchainError("no C++ compiler found; install one (Debian: apt-get install g++) or name it in CXX")


def cache_folder() -> Path:
    """Where libraries are kept: ``INT8_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("INT8_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "int8-harness"


def build(progress: Callable[[str], None] | None = None) -> Path:
    """The library's file, compiled now if this version of it is not in the cache.

    Args:
        progress: is told each source as it has been compiled.

    Raises:
        ToolchainError: no compiler, or it refused; the message holds its output.
    """
    library = cache_folder() / "kernels" / library_key() / "int8_ops.so"
    if library.exists():
        return library
    with _building(library.parent):
        if not library.exists():  # another process may have built it meanwhile
            _build(library, progress)
    return library


@functools.cache
def load() -> Path:
    """Build if needed, register the operators with torch, and return the library's file."""
    library = build()
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    from int8.kernels import fake

    fake.register()
    return library


@functools.cache
def library_key() -> str:
    """Hash of the sources, compiler, flags, torch and this machine's architecture."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = _run([compiler(), "--version"]).splitlines()[0]
    for part in (version, torch.__version__, repr(ISA_FLAGS), repr(COMMON_FLAGS), repr(_torch_flags())):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def _torch_flags() -> tuple[str, ...]:
    from torch.utils import cpp_extension

    abi = int(torch.compiled_with_cxx11_abi())
    includes = (f"-isystem{path}" for path in cpp_extension.include_paths())
    # at::parallel_for is a template: without OpenMP here it runs on one thread, silently.
    return ("-std=c++20", "-fopenmp", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes)


def flags_of(source: Path) -> tuple[str, ...]:
    """Compiler flags of one source."""
    isa = isa_of(source)
    if isa is not None:
        return ("-std=c++17", *COMMON_FLAGS, *ISA_FLAGS[isa])
    plain = source.stem.endswith("_portable")
    return (*(("-std=c++17",) if plain else _torch_flags()), *COMMON_FLAGS)


def _build(library: Path, progress: Callable[[str], None] | None) -> None:
    cxx, started = compiler(), time.monotonic()
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: isa_of(path) is not None)  # the slow ones first
    print("int8: compiling kernels, once (about a minute)...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = [
                [cxx, *flags_of(source), "-c", str(source), "-o", str(target)]
                for source, target in zip(sources, objects, strict=True)
            ]
            for source, _ in zip(sources, pool.map(_run, commands), strict=True):
                if progress:
                    progress(source.name)
        linked = Path(folder) / library.name
        _run([cxx, "-shared", "-o", str(linked), *map(str, objects), *_link_flags()])
        linked.replace(library)
    print(f"int8: kernels compiled in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _link_flags() -> tuple[str, ...]:
    """No OpenMP library of our own: its symbols are found in torch's, so that all share its threads."""
    libraries = Path(torch.__file__).parent / "lib"
    return (f"-L{libraries}", "-ltorch_cpu", "-lc10", "-Wl,--as-needed")


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise ToolchainError(
            f"the C++ compiler failed ({result.returncode}): {' '.join(command)}\n{result.stderr.strip()[-4000:]}"
        )
    return result.stdout


@contextmanager
def _building(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that processes that start together compile once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ToolchainError(
            f"cannot keep compiled kernels in {folder}: {error.strerror}; name a writable folder in INT8_CACHE"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
