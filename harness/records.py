"""Records of measured cells: their shape, and the store that keeps them. The only file that knows the JSON.

A *cell* is what is measured; a *record* is everything known about one cell in one run; a *run* is the records of one
invocation plus the host's fingerprint, the commit and the versions. A value that was not measured is None, never zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import re
import secrets
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from harness.errors import AssetError, StoreError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCHEMA_VERSION = 1

Status = Literal["ok", "failed", "skipped", "invalid"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "invalid")


@dataclass(frozen=True)
class Cell:
    """What is measured. ``key`` is how it is written: ``model/engine/recipe/isa/scenario[/aoti][@task]``."""

    model: str
    engine: str
    recipe: str
    isa: str
    scenario: str
    deploy: str = "jit"
    task: str | None = None
    family: str | None = None
    weights: Literal["real", "synthetic"] | None = None
    compute_dtype: Literal["fp32", "bf16"] | None = None

    @property
    def key(self) -> str:
        """The cell's name; family, weights and compute dtype follow from it and are not part of it."""
        parts = [self.model, self.engine, self.recipe, self.isa, self.scenario]
        if self.deploy != "jit":
            parts.append(self.deploy)
        return "/".join(parts) + (f"@{self.task}" if self.task else "")


@dataclass(frozen=True)
class Round:
    """One slice of steady-state timing in one process. ``t0``: Unix time in seconds of its first iteration."""

    t0: float
    process: int
    samples_s: tuple[float, ...]


@dataclass(frozen=True)
class Latency:
    """Percentiles of the time of one iteration, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Instance:
    """One of the processes that a scenario ``multi`` runs at once: its CPUs, its process id, its sequences a second."""

    cpus: tuple[int, ...]
    process: int
    throughput: float


@dataclass(frozen=True)
class Timing:
    """The clocks of a cell, in seconds, and what follows from its samples. ``throughput``: sequences a second.

    ``instances``: where several processes ran at once (scenario ``multi``), each of them; ``throughput`` is then their
    total, and each has rounds of its own.
    """

    rounds: tuple[Round, ...] = ()
    throughput: float | None = None
    latency_s: Latency | None = None
    load_s: float | None = None
    calibrate_s: float | None = None
    quantize_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    steady: bool | None = None
    brief: bool = False
    instances: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class Speedup:
    """Ratio of median times, ``int8/fp32`` of the same model, ISA, scenario and run over this cell."""

    value: float
    ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one forward pass spent in linears, attention and the rest."""

    linear: float
    attention: float
    other: float


