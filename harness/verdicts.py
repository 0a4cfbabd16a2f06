"""Verdicts on a run's records, by the rules of docs/gates.md. Pure: no input or output, no clock, no torch.

:func:`judge` looks at every cell (did it run, as its label says, accurately, fast) and at the run as a whole;
:func:`exit_code` says what the gated verdicts come to.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness import stats
from harness.records import Accuracy, Cell, Record, Run, RunHeader, Speedup, Timing

Outcome = Literal["pass", "regression", "improvement", "inconclusive", "invalid", "failed"]

#: Exit code of each outcome that is not a pass; where several apply, the first one here wins.
EXIT_CODES: dict[Outcome, int] = {"invalid": 3, "failed": 2, "regression": 1, "inconclusive": 4}

#: ``cell_key`` of verdicts on the run as a whole.
WHOLE_RUN = "(run)"
#: Recipes that quantize nothing: they have no fused linears to prove and no accuracy of their own to lose.
FLOAT_RECIPES = frozenset({"fp32", "bf16"})
#: oneDNN's name for an INT8 product without a fast implementation, a thousand times slower. (Plain ``ref`` also names
#: harmless copies.)
_REFERENCE_KERNEL = "ref_int8"
#: Verdicts that must pass before a speed-up is shown.
TRUSTED = frozenset({"status", "evidence", "accuracy", "noninferiority", "flips", "flips_previous", "chance"})
#: Option of ``harness run`` that narrows each part of a cell.
_AXES = {
    "model": "--models",
    "engine": "--engines",
    "recipe": "--recipes",
    "isa": "--isa",
    "scenario": "--scenarios",
    "deploy": "--deploy",
    "task": "--task",
}


@dataclass(frozen=True)
class Rules:
    """The limits. Fractions: ``accuracy_floor`` of FP32's metric, ``max_flips`` of the examples, ``max_flips_repeat``
    of them between two runs of one commit and ``max_flips_previous`` between others, ``speed_floor`` of the baseline's
    speed. The interval of accuracy must exclude a loss of ``sure_within`` times what the floor allows. An interval of
    the speed that contains 1 and spans ``hopeless_span`` or more is inconclusive."""

    accuracy_floor: float = 0.99
    max_flips: float = 0.03
    max_flips_repeat: float = 0.002
    max_flips_previous: float = 0.01
    speed_floor: float = 0.90
    sure_within: float = 2.0
    hopeless_span: float = 2.0

    @property
    def margin(self) -> float:
        """The loss that the interval must exclude, as a fraction of FP32's metric."""
        return self.sure_within * (1.0 - self.accuracy_floor)


#: MLPerf's stricter rule: 99.9 % of FP32's metric.
STRICT = Rules(accuracy_floor=0.999)


@dataclass(frozen=True)
class Repetition:
    """A cell's predictions beside those that it made in an earlier run: ``changed`` of ``n`` examples differ.

    ``same`` is True where nothing that should matter lies between the runs: one commit, the same versions.
    """

    run_id: str
    n: int
    changed: int
    same: bool


@dataclass(frozen=True)
class Verdict:
    """What was concluded about one thing, with its numbers and its reason.

    ``value`` is what was judged and ``limit`` what it was held against, in one unit: for ``accuracy`` the task's
    metric, for ``flips`` a fraction of the examples, for ``speed`` the ratio to the baseline's speed (``interval``
    around it).
    ``baseline`` is the number compared with: FP32's metric, or the baseline's seconds an iteration; ``baseline_run``
    names the run that it comes from. ``command`` is the one to go on with, None where there is nothing to do.
    """

    cell_key: str
    metric: str
    outcome: Outcome
    gated: bool
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    reason: str = ""
    command: str | None = None
    interval: tuple[float, float] | None = None
    baseline_run: str | None = None

    @property
    def good(self) -> bool:
        """True for ``pass`` and ``improvement``."""
        return self.outcome in ("pass", "improvement")


