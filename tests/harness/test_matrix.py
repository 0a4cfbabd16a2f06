"""The matrix: scenarios, profiles, cell names, and the plan of a run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from harness import matrix
from harness.errors import UsageError
from harness.matrix import Budget, Catalog, Overrides, Profile, Scenario
from harness.records import Cell
from int8 import recipe as recipes

XEON = ("amx", "vnni", "avx512", "avx2")
CATALOG = Catalog(("minilm", "bert-large"), ("reviews",), unjudged=frozenset({("bert-large", "reviews")}))


def keys(plan: matrix.Plan, skipped: bool = False) -> list[str]:
    return [planned.cell.key for planned in plan.cells if (planned.skip_reason is not None) == skipped]


def make(**changes: object) -> Profile:
    base: dict[str, object] = {
        "name": "test",
        "about": "",
        "models": ("minilm",),
        "recipes": {"int8": ("sq-static", "fp32")},
        "isas": ("amx", "vnni"),
        "scenarios": (Scenario.parse("offline:b8:s128"), Scenario.parse("single:s128")),
        "task": "reviews",
    }
    return Profile(**{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "scenario"),
    [
        ("offline:b8:s128", Scenario("offline", 8, 128)),
        ("single:s64", Scenario("single", 1, 64)),
        ("multi:2x3:b4:s32", Scenario("multi", 4, 32, 2, 3)),
    ],
)
def test_a_scenario_is_read_and_written_alike(text: str, scenario: Scenario) -> None:
    assert Scenario.parse(text) == scenario
    assert str(scenario) == text


@pytest.mark.parametrize(
    "text", ["", "offline", "offline:8:128", "offline:b0:s128", "single:b1:s8", "multi:2:b8:s128", "offline:b8:s128x"]
)
def test_what_is_no_scenario_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"offline:b8:s128.*single:s128.*multi:2x1"):
        Scenario.parse(text)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("minilm/int8/fp32/amx/single:s128", Cell("minilm", "int8", "fp32", "amx", "single:s128")),
        (
            "minilm/int8/sq-static/vnni/offline:b8:s128/aoti@reviews",
            Cell("minilm", "int8", "sq-static", "vnni", "offline:b8:s128", "aoti", "reviews"),
        ),
        (
            "./my@models/a/torchao/sq-dynamic/avx2/offline:b8:s128",
            Cell("./my@models/a", "torchao", "sq-dynamic", "avx2", "offline:b8:s128"),
        ),
    ],
)
def test_a_cells_name_is_read_back(text: str, cell: Cell) -> None:
    parsed = matrix.parse_cell(text)
    assert parsed.key == cell.key == text
    assert (parsed.model, parsed.task) == (cell.model, cell.task)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("minilm", "is not a cell"),
        ("minilm/int8/fp32/amx", "is not a cell"),
        ("minilm/int9/fp32/amx/single:s128", "did you mean int8"),
        ("minilm/int8/fp23/amx/single:s128", "did you mean fp32"),
        ("minilm/int8/fp32/axm/single:s128", "did you mean amx"),
        ("minilm/int8/fp32/amx/singel:s128", "unknown scenario"),
    ],
)
def test_a_wrong_cell_name_is_one_line_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        matrix.parse_cell(text)
    assert "\n" not in str(error.value)


def test_every_profile_of_the_catalog_plans() -> None:
    from harness import runner

    for profile in matrix.load_profiles().values():
        plan = matrix.plan(profile, Overrides(), XEON, runner.catalog())
        assert keys(plan), profile.name
        assert set(profile.gated) <= set(profile.recipes["int8"]), profile.name


def test_quick_is_what_the_first_user_runs() -> None:
    quick = matrix.get_profile("quick")
    plan = matrix.plan(quick, Overrides(), XEON, CATALOG)
    assert len(keys(plan)) == 2 * 2 * 6  # ISAs, scenarios, engine and recipe
    assert not keys(plan, skipped=True)
    assert {p.cell.task for p in plan.cells} == {"reviews"}
    assert quick.limit is not None and quick.limit >= 4000


def test_cells_are_grouped_by_model_and_isa_with_the_baseline_first() -> None:
    plan = matrix.plan(make(), Overrides(), XEON, CATALOG)
    assert keys(plan) == [
        f"minilm/int8/{recipe}/{isa}/{scenario}@reviews"
        for isa in ("amx", "vnni")
        for scenario in ("offline:b8:s128", "single:s128")
        for recipe in ("fp32", "sq-static")
    ]


def test_compute_dtype_follows_the_isa() -> None:
    plan = matrix.plan(make(), Overrides(), XEON, CATALOG)
    dtypes = {(p.cell.recipe, p.cell.isa): p.cell.compute_dtype for p in plan.cells}
    assert dtypes[("sq-static", "amx")] == "bf16"
    assert dtypes[("sq-static", "vnni")] == "fp32"
    assert dtypes[("fp32", "amx")] == "fp32"


def test_isas_that_the_host_lacks_are_left_out_with_a_notice() -> None:
    plan = matrix.plan(make(), Overrides(), XEON[1:], CATALOG)
    assert {p.cell.isa for p in plan.cells} == {"vnni"}
    assert any("amx" in notice and "vnni, avx512, avx2" in notice for notice in plan.notices)


def test_a_host_with_none_of_the_profiles_isas_measures_its_best() -> None:
    plan = matrix.plan(make(), Overrides(), ("avx2",), CATALOG)
    assert {p.cell.isa for p in plan.cells} == {"avx2"}
    assert len(plan.notices) == 2


def test_native_is_the_hosts_best() -> None:
    plan = matrix.plan(make(isas=("native",)), Overrides(), XEON[1:], CATALOG)
    assert {p.cell.isa for p in plan.cells} == {"vnni"}
    assert matrix.plan(make(), Overrides(isas=("native", "avx512")), XEON[2:], CATALOG).cells[0].cell.isa == "avx512"


def test_an_isa_asked_for_that_the_host_lacks_is_an_error_that_names_what_it_has() -> None:
    with pytest.raises(UsageError, match=r"lacks ISA amx; it has avx512, avx2"):
        matrix.plan(make(), Overrides(isas=("amx", "avx2")), XEON[2:], CATALOG)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (Overrides(models=("minlim",)), "unknown model 'minlim'; did you mean minilm"),
        (Overrides(engines=("torcha",)), "did you mean torchao"),
        (Overrides(recipes=("sq-statik",)), "did you mean sq-static"),
        (Overrides(isas=("vnn",)), "did you mean vnni"),
        (Overrides(tasks=("review",)), "did you mean reviews"),
        (Overrides(deploys=("jitt",)), "did you mean jit"),
        (Overrides(shard=(3, 2)), "shard 3/2"),
    ],
)
def test_unknown_names_are_usage_errors_with_the_nearest(overrides: Overrides, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        matrix.plan(make(), overrides, XEON, CATALOG)
    assert error.value.exit_code == 64


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean quick"):
        matrix.get_profile("quik")


def test_the_command_line_replaces_the_profile() -> None:
    overrides = Overrides(recipes=("sq-dynamic",), scenarios=("single:s32",), isas=("avx2",), no_task=True)
    assert keys(matrix.plan(make(), overrides, XEON, CATALOG)) == ["minilm/int8/sq-dynamic/avx2/single:s32"]


def test_an_engine_that_the_profile_does_not_list_brings_all_its_recipes() -> None:
    plan = matrix.plan(make(), Overrides(engines=("torchao",)), XEON, CATALOG)
    assert {p.cell.recipe for p in plan.cells} == {"static", "dynamic", "sq-static", "sq-dynamic"}
    assert not keys(plan, skipped=True)


def test_combinations_that_do_not_exist_are_skipped_with_the_reason() -> None:
    overrides = Overrides(engines=("int8", "torchao"), recipes=("fp32", "sq-static"), isas=("amx",))
    plan = matrix.plan(make(), overrides, XEON, CATALOG)
    skipped = [planned for planned in plan.cells if planned.skip_reason]
    assert {(p.cell.engine, p.cell.recipe) for p in skipped} == {("torchao", "fp32")}
    assert "int8/fp32" in str(skipped[0].skip_reason)


def test_the_schemes_of_llm_int8_are_ours_alone() -> None:
    schemes = ("absmax", "zeropoint", "rowwise", "vectorwise", "llm-int8", "llm-int8-offline")
    overrides = Overrides(engines=("int8", "torchao"), recipes=schemes, isas=("amx", "vnni"))
    plan = matrix.plan(make(), overrides, XEON, CATALOG)
    measured = {(p.cell.engine, p.cell.recipe) for p in plan.cells if p.skip_reason is None}
    assert measured == {("int8", scheme) for scheme in schemes}


def test_profile_accuracy_has_every_recipe_and_family() -> None:
    profile = matrix.get_profile("accuracy")
    assert set(profile.recipes["int8"]) == set(recipes.names()) - {"auto"}
    families = ("minilm", "minilm-distilbert", "minilm-xlmr")
    assert set(profile.models) == {*families, *(f"{name}-outliers" for name in families)}
    assert (profile.isas, profile.task, profile.limit, profile.prepare_at_once) == (("amx", "vnni"), "reviews", 4000, 2)
    with pytest.raises(UsageError, match="prepare_at_once"):
        dataclasses.replace(profile, prepare_at_once=0)


def test_packages_of_our_engine_stand_beside_what_is_compiled() -> None:
    plan = matrix.plan(make(), Overrides(engines=("int8", "torchao"), deploys=("aoti", "jit")), XEON, CATALOG)
    measured = [p.cell for p in plan.cells if p.skip_reason is None]
    ours = [cell for cell in measured if cell.engine == "int8" and cell.deploy == "jit"]
    packaged = [cell for cell in measured if cell.deploy == "aoti"]
    assert ours and packaged == [dataclasses.replace(cell, deploy="aoti") for cell in ours]
    reasons = {p.skip_reason for p in plan.cells if p.cell.engine == "torchao" and p.cell.deploy == "aoti"}
    assert reasons == {"deploy aoti is measured for engine int8 alone"}


def test_the_baseline_is_compiled_never_a_package() -> None:
    plan = matrix.plan(make(), Overrides(recipes=("fp32",), deploys=("aoti", "jit")), XEON, CATALOG)
    assert [(p.cell.deploy, matrix.is_baseline(p.cell)) for p in plan.cells][:2] == [("jit", True), ("aoti", False)]


def test_multi_is_measured_where_its_instances_have_cpus_of_their_own() -> None:
    overrides = Overrides(scenarios=("multi:2x1:b8:s128",))
    assert keys(matrix.plan(make(), overrides, XEON, CATALOG, host_cpus=2))
    assert not keys(matrix.plan(make(), overrides, XEON, CATALOG, host_cpus=1))


def test_synthetic_weights_are_not_judged() -> None:
    plan = matrix.plan(make(models=("minilm", "bert-large")), Overrides(), XEON, CATALOG)
    assert {(p.cell.model, p.cell.task) for p in plan.cells} == {("minilm", "reviews"), ("bert-large", None)}
    assert any("bert-large" in notice for notice in plan.notices)


def test_a_folder_or_a_hub_id_passes_as_a_model() -> None:
    plan = matrix.plan(make(), Overrides(models=("org/some-model",)), XEON, CATALOG)
    assert matrix.parse_cell(keys(plan)[0]).model == "org/some-model"


def test_shards_partition_the_groups_and_do_not_move() -> None:
    profile = make(models=("minilm", "bert-large"), isas=XEON)
    whole = keys(matrix.plan(profile, Overrides(), XEON, CATALOG))
    parts = [keys(matrix.plan(profile, Overrides(shard=(i, 3)), XEON, CATALOG)) for i in (1, 2, 3)]
    assert sorted(key for part in parts for key in part) == sorted(whole)
    assert sum(bool(part) for part in parts) > 1
    smaller = make(models=("minilm",), isas=XEON)
    for i, part in enumerate(parts, start=1):
        moved = set(keys(matrix.plan(smaller, Overrides(shard=(i, 3)), XEON, CATALOG))) - set(part)
        assert not moved


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="i/n"):
        matrix.parse_shard(text)


def test_a_shard_is_read() -> None:
    assert matrix.parse_shard("2/4") == (2, 4)


def test_bf16_is_brief_where_it_is_emulated() -> None:
    def brief(recipe: str, isa: str) -> bool:
        return matrix.is_brief(Cell("minilm", "int8", recipe, isa, "single:s128"))

    assert [brief("bf16", isa) for isa in XEON] == [False, True, True, True]
    assert not brief("fp32", "avx2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[p]\nabout = ""\nmodels = []\n', "incomplete"),
        ('[p]\nabout = ""\nspeed = 1\n', "unknown fields speed"),
        (
            '[p]\nabout=""\nmodels=["m"]\nrecipes={}\nisa=["amx"]\nscenarios=["single:s8"]\nbudget={roundz=1}\n',
            "profile 'p' is incomplete or wrong",
        ),
    ],
)
def test_a_wrong_profile_names_the_field(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        matrix.parse_profiles(text)


def test_a_budget_that_times_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        Budget(rounds=0)
    with pytest.raises(UsageError):
        Budget(min_iterations=10, max_iterations=5)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from harness import matrix\n"
        "matrix.plan(matrix.get_profile('quick'), matrix.Overrides(), ('amx', 'avx2'),"
        " matrix.Catalog(('minilm',), ('reviews',)))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bf16_and_fp32_stand_beside_int8_wherever_speed_is_the_question() -> None:
    for name, profile in matrix.load_profiles().items():
        ours = profile.recipes.get("int8", ())
        if name != "smoke" and set(ours) & set(profile.gated):
            assert {"fp32", "bf16"} <= set(ours), name