@dataclass(frozen=True)
class Memory:
    """Bytes: the worker's peak resident set, the model's parameters and buffers, and those of the linears' weights."""

    peak_rss_bytes: int | None = None
    model_bytes: int | None = None
    linear_weight_bytes: int | None = None


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over paired examples against eager FP32.

    ``delta`` is value - fp32_value (negative: worse). ``flips`` is the fraction of examples whose prediction differs,
    ``flips_gained`` and ``flips_lost`` count those that became right and wrong, or better and worse where an example
    has a score of its own (F1). ``others`` are further metrics of the same predictions, by name, from 0 to 1.
    ``scenario`` names the scenario in whose compiled graph the examples were judged. ``outputs`` is the sidecar file,
    relative to the store's root.
    """

    metric: str
    value: float
    fp32_value: float
    chance: float
    delta: float
    delta_ci95: tuple[float, float] | None
    n: int
    flips: float
    flips_gained: int
    flips_lost: int
    sqnr_db: float | None
    cosine: float | None
    outputs: str | None = None
    scenario: str | None = None
    others: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Disturbance:
    """What else happened on a cell's CPUs while it was timed.

    ``seconds`` were watched. ``others`` and ``steal``: shares of the CPUs' time that other processes and other guests
    of the machine took. ``throttled``: how often the CPUs were slowed down for heat. ``lowest_mhz`` and
    ``highest_mhz``: their frequency. What the host does not show is None.
    """

    seconds: float
    others: float | None
    steal: float | None
    throttled: int | None = None
    lowest_mhz: float | None = None
    highest_mhz: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What really ran. Counts are of original ``nn.Linear`` modules; ``kernels`` maps a kernel's name to its calls in
    one forward pass; ``amx_permission`` is the process's AMX bit when the cell ended. ``weight_bits`` is 7 where the
    ISA's kernels would saturate with 8. ``selection`` has an object for each product for which a kernel was chosen:
    ``m``, ``n``, ``k``, ``epilogue``, ``out_dtype``, ``kernel`` and ``times_s`` (seconds by kernel, as measured).
    ``fp32_cosine`` sets the output for the timed batch beside eager FP32's, where no task judges the cell."""

    linears: int | None = None
    quantized_linears: int | None = None
    fused_linears: int | None = None
    kernels: dict[str, int] = field(default_factory=dict)
    isa_effective: str | None = None
    amx_permission: bool | None = None
    weight_bits: int | None = None
    threads: int | None = None
    fp32_cosine: float | None = None
    notes: tuple[str, ...] = ()
    selection: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Record:
    """Everything known about one cell in one run.

    ``linear_speedup`` is ``speedup`` for the linears alone, out of the time splits of both cells; like those it is
    there only where the run profiled.
    """

    run_id: str
    commit: str | None
    status: Status
    reason: str | None
    cell: Cell
    timing: Timing = Timing()
    speedup: Speedup | None = None
    time_split_s: TimeSplit | None = None
    linear_speedup: Speedup | None = None
    memory: Memory = Memory()
    accuracy: Accuracy | None = None
    evidence: Evidence = Evidence()
    disturbance: Disturbance | None = None
    fingerprint: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RunHeader:
    """First line of a run's file.

    ``fingerprint`` is the id of the host's comparable fields, ``host`` spells all fields out (a flat mapping),
    ``versions`` maps a distribution to its version. ``started_at`` is Unix time in seconds. ``gated`` lists the recipes
    whose ``int8`` cells decide the gate. ``arguments`` is the command line after ``harness``.
    """

    run_id: str
    started_at: float
    commit: str | None
    fingerprint: str
    host: dict[str, Any]
    versions: dict[str, str]
    profile: str | None
    gated: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    dirty: bool | None = None
    invalid_reason: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Run:
    """A run as read back. ``problems`` says in words what could not be read (a torn tail, a damaged line).

    ``finished`` is False where the run was killed or still goes on. ``host_at_end`` holds the host's fields that were
    read again at the end (load, steal time).
    """

    header: RunHeader
    records: tuple[Record, ...]
    problems: tuple[str, ...] = ()
    finished: bool = False
    host_at_end: dict[str, Any] | None = None


# --- JSON -------------------------------------------------------------------------------------------------------------


class DamagedError(ValueError):
    """A JSON value does not have the shape of what it should become; the message names the field."""


def to_json(value: Any) -> Any:
    """``value`` (a record, a header, or any part of one) as what strict JSON can hold.

    Dataclasses become objects in the order of their fields and tuples become lists. A number that is not finite becomes
    null: it was not measured.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {name: to_json(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        return to_json(value.item())
    raise TypeError(f"{type(value).__name__} has no place in a record: {value!r}")


def from_json(data: Mapping[str, Any]) -> Record:
    """The record in ``data``, which :func:`to_json` made, perhaps in a newer version: unknown fields are ignored.

    Raises:
        DamagedError: a field is missing or has the wrong type, or the schema version is newer than this code.
    """
    record: Record = _decode(Record, data)
    return record


def header_from_json(data: Mapping[str, Any]) -> RunHeader:
    """The header in ``data``, which :func:`to_json` made. Raises as :func:`from_json`."""
    header: RunHeader = _decode(RunHeader, data)
    return header


def _encode_line(value: Any) -> bytes:
    """``value`` as one line of strict JSON. Pure ASCII, so no character in it can look like a line's end."""
    return json.dumps(to_json(value), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _parse_line(line: bytes) -> Any:
    """The JSON value in ``line``; NaN and infinities, which strict JSON lacks, become None. Raises ValueError."""
    return json.loads(line, parse_constant=lambda _: None)


def _decode(kind: Any, data: Any) -> Any:
    """``data`` as an instance of the dataclass ``kind``, which has a schema version."""
    if not isinstance(data, Mapping):
        raise DamagedError(f"expected an object, found {_shown(data)}")
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        raise DamagedError(f"schema_version is {_shown(version)}")
    if version > SCHEMA_VERSION:
        raise DamagedError(
            f"a newer harness wrote it (schema version {version}, this one reads up to {SCHEMA_VERSION}); upgrade"
        )
    return _decoder(kind)(data)


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(kind))


