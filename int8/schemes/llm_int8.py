"""``llm-int8``: vector-wise INT8 with outlier feature dimensions in floating point (arXiv 2208.07339, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Int8Tensor, MappingType

from int8 import isa as isa_module
from int8 import recipe as recipes
from int8.errors import QuantizationError
from int8.recipe import Recipe
from int8.schemes import vectorwise
from int8.tensor import Int8Weight, LinearCall, WeightBits, check_weight, tensor_fields

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, threshold: float = 6.0, weight_levels: int = 127
) -> Tensor:
    """``sum over O of X W + vector-wise sum over the rest + b``, O the dimensions with any |X_ij| >= threshold.

    Args:
        x: (..., K) float; no token may be zero outside of O, nor all its features lie in O.
        weight: (N, K) float.
        bias: (N,) or None.
        threshold: the paper's alpha, 6.0.
        weight_levels: the weight's largest level; 63 where kernels have no VNNI.

    Returns:
        (..., N) FP64; the outlier product is exact up to FP64.
    """
    tokens = x.reshape(-1, x.shape[-1])
    outlier = (tokens.abs() >= threshold).any(dim=0)
    exact = x[..., outlier].double() @ weight[:, outlier].double().t()
    rest = torch.where(outlier, torch.zeros(()), x)
    result = exact + vectorwise.linear(rest, weight, None, weight_levels)
    return result if bias is None else result + bias


class DecomposedWeight(Int8Weight):
    """A vector-wise INT8 weight with what its outlier dimensions need.

    Attributes:
        outlier_weight: (N, K) weights in the dtype that multiplies them; with ``outlier_index`` (N, |O|), its columns;
            None takes the columns from the INT8 levels.
        outlier_index: (|O|,) int64, the outlier dimensions where calibration fixed them; None finds them in each call.
        outlier_threshold: magnitude from which on a value is an outlier.
    """

    optional_tensor_data_names = [*Int8Weight.optional_tensor_data_names, "outlier_weight", "outlier_index"]  # noqa: RUF012
    optional_tensor_attribute_names = [*Int8Weight.optional_tensor_attribute_names, "outlier_threshold"]  # noqa: RUF012

    outlier_weight: Tensor | None
    outlier_index: Tensor | None
    outlier_threshold: float

    def __new__(
        cls,
        *args: Any,
        outlier_weight: Tensor | None = None,
        outlier_index: Tensor | None = None,
        outlier_threshold: float = 6.0,
        **kwargs: Any,
    ) -> Any:
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        *args: Any,
        outlier_weight: Tensor | None = None,
        outlier_index: Tensor | None = None,
        outlier_threshold: float = 6.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.outlier_weight = outlier_weight
        self.outlier_index = outlier_index
        self.outlier_threshold = outlier_threshold

    @classmethod
    def decomposed(
        cls, weight: Int8Tensor, threshold: float, outlier_weight: Tensor | None, outlier_index: Tensor | None
    ) -> DecomposedWeight:
        """``weight`` with its outlier parts; shares storage.

        Raises:
            QuantizationError: the weight is not vector-wise.
        """
        base = Int8Weight.from_torchao(weight)
        affine = base.act_quant_kwargs.mapping_type is MappingType.ASYMMETRIC
        if affine or not base.dynamic or base.act_per_tensor or base.act_pre_scale is not None:
            raise QuantizationError("outliers are decomposed from a vector-wise weight alone")
        parts: dict[str, Any] = {
            "outlier_weight": outlier_weight,
            "outlier_index": outlier_index,
            "outlier_threshold": threshold,
        }
        return cls(*tensor_fields(base), **parts)

    def describe(self) -> str:
        """As the other weights' words, and what is kept out of INT8."""
        index = self.outlier_index
        which = f"dimensions from {self.outlier_threshold}" if index is None else f"{index.numel()} fixed dimensions"
        return f"{super().describe()}, {which} in floating point"

    def linear_call(self) -> LinearCall:
        """The decomposed operator, with the dtype of this process's ISA for the outliers."""
        dtype = _DTYPES[recipes.outlier_dtype(isa_module.effective())]
        kept = self.outlier_weight
        return LinearCall(
            torch.ops.int8.linear_decomposed,
            {
                "qweight": self.qdata,
                "weight_scale": self.row_scales(),
                "outlier_weight": kept if kept is None else kept.to(dtype),
                "outlier_index": self.outlier_index,
            },
            {"outlier_threshold": self.outlier_threshold, "outlier_dtype": dtype},
        )


def build_weight(
    weight: Tensor, recipe: Recipe, bits: WeightBits, *, isa: str, act_absmax: Tensor | None = None
) -> DecomposedWeight:
    """The quantized weight of this scheme from ``weight`` (N, K).

    Where calibration fixed the outlier dimensions and keeps their columns, the INT8 levels hold zeros there, so that a
    row's scale is that of the columns it multiplies.

    Args:
        weight: float32 or bfloat16.
        recipe: says the threshold, where outlier columns come from and whether calibration fixes them.
        bits: bits of the INT8 levels.
        isa: decides the dtype of kept columns.
        act_absmax: (K,) largest magnitude of each input channel over calibration.

    Raises:
        QuantizationError: the weight cannot be quantized, or calibration is missing.
    """
    if recipe.outlier_threshold is None:
        raise QuantizationError(f"recipe {recipe.name!r} has no outlier_threshold; use vectorwise instead")
    check_weight(weight)
    index = None
    if recipe.outliers_from_calibration:
        if act_absmax is None:
            raise QuantizationError(f"recipe {recipe.name!r} takes outlier dimensions from calibration; pass data")
        index = (act_absmax >= recipe.outlier_threshold).nonzero().reshape(-1)
    kept, rest = None, weight.detach()
    if recipe.outlier_weights == "float":
        columns = rest if index is None else rest.index_select(1, index)
        kept = columns.to(_DTYPES[recipes.outlier_dtype(isa)]).contiguous()
        rest = rest if index is None else rest.index_fill(1, index, 0.0)
    base = vectorwise.build_weight(rest, bits)
    return DecomposedWeight.decomposed(base, recipe.outlier_threshold, kept, index)


torch.serialization.add_safe_globals([DecomposedWeight])
