"""Profiles, scenarios and the plan of a run: which cells are measured, in which order, and which are skipped and why.

Pure: nothing here reads a clock, starts a process or imports torch, so a matrix is planned and checked in milliseconds.
The only file read is the catalog's ``profiles.toml``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from harness import engines
from harness.errors import UsageError
from harness.records import Cell
from int8 import recipe as recipes
from int8.errors import RecipeError
from int8.isa import NAMES as ISAS

DEPLOYS = ("jit", "aoti")
#: Engine and recipe of the cell that speed-ups are measured against: same model, ISA and scenario, deploy jit.
BASELINE = ("int8", "fp32")

T = TypeVar("T")

_SCENARIO = re.compile(
    r"(?:(?P<single>single)|(?P<offline>offline):b(?P<b1>\d+)|(?P<multi>multi):(?P<inst>\d+)x(?P<thr>\d+):b(?P<b2>\d+))"
    r":s(?P<seq>\d+)"
)


@dataclass(frozen=True)
class Scenario:
    """A load: ``offline:b8:s128`` (throughput), ``single:s128`` (latency, batch 1), ``multi:2x1:b8:s128``.

    Attributes:
        kind: offline, single or multi.
        batch: sequences a batch.
        seq: tokens a sequence, padded to exactly this length.
        instances: processes that run at the same time.
        threads: threads of each instance; None for all that the host grants.
    """

    kind: Literal["offline", "single", "multi"]
    batch: int
    seq: int
    instances: int = 1
    threads: int | None = None

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """The scenario written ``text``.

        Raises:
            UsageError: not a scenario; the message shows the three forms.
        """
        match = _SCENARIO.fullmatch(text)
        numbers = [int(n) for n in re.findall(r"\d+", text)] if match else []
        if match is None or min(numbers, default=0) < 1:
            raise UsageError(
                f"unknown scenario {text!r}; write offline:b8:s128 (batch, length), single:s128 or multi:2x1:b8:s128 "
                "(instances x threads), all numbers at least 1"
            )
        seq = int(match["seq"])
        if match["single"]:
            return cls("single", 1, seq)
        if match["offline"]:
            return cls("offline", int(match["b1"]), seq)
        return cls("multi", int(match["b2"]), seq, int(match["inst"]), int(match["thr"]))

    def __str__(self) -> str:
        if self.kind == "single":
            return f"single:s{self.seq}"
        spread = f"{self.instances}x{self.threads}:" if self.kind == "multi" else ""
        return f"{self.kind}:{spread}b{self.batch}:s{self.seq}"


@dataclass(frozen=True)
class Budget:
    """How long one cell is timed.

    Attributes:
        rounds: slices of each cell; the cells that are compared take turns, A B C then C B A.
        slice_s: seconds of one slice.
        min_iterations: iterations of a slice, however long they take.
        max_iterations: bound on a slice's samples.
        warmup_s: seconds after which a cell that is still not steady is measured all the same and marked so.
    """

    rounds: int = 4
    slice_s: float = 2.0
    min_iterations: int = 5
    max_iterations: int = 2000
    warmup_s: float = 20.0

    def __post_init__(self) -> None:
        if min(self.rounds, self.min_iterations) < 1 or self.slice_s <= 0 or self.warmup_s <= 0:
            raise UsageError(f"timing budget {self}: rounds and iterations must be at least 1 and seconds above 0")
        if self.max_iterations < self.min_iterations:
            raise UsageError(f"timing budget {self}: max_iterations is below min_iterations")


#: For cells whose speed nobody will use (BF16 where it is emulated): enough to see the order of magnitude.
BRIEF_BUDGET = Budget(rounds=2, slice_s=0.5, min_iterations=2, max_iterations=3, warmup_s=1.0)
#: Examples that a brief cell is judged on.
BRIEF_LIMIT = 64


@dataclass(frozen=True)
class Profile:
    """A named matrix.

    Attributes:
        recipes: engine -> recipes.
        isas: ISAs wanted; ``native`` is the host's best. Those the host lacks are left out with a notice.
        task: where accuracy is judged on models with real weights; None for speed alone.
        tasks: instead of ``task``, several tasks, each with the scenarios it is measured in; for each a model has a
            checkpoint of its own.
        limit: examples that a cell is judged on; None for all held out.
        float_limit: the same for recipes that quantize nothing, whose outputs hardly differ from eager FP32.
        gated: recipes whose ``int8`` cells decide the gate's exit code.
        preload: libraries that workers are started with, by name or path: an allocator, an OpenMP runtime.
        split: whether each cell is profiled, after it was timed, for where its time goes.
        prepare_at_once: workers made ready at the same time. Above 1 a run is shorter, because compiling hardly uses
            more than one core, and the clocks of making ready (load_s to compile_s) say little; timing is not touched.
    """

    name: str
    about: str
    models: tuple[str, ...]
    recipes: Mapping[str, tuple[str, ...]]
    isas: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    deploys: tuple[str, ...] = ("jit",)
    task: str | None = None
    tasks: Mapping[str, tuple[Scenario, ...]] = field(default_factory=dict)
    limit: int | None = None
    float_limit: int | None = None
    gated: tuple[str, ...] = ()
    budget: Budget = Budget()
    preload: tuple[str, ...] = ()
    prepare_at_once: int = 1

    def __post_init__(self) -> None:
        if self.prepare_at_once < 1:
            raise UsageError(f"profile {self.name!r}: prepare_at_once must be at least 1, not {self.prepare_at_once}")

    split: bool = False


@dataclass(frozen=True)
class Overrides:
    """What the command line asks for; None leaves the profile's value, a tuple replaces it.

    ``shard`` is (i, n), 1 <= i <= n. ``no_task`` leaves accuracy out.
    """

    models: tuple[str, ...] | None = None
    engines: tuple[str, ...] | None = None
    recipes: tuple[str, ...] | None = None
    isas: tuple[str, ...] | None = None
    scenarios: tuple[str, ...] | None = None
    deploys: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    shard: tuple[int, int] | None = None
    no_task: bool = False


@dataclass(frozen=True)
class Catalog:
    """Names that exist. ``unjudged``: pairs of a model and a task that cannot judge it, because the model has synthetic
    weights or lacks the task's head."""

    models: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    unjudged: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class PlannedCell:
    """A cell to measure, or to record as skipped for ``skip_reason``."""

    cell: Cell
    skip_reason: str | None = None