_Decoder = Callable[[Any], Any]


@functools.cache
def _decoder(hint: Any) -> _Decoder:
    """A function that checks a JSON value against the type ``hint`` and converts it. Raises DamagedError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object_decoder(hint)
    if origin in (Union, UnionType):
        (inner,) = (item for item in arguments if item is not NoneType)
        decode = _decoder(inner)
        return lambda value: None if value is None else decode(value)
    if origin is Literal:
        return _choice_decoder(arguments)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if origin is dict:
        return _mapping_decoder(_decoder(arguments[1]))
    return _SCALARS[hint]


def _object_decoder(kind: Any) -> _Decoder:
    hints = get_type_hints(kind)
    fields = [
        (item.name, _decoder(hints[item.name]), _required(item)) for item in dataclasses.fields(kind) if item.init
    ]

    def decode(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise DamagedError(f"expected an object, found {_shown(value)}")
        known = {}
        for name, decode_field, required in fields:
            if name in value:
                try:
                    known[name] = decode_field(value[name])
                except DamagedError as error:
                    raise DamagedError(f"{name}: {error}") from None
            elif required:
                raise DamagedError(f"{name} is missing")
        return kind(**known)

    return decode


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _choice_decoder(choices: tuple[Any, ...]) -> _Decoder:
    def decode(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise DamagedError(f"expected one of {', '.join(choices)}, found {_shown(value)}")
        return value

    return decode


def _tuple_decoder(arguments: tuple[Any, ...]) -> _Decoder:
    length = None if arguments[-1] is Ellipsis else len(arguments)
    decode_item = _decoder(arguments[0])

    def decode(value: Any) -> Any:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise DamagedError(f"expected a list{f' of {length}' if length else ''}, found {_shown(value)}")
        return tuple(decode_item(item) for item in value)

    return decode


def _mapping_decoder(decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise DamagedError(f"expected an object, found {_shown(value)}")
        return {key: decode_item(item) for key, item in value.items()}

    return decode


def _decode_float(value: Any) -> float:
    if value is None:  # a number that was not finite; where the field may be empty, this is never reached
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DamagedError(f"expected a number, found {_shown(value)}")
    return float(value)


def _exactly(kind: type, words: str) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise DamagedError(f"expected {words}, found {_shown(value)}")
        return value

    return decode


_SCALARS: dict[Any, _Decoder] = {
    Any: lambda value: value,
    float: _decode_float,
    int: _exactly(int, "a whole number"),
    bool: _exactly(bool, "true or false"),
    str: _exactly(str, "a text"),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# --- the store --------------------------------------------------------------------------------------------------------

LATEST = "latest"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def new_run_id(now: float) -> str:
    """A name for a run that starts at ``now`` (Unix time in seconds). Names sort by time and never collide."""
    moment = datetime.fromtimestamp(now, UTC)
    return f"{moment:%Y%m%dT%H%M%S}.{moment.microsecond // 1000:03d}Z-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Listing:
    """The runs of a store: ``headers``, oldest first, and ``problems``: why each unreadable run was left out."""

    headers: tuple[RunHeader, ...]
    problems: tuple[str, ...]


class Store:
    """Runs as files below one folder, ``root``.

        runs/<run_id>.jsonl         the header's line, a line a record, the end's line
        outputs/<run_id>/<cell>.npz per-example outputs
        logs/<run_id>/<cell>.txt    what failed cells said
        accepted/<run_id>.json      marks a run as a baseline
        pinned/<run_id>.json        marks a run as the release that slow drift is measured from
        index/                      derived (harness/history.py), may be deleted

    Files only ever appear, so the stores of several machines merge by the union of their files. A reader needs no lock.
    Every method that touches the disk raises StoreError, in one line, where the disk refuses.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def create_run(self, header: RunHeader) -> RunWriter:
        """Begin a run: its file exists, with the header in it, when this returns.

        Raises:
            UsageError: the run's id is no file name, or is reserved.
            StoreError: the run exists already, or the disk refuses.
        """
        check_run_id(header.run_id)
        return RunWriter(self, header)

    def listing(self) -> Listing:
        """Headers of the runs that can be read, oldest first, and why the others cannot."""
        headers, problems = [], []
        for path in self.run_files():
            try:
                headers.append(_read_header(path))
            except StoreError as error:
                problems.append(str(error))
        return Listing(tuple(sorted(headers, key=lambda item: (item.started_at, item.run_id))), tuple(problems))

    def runs(self) -> list[RunHeader]:
        """Headers of the runs that can be read, oldest first. :meth:`listing` also says what was left out and why."""
        return list(self.listing().headers)

    def load(self, run_id: str = LATEST) -> Run:
        """The run called ``run_id``, or the newest one. What could not be read of it is in ``problems``.

        Raises:
            AssetError: there is no such run; the message has the nearest ids.
            StoreError: its header is damaged, or a newer harness wrote it.
        """
        if run_id != LATEST:
            return _read_run(self._existing(run_id))
        listing = self.listing()
        if not listing.headers:
            why = f" ({listing.problems[0]})" if listing.problems else ""
            raise AssetError(f"no run in {self.root}{why}; measure one with `harness run --profile smoke`")
        run = _read_run(self._path(listing.headers[-1].run_id))
        return dataclasses.replace(run, problems=(*listing.problems, *run.problems))

    def accept(self, run_id: str, now: float | None = None) -> None:
        """Mark a run as the baseline, from ``now`` on (Unix time in seconds; by default the present).

        Raises:
            AssetError: there is no such run.
            StoreError: the run cannot be read, or the disk refuses.
        """
        self._mark("accepted", run_id, now)

    def accepted(self) -> list[str]:
        """Ids of the accepted runs, in the order in which they were accepted; those with a damaged marker first."""
        return self._marked("accepted")

    def pin(self, run_id: str, now: float | None = None) -> None:
        """Mark a run as the release that slow drift is measured from. Arguments and errors as :meth:`accept`."""
        self._mark("pinned", run_id, now)

    def pinned(self) -> list[str]:
        """Ids of the pinned runs, in the order in which they were pinned; those with a damaged marker first."""
        return self._marked("pinned")

    def _mark(self, kind: str, run_id: str, now: float | None) -> None:
        header = _read_header(self._existing(run_id))
        marker = {"run_id": header.run_id, f"{kind}_at": time.time() if now is None else now}
        _write_whole(self.root / kind / f"{header.run_id}.json", _encode_line(marker))

    def _marked(self, kind: str) -> list[str]:
        marked = [(_marked_at(path, f"{kind}_at"), path.stem) for path in _files(self.root / kind, "*.json")]
        return [run_id for _, run_id in sorted(marked)]

    def outputs(self, relative: str) -> dict[str, NDArray[Any]]:
        """The arrays of a sidecar file, named as :class:`RunWriter` returned it.

        Raises:
            AssetError: the file is missing.
            StoreError: it lies outside the store, or is damaged.
        """
        import numpy as np

        path = self._inside(relative)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except FileNotFoundError:
            raise AssetError(f"{path} is missing; copy the store with its outputs, or measure the cell again") from None
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise StoreError(f"{path} is damaged ({error}); measure the cell again") from None

    def log(self, relative: str) -> str:
        """The text of a cell's log, named as :class:`RunWriter` returned it. Raises as :meth:`outputs`."""
        path = self._inside(relative)
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise AssetError(f"{path} is missing; copy the store with its logs") from None
        except OSError as error:
            raise _refused(path, error) from error

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold this host's right to measure into this store: two measurements at once would disturb each other.

        Raises:
            StoreError: another process holds it (the message has its pid), or the disk refuses.
        """
        path = self.root / ".lock"
        _make_folder(self.root)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _refused(path, error) from error
        try:
            _lock_host(descriptor, path)
            yield
        finally:
            os.close(descriptor)

    def run_files(self) -> list[Path]:
        """The runs' files in the order of their names, readable or not."""
        return _files(self.root / "runs", "*.jsonl")

    def _path(self, run_id: str) -> Path:
        return self.root / "runs" / f"{run_id}.jsonl"

    def _existing(self, run_id: str) -> Path:
        path = self._path(run_id)
        if _RUN_ID.fullmatch(run_id) and path.is_file():
            return path
        known = [item.stem for item in self.run_files()]
        if not known:
            raise AssetError(f"no run in {self.root}; measure one with `harness run --profile smoke`")
        near = difflib.get_close_matches(run_id, known, n=3, cutoff=0.4) or known[-1:]
        raise AssetError(f"no run {run_id!r} in {self.root}; did you mean {' or '.join(near)}?")

    def _inside(self, relative: str) -> Path:
        path = self.root / relative
        if "\0" in relative or not path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"{relative!r} lies outside the store {self.root}: the record that names it is damaged")
        return path


