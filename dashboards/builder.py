"""Builds the site: reads each run once, writes every page into a folder beside the site, then swaps the folders."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashboards import (
    accuracy,
    analyses,
    changes,
    environments,
    examples,
    feed,
    frontier,
    health,
    judging,
    kernels,
    marks,
    outliers,
    overview,
    rooflines,
    runs,
    selftests,
    static_files,
    wording,
)
from dashboards import series as histories
from dashboards.facts import FAIL, Digest, Facts, digest
from dashboards.judging import Judgement
from dashboards.render import Pages
from harness import fingerprint, known_changes, metrics, verdicts
from harness import history as index
from harness.errors import HarnessError, StoreError, UsageError
from harness.records import RunHeader, Store, slug

#: Proof that a folder is a site of ours, so that a wrong ``--site`` cannot wipe somebody's files.
MARKER = ".int8-site"
#: What a build keeps of the folder that it replaces, and links: pages that others write, by folder, with their names.
KEPT = {"asv": "asv", "docs": "Handbook"}
#: A host whose newest run is older than this, compared with the newest run of all, has left the overview.
HOST_KEEP_S = 30 * 86400.0
#: From how many runs on several processes pay, and how many of them at the most.
WORTH_WORKERS = 24
MOST_WORKERS = 8

NAVIGATION = (
    ("index.html", "Overview"),
    ("frontier.html", "Frontier"),
    ("roofline.html", "Roofline"),
    ("outliers.html", "Outliers"),
    ("accuracy.html", "Accuracy"),
    ("kernels.html", "Kernels"),
    ("series/index.html", "Series"),
    ("runs/index.html", "Runs"),
    ("health.html", "Health"),
)


@dataclass
class History:
    """What is left of all runs once each was read: series, the newest records, and a line a run."""

    headers: list[RunHeader] = field(default_factory=list)
    series: dict[str, histories.Series] = field(default_factory=dict)
    latest: dict[str, dict[str, overview.Latest]] = field(default_factory=dict)
    ailing: list[health.RunHealth] = field(default_factory=list)
    lines: list[RunLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, found: Digest) -> None:
        """Take in one run; runs come oldest first."""
        number = len(self.headers)
        self.headers.append(found.header)
        counts = found.counts()
        file = runs.file_of(found.header)
        self.lines.append(RunLine(found.header, file, counts, len(found.problems), found.finished))
        ill = health.run_health(found.header, file, found.problems, found.finished, counts["failed"])
        if ill is not None:
            self.ailing.append(ill)
        mine = self.latest.setdefault(found.header.fingerprint, {})
        for one in found.facts:
            if one.key not in self.series:
                self.series[one.key] = histories.Series(one.cell, one.key)
            self.series[one.key].add(number, one)
            mine[one.key] = overview.Latest(found.header, one)


def newest_of(headers: Iterable[RunHeader]) -> dict[str, RunHeader]:
    """The newest run of each host that is still on the overview, the host with the newest run first.

    ``headers`` come oldest first.
    """
    found = {header.fingerprint: header for header in headers}
    newest = max((header.started_at for header in found.values()), default=0.0)
    kept = [header for header in found.values() if newest - header.started_at <= HOST_KEEP_S]
    return {header.fingerprint: header for header in sorted(kept, key=lambda one: -one.started_at)}


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the list of runs."""

    header: RunHeader
    file: str
    counts: dict[str, int]
    problems: int
    finished: bool