@dataclass(frozen=True)
class Baseline:
    """What a run is compared with: cells that were measured (``records`` by cell key), and the headers, by run id, of
    the runs that they come from."""

    records: Mapping[str, Record]
    headers: Mapping[str, RunHeader]

    @classmethod
    def of(cls, *runs: Run) -> Baseline:
        """The measured cells of ``runs``; where several have a cell, the first of them counts."""
        records: dict[str, Record] = {}
        for run in runs:
            if run.header.invalid_reason is None:
                for key, record in latest(run).items():
                    if record.status == "ok":
                        records.setdefault(key, record)
        return cls(records, {run.header.run_id: run.header for run in runs})


def latest(run: Run) -> dict[str, Record]:
    """The run's record of each cell, by key; where a cell has several, the last one."""
    return {record.cell.key: record for record in run.records}


def is_gated(cell: Cell, header: RunHeader) -> bool:
    """True if the cell decides the exit code: engine ``int8``, and a recipe that the run's header lists."""
    return cell.engine == "int8" and cell.recipe in header.gated


def is_quantized(cell: Cell) -> bool:
    """True if the cell's recipe runs linears in INT8. An unknown recipe counts as one, so that it must prove itself."""
    return cell.recipe not in FLOAT_RECIPES


#: Verdicts on cells that were reached elsewhere, by cell key: of a history, or of predictions in other runs.
Further = Mapping[str, Sequence["Verdict"]]


def judge(
    run: Run, baseline: Run | Baseline | None = None, rules: Rules | None = None, further: Further | None = None
) -> list[Verdict]:
    """Every verdict on ``run``: first on the run as a whole, then on its cells in the order measured, then on cells
    that are gone. Only those with ``gated`` set decide.

    ``further`` are verdicts on its cells by other means; one named ``speed`` takes the place of the comparison with the
    baseline.
    """
    rules = rules or Rules()
    reference = Baseline.of(baseline) if isinstance(baseline, Run) else baseline
    verdicts = list(_judge_run(run))
    for key, record in latest(run).items():
        verdicts += judge_record(record, run.header, reference, rules, () if further is None else further.get(key, ()))
    return [_with_sources(one, run) for one in (*verdicts, *_judge_missing(run, reference))]


def _with_sources(verdict: Verdict, run: Run) -> Verdict:
    """``verdict`` with a command that finds the checkpoints and data which the run was given."""
    plain, sources = replay_command(verdict.cell_key), option(run.header.arguments, "--sources")
    if sources is None or verdict.command is None or not verdict.command.startswith(plain):
        return verdict
    command = replay_command(verdict.cell_key, sources) + verdict.command.removeprefix(plain)
    return dataclasses.replace(verdict, command=command)


def judge_groups(run: Run, verdicts: Sequence[Verdict], rules: Rules | None = None) -> list[Verdict]:
    """Verdicts ``geomean``, named ``model/engine/recipe``: the geometric mean of the speeds of its cells against the
    baseline, where several have one."""
    rules = rules or Rules()
    ratios = {one.cell_key: one.value for one in verdicts if one.metric == "speed" and one.value is not None}
    groups: dict[str, list[Record]] = {}
    for key, record in latest(run).items():
        if key in ratios:
            cell = record.cell
            groups.setdefault(f"{cell.model}/{cell.engine}/{cell.recipe}", []).append(record)
    return [_group_verdict(name, records, ratios, run, rules) for name, records in groups.items() if len(records) > 1]


def _group_verdict(
    name: str, records: Sequence[Record], ratios: Mapping[str, float], run: Run, rules: Rules
) -> Verdict:
    keys = [record.cell.key for record in records]
    value = math.exp(sum(math.log(ratios[key]) for key in keys) / len(keys))
    outcome = _speed_outcome(value, None, rules)
    slowest = min(keys, key=lambda key: ratios[key])
    sources = option(run.header.arguments, "--sources")
    return Verdict(
        name,
        "geomean",
        outcome,
        any(is_gated(record.cell, run.header) for record in records),
        value=value,
        limit=rules.speed_floor,
        reason=f"{100 * value:.1f} % of the baseline's speed over {len(keys)} cells; {100 * rules.speed_floor:g} % is "
        "needed",
        command=None if outcome in ("pass", "improvement") else f"{replay_command(slowest, sources)} --profile",
    )