def check_run_id(run_id: str) -> None:
    """Raise UsageError unless ``run_id`` can name a run: letters, digits, dot, dash, underscore; not ``latest``."""
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise UsageError(
            f"run id {run_id!r} cannot name a run; use up to 120 letters, digits, '.', '-' and '_' (not {LATEST!r})"
        )


class RunWriter:
    """Appends to one run. A context manager; leaving it closes the file and changes nothing that is on disk.

    A line is written by one call and is on the disk when :meth:`append` returns. If the disk refuses a part of a line,
    the rest of it is taken back, so the lines before it stay readable and the next one can still be written.
    """

    def __init__(self, store: Store, header: RunHeader) -> None:
        self.header = header
        self.count = 0
        self._store = store
        self._path = store._path(header.run_id)
        _make_folder(self._path.parent)
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError:
            raise StoreError(
                f"run {header.run_id} exists already in {store.root}; choose another --run-id, or leave it out"
            ) from None
        except OSError as error:
            raise _refused(self._path, error) from error
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks; O_EXCL has kept others out
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._write_line({"header": header})
            _sync_folder(self._path.parent)
        except StoreError:
            self.close()
            self._path.unlink(missing_ok=True)
            raise

    def append(self, record: Record) -> None:
        """Write ``record`` as one line; it survives a crash of the process or the host once this returns.

        Raises:
            StoreError: the disk refuses. Everything appended before stays.
            ValueError: a field has a type that could not be read back; nothing is written.
        """
        if record.run_id != self.header.run_id:
            raise ValueError(f"record of run {record.run_id} appended to run {self.header.run_id}")
        from_json(to_json(record))  # what could not be read back must not be written
        self._write_line(record)
        self.count += 1

    def write_outputs(self, cell_key: str, arrays: Mapping[str, NDArray[Any]]) -> str:
        """Keep per-example arrays of a cell. Returns the file's name relative to the store: ``Accuracy.outputs``."""
        import numpy as np

        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]
        return self._write_sidecar("outputs", f"{slug(cell_key)}.npz", buffer.getvalue())

    def write_log(self, cell_key: str, text: str) -> str:
        """Keep what a cell's worker said. Returns the file's name relative to the store."""
        return self._write_sidecar("logs", f"{slug(cell_key)}.txt", text.encode("utf-8", errors="backslashreplace"))

    def finish(self, *, invalid_reason: str | None = None, host: Mapping[str, Any] | None = None) -> None:
        """Write the end's line: the run is complete.

        Args:
            invalid_reason: why the host was disturbed, where it was; it replaces the header's when the run is loaded.
            host: fields of the host at the end (load, steal time).
        """
        end = {"finished_at": time.time(), "records": self.count, "invalid_reason": invalid_reason, "host": host}
        self._write_line({"end": end})

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_line(self, value: Any) -> None:
        rest = _encode_line(value)
        try:
            before = os.fstat(self._descriptor).st_size
            try:
                while rest:  # once, unless the disk takes only a part: then the next call says why
                    rest = rest[os.write(self._descriptor, rest) :]
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, before)
                raise
        except OSError as error:
            raise _refused(self._path, error, kept=self.count) from error

    def _write_sidecar(self, kind: str, name: str, data: bytes) -> str:
        path = self._store.root / kind / self.header.run_id / name
        _write_whole(path, data)
        return path.relative_to(self._store.root).as_posix()


