"""Recipe ``auto``: for each group of linears the fastest number format that keeps the model within its budget.

The budget is said in points of accuracy. The library sees no labels, so it holds the model's output to a
signal-to-noise ratio that stands for them (:func:`wanted_sqnr_db`). Calibration data is split: on one part activations
are calibrated and formats chosen, on the other the choice is verified, and it is made safer until it holds there.

    1. all groups static (searched smoothing). If that holds on both parts, it is the answer.
    2. the noise of each group alone predicts that of all, times how far the last prediction was off.
    3. the noisiest group moves to the format (dynamic, LLM.int8(), floating point) that takes the most noise away for
       the seconds it costs (:mod:`int8.speed_model`), until the prediction holds; then 1. is asked again.

Each round makes at least one group safer, so this ends; in the worst case with nothing quantized, which is an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from int8 import recipe as recipes
from int8 import speed_model
from int8.calibrate import Batch, Calibration, collect
from int8.errors import CalibrationError, QuantizationError
from int8.quantization import WeightAndBias, input_groups, quantized_weights, with_weights
from int8.recipe import Recipe
from int8.sensitivity import Group, Trial, group_name, sqnr_db
from int8.speed_model import FORMATS, Format

log = logging.getLogger(__name__)

#: Predictions that change, over the output's noise-to-signal amplitude ratio. On real MiniLM weights (reviews, logistic
#: head on the embedding) 12 recipes from 3.6 to 28.7 dB lie between 0.20 and 0.30; torchao's and ours alike.
FLIPS_OVER_NOISE = 0.28
#: Part of the changed predictions that is lost on balance: they change where the model is unsure, so many were wrong.
#: At the largest losses of the same measurement it was 0.2 and 0.14.
LOST_SHARE_OF_FLIPS = 0.25

#: Every so many batches, one is kept back to verify the choice.
VERIFY_EVERY = 4
#: Texts on which formats are chosen, at most: the ranking of groups is stable long before.
CHOOSE_SEQUENCES = 64

_RECIPES: dict[Format, str] = {"static": "sq-static", "dynamic": "sq-dynamic", "llm-int8": "llm-int8"}


@dataclass(frozen=True)
class Choice:
    """What one group of linears got.

    Attributes:
        linears: qualified names.
        format: static, dynamic, llm-int8 or float.
        static_db: SQNR of the model's output if this group alone were static; None where nobody had to ask.
        alone_db: the same in its format.
        slower: its predicted time over that of static.
    """

    linears: Group
    format: Format
    static_db: float | None
    alone_db: float | None
    slower: float


@dataclass(frozen=True)
class Plan:
    """The choice for a whole model and what it rests on.

    Attributes:
        budget_points: points of accuracy that may be lost.
        wanted_db: the SQNR of the output that stands for them.
        chosen_db, verified_db: SQNR on the texts that chose, and on those kept back.
        static_db: SQNR on the texts kept back with all groups static.
        seconds: predicted time of the linears of one forward pass; ``static_s`` with all static, ``dynamic_s`` dynamic.
        choices: by group, in the model's order.
    """

    budget_points: float
    wanted_db: float
    chosen_db: float
    verified_db: float
    static_db: float
    seconds: float
    static_s: float
    dynamic_s: float
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        """The plan as a table and the sentences that explain it."""
        rows = [("linears", "format", "SQNR if static", "SQNR", "time over static")]
        rows += [
            (group_name(one.linears), one.format, _db(one.static_db), _db(one.alone_db), f"{one.slower:.2f}")
            for one in self.choices
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        budget = f"auto: budget {self.budget_points:g} points, taken as {self.wanted_db:.1f} dB of the output"
        return "\n".join([budget, *lines, *self.summary()])

    def summary(self) -> tuple[str, ...]:
        """The plan in two sentences: what was chosen, and that it holds."""
        counts = {kind: sum(one.format == kind for one in self.choices) for kind in FORMATS}
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return (
            f"groups: {told}; predicted time of the linears {self.seconds / self.static_s:.2f} of all static, "
            f"{self.seconds / self.dynamic_s:.2f} of all dynamic",
            f"all static: {self.static_db:.1f} dB; chosen: {self.chosen_db:.1f} dB where it was chosen, "
            f"{self.verified_db:.1f} dB on texts kept back; wanted: {self.wanted_db:.1f} dB "
            f"for {self.budget_points:g} points",
        )


def _db(value: float | None) -> str:
    return "" if value is None else "exact" if math.isinf(value) and value > 0 else f"{value:.1f} dB"


def wanted_sqnr_db(points: float) -> float:
    """The SQNR of the output at which a model is taken to lose ``points`` (hundredths of accuracy), in dB.

    Predictions change in proportion to the noise's amplitude, and a part of the changed ones is lost on balance:
    points / 100 = LOST_SHARE_OF_FLIPS * FLIPS_OVER_NOISE * 10^(-dB / 20).
    """
    return 20.0 * math.log10(LOST_SHARE_OF_FLIPS * FLIPS_OVER_NOISE / (points / 100.0))


def quantize(
    model: nn.Module,
    recipe: Recipe,
    linears: Mapping[str, nn.Linear],
    calibration: Iterable[Batch],
    *,
    isa: str,
    progress: Callable[[int], None] | None = None,
) -> nn.Module:
    """A quantized copy of ``model`` within the budget of ``recipe``; its :class:`Plan` is ``model.int8_plan``.

    Args:
        model: floating-point, in eval mode.
        recipe: with ``budget_points``.
        linears: those that may be quantized, by qualified name.
        calibration: batches of real examples, at least two.
        isa: decides the weights' bits and the speed model's rates.
        progress: called with the number of calibration batches done.

    Raises:
        CalibrationError: bad calibration data, or one batch alone.
        QuantizationError: no choice that quantizes anything keeps to the budget.
    """
    choosing, verifying = split(list(calibration))
    seen = collect(model, linears, choosing, progress)
    search = _Search(model, recipe, linears, seen, isa, _some(choosing), verifying)
    plan = search.run()
    log.info("%s", plan)
    quantized = with_weights(model, linears, search.weights(), recipe)
    quantized.int8_plan = plan  # type: ignore[assignment]
    return quantized


def split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Batches that choose, and those kept back to verify: one of ``VERIFY_EVERY``, at least one of each.

    Raises:
        CalibrationError: fewer than two batches.
    """
    if len(batches) < 2:
        raise CalibrationError(
            f"recipe auto keeps calibration data back to verify its choice and needs at least 2 batches, not "
            f"{len(batches)}; pass more, or smaller ones"
        )
    kept_back = [batch for index, batch in enumerate(batches) if index % VERIFY_EVERY == 1]
    return [batch for index, batch in enumerate(batches) if index % VERIFY_EVERY != 1], kept_back


