"""Recipe ``auto`` on small encoders: it keeps its budget, says why, and costs no more than it must."""

from __future__ import annotations

import copy

import pytest
import torch
from small_encoders import Encoder, make_batch

import int8
from int8 import auto, quantization, recipe, sensitivity
from int8.errors import CalibrationError, QuantizationError, RecipeError
from int8.tensor import Int8Weight

BATCHES = [make_batch(4, 12, pads=3, seed=seed) for seed in range(6)]


def with_budget(points: float) -> int8.Recipe:
    return recipe.get("auto").replace(budget_points=points, weight_bits=8)


@pytest.fixture
def uneven(encoder: Encoder) -> Encoder:
    """Tokens whose sizes differ sixtyfold: calibrated scales lose much in the first layer, one a token little."""
    with torch.no_grad():
        encoder.embed.weight[:5] *= 60.0
    return encoder


def test_a_wide_budget_leaves_everything_static(encoder: Encoder) -> None:
    quantized = int8.quantize(encoder, with_budget(20.0), BATCHES)
    plan: auto.Plan = quantized.int8_plan  # type: ignore[assignment]
    assert {one.format for one in plan.choices} == {"static"}
    assert plan.seconds == plan.static_s < plan.dynamic_s
    assert plan.verified_db >= plan.wanted_db
    assert quantized.int8_recipe.name == "auto"  # type: ignore[union-attr]


def test_a_narrow_budget_is_kept_on_texts_that_did_not_choose(uneven: Encoder) -> None:
    quantized = int8.quantize(uneven, with_budget(0.2), BATCHES)
    plan: auto.Plan = quantized.int8_plan  # type: ignore[assignment]
    assert plan.static_db < plan.wanted_db <= min(plan.chosen_db, plan.verified_db)
    assert {one.format for one in plan.choices} > {"static"} or "static" not in {one.format for one in plan.choices}
    _, kept_back = auto.split(BATCHES)
    lost = sensitivity.Trial(uneven, kept_back)
    weights = {name: (module.weight, module.bias) for name, module in int8.quantized_modules(quantized).items()}
    assert lost.sqnr_db(lost.noise(weights)) == pytest.approx(plan.verified_db, abs=1e-6)  # type: ignore[arg-type]


def test_formats_are_in_the_model_as_the_plan_says(uneven: Encoder) -> None:
    quantized = int8.quantize(uneven, with_budget(0.2), BATCHES)
    plan: auto.Plan = quantized.int8_plan  # type: ignore[assignment]
    modules = dict(quantized.named_modules())
    for choice in plan.choices:
        for name in choice.linears:
            weight = modules[name].weight
            kind = "float"
            if isinstance(weight, Int8Weight):
                decomposed = hasattr(weight, "outlier_threshold")
                kind = "llm-int8" if decomposed else "dynamic" if weight.dynamic else "static"
            assert kind == choice.format


def test_the_table_explains_the_choice(uneven: Encoder) -> None:
    quantized = int8.quantize(uneven, with_budget(0.2), BATCHES)
    text = str(quantized.int8_plan)
    assert "budget 0.2 points" in text
    assert all(name in text for name in ("layers.0.up", "layers.1.down", "all static", "kept back"))


def test_a_budget_that_nothing_keeps_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(QuantizationError, match="raise the budget"):
        int8.quantize(encoder, with_budget(1e-7), BATCHES)


def test_one_batch_cannot_be_split(encoder: Encoder) -> None:
    with pytest.raises(CalibrationError, match="at least 2 batches"):
        int8.quantize(encoder, "auto", BATCHES[:1])
    with pytest.raises(CalibrationError, match="pass the batches"):
        int8.quantize(encoder, "auto", quantization.statistics(encoder, BATCHES))
    choosing, kept_back = auto.split(BATCHES)
    assert (len(choosing), len(kept_back)) == (4, 2)
    assert not any(one is other for one in choosing for other in kept_back)


def test_budgets_are_checked_and_stand_for_decibels() -> None:
    with pytest.raises(RecipeError, match="above 0"):
        with_budget(0.0)
    with pytest.raises(RecipeError, match="static"):
        recipe.get("dynamic").replace(budget_points=0.5)
    assert auto.wanted_sqnr_db(0.5) == pytest.approx(22.9, abs=0.05)
    assert auto.wanted_sqnr_db(0.05) == pytest.approx(42.9, abs=0.05)


def test_the_callers_model_is_not_touched(uneven: Encoder) -> None:
    before = copy.deepcopy(uneven.state_dict())
    int8.quantize(uneven, with_budget(0.2), BATCHES)
    assert all(torch.equal(before[name], value) for name, value in uneven.state_dict().items())


def test_mixed_formats_compile_and_save(uneven: Encoder, tmp_path: object) -> None:
    recipe_here = recipe.get("auto").replace(budget_points=0.2)  # the bits of this host's ISA
    quantized = int8.quantize(uneven, recipe_here, BATCHES)
    batch = BATCHES[0]
    compiled = int8.compile(quantized)
    torch.testing.assert_close(compiled(**batch), quantized(**batch), rtol=0.02, atol=0.05)
    assert compiled.fused_linears == len(int8.quantized_modules(quantized))
    int8.save(quantized, tmp_path)  # type: ignore[arg-type]
    loaded = int8.load(tmp_path, into=Encoder().eval())  # type: ignore[arg-type]
    assert torch.equal(loaded(**batch), quantized(**batch))
    assert loaded.int8_recipe == quantized.int8_recipe