def slug(cell_key: str) -> str:
    """A file name for a cell: readable, and unique by a part of its hash."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", cell_key).strip("-")[:120]
    return f"{readable}-{hashlib.sha256(cell_key.encode('utf-8', errors='surrogatepass')).hexdigest()[:8]}"


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_header(path: Path) -> RunHeader:
    """The header of the run in ``path``. Raises StoreError, in one line that names the run."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise _refused(path, error) from error
    return _parse_header(path, line)


def _parse_header(path: Path, line: bytes) -> RunHeader:
    try:
        data = _parse_line(line)
        header: RunHeader = _decode(RunHeader, data.get("header") if isinstance(data, dict) else None)
    except DamagedError as error:
        raise StoreError(f"run {path.stem} cannot be read: {error}") from None
    except (ValueError, RecursionError):
        what = "it was cut short before its header was written" if not line.endswith(b"\n") else "its header is damaged"
        raise StoreError(f"run {path.stem} cannot be read: {what}; nothing else depends on {path.name}") from None
    if header.run_id != path.stem:
        raise StoreError(f"run {path.stem} cannot be read: its header names run {header.run_id}; rename the file back")
    return header


def _read_run(path: Path) -> Run:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _refused(path, error) from error
    first, *lines = content.split(b"\n")
    header = _parse_header(path, first + b"\n" if lines else first)
    records: list[Record] = []
    problems: list[str] = []
    end: dict[str, Any] | None = None
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            data = _parse_line(line)
            if isinstance(data, dict) and "end" in data:
                end = _end(data["end"])
            else:
                records.append(from_json(data))
        except (ValueError, RecursionError) as error:
            torn = number == len(lines) + 1  # the last line has no newline: the write was cut short
            problems.append(_problem(path.stem, number, line, error, torn))
    if end is not None:
        problems += _lost(path.stem, len(records), end["records"])
        if end["invalid_reason"]:
            header = dataclasses.replace(header, invalid_reason=str(end["invalid_reason"]))
    host_at_end = None if end is None else end["host"]
    return Run(header, tuple(records), tuple(problems), finished=end is not None, host_at_end=host_at_end)