def exit_code(verdicts: Iterable[Verdict], run: Run | None = None) -> int:
    """3 host invalid, 2 something failed to run, 1 regression, 4 inconclusive, 0 pass; the first named that applies.

    ``run`` adds what is true of the run as a whole, in case ``verdicts`` were filtered.
    """
    outcomes = {verdict.outcome for verdict in verdicts if verdict.gated}
    if run is not None:
        outcomes |= {verdict.outcome for verdict in _judge_run(run)}
    return next((code for outcome, code in EXIT_CODES.items() if outcome in outcomes), 0)


def published(run: Run, verdicts: Sequence[Verdict]) -> tuple[Record, ...]:
    """The run's records, without their speed-ups where those may not be shown: speed without accuracy is never
    published. ``verdicts`` are those on the run.

    One prepared model serves all scenarios of a model, engine, recipe, ISA and deploy: if it fails in one of them, it
    shows no speed-up in any.
    """
    broken = {
        _prepared(record.cell) for record in run.records if record.status == "ok" and not _stands(record, verdicts)
    }
    return tuple(
        dataclasses.replace(record, speedup=None, linear_speedup=None)
        if published_speedup(record, verdicts) is None or _prepared(record.cell) in broken
        else record
        for record in run.records
    )


def _prepared(cell: Cell) -> tuple[str, ...]:
    return (cell.model, cell.engine, cell.recipe, cell.isa, cell.deploy)


def _stands(record: Record, verdicts: Iterable[Verdict]) -> bool:
    """True if nothing but speed speaks against the record."""
    key = record.cell.key
    return all(one.good for one in verdicts if one.cell_key == key and one.metric in TRUSTED)


def published_speedup(record: Record, verdicts: Iterable[Verdict]) -> Speedup | None:
    """The record's own speed-up if it may be shown; :func:`published` also looks at the other scenarios.

    ``verdicts`` are those on the record's run. None if the cell is not ``ok``, if its status, evidence, accuracy, flips
    or chance did not pass, or if it is a quantized cell on other than synthetic weights whose accuracy nobody judged.
    """
    own = [verdict for verdict in verdicts if verdict.cell_key == record.cell.key and verdict.metric in TRUSTED]
    if record.status != "ok" or not all(verdict.good for verdict in own):
        return None
    judged = any(verdict.metric == "accuracy" for verdict in own)
    if is_quantized(record.cell) and not judged and (record.cell.task or record.cell.weights != "synthetic"):
        return None
    return record.speedup


#: Verdicts that a person may accept: they are held against what was, not against FP32.
_ACCEPTABLE = frozenset({"speed", "drift", "geomean", "flips_previous"})


def commands(verdict: Verdict, run_id: str) -> tuple[tuple[str, str], ...]:
    """What to do about a verdict that is not good, as (purpose, exact command): reproduce, profile, accept."""
    if verdict.good or verdict.command is None:
        return ()
    if verdict.cell_key == WHOLE_RUN:
        return (("repeat", verdict.command),)
    replay = verdict.command.removesuffix(" --profile")
    found = [("reproduce", replay)]
    if verdict.metric in ("speed", "drift", "geomean"):
        found += [("profile", f"{replay} --profile")]
    if verdict.metric in _ACCEPTABLE:
        pin = " --pin" if verdict.metric == "drift" else ""
        found += [("accept", f"harness accept {quoted(run_id)}{pin}")]
    return tuple(found)


def replay_command(cell_key: str, sources: str | None = None) -> str:
    """The command that measures one cell again, with the file that names a user's checkpoints and data."""
    return f"harness replay {quoted(cell_key)}" + ("" if sources is None else f" --sources {quoted(sources)}")


def repeat_command(arguments: Sequence[str]) -> str:
    """The command that measures a run again: ``harness`` and its ``arguments``, without the id, which is taken."""
    words = list(arguments) or ["run"]
    while "--run-id" in words:
        place = words.index("--run-id")
        del words[place : place + 2]
    return shlex.join(["harness", *(word for word in words if not word.startswith("--run-id="))])


