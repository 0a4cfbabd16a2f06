"""Quantization schemes, one file each: the definition in plain torch, and how to build the weight that computes it.

The definitions start from floating-point operands and are written as the papers write them; the operators of
:mod:`int8.ops` compute the same from stored levels, and the tests hold them together.
"""

from __future__ import annotations

from torch import Tensor

from int8.recipe import Recipe
from int8.schemes import absmax, llm_int8, rowwise, vectorwise, zeropoint
from int8.tensor import Int8Weight, WeightBits


def build_weight(
    weight: Tensor, recipe: Recipe, bits: WeightBits, *, isa: str, act_absmax: Tensor | None = None
) -> Int8Weight:
    """The quantized weight of a recipe that takes its activation scales at run time and smooths nothing.

    Args:
        weight: (N, K), float32 or bfloat16.
        recipe: dynamic, without smoothing.
        bits: bits of the INT8 levels.
        isa: the ISA it is for; decides the dtype of outlier columns that are kept.
        act_absmax: (K,) largest magnitude of each input channel over calibration; for fixed outlier dimensions.

    Raises:
        QuantizationError: the weight cannot be quantized.
    """
    if recipe.outlier_threshold is not None:
        return llm_int8.build_weight(weight, recipe, bits, isa=isa, act_absmax=act_absmax)
    if recipe.asymmetric:
        return zeropoint.build_weight(weight, bits)
    if recipe.act_granularity == "tensor":
        return absmax.build_weight(weight, bits)
    if recipe.weight_granularity == "tensor":
        return rowwise.build_weight(weight, bits)
    return vectorwise.build_weight(weight, bits)