def build(store: Store, site: Path, *, now: float, repository: str | None = None, root: Path | None = None) -> Path:
    """Write the site of ``store`` into the folder ``site``, replacing the one that stands there.

    A reader sees the old site or the new one, never half of either. asv's pages in ``site/asv`` are kept, and linked.

    Args:
        store: the runs.
        site: the folder; it is made. One that holds something else than a site is refused.
        now: Unix time in seconds, for the site's ages and its staleness.
        repository: address of the repository's web pages, for links to commits; None for no such links.
        root: the checkout, whose known changes are marked in the series; None for none.

    Returns:
        The overview, ``site/index.html``.

    Raises:
        UsageError: ``site`` is a file, or a folder with something else in it.
        StoreError: the disk refuses.
    """
    site = Path(os.path.abspath(site))  # noqa: PTH100 - a link to the site stays a link
    _check_target(site)
    try:
        with _beside(site) as draft, _without_collecting():
            beside = {name: (site / name / "index.html").is_file() for name in KEPT}
            _write_site(store, draft, now=now, repository=repository, root=root, beside=beside)
            _swap(draft, site)
    except OSError as error:
        raise StoreError(
            f"{site}: {error.strerror or error}: make it writable, free some space, or choose another --site"
        ) from error
    return site / "index.html"