@dataclass(frozen=True)
class Plan:
    """Cells in the order they are measured, and notices for the user (what was left out and why)."""

    cells: tuple[PlannedCell, ...]
    notices: tuple[str, ...] = field(default=())


def load_profiles() -> dict[str, Profile]:
    """The catalog's profiles, by name.

    Raises:
        UsageError: the file holds a field or a value that does not exist.
    """
    source = importlib.resources.files("harness").joinpath("catalog/profiles.toml")
    return parse_profiles(source.read_text(encoding="utf-8"))


def parse_profiles(text: str) -> dict[str, Profile]:
    """Profiles out of TOML text: one table each; see ``profiles.toml``."""
    return {name: _profile(name, table) for name, table in tomllib.loads(text).items()}


def get_profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        UsageError: no such profile; the message has the nearest names.
    """
    profiles = load_profiles()
    _check("profile", (name,), tuple(profiles))
    return profiles[name]


def _profile(name: str, table: Mapping[str, Any]) -> Profile:
    known = {f.name for f in dataclasses.fields(Profile)} - {"name", "isas", "deploys"} | {"isa", "deploy"}
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"profiles.toml: profile {name!r} has unknown fields {', '.join(unknown)}")
    try:
        return Profile(
            name=name,
            about=table["about"],
            models=tuple(table["models"]),
            recipes={engine: tuple(listed) for engine, listed in table["recipes"].items()},
            isas=tuple(table["isa"]),
            scenarios=_scenarios(table["scenarios"]),
            deploys=tuple(table.get("deploy", ("jit",))),
            task=table.get("task"),
            tasks={task: _scenarios(listed) for task, listed in table.get("tasks", {}).items()},
            limit=table.get("limit"),
            float_limit=table.get("float_limit"),
            gated=tuple(table.get("gated", ())),
            budget=Budget(**table.get("budget", {})),
            preload=tuple(table.get("preload", ())),
            split=bool(table.get("split", False)),
            prepare_at_once=int(table.get("prepare_at_once", 1)),
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"profiles.toml: profile {name!r} is incomplete or wrong: {error}") from error


def _scenarios(texts: Iterable[str]) -> tuple[Scenario, ...]:
    return tuple(Scenario.parse(text) for text in texts)


def parse_cell(text: str) -> Cell:
    """The cell written ``model/engine/recipe/isa/scenario[/deploy][@task]``. A model's name may itself hold slashes.

    Raises:
        UsageError: not a cell, or it names an engine, recipe, ISA or scenario that does not exist.
    """
    body, _, task = text.rpartition("@")
    if not body or "/" in task:  # no task; an @ before a slash belongs to a folder's name
        body, task = text, ""
    parts = body.split("/")
    deploy = parts.pop() if parts[-1] in DEPLOYS else "jit"
    if len(parts) < 5:
        raise UsageError(
            f"{text!r} is not a cell; write model/engine/recipe/isa/scenario[/aoti][@task], "
            "such as minilm/int8/sq-static/vnni/offline:b8:s128@reviews"
        )
    model, (engine, recipe, isa, scenario) = "/".join(parts[:-4]), parts[-4:]
    _check("engine", (engine,), engines.names())
    _check("ISA", (isa,), (*ISAS, "native"))
    return _cell(model, engine, _recipe(recipe).name, isa, Scenario.parse(scenario), deploy, task or None)


def plan(
    profile: Profile,
    overrides: Overrides,
    host_isas: tuple[str, ...],
    catalog: Catalog,
    host_cpus: int | None = None,
) -> Plan:
    """The cells of a run.

    Args:
        profile: the matrix.
        overrides: what the command line replaces in it.
        host_isas: ISAs that this host can use, best first.
        catalog: the names of models and tasks that exist.
        host_cpus: CPUs that a worker may use; scenarios that need more are skipped. None: not looked at.

    Returns:
        Cells grouped by model, ISA and task (the cells of a group are measured together), then by scenario, the
        baseline first in each.

    Raises:
        UsageError: a name that does not exist (with the nearest ones), an ISA asked for that the host lacks, or a
            shard that is not 1 <= i <= n.
    """
    models = _unique(overrides.models or profile.models)
    # A name with a slash is a folder or a hub id: whether it exists is known when it is loaded.
    _check("model", (m for m in models if "/" not in m), catalog.models)
    deploys = _unique(overrides.deploys or profile.deploys)
    _check("deploy", deploys, DEPLOYS)
    deploys = tuple(sorted(deploys, key=DEPLOYS.index))  # the baseline is jit and comes first
    isas, notices = _isas(profile.isas, overrides.isas, host_isas)
    loads = _loads(profile, overrides)
    _check("task", (task for task in loads if task is not None), catalog.tasks)
    notices += _unjudged_notices(models, loads, catalog)
    pairs = _engine_recipes(profile, overrides)
    cells = []
    for model, isa in _shard(((m, i) for m in models for i in isas), overrides.shard):
        for task, scenario in _judged_loads(model, loads, catalog):
            for deploy in deploys:
                for engine, recipe in pairs:
                    cell = _cell(model, engine, recipe, isa, scenario, deploy, task)
                    cells.append(PlannedCell(cell, skip_reason(cell, host_cpus)))
    return Plan(tuple(cells), notices)


#: Tasks with their scenarios; None has those of models that no task judges.
Loads = Mapping[str | None, tuple[Scenario, ...]]


def _loads(profile: Profile, overrides: Overrides) -> Loads:
    """What is asked for: scenarios of the command line go before the task's, and these before the profile's."""
    asked = _unique(_scenarios(overrides.scenarios)) if overrides.scenarios else None
    tasks = overrides.tasks or tuple(profile.tasks) or ((profile.task,) if profile.task else ())
    judged = () if overrides.no_task else _unique(tasks)
    return {task: asked or _unique(profile.tasks.get(task or "") or profile.scenarios) for task in (None, *judged)}


def _judged_loads(model: str, loads: Loads, catalog: Catalog) -> list[tuple[str | None, Scenario]]:
    """Task and scenario of a model's cells: for the tasks that can judge it, or for speed alone if none can."""
    able: list[str | None] = [task for task in loads if task is not None and (model, task) not in catalog.unjudged]
    return [(task, scenario) for task in able or [None] for scenario in loads[task]]