def quoted(word: str) -> str:
    """``word`` as a shell reads it back."""
    return shlex.quote(word)


# --- the run as a whole -----------------------------------------------------------------------------------------------


def _judge_run(run: Run) -> Iterator[Verdict]:
    again = repeat_command(run.header.arguments)
    if run.header.invalid_reason is not None:
        reason = f"the host was disturbed: {run.header.invalid_reason}"
        yield Verdict(WHOLE_RUN, "host", "invalid", True, reason=reason, command=again)
    if not run.finished:
        reason = "the run did not finish: it was stopped or still goes on, and cells may be missing"
        yield Verdict(WHOLE_RUN, "complete", "failed", True, reason=reason, command=again)
    for problem in run.problems:
        yield Verdict(WHOLE_RUN, "complete", "failed", True, reason=problem, command=again)
    if all(record.status != "ok" for record in latest(run).values()):
        reason = "no cell was measured" if run.records else "the run has no records"
        yield Verdict(WHOLE_RUN, "complete", "failed", True, reason=reason, command=again)


# --- one cell ---------------------------------------------------------------------------------------------------------


def judge_record(
    record: Record,
    header: RunHeader,
    baseline: Baseline | None = None,
    rules: Rules | None = None,
    further: Sequence[Verdict] = (),
) -> list[Verdict]:
    """The verdicts on one record of the run with ``header``, and those ``further`` ones that were reached elsewhere.

    Empty for a skipped cell that the baseline lacks too.
    """
    rules = rules or Rules()
    before = baseline.records.get(record.cell.key) if baseline else None
    gated = is_gated(record.cell, header)
    if record.status != "ok":
        return _judge_status(record, before, gated)
    found = [Verdict(record.cell.key, "status", "pass", gated, reason="measured"), *judge_itself(record, header, rules)]
    found += [one for one in further if one.metric in TRUSTED]
    sound = all(one.good for one in found)
    speeds = [one for one in further if one.metric not in TRUSTED]
    if not any(one.metric == "speed" for one in speeds):
        disturbed = header.invalid_reason is not None
        has_baseline = baseline is not None
        speed = judge_speed(record, before, gated, rules, has_baseline=has_baseline, disturbed=disturbed)
        speeds = [speed, *speeds]
    return found + [one if sound else _without_gain(one) for one in speeds]


def _without_gain(verdict: Verdict) -> Verdict:
    """``verdict`` on the speed of a cell whose accuracy or evidence did not pass: its gains are not shown."""
    if not verdict.good or verdict.value is None:
        return verdict
    reason = "not shown: speed counts only where accuracy and evidence pass"
    return dataclasses.replace(verdict, outcome="pass", value=None, limit=None, interval=None, reason=reason)


def judge_itself(record: Record, header: RunHeader, rules: Rules | None = None) -> list[Verdict]:
    """What the rules say of a measured record by itself: its evidence, its accuracy, flips and chance."""
    gated = is_gated(record.cell, header)
    found = [judge_evidence(record, gated)]
    if record.accuracy is not None or (record.cell.task and is_quantized(record.cell)):
        found += judge_accuracy(record, gated, rules)
    return found


def _judge_status(record: Record, before: Record | None, gated: bool) -> list[Verdict]:
    key, reason = record.cell.key, record.reason or "no reason was recorded"
    if record.status == "skipped":
        if before is None:
            return []
        lost = f"measured in {before.run_id}, now skipped: {reason}"
        return [_failed(key, "status", gated, lost, baseline_run=before.run_id)]
    outcome: Outcome = "invalid" if record.status == "invalid" else "failed"
    return [Verdict(key, "status", outcome, gated, reason=reason, command=replay_command(key))]


def _failed(key: str, metric: str, gated: bool, reason: str, baseline_run: str | None = None) -> Verdict:
    return Verdict(key, metric, "failed", gated, reason=reason, command=replay_command(key), baseline_run=baseline_run)