def _check_target(site: Path) -> None:
    if not site.exists():
        return
    if not site.is_dir():
        raise UsageError(f"{site} is a file; choose a folder with --site")
    names = {path.name for path in site.iterdir()}
    if names - set(KEPT) and MARKER not in names:
        raise UsageError(f"{site} holds something else than a site and would be replaced; choose another --site")


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """No search for cycles meanwhile: records and pages have none, and looking takes a third of a build's time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _beside(site: Path) -> Iterator[Path]:
    """An empty folder on the same disk as ``site``; gone in the end, unless it was moved."""
    site.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{site.name}.", suffix=".draft", dir=site.parent))
    draft.chmod(0o755)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _swap(draft: Path, site: Path) -> None:
    """Put ``draft`` where ``site`` is; on an error the old site is back."""
    if not site.exists():
        draft.rename(site)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{site.name}.", suffix=".old", dir=site.parent)) / "site"
    site.rename(old)
    try:
        draft.rename(site)
    except OSError:
        old.rename(site)
        raise
    for name in KEPT:
        if (old / name).exists():
            (old / name).rename(site / name)
    shutil.rmtree(old.parent, ignore_errors=True)


def _write_site(
    store: Store, draft: Path, *, now: float, repository: str | None, root: Path | None, beside: dict[str, bool]
) -> None:
    listing = store.listing()
    pages = Pages(
        draft,
        {
            "navigation": NAVIGATION + tuple((f"{name}/index.html", KEPT[name]) for name in KEPT if beside[name]),
            "built_at": now,
            "repository": repository,
            "generated": any(bool(header.host.get("generated")) for header in listing.headers),
        },
    )
    static_files.copy(draft / "static")
    pages.write_text(MARKER, "Made by `harness report`; the next one replaces this folder.\n")
    pages.write_text(".nojekyll", "")
    history = History(problems=list(listing.problems))
    judgements = _write_runs(pages, store, listing.headers, history)
    earlier = _to_compare(store, listing.headers, judgements)
    kept = _compared(store, earlier, judgements)
    _write_overview(pages, store, history, judgements, _comparisons(earlier, judgements, kept), now)
    _write_series(pages, history, store.accepted(), _known(store, root))
    _write_others(pages, store, history, judgements, now)


def _write_runs(pages: Pages, store: Store, headers: tuple[RunHeader, ...], history: History) -> dict[str, Judgement]:
    """Write the page of each run, and take each into ``history``; returns the gate's word on each host's newest run.

    The gate reads years of history from the store's index. Every run is loaded here anyway, so it is indexed on the
    way, and the newest ones, whose pages show the gate's word, come last.
    """
    newest = {header.run_id for header in newest_of(headers).values()}
    last = [place for place, header in enumerate(headers) if header.run_id in newest]
    rest = [place for place, header in enumerate(headers) if header.run_id not in newest]
    held: dict[int, Digest | str] = {}
    printer = _Printer(store, pages, headers, {})
    for place, found in zip(rest, _each(printer, rest, len(rest) >= WORTH_WORKERS), strict=True):
        if place < last[0]:
            _take(history, found)
        else:  # of another host than the run that it follows: it waits for its turn
            held[place] = found
    judgements = {header.fingerprint: judging.judge(store, header.run_id) for header in newest_of(headers).values()}
    printer = _Printer(store, pages, headers, judgements)
    held.update({place: printer(place) for place in last})
    for place in sorted(held):
        _take(history, held[place])
    return judgements


def _take(history: History, found: Digest | str) -> None:
    if isinstance(found, str):
        history.problems.append(found)
    else:
        history.add(found)


def _compared(
    store: Store, earlier: dict[str, tuple[tuple[str, str], ...]], judgements: dict[str, Judgement]
) -> dict[str, Digest]:
    """The runs that the overview compares, by id, as far as they can be read."""
    judged = {judgement.header.run_id: judgement for judgement in judgements.values()}
    found = {}
    for run_id in dict.fromkeys([*judged, *(run_id for pairs in earlier.values() for _, run_id in pairs)]):
        with contextlib.suppress(HarnessError):
            found[run_id] = digest(store.load(run_id), judging.trusting(judged.get(run_id)))
    return found


def _to_compare(
    store: Store, headers: tuple[RunHeader, ...], judgements: dict[str, Judgement]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """What the newest run of each host is compared with, as (title, run id)."""
    pinned = store.pinned()
    return {
        host: changes.earlier_runs([one for one in headers if one.fingerprint == host], judgement.baseline, pinned)
        for host, judgement in judgements.items()
    }


@dataclass(frozen=True)
class _Printer:
    """Reads runs and writes their pages."""

    store: Store
    pages: Pages
    headers: tuple[RunHeader, ...]
    judgements: dict[str, Judgement]

    def __call__(self, place: int) -> Digest | str:
        """Write the page of run number ``place``; what the other pages need of it, or why it could not be read."""
        judgement = self.judgements.get(self.headers[place].fingerprint)
        if judgement is not None and judgement.header.run_id != self.headers[place].run_id:
            judgement = None
        run_id = self.headers[place].run_id
        try:
            source = index.stamp(self.store, run_id)
            run = self.store.load(run_id)
            index.keep(self.store, run, source)
            found = digest(run, judging.trusting(judgement))
        except HarnessError as error:  # a file that vanished or broke since it was listed
            return str(error)
        header = found.header
        earlier = self.headers[:place]
        before = next((one for one in reversed(earlier) if one.fingerprint == header.fingerprint), None)
        self.pages.write(
            runs.file_of(header),
            "run.html",
            title=f"Run {header.run_id}",
            run=found,
            counts=found.counts(),
            judgement=judgement,
            groups=runs.groups(found),
            failures=runs.failures(self.store, found),
            skipped=[one for one in found.facts if one.status == "skipped"],
            before=before,
            before_file=runs.file_of(before) if before else None,
            earlier=runs.file_of(earlier[-1]) if earlier else None,
            later=runs.file_of(self.headers[place + 1]) if place + 1 < len(self.headers) else None,
            environment=runs.environment_changes(before, header),
            clocks=runs.CLOCKS,
        )
        return found


#: What the processes that write pages inherit when they are forked: it holds templates, which cannot be sent.
_writer: Callable[[int], Any] | None = None


def _write_one(place: int) -> Any:
    assert _writer is not None
    return _writer(place)


def _each(writer: Callable[[int], Any], places: Sequence[int], worth: bool) -> Iterator[Any]:
    """``writer`` of each of ``places``, in order; by all CPUs that this process may use where it is worth it."""
    global _writer
    workers = min(fingerprint.usable_threads(), MOST_WORKERS)
    if workers < 2 or not worth:
        yield from map(writer, places)
        return
    _writer = writer
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            yield from pool.map(_write_one, places, chunksize=4)
    finally:
        _writer = None


def _comparisons(
    earlier: dict[str, tuple[tuple[str, str], ...]], judgements: dict[str, Judgement], kept: dict[str, Digest]
) -> list[changes.Comparison]:
    """Each host's newest run against the earlier ones, as far as they could be read."""
    return [
        changes.compare(title, kept[run_id], kept[judgements[host].header.run_id])
        for host, pairs in earlier.items()
        for title, run_id in pairs
        if run_id in kept and judgements[host].header.run_id in kept
    ]