def _end(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise DamagedError(f"end: expected an object, found {_shown(data)}")
    host = data.get("host")
    return {
        "records": data.get("records"),
        "invalid_reason": data.get("invalid_reason"),
        "host": host if isinstance(host, dict) else None,
    }


def _problem(run_id: str, number: int, line: bytes, error: Exception, torn: bool) -> str:
    if torn:
        return f"run {run_id}: the last line was cut short after {len(line)} bytes and is left out"
    why = str(error) if isinstance(error, DamagedError) else "it is not JSON"
    return f"run {run_id}: line {number} is damaged and left out: {why}"


def _lost(run_id: str, found: int, written: Any) -> list[str]:
    if not isinstance(written, int) or written == found:
        return []
    return [f"run {run_id}: {written} records were written but {found} can be read"]


def _marked_at(path: Path, name: str) -> float:
    try:
        moment = json.loads(path.read_bytes())[name]
        return float(moment)
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0


def _files(folder: Path, pattern: str) -> list[Path]:
    """Files of ``folder`` in the order of their names; a missing folder has none."""
    try:
        return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
    except OSError as error:
        raise _refused(folder, error) from error


# --- writing ----------------------------------------------------------------------------------------------------------


def _make_folder(path: Path) -> None:
    """Make ``path`` and its parents, and make their entries survive a crash."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Put the entries of ``path`` on the disk. File systems that cannot sync a folder are let be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that may be entered but not listed
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(path: Path, data: bytes) -> None:
    """Write ``path`` so that nobody ever sees a part of it: under another name, synced, then renamed."""
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _refused(path, error) from error
    _sync_folder(path.parent)


def _lock_host(descriptor: int, path: Path) -> None:
    """Lock ``path`` for this process and write its pid there. The kernel drops the lock when the process ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
        raise StoreError(
            f"another harness (pid {holder}) is measuring into {path.parent}; two at once would disturb each other: "
            "wait until it ends, or stop it"
        ) from None
    except OSError as error:
        raise _refused(path, error) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError, kept: int | None = None) -> StoreError:
    """What the disk refused, as one line that says what to do and what was kept."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some space"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "make it writable, or choose another folder with --results"
    else:
        advice = "choose another folder with --results"
    saved = f"; records written before ({kept}) are kept" if kept else ""
    return StoreError(f"{path}: {reason}: {advice}{saved}")