def judge_evidence(record: Record, gated: bool) -> Verdict:
    """Did what the label says run? Absent evidence fails cells of engine ``int8``; others fail on a contradiction."""
    problems = list(_isa_problems(record))
    if record.cell.engine == "int8" and is_quantized(record.cell):
        problems += _fusion_problems(record)
    if problems:
        return _failed(record.cell.key, "evidence", gated, "; ".join(problems))
    fused = record.evidence.fused_linears
    reason = f"ISA {record.evidence.isa_effective}" + (f", {fused} linears fused" if fused else "")
    return Verdict(record.cell.key, "evidence", "pass", gated, reason=reason)


def _isa_problems(record: Record) -> Iterator[str]:
    isa, evidence = record.cell.isa, record.evidence
    ours = record.cell.engine == "int8"
    if evidence.isa_effective != isa and (ours or evidence.isa_effective is not None):
        yield f"ran on ISA {evidence.isa_effective or 'unknown'}, not {isa}"
    if evidence.amx_permission and isa != "amx":
        yield f"the process had AMX permission under ISA {isa}: the mask did not hold"
    if ours and is_quantized(record.cell):
        if evidence.amx_permission is None:
            yield "AMX permission was not recorded"
        elif isa == "amx" and not evidence.amx_permission:
            yield "the process had no AMX permission, so AMX did not run"


def _fusion_problems(record: Record) -> Iterator[str]:
    evidence = record.evidence
    quantized, fused = evidence.quantized_linears, evidence.fused_linears
    if not quantized:
        yield "no linear was quantized" if quantized == 0 else "the number of quantized linears was not recorded"
    elif fused is None:
        yield "the number of fused linears was not recorded"
    elif fused != quantized:
        yield f"{fused} of {quantized} quantized linears ran in fused kernels"
    slow = sorted(name for name in evidence.kernels if name.startswith(_REFERENCE_KERNEL))
    if slow:
        yield f"INT8 products ran in reference kernels: {', '.join(slow)}"


# --- accuracy ---------------------------------------------------------------------------------------------------------


def judge_accuracy(record: Record, gated: bool, rules: Rules | None = None) -> list[Verdict]:
    """Verdicts ``accuracy`` and ``flips``, and ``chance`` where the score is no better than guessing."""
    rules = rules or Rules()
    key, accuracy = record.cell.key, record.accuracy
    if accuracy is None:
        return [_failed(key, "accuracy", gated, f"no accuracy was measured on task {record.cell.task}")]
    problem = _unusable(accuracy)
    if problem:
        return [_failed(key, "accuracy", gated, problem)]
    return [
        _accuracy_verdict(key, accuracy, gated, rules),
        *_noninferiority_verdicts(key, accuracy, gated, rules),
        _flips_verdict(key, accuracy, gated, rules),
        *_chance_verdicts(key, accuracy, gated),
    ]


def _unusable(accuracy: Accuracy) -> str | None:
    numbers = ("value", "fp32_value", "chance", "delta", "flips")
    bad = [name for name in numbers if not _is_number(getattr(accuracy, name))]
    if bad:
        return f"not a number: {', '.join(bad)}"
    if accuracy.n < 1:
        return "accuracy was judged on no example"
    if not 0.0 <= accuracy.flips <= 1.0:
        return f"flips is {accuracy.flips:g}, but must be a fraction from 0 to 1"
    return None if accuracy.fp32_value > 0 else f"FP32's own {accuracy.metric} is {accuracy.fp32_value:g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _worst_value(accuracy: Accuracy) -> float:
    """The lower of the two statements of the cell's metric, so that a contradiction cannot hide a loss."""
    return min(accuracy.value, accuracy.fp32_value + accuracy.delta)


def _accuracy_verdict(key: str, accuracy: Accuracy, gated: bool, rules: Rules) -> Verdict:
    value, reference = _worst_value(accuracy), accuracy.fp32_value
    limit = rules.accuracy_floor * reference
    passed = _at_least(value, limit)
    reason = (
        f"{accuracy.metric} {value:.4g} is {100 * value / reference:.2f} % of FP32's {reference:.4g} on {accuracy.n} "
        f"examples{_interval_text(accuracy.delta_ci95)}; {100 * rules.accuracy_floor:g} % is needed"
        f"{_mcnemar_text(accuracy)}"
    )
    return Verdict(
        key,
        "accuracy",
        "pass" if passed else "regression",
        gated,
        value=value,
        baseline=reference,
        limit=limit,
        reason=reason,
        command=None if passed else replay_command(key),
    )