def _some(batches: Sequence[Batch]) -> list[Batch]:
    """Batches spread over all of them that hold about ``CHOOSE_SEQUENCES`` texts."""
    total = sum(_sequences(batch) for batch in batches)
    step = max(1, round(total / CHOOSE_SEQUENCES))
    return list(batches[step // 2 :: step]) or list(batches[:1])


def _sequences(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


@dataclass
class _Search:
    """The search's state: the format of each group, and the noise of each group in each format, once known."""

    model: nn.Module
    recipe: Recipe
    linears: Mapping[str, nn.Linear]
    seen: Calibration
    isa: str
    choosing: Sequence[Batch]
    verifying: Sequence[Batch]
    formats: dict[Group, Format] = field(init=False)

    def __post_init__(self) -> None:
        assert self.recipe.budget_points is not None
        self.wanted_db = wanted_sqnr_db(self.recipe.budget_points)
        self.groups = input_groups(self.seen)
        self.formats = dict.fromkeys(self.groups, "static")
        self._trial = Trial(self.model, self.choosing)
        self._check = Trial(self.model, self.verifying)
        self._noise: dict[tuple[Group, Format], float] = {}
        self._weights: dict[Format, dict[str, WeightAndBias]] = {}

    def run(self) -> Plan:
        """Choose; see the module."""
        chosen, verified = self._measured()
        static = verified
        while min(chosen, verified) < self.wanted_db:
            # How far the sum of the groups' noise was off on either part, and how much too much it was.
            actual_db = min(chosen, verified)
            allowed = self._predicted() * 10.0 ** ((actual_db - self.wanted_db) / 10.0)
            self._make_safer(allowed)
            if all(kind == "float" for kind in self.formats.values()):
                raise QuantizationError(
                    f"no INT8 format keeps this model within {self.recipe.budget_points:g} points "
                    f"({self.wanted_db:.1f} dB of its output); raise the budget, or use recipe bf16"
                )
            log.info("auto: %s static groups left", sum(kind == "static" for kind in self.formats.values()))
            chosen, verified = self._measured()
        return self._plan(chosen, verified, static)

    def weights(self) -> dict[str, WeightAndBias]:
        """The quantized weights of the formats as they are now, by linear."""
        return {name: self._of(kind)[name] for group, kind in self.formats.items() if kind != "float" for name in group}

    def _make_safer(self, allowed: float) -> None:
        """Move the noisiest groups to safer formats, one at least, until the predicted noise is at most ``allowed``."""
        while True:
            group = max(self.groups, key=lambda one: self._alone(one, self.formats[one]))
            self.formats[group] = self._next(group)
            if self._predicted() <= allowed or all(kind == "float" for kind in self.formats.values()):
                return

    def _next(self, group: Group) -> Format:
        """The format, among the costlier ones, that takes the most noise away for the seconds it adds."""
        now = self.formats[group]
        noise, seconds = self._alone(group, now), self._seconds(group, now)

        def gain(kind: Format) -> float:
            return (noise - self._alone(group, kind)) / max(self._seconds(group, kind) - seconds, 1e-12)

        safer = [kind for kind in FORMATS[FORMATS.index(now) + 1 :] if self._alone(group, kind) < noise]
        return max(safer, key=gain) if safer else "float"

    def _predicted(self) -> float:
        return sum(self._alone(group, kind) for group, kind in self.formats.items())

    def _alone(self, group: Group, kind: Format) -> float:
        """Noise at the output when ``group`` alone is quantized."""
        if kind == "float":
            return 0.0
        if (group, kind) not in self._noise:
            self._noise[group, kind] = self._trial.noise({name: self._of(kind)[name] for name in group})
        return self._noise[group, kind]

    def _of(self, kind: Format) -> dict[str, WeightAndBias]:
        """The weights of all linears in a format."""
        if kind not in self._weights:
            base = recipes.get(_RECIPES[kind]).replace(weight_bits=self.recipe.weight_bits)
            self._weights[kind] = quantized_weights(self.linears, base, self.seen, isa=self.isa)
        return self._weights[kind]

    def _measured(self) -> tuple[float, float]:
        """SQNR on the texts that choose, and on those kept back, with the formats as they are."""
        weights = self.weights()
        return (
            self._trial.sqnr_db(self._trial.noise(weights)),
            self._check.sqnr_db(self._check.noise(weights)),
        )

    def _seconds(self, group: Group, kind: Format) -> float:
        linears = [self.linears[name] for name in group]
        inner, outer = linears[0].in_features, sum(linear.out_features for linear in linears)
        threshold = recipes.get("llm-int8").outlier_threshold or math.inf
        outliers = int((self.seen.stats[group[0]].absmax >= threshold).sum())
        return speed_model.group_s(kind, inner, outer, isa=self.isa, outliers=outliers)

    def _plan(self, chosen: float, verified: float, static: float) -> Plan:
        assert self.recipe.budget_points is not None
        choices = tuple(self._choice(group) for group in self.groups)
        return Plan(
            budget_points=self.recipe.budget_points,
            wanted_db=self.wanted_db,
            chosen_db=chosen,
            verified_db=verified,
            static_db=static,
            seconds=sum(self._seconds(group, kind) for group, kind in self.formats.items()),
            static_s=sum(self._seconds(group, "static") for group in self.groups),
            dynamic_s=sum(self._seconds(group, "dynamic") for group in self.groups),
            choices=choices,
        )

    def _choice(self, group: Group) -> Choice:
        kind = self.formats[group]
        static, alone = self._noise.get((group, "static")), self._noise.get((group, kind))
        if kind == "float":
            alone = 0.0
        return Choice(
            group,
            kind,
            None if static is None else sqnr_db(self._trial.signal, static),
            None if alone is None else sqnr_db(self._trial.signal, alone),
            self._seconds(group, kind) / self._seconds(group, "static"),
        )
