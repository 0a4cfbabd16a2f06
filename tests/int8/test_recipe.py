from __future__ import annotations

import subprocess
import sys

import pytest

from int8 import recipe
from int8.errors import RecipeError
from int8.recipe import Recipe


def test_named_recipes_say_what_they_are() -> None:
    assert recipe.get("sq-static").activation == "static"
    assert recipe.get("sq-static").smoothing
    assert recipe.get("sq-dynamic").activation == "dynamic"
    assert not recipe.get("static").smoothing
    assert not recipe.get("fp32").quantized


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="sq-static"):
        recipe.get("sq-statik")


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_alpha_is_bounded(alpha: float) -> None:
    with pytest.raises(RecipeError, match="between 0 and 1"):
        Recipe("x", "static", smoothing=True, alpha=alpha)


def test_smoothing_and_alpha_go_together() -> None:
    with pytest.raises(RecipeError, match="alpha"):
        Recipe("x", "static", alpha=0.5)
    with pytest.raises(RecipeError, match="not searched"):
        Recipe("x", "static", smoothing=True, search=True, alpha=0.5)
    with pytest.raises(RecipeError, match="turn smoothing on"):
        Recipe("x", "static", search=True)
    with pytest.raises(RecipeError, match="activation"):
        Recipe("x", "float", smoothing=True, alpha=0.5)


def test_defaults_follow_the_isa() -> None:
    quantized = recipe.get("sq-static")
    assert [quantized.resolve_compute_dtype(isa) for isa in ("amx", "vnni", "avx2")] == ["bf16", "fp32", "fp32"]
    assert [quantized.resolve_weight_bits(isa) for isa in ("amx", "vnni", "avx512", "avx2")] == [8, 8, 7, 7]
    assert recipe.get("bf16").resolve_compute_dtype("vnni") == "bf16"


def test_planning_imports_no_torch() -> None:
    code = "import int8, int8.recipe, int8.isa, sys; int8.isa.describe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