def _write_overview(
    pages: Pages,
    store: Store,
    history: History,
    judgements: dict[str, Judgement],
    comparisons: list[changes.Comparison],
    now: float,
) -> None:
    newest = newest_of(history.headers)
    if not newest:
        pages.write("index.html", "empty.html", title="Overview", problems=history.problems, root=str(store.root.name))
        return
    latest = {host: overview.recent(history.latest[host]) for host in newest}
    first = next(iter(newest.values()))
    pages.write(
        "index.html",
        "overview.html",
        title="Overview",
        newest=first,
        newest_file=runs.file_of(first),
        judgements=[judgements[host] for host in newest],
        hosts={host: overview.host_title(header) for host, header in newest.items()},
        files={header.run_id: runs.file_of(header) for header in history.headers},
        counts=history.lines[-1].counts,
        panels=overview.panels(latest, judgements, now=now),
        comparisons=comparisons,
        stale_after=overview.STALE_S,
        stale=now - first.started_at > overview.STALE_S,
        age=wording.age(now - first.started_at),
        problems=history.problems,
    )


def _known(store: Store, root: Path | None) -> dict[str, tuple[marks.Known, ...]]:
    """Listed changes by cell, where the checkout at ``root`` lists any; a file that cannot be read is the gate's."""
    try:
        listed = known_changes.read(root / known_changes.FILE) if root is not None else ()
    except UsageError:
        return {}
    if not listed or root is None:
        return {}
    found: dict[str, tuple[marks.Known, ...]] = {}
    for one in known_changes.applying(listed, index.read(store), known_changes.descendants(root)):
        for key in one.keys:
            mark = marks.Known(one.first_run, one.change.reason, one.change.who)
            found[key] = (*found.get(key, ()), mark)
    return found


def _write_series(
    pages: Pages, history: History, accepted: Sequence[str], known: dict[str, tuple[marks.Known, ...]]
) -> None:
    files = [runs.file_of(header) for header in history.headers]
    pages.write_script("data/runs.js", "runs", histories.runs_script(history.headers, files))
    pages.write_script("data/environments.js", "environments", environments.script(history.headers))
    pages.write("runs/compare.html", "compare.html", title="Compare two environments")
    every = list(history.series.values())
    writer = _SeriesWriter(pages, history.headers, files, frozenset(accepted), known, every)
    for _ in _each(writer, range(len(every)), len(every) * len(files) >= WORTH_WORKERS * 200):
        pass
    pages.write("series/index.html", "series_index.html", title="Series", lines=histories.index_lines(every))


@dataclass(frozen=True)
class _SeriesWriter:
    """Writes the page and the data of series number so and so."""

    pages: Pages
    headers: Sequence[RunHeader]
    files: Sequence[str]
    accepted: frozenset[str]
    known: dict[str, tuple[marks.Known, ...]]
    every: Sequence[histories.Series]

    def __call__(self, place: int) -> None:
        one = self.every[place]
        name = slug(one.key)
        found = marks.marks(one, self.headers, self.accepted, self.known.get(one.key, ()))
        table = histories.rounded(one)
        data = histories.script_data(one, table, marks.script_marks(found))
        self.pages.write_script(f"data/series/{name}.js", "series", data)
        self.pages.write_text(f"data/series/{name}.csv", histories.series_csv(one, table, self.headers))
        self.pages.write(
            f"series/{name}.html",
            "series.html",
            title=one.key,
            series=one,
            name=name,
            newest=histories.newest_points(one, self.headers, self.files),
            happened=marks.listed(found, self.headers, self.files),
            scenario=wording.scenario_title(one.cell.scenario),
            replay=verdicts.replay_command(one.key),
            withheld=one.withheld(),
        )