def _interval_text(interval: tuple[float, float] | None) -> str:
    return f" (difference {interval[0]:+.4f} to {interval[1]:+.4f})" if interval else ""


def _mcnemar_text(accuracy: Accuracy) -> str:
    gained, lost = accuracy.flips_gained, accuracy.flips_lost
    if min(gained, lost) < 0:
        return ""
    return f"; McNemar p {stats.mcnemar(gained, lost):.2g} ({gained} gained, {lost} lost)"


def _noninferiority_verdicts(key: str, accuracy: Accuracy, gated: bool, rules: Rules) -> Iterator[Verdict]:
    """Whether the interval of the difference excludes too large a loss; none where no interval was computed."""
    interval = accuracy.delta_ci95
    if interval is None:
        return
    margin = rules.margin * accuracy.fp32_value
    outcome = noninferiority(interval, margin)
    low, high = interval
    reason = (
        f"the difference from FP32 lies between {low:+.4f} and {high:+.4f} (95 %); a loss of {margin:.4f} must lie "
    )
    reason += {"pass": "outside it", "regression": "above it"}.get(outcome, "outside it: judge more examples")
    yield Verdict(
        key,
        "noninferiority",
        outcome,
        gated,
        value=low,
        baseline=accuracy.fp32_value,
        limit=-margin,
        reason=reason,
        command=None if outcome == "pass" else replay_command(key),
        interval=interval,
    )


def judge_repetition(key: str, found: Repetition, gated: bool, rules: Rules | None = None) -> Verdict:
    """Verdict ``flips_previous``: what runs of one commit should not change at all, and others little.

    One example may always differ, since on few examples the limit would allow none.
    """
    rules = rules or Rules()
    limit = rules.max_flips_repeat if found.same else rules.max_flips_previous
    passed = found.changed <= max(1.0, limit * found.n)
    what = "of the same commit and versions" if found.same else "of another commit or other versions"
    reason = (
        f"{found.changed} of {found.n} predictions differ from those in run {found.run_id}, {what}; "
        f"{100 * limit:g} % are allowed"
    )
    return Verdict(
        key,
        "flips_previous",
        "pass" if passed else "regression",
        gated,
        value=found.changed / found.n,
        limit=max(limit, 1.0 / found.n),
        reason=reason,
        command=None if passed else replay_command(key),
        baseline_run=found.run_id,
    )


def _flips_verdict(key: str, accuracy: Accuracy, gated: bool, rules: Rules) -> Verdict:
    passed = _at_least(rules.max_flips, accuracy.flips)
    reason = (
        f"{100 * accuracy.flips:.2f} % of {accuracy.n} predictions differ from FP32's (gained {accuracy.flips_gained}, "
        f"lost {accuracy.flips_lost}); {100 * rules.max_flips:g} % are allowed"
    )
    return Verdict(
        key,
        "flips",
        "pass" if passed else "regression",
        gated,
        value=accuracy.flips,
        limit=rules.max_flips,
        reason=reason,
        command=None if passed else replay_command(key),
    )


def _chance_verdicts(key: str, accuracy: Accuracy, gated: bool) -> Iterator[Verdict]:
    """FAILURES 18: a model at chance was mistaken for one that lost accuracy; its causes are others."""
    value = _worst_value(accuracy)
    if stats.at_chance(accuracy.fp32_value, accuracy.chance, accuracy.n):
        reason = f"FP32 itself is at chance ({accuracy.fp32_value:.4g}, chance {accuracy.chance:.4g})"
        yield _failed(key, "chance", gated, f"{reason}: check weights, head and label order before judging INT8")
    elif stats.at_chance(value, accuracy.chance, accuracy.n):
        reason = (
            f"{accuracy.metric} {value:.4g} is at chance level {accuracy.chance:.4g}: broken rather than less accurate"
        )
        yield Verdict(
            key,
            "chance",
            "regression",
            gated,
            value=value,
            baseline=accuracy.fp32_value,
            limit=accuracy.chance,
            reason=reason,
            command=replay_command(key),
        )


