"""Recipes: how the numbers of a model are represented.

A recipe is data. It says what is quantized and how, never how fast or by whom: engines execute recipes. This module
imports no torch, so that a matrix of recipes can be planned and checked in milliseconds.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Literal

from int8.errors import RecipeError

Activation = Literal["float", "static", "dynamic"]
ComputeDtype = Literal["auto", "fp32", "bf16"]
ActGranularity = Literal["token", "tensor"]
WeightGranularity = Literal["row", "tensor"]
OutlierWeights = Literal["float", "dequantized"]

#: ISAs on which BF16 arithmetic is native. Elsewhere it is emulated, several times slower than FP32.
NATIVE_BF16_ISAS = frozenset({"amx"})


@dataclass(frozen=True)
class Recipe:
    """How a model's linears and its other operations represent numbers.

    Attributes:
        name: the recipe's name in the matrix and in records.
        activation: ``float`` (nothing is quantized), ``static`` (one scale a tensor, found by calibration) or
            ``dynamic`` (one scale a token, computed at run time).
        smoothing: whether SmoothQuant's factor moves outliers from activations to weights (arXiv 2211.10438).
        alpha: migration strength of the smoothing, 0 to 1, the same for all linears; None where there is no smoothing,
            or where it is searched.
        search: strength, channel shift and zero point are chosen for each input by the error of the linears that read
            it, on calibration tokens (see :mod:`int8.smooth`).
        compute_dtype: dtype of everything that is not an INT8 linear. ``auto`` follows the ISA: BF16 where the ISA
            multiplies it natively, FP32 where it would be emulated.
        weight_bits: 8, 7, or None for what the ISA needs: kernels without VNNI add pairs of products in 16 bit and
            saturate unless weights keep to 7 bits.
        act_granularity: what one scale of a dynamic activation covers, a token or the whole tensor of a call (with
            its padding). Static activations have one scale a tensor, whatever this says.
        weight_granularity: what one weight scale covers, an output row or the whole weight.
        asymmetric: whether both operands are affine, with zero points (LLM.int8(), section 2.1).
        outlier_threshold: feature dimensions with a magnitude at or above it are multiplied in floating point
            (LLM.int8(), section 3.2; the paper's is 6.0); None decomposes nothing.
        outlier_weights: where a decomposed weight's outlier columns come from: ``float`` keeps a copy of the weight
            in the dtype that multiplies them, ``dequantized`` takes the INT8 levels and needs no more memory.
        outliers_from_calibration: the outlier dimensions of each linear are those that calibration saw, instead of
            those of each call.
    """

    name: str
    activation: Activation
    smoothing: bool = False
    alpha: float | None = None
    search: bool = False
    compute_dtype: ComputeDtype = "auto"
    weight_bits: Literal[7, 8] | None = None
    act_granularity: ActGranularity = "token"
    weight_granularity: WeightGranularity = "row"
    asymmetric: bool = False
    outlier_threshold: float | None = None
    outlier_weights: OutlierWeights = "float"
    outliers_from_calibration: bool = False
    budget_points: float | None = None

    def __post_init__(self) -> None:
        if self.smoothing and self.activation == "float":
            raise RecipeError(f"recipe {self.name!r}: smoothing needs a quantized activation (static or dynamic)")
        if self.search and not self.smoothing:
            raise RecipeError(f"recipe {self.name!r}: search chooses how to smooth; turn smoothing on")
        if (self.smoothing and not self.search) != (self.alpha is not None):
            raise RecipeError(f"recipe {self.name!r}: alpha is set exactly when smoothing is on and not searched")
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise RecipeError(f"recipe {self.name!r}: alpha is {self.alpha}, but must lie between 0 and 1")
        if self.budget_points is not None and not (self.activation == "static" and self.search):
            raise RecipeError(f"recipe {self.name!r}: a budget begins with static activations and searched smoothing")
        if self.budget_points is not None and not self.budget_points > 0.0:
            raise RecipeError(f"recipe {self.name!r}: budget_points is {self.budget_points}, but must be above 0")
        self._check_scheme()

    def _check_scheme(self) -> None:
        """The schemes of the LLM.int8() paper combine only as it defines them."""
        coarse = self.act_granularity == "tensor" or self.weight_granularity == "tensor" or self.asymmetric
        decomposed = self.outlier_threshold is not None
        if (coarse or decomposed) and (self.activation != "dynamic" or self.smoothing):
            raise RecipeError(
                f"recipe {self.name!r}: scales of a whole tensor, zero points and outlier decomposition are for "
                "dynamic activations without smoothing"
            )
        if self.asymmetric and (self.act_granularity, self.weight_granularity) != ("tensor", "tensor"):
            raise RecipeError(f"recipe {self.name!r}: zero points need one scale a tensor on both sides")
        if (self.act_granularity, self.weight_granularity) == ("tensor", "row"):
            raise RecipeError(f"recipe {self.name!r}: one scale for the activation needs one for the weight (absmax)")
        if coarse and decomposed:
            raise RecipeError(f"recipe {self.name!r}: outliers are decomposed from vector-wise quantization alone")
        if self.outlier_threshold is not None and not self.outlier_threshold >= 0.0:
            raise RecipeError(f"recipe {self.name!r}: outlier_threshold is {self.outlier_threshold}, but must be >= 0")
        if self.outliers_from_calibration and not decomposed:
            raise RecipeError(f"recipe {self.name!r}: outliers_from_calibration needs an outlier_threshold")

    @property
    def quantized(self) -> bool:
        """True if the recipe's linears run in INT8."""
        return self.activation != "float"

    @property
    def needs_calibration(self) -> bool:
        """True if the recipe takes something from calibration data."""
        return self.activation == "static" or self.smoothing or self.outliers_from_calibration

    def resolve_compute_dtype(self, isa: str) -> Literal["fp32", "bf16"]:
        """The dtype of the non-linear operations on ``isa`` (one of amx, vnni, avx512, avx2)."""
        if self.compute_dtype != "auto":
            return self.compute_dtype
        return "bf16" if isa in NATIVE_BF16_ISAS else "fp32"

    def resolve_weight_bits(self, isa: str) -> Literal[7, 8]:
        """Bits of a weight on ``isa``: 7 where 8 would saturate a u8 x s8 kernel without VNNI."""
        if self.weight_bits is not None:
            return self.weight_bits
        return 8 if isa in ("amx", "vnni") else 7

    def replace(self, **changes: object) -> Recipe:
        """A copy with the named fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


# SmoothQuant searches. With one alpha for all linears, real MiniLM weights (reviews, 8 bits) gave: static 0.75 to 0.9
# 20.2, 21.9, 22.9, 23.1 dB, dynamic 0.5, 0.7, 0.8 24.9, 26.6, 25.7 dB; searched, with zero points, 24.3 and 28.7 dB.
_NAMED = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "float", compute_dtype="fp32"),
        Recipe("bf16", "float", compute_dtype="bf16"),
        Recipe("static", "static"),
        Recipe("dynamic", "dynamic"),
        Recipe("sq-static", "static", smoothing=True, search=True),
        Recipe("sq-dynamic", "dynamic", smoothing=True, search=True),
        Recipe("absmax", "dynamic", act_granularity="tensor", weight_granularity="tensor"),
        Recipe("zeropoint", "dynamic", act_granularity="tensor", weight_granularity="tensor", asymmetric=True),
        Recipe("rowwise", "dynamic", weight_granularity="tensor"),
        Recipe("vectorwise", "dynamic"),  # what `dynamic` computes, under the paper's name: see int8.schemes.vectorwise
        # Outlier columns are kept: on MiniLM (256 reviews, 8-bit weights, FP32 outliers) that gave 28.6 dB, dequantized
        # ones 27.9; with planted outliers 28.6 against 17.2, where a large offset multiplies the weight's rounding.
        Recipe("llm-int8", "dynamic", outlier_threshold=6.0),
        Recipe("llm-int8-offline", "dynamic", outlier_threshold=6.0, outliers_from_calibration=True),
        Recipe("auto", "static", smoothing=True, search=True, budget_points=0.5),
    )
}


def outlier_dtype(isa: str) -> Literal["fp32", "bf16"]:
    """The dtype in which outlier feature dimensions are multiplied on ``isa``: 16 bit where that is native."""
    return "bf16" if isa in NATIVE_BF16_ISAS else "fp32"


def names() -> tuple[str, ...]:
    """Names of the recipes that this version executes, in the order tables show them."""
    return tuple(_NAMED)


def get(name: str) -> Recipe:
    """The recipe called ``name``.

    Raises:
        RecipeError: no such recipe; the message has the nearest names.
    """
    try:
        return _NAMED[name]
    except KeyError:
        near = difflib.get_close_matches(name, _NAMED, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_NAMED)}"
        raise RecipeError(f"unknown recipe {name!r}; {hint}") from None