def _write_others(pages: Pages, store: Store, history: History, judgements: dict[str, Judgement], now: float) -> None:
    current = [
        one.facts for host in newest_of(history.headers) for one in overview.recent(history.latest[host]).values()
    ]
    pages.write("frontier.html", "frontier.html", title="Frontier", charts=frontier.charts(current))
    judged = {one.key: examples.read(store, one.cell, one.accuracy) for one in current if one.accuracy is not None}
    pages.write(
        "accuracy.html",
        "accuracy.html",
        title="Accuracy",
        groups=accuracy.groups(current),
        examples={key: told for key, told in judged.items() if told is not None},
    )
    pages.write("kernels.html", "kernels.html", title="Kernels", panels=kernels.panels(current))
    failing = {(one.cell.model, one.cell.recipe, one.cell.isa) for one in current if _fails(one)}
    roofs, troubles = analyses.read(store, "roofline")
    pages.write(
        "roofline.html",
        "roofline.html",
        title="Roofline",
        sections=rooflines.sections(roofs, failing),
        problems=troubles,
    )
    reports, troubles = analyses.read(store, "outliers")
    pages.write(
        "outliers.html", "outliers.html", title="Outliers", reports=outliers.reports(reports), problems=troubles
    )
    pages.write_text("data/latest.csv", histories.latest_csv(current))
    margin = metrics.get("throughput").default_margin
    prints = [header.fingerprint for header in history.headers]
    tested, troubles = analyses.read(store, "selftest")
    pages.write(
        "health.html",
        "health.html",
        title="Health",
        ailing=list(reversed(history.ailing)),
        runs_read=len(history.headers),
        problems=history.problems,
        noises=health.noises(history.series.values(), prints, margin),
        window=health.WINDOW,
        selftests=selftests.selftests(tested),
        troubles=troubles,
    )
    pages.write("runs/index.html", "runs_index.html", title="Runs", lines=list(reversed(history.lines)))
    _write_feeds(pages, history, judgements, now)


def _fails(one: Facts) -> bool:
    """True for a cell of ours whose speed may be shown nowhere, whoever measured it."""
    return one.cell.engine == "int8" and one.status == "ok" and one.trust.outcome == FAIL


def _write_feeds(pages: Pages, history: History, judgements: dict[str, Judgement], now: float) -> None:
    words = {one.header.run_id: one for one in judgements.values()}
    entries = []
    for line in reversed(history.lines[-feed.ENTRIES :]):
        judged = words.get(line.header.run_id)
        counted = ", ".join(f"{count} {status}" for status, count in line.counts.items() if count)
        title = f"{judged.title}: " if judged else ""
        entries.append((line.header, line.file, f"{title}{line.header.run_id}", counted or "no records"))
    pages.write_text("feed.atom", feed.atom(entries, now))
    newest = list(newest_of(history.headers).values())
    head = words.get(newest[0].run_id) if newest else None
    pages.write_text("badge.svg", feed.badge(head.state if head else "none", head.title.lower() if head else "no run"))
    series: list[dict[str, Any]] = [
        {
            "key": one.key,
            "runs": len(one.runs),
            "page": f"series/{slug(one.key)}.html",
            "csv": f"data/series/{slug(one.key)}.csv",
        }
        for one in history.series.values()
    ]
    pages.write_text(
        "data/index.json",
        feed.index_json(
            now=now,
            headers=history.headers,
            files=[line.file for line in history.lines],
            series=series,
            judgements=judgements.values(),
            pages=[name for name, _ in pages.shared["navigation"]],
        ),
    )