def _at_least(value: float, limit: float) -> bool:
    """``value >= limit``, but for the rounding of the arithmetic that made them."""
    return value >= limit or math.isclose(value, limit, rel_tol=1e-12)


# --- speed ------------------------------------------------------------------------------------------------------------


def judge_speed(
    record: Record,
    before: Record | None,
    gated: bool,
    rules: Rules | None = None,
    *,
    has_baseline: bool = True,
    disturbed: bool = False,
) -> Verdict:
    """Verdict ``speed`` against the record ``before`` of the same cell, None where the baseline has none."""
    rules = rules or Rules()
    key = record.cell.key
    problem = _unusable_timing(record.timing)
    if problem:
        return _failed(key, "speed", gated, problem)
    if disturbed:
        return Verdict(key, "speed", "invalid", gated, reason="not judged: the host was disturbed", command=None)
    if before is None:
        return Verdict(key, "speed", "pass", gated, reason="not in the baseline" if has_baseline else "no baseline")
    ratio = stats.speed_ratio(before.timing, record.timing)
    if ratio is None:
        reason = f"not in the baseline: run {before.run_id} has no usable time for it"
        return Verdict(key, "speed", "pass", gated, reason=reason, baseline_run=before.run_id)
    name, value = _worst_speed(before.timing, record.timing, ratio.value)
    outcome = _speed_outcome(value, ratio.interval, rules)
    return Verdict(
        key,
        "speed",
        outcome,
        gated,
        value=value,
        baseline=stats.median_time_s(before.timing),
        limit=rules.speed_floor,
        reason=_speed_reason(name, value, ratio, record.timing, before, rules),
        command=None if outcome in ("pass", "improvement") else f"{replay_command(key)} --profile",
        interval=ratio.interval,
        baseline_run=before.run_id,
    )


def _unusable_timing(timing: Timing) -> str | None:
    if stats.median_time_s(timing) is None:
        return (
            "a sample is not a positive number"
            if any(one.samples_s for one in timing.rounds)
            else "no time was measured"
        )
    bad = [name for name, value in _published(timing).items() if not (_is_number(value) and value > 0)]
    return f"not a positive number: {', '.join(bad)}" if bad else None


def _published(timing: Timing) -> dict[str, float]:
    """The numbers of speed that are shown to people, beside the samples."""
    found = {} if timing.throughput is None else {"throughput": timing.throughput}
    return found if timing.latency_s is None else {**found, "median latency": timing.latency_s.p50}


def _worst_speed(before: Timing, now: Timing, of_rounds: float) -> tuple[str, float]:
    """The lowest ratio among the rounds' and those of the published numbers, with its name."""
    ratios = {"time of rounds": of_rounds}
    old, new = _published(before), _published(now)
    if _usable(old.get("throughput")) and "throughput" in new:
        ratios["throughput"] = new["throughput"] / old["throughput"]
    if _usable(old.get("median latency")) and "median latency" in new:
        ratios["median latency"] = old["median latency"] / new["median latency"]
    name = min(ratios, key=lambda key: ratios[key])
    return name, ratios[name]


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _speed_outcome(value: float, interval: tuple[float, float] | None, rules: Rules) -> Outcome:
    if interval and interval[0] <= 1.0 <= interval[1] and interval[1] >= rules.hopeless_span * interval[0]:
        return "inconclusive"
    if not _at_least(value, rules.speed_floor):
        return "regression"
    return "improvement" if value > 1.0 / rules.speed_floor else "pass"


def _speed_reason(name: str, value: float, ratio: stats.Ratio, now: Timing, before: Record, rules: Rules) -> str:
    source = "" if name == "time of rounds" else f" (by {name})"
    parts = [
        f"{100 * value:.1f} % of the speed of run {before.run_id}{source}; {100 * rules.speed_floor:g} % is needed"
    ]
    if ratio.interval is None:
        parts.append("one round: no interval")
    else:
        units = "processes" if ratio.unit == "process" else "rounds of one process"
        low, high = (100 * end for end in ratio.interval)
        parts.append(f"95 % interval {low:.1f}-{high:.1f} % over {ratio.units} {units}")
    if now.brief or before.timing.brief:
        parts.append("measured briefly")
    if now.steady is False:
        parts.append("never became steady")
    return "; ".join(parts)