def _unjudged_notices(models: Iterable[str], loads: Loads, catalog: Catalog) -> tuple[str, ...]:
    """Which models will not be judged on which tasks."""
    asked = [task for task in loads if task is not None]
    alone: list[str] = []
    partly: list[str] = []
    for model in models:
        lacking = [task for task in asked if (model, task) in catalog.unjudged]
        if lacking and len(lacking) == len(asked):
            alone.append(model)
        elif lacking:
            partly.append(f"{model} is left out on {', '.join(lacking)}: it has no checkpoint for it (--sources)")
    whole = f"{', '.join(alone)}: no weights that {', '.join(asked)} can judge, measured for speed alone"
    return (*((whole,) if alone else ()), *partly)


def skip_reason(cell: Cell, host_cpus: int | None = None) -> str | None:
    """Why this combination is not measured by this version or, with ``host_cpus`` CPUs, on this host; None if it is."""
    scenario = Scenario.parse(cell.scenario)
    needed = scenario.instances * (scenario.threads or 1)
    if host_cpus is not None and needed > host_cpus:
        return f"{cell.scenario} needs {needed} CPUs of its own and this host grants {host_cpus}"
    return engines.get(cell.engine).unsupported(recipes.get(cell.recipe), cell.isa, cell.deploy)


def split_cpus(cpus: tuple[int, ...], scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each instance of a scenario: disjoint, neighbours together.

    Raises:
        UsageError: a CPU is named twice, or there are too few.
    """
    threads = scenario.threads or len(cpus)
    if len(set(cpus)) != len(cpus):
        raise UsageError(f"CPUs {cpus} name one twice: instances of {scenario} would overlap")
    if scenario.instances * threads > len(cpus):
        raise UsageError(f"{scenario} needs {scenario.instances * threads} CPUs of its own; there are {len(cpus)}")
    return tuple(cpus[start : start + threads] for start in range(0, scenario.instances * threads, threads))


def is_baseline(cell: Cell) -> bool:
    """True for the cell that others of its model, ISA and scenario are set against."""
    return (cell.engine, cell.recipe) == BASELINE and cell.deploy == "jit"


def is_brief(cell: Cell) -> bool:
    """True for BF16 cells on an ISA that emulates BF16: they are measured briefly and marked so."""
    return cell.recipe == "bf16" and cell.isa not in recipes.NATIVE_BF16_ISAS


def _cell(model: str, engine: str, recipe: str, isa: str, scenario: Scenario, deploy: str, task: str | None) -> Cell:
    dtype = recipes.get(recipe).resolve_compute_dtype(isa)
    return Cell(model, engine, recipe, isa, str(scenario), deploy, task, compute_dtype=dtype)


def _engine_recipes(profile: Profile, overrides: Overrides) -> tuple[tuple[str, str], ...]:
    """(engine, recipe) pairs in the order they are measured, the baseline first."""
    chosen = _unique(overrides.engines or tuple(profile.recipes))
    _check("engine", chosen, engines.names())
    pairs = []
    for engine in chosen:
        listed = overrides.recipes or profile.recipes.get(engine) or _all_recipes(engine)
        pairs += [(engine, _recipe(name).name) for name in _unique(listed)]
    return tuple(sorted(pairs, key=lambda pair: pair != BASELINE))


def _all_recipes(engine: str) -> tuple[str, ...]:
    if engine in engines.PEER_RECIPES:  # also where it is not installed: its cells then say so
        return engines.PEER_RECIPES[engine]
    found = engines.get(engine)
    return tuple(name for name in recipes.names() if found.unsupported(recipes.get(name), "amx", "jit") is None)


def _isas(
    wanted: tuple[str, ...], asked: tuple[str, ...] | None, host: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ISAs to measure, and notices about those left out."""
    if not host:
        raise UsageError("this CPU has none of the ISAs amx, vnni, avx512, avx2; nothing can be measured here")
    if asked is not None:
        _check("ISA", asked, (*ISAS, "native"))
        resolved = [host[0] if isa == "native" else isa for isa in asked]
        lacking = [isa for isa in resolved if isa not in host]
        if lacking:
            raise UsageError(f"this host lacks ISA {', '.join(lacking)}; it has {', '.join(host)}")
        return _unique(resolved), ()
    resolved = [host[0] if isa == "native" else isa for isa in wanted]
    kept = _unique(isa for isa in resolved if isa in host)
    lacking = [isa for isa in resolved if isa not in host]
    notices = (f"ISA {', '.join(lacking)} left out: this host has {', '.join(host)}",) if lacking else ()
    if kept:
        return kept, notices
    return (host[0],), (*notices, f"none of the profile's ISAs is left, so {host[0]} is measured")


def _shard(groups: Iterable[tuple[str, str]], shard: tuple[int, int] | None) -> Iterable[tuple[str, str]]:
    """Groups of this shard. By a hash of the group's name: a new model or ISA moves no other group."""
    if shard is None:
        return groups
    index, count = shard
    if not 1 <= index <= count:
        raise UsageError(f"shard {index}/{count} does not exist; write i/n with 1 <= i <= n")
    return [g for g in groups if _stable_hash("/".join(g)) % count == index - 1]


def parse_shard(text: str) -> tuple[int, int]:
    """(i, n) out of ``i/n``.

    Raises:
        UsageError: not two whole numbers with 1 <= i <= n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"shard {text!r} does not exist; write i/n with 1 <= i <= n, such as 1/4")
    return int(match[1]), int(match[2])


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _recipe(name: str) -> recipes.Recipe:
    try:
        return recipes.get(name)
    except RecipeError as error:
        raise UsageError(str(error)) from None


def _check(what: str, asked: Iterable[str], known: tuple[str, ...]) -> None:
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"unknown {what} {name!r}; {hint}")


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))
