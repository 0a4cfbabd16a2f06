"""What an AOTInductor package says of itself, read from its zip before any of it is loaded.

A package is torch's ``.pt2`` archive with one file more, ``extra/int8.json``, and the operator libraries that its graph
calls. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from int8 import isa as isa_module
from int8.errors import PackageError

#: Version of the manifest; a package of another one is refused.
SCHEMA = 1
MANIFEST_FILE = "int8.json"
#: Where the libraries lie, below the archive's root.
LIBRARY_FOLDER = "data/int8"

#: Beginnings of the names, in /proc/cpuinfo, of instruction sets that a compiler uses by itself.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpclmulqdq", "sha", "adx", "movbe", "popcnt")


@dataclass(frozen=True)
class InputSpec:
    """One input: its name, its dtype as torch spells it (``int64``), and its shape, a name where a size may vary."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Library:
    """A C++ operator library inside the package.

    Attributes:
        file: its name; it lies in :data:`LIBRARY_FOLDER`.
        key: what it was built from, as :mod:`int8.kernels.build` names it; equal keys are equal libraries.
        sha256: of the file, in hex.
    """

    file: str
    key: str
    sha256: str


@dataclass(frozen=True)
class PackageInfo:
    """The manifest of a package.

    Attributes:
        isa: the ISA that kernels and packed weights were made for.
        cpu_model: where it was built.
        cpu_flags: instruction sets of that CPU that the compiler was free to use, beyond those of the ISA; empty where
            the ISA's mask named the architecture.
        torch: version that built it.
        int8: version of this library that built it.
        threads: of the process that built it; for information, a package runs with any number.
        recipe: fields of the recipe, None for a floating-point model as it is.
        weight_bits: of the quantized linears; None without any.
        compute_dtype: dtype of everything but INT8 linears.
        linears, quantized_linears, fused_linears: counts of original ``nn.Linear`` modules.
        inputs: in the order in which the graph takes them.
        sizes: name of a varying size -> smallest and largest value; None for no bound.
        outputs: how the graph's tensors make up the model's output: an index for a tensor, lists and objects around it.
        libraries: C++ operators that the graph calls.
    """

    isa: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    torch: str
    int8: str
    threads: int
    recipe: Mapping[str, Any] | None
    weight_bits: int | None
    compute_dtype: str
    linears: int
    quantized_linears: int
    fused_linears: int
    inputs: tuple[InputSpec, ...] = ()
    sizes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    outputs: Any = None
    libraries: tuple[Library, ...] = ()
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The manifest's text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> PackageInfo:
        """The manifest in ``text``.

        Raises:
            PackageError: of another schema.
            ValueError, KeyError, TypeError: not a manifest.
        """
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise PackageError(f"has schema {data['schema']}, this version reads {SCHEMA}; build it again")
        inputs = tuple(InputSpec(one["name"], one["dtype"], tuple(one["shape"])) for one in data["inputs"])
        sizes = {name: (int(low), high) for name, (low, high) in data["sizes"].items()}
        libraries = tuple(Library(**one) for one in data["libraries"])
        flags = tuple(data["cpu_flags"])
        return cls(**{**data, "inputs": inputs, "sizes": sizes, "libraries": libraries, "cpu_flags": flags})


def describe(path: str | os.PathLike[str]) -> PackageInfo:
    """What the package at ``path`` says of itself; nothing of it is loaded.

    Raises:
        PackageError: there is no such file, it is damaged, or it is not a package of :func:`int8.export`.
    """
    with open_archive(path) as archive:
        name = root_of(archive) + f"extra/{MANIFEST_FILE}"
        if name not in archive.namelist():
            raise PackageError(f"{path} holds no {MANIFEST_FILE}; it is not a package written by int8.export")
        try:
            return PackageInfo.from_json(archive.read(name))
        except PackageError as error:
            raise PackageError(f"{path} {error}") from None
        except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise PackageError(f"{path} is damaged: its manifest cannot be read ({error}); build it again") from error


def open_archive(path: str | os.PathLike[str]) -> zipfile.ZipFile:
    """The package's zip.

    Raises:
        PackageError: no such file, or one that is not a whole zip.
    """
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise PackageError(f"there is no package {path}") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise PackageError(f"{path} is not a whole package ({error}); copy or build it again") from error


def root_of(archive: zipfile.ZipFile) -> str:
    """The folder inside the archive under which everything lies, with its slash."""
    first = next(iter(archive.namelist()), "")
    return first.partition("/")[0] + "/"


def check_whole(path: str | os.PathLike[str]) -> None:
    """Read all of the package against its checksums.

    Raises:
        PackageError: a part is damaged.
    """
    with open_archive(path) as archive:
        try:
            damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
            raise PackageError(f"{path} is damaged ({error}); copy or build it again") from error
    if damaged is not None:
        raise PackageError(f"{path} is damaged: {damaged} does not match its checksum; copy or build it again")


def check_host(info: PackageInfo, path: str | os.PathLike[str], torch_version: str) -> None:
    """Refuse a package that this process cannot run as it was built.

    Its weights are packed for the kernels of one ISA, and those of another would unpack them on every call or compute
    something else. So a package for ``vnni`` runs on a host with AMX only in a process that is held to ``vnni``.

    Raises:
        PackageError: the host lacks the ISA or instruction sets, the process is held to another ISA, or torch has
            another minor version.
    """
    if _minor(info.torch) != _minor(torch_version):
        raise PackageError(
            f"{path} was built with torch {info.torch}, this is torch {torch_version}; build it again with this one"
        )
    if info.isa not in isa_module.NAMES:
        raise PackageError(f"{path} was built for ISA {info.isa!r}, which this version does not know")
    reason = isa_module.why_unsupported(info.isa)
    if reason is not None:
        raise PackageError(f"{path} was built for ISA {info.isa!r}: {reason}; build it on a host like this one")
    lacking = [flag for flag in info.cpu_flags if flag not in isa_module.cpu_flags()]
    if lacking:
        raise PackageError(
            f"{path} was built for the instructions of {info.cpu_model}, of which this CPU ({isa_module.cpu_model()}) "
            f"lacks {', '.join(lacking)}; build it on a host like this one"
        )
    effective = isa_module.effective()
    if effective != info.isa:
        raise PackageError(
            f"{path} was built for ISA {info.isa!r} and this process runs {effective!r}; start it with "
            f"{isa_module.VARIABLE}={info.isa}, or build the package for {effective!r}"
        )


def instruction_sets() -> tuple[str, ...]:
    """Names of this CPU's instruction sets that a compiler may use by itself."""
    return tuple(sorted(flag for flag in isa_module.cpu_flags() if flag.startswith(_INSTRUCTION_SETS)))


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def library_path(archive: zipfile.ZipFile, library: Library) -> str:
    """Where a library lies in the archive."""
    return f"{root_of(archive)}{LIBRARY_FOLDER}/{Path(library.file).name}"