# --- whole intervals against a margin ---------------------------------------------------------------------------------


def noninferiority(interval: tuple[float, float], margin: float) -> Outcome:
    """Is something not worse by ``margin`` (at least 0)? ``interval`` is that of the difference, higher being better.

    ``pass`` if even its lower end lies above ``-margin``, ``regression`` if even its upper end lies below, else
    ``inconclusive``: a difference that was not found is no proof that there is none (G. Piaggio et al., "Reporting of
    noninferiority and equivalence randomized trials", JAMA 308, 2012).
    """
    low, high = interval
    if not (math.isfinite(low) and math.isfinite(high)):
        return "failed"
    if low > -margin:
        return "pass"
    return "regression" if high < -margin else "inconclusive"


def speed_beyond_margin(ratio: stats.Ratio, margin: float, noise_floor: float = 0.0) -> Outcome:
    """What a speed ratio with its interval says against a margin (a fraction of the speed), neither below the noise.

    ``regression`` only if the whole interval is beyond the larger of margin and noise floor; ``pass`` or
    ``improvement`` only if none of it is; otherwise, or without an interval, ``inconclusive``: measure more.
    """
    limit = 1.0 - max(margin, noise_floor)
    if ratio.interval is None or not all(math.isfinite(end) for end in ratio.interval):
        return "inconclusive"
    low, high = ratio.interval
    if high < limit:
        return "regression"
    if low < limit:
        return "inconclusive"
    return "improvement" if low > 1.0 / limit else "pass"


# --- cells that are gone ----------------------------------------------------------------------------------------------


def _judge_missing(run: Run, baseline: Baseline | None) -> Iterator[Verdict]:
    """Gated cells that the baseline has measured, that this run was asked for, and that it has no record of."""
    if baseline is None or not run.finished:
        return
    present = latest(run)
    for key, record in baseline.records.items():
        header = baseline.headers.get(record.run_id)
        if key in present or header is None or not is_gated(record.cell, run.header):
            continue
        if was_asked_for(record.cell, run, header):
            reason = f"missing: measured in run {record.run_id}, and this run was asked for it but has no record of it"
            yield _failed(key, "status", True, reason, baseline_run=record.run_id)


def was_asked_for(cell: Cell, run: Run, holder: RunHeader) -> bool:
    """True if ``run`` should have measured ``cell``, which the run with header ``holder`` has measured.

    Part by part: the values that the command line lists; else, if neither narrowed the same profile, all of the
    holder's; else the values that occur in the run's records. A shard is held against the same shard only.
    """
    same_profile = run.header.profile is not None and run.header.profile == holder.profile
    shard = option(run.header.arguments, "--shard")
    if shard != option(holder.arguments, "--shard") or (shard is not None and not same_profile):
        return False
    return all(_asked_for_value(cell, axis, run, holder, same_profile) for axis in _AXES)


def _asked_for_value(cell: Cell, axis: str, run: Run, holder: RunHeader, same_profile: bool) -> bool:
    value = getattr(cell, axis)
    listed = option(run.header.arguments, _AXES[axis])
    if axis == "task" and value is None and cell.weights == "synthetic":
        return True  # no task judges synthetic weights, whatever was asked for
    if listed is not None and not (axis == "isa" and "native" in listed.split(",")):
        return value in {part.strip() for part in listed.split(",")}
    if listed is None and same_profile and option(holder.arguments, _AXES[axis]) is None:
        return True
    return any(getattr(record.cell, axis) == value for record in run.records)


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of option ``name`` on a command line, written ``--name value`` or ``--name=value``."""
    found = None
    for position, word in enumerate(arguments):
        if word == name and position + 1 < len(arguments):
            found = arguments[position + 1]
        elif word.startswith(f"{name}="):
            found = word[len(name) + 1 :]
    return found
