"""Other runtimes as engines: when they are skipped and why, and each on tiny encoders where it is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness import engines, processes, runner
from harness.engines import PEER_RECIPES, openvino, peer
from harness.errors import HarnessError, UsageError
from harness.matrix import Catalog, Overrides, get_profile, plan
from harness.processes import WorkerHandle
from harness.records import Cell, Evidence
from harness.worker import WorkerSpec
from int8 import isa
from int8 import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnx", "onnxruntime"), "ctranslate2": ("ctranslate2",)}
PAIRS = [(engine, recipe) for engine, listed in PEER_RECIPES.items() for recipe in listed if recipe != "bf16"]


def missing(engine: str) -> list[str]:
    return [package for package in PACKAGES[engine] if importlib.util.find_spec(package) is None]


def every_package(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if there else None)


def skip_reason(engine: str, recipe: str, name: str, deploy: str = "jit") -> str | None:
    return engines.get(engine).unsupported(recipes.get(recipe), name, deploy)


@pytest.mark.parametrize("engine", PEER_RECIPES)
def test_what_a_peer_offers_and_what_it_does_not(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_package(monkeypatch, there=True)
    monkeypatch.setattr(isa, "supported", lambda: ("amx", "vnni", "avx512", "avx2"))
    offered = [name for name in recipes.names() if skip_reason(engine, name, "amx") is None]
    assert sorted(offered) == sorted(PEER_RECIPES[engine])
    assert f"{engine} has no recipe llm-int8" in str(skip_reason(engine, "llm-int8", "amx"))
    assert "aoti" in str(skip_reason(engine, "fp32", "amx", "aoti"))


@pytest.mark.parametrize("engine", PEER_RECIPES)
def test_without_its_packages_a_peer_says_what_to_run(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_package(monkeypatch, there=False)
    reason = skip_reason(engine, "fp32", isa.best())
    assert reason is not None and "run make peers" in reason
    assert all(package in reason for package in PACKAGES[engine])


def test_onnxruntime_is_measured_under_the_hosts_own_isa_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    every_package(monkeypatch, there=True)
    monkeypatch.setattr(isa, "supported", lambda: ("amx", "vnni", "avx512", "avx2"))
    assert skip_reason("onnxruntime", "dynamic", "amx") is None
    assert "cannot be masked" in str(skip_reason("onnxruntime", "dynamic", "vnni"))
    monkeypatch.setattr(isa, "supported", lambda: ("vnni", "avx512", "avx2"))
    assert skip_reason("onnxruntime", "dynamic", "vnni") is None
    assert skip_reason("openvino", "sq-static", "avx512") is None
    assert skip_reason("ctranslate2", "dynamic", "avx2") is None


def test_openvinos_silent_fp32_is_not_called_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    every_package(monkeypatch, there=True)
    assert "fp32" in str(skip_reason("openvino", "bf16", "avx2"))
    assert skip_reason("openvino", "bf16", "amx") is None


def test_cells_of_a_peer_that_is_not_installed_are_planned_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    every_package(monkeypatch, there=False)
    overrides = Overrides(models=("m",), engines=("openvino",), scenarios=("single:s8",), no_task=True)
    found = plan(get_profile("quick"), overrides, ("avx2",), Catalog(models=("m",)))
    assert [planned.cell.recipe for planned in found.cells] == list(PEER_RECIPES["openvino"])
    assert all(planned.skip_reason for planned in found.cells)


def test_an_unknown_engine_is_still_an_error() -> None:
    with pytest.raises(UsageError, match="known: int8, torchao, openvino, onnxruntime, ctranslate2"):
        engines.get("tvm")


# --- the environment --------------------------------------------------------------------------------------------------


def spec(engine: str, recipe: str, model: str = "tiny-bert", task: str | None = None) -> WorkerSpec:
    scenario = "offline:b2:s16"
    cpus = processes.worker_cpus()
    judged_in = scenario if task else None
    return WorkerSpec(model, engine, recipe, isa.best(), "jit", task, (scenario,), cpus, judged_in, 32)


def test_peers_start_in_this_environment_with_the_mask_and_without_gnus_pinning() -> None:
    """GNU's OpenMP would leave the main thread, and with it a peer's own pool, on one CPU."""
    ours = processes.worker_environment(spec("int8", "fp32"), {})
    theirs = processes.worker_environment(spec("openvino", "fp32"), {})
    assert "GOMP_CPU_AFFINITY" in ours and "GOMP_CPU_AFFINITY" not in theirs
    assert set(ours) - set(theirs) == {"GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
    assert theirs["ONEDNN_MAX_CPU_ISA"] == ours["ONEDNN_MAX_CPU_ISA"]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_peers_lock_adds_to_the_other_one_and_covers_the_extra() -> None:
    text = (ROOT / "requirements-peers.lock").read_text(encoding="utf-8")
    assert all(re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in text.splitlines())
    added, base = _pins("requirements-peers.lock"), _pins("requirements.lock")
    assert not set(added) & set(base)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["peers"]]
    assert {canonicalize_name(one.name) for one in extra} <= set(added)
    assert all(one.specifier.contains(added[canonicalize_name(one.name)]) for one in extra)


def test_the_locks_maker_lists_an_extra_alone() -> None:
    listed = subprocess.run(
        [sys.executable, ROOT / ".ci/list-wanted", "peers"], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == ["openvino", "nncf", "onnx", "onnxruntime", "ctranslate2"]


# --- what proves a cell -----------------------------------------------------------------------------------------------


def test_kernels_beyond_the_mask_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "best", lambda: "amx")
    peer.check_mask("openvino", "amx", {"brgemm_avx512_amx_I8": 1})
    peer.check_mask("openvino", "vnni", {"brgemm_avx512_vnni_I8": 1, "gemm_mlas_f32": 1})
    for name, kernel in (
        ("vnni", "brgemm_avx512_amx_I8"),
        ("avx512", "brgemm_avx512_vnni_I8"),
        ("avx2", "jit_avx512_f32"),
        ("avx2", "gemm_mlas_f32"),
    ):
        with pytest.raises(HarnessError, match=kernel):
            peer.check_mask("openvino", name, {kernel: 3})
    monkeypatch.setattr(isa, "best", lambda: "avx2")
    peer.check_mask("openvino", "avx2", {"gemm_mlas_f32": 1})


def test_openvinos_linears_are_counted_by_the_modules_they_came_from() -> None:
    def layer(kind: str, precision: str, names: str) -> dict[str, str]:
        return {"layerType": kind, "primitiveType": "k", "runtimePrecision": precision, "originalLayersNames": names}

    joint = "__module.layer.0.query/aten::linear/MatMul,__module.layer.0.key/aten::linear/Add"
    layers = [
        layer("FullyConnected", "i8", joint),
        layer("FullyConnected", "u8", "__module.layer.0.output.dense/aten::linear/MatMul/DequantizationMultiply"),
        layer("FullyConnected", "f32", "__module.layer.1.query/aten::linear/MatMul"),
        layer("MatMul", "i8", "__module.layer.0.attention/aten::matmul/MatMul"),
        layer("Const", "i8", "__module.layer.1.key/aten::linear/weights"),
    ]
    assert openvino.linears_in(layers, ("i8", "u8")) == {"layer.0.query", "layer.0.key", "layer.0.output.dense"}
    assert openvino.count_kernels(layers) == {"openvino:FullyConnected:k": 3, "openvino:MatMul:k": 1}


@pytest.mark.parametrize(
    ("weights", "task", "cosine", "fails"),
    [
        ("synthetic", None, 0.97, True),
        ("synthetic", None, 0.99, False),
        ("synthetic", None, float("nan"), True),
        ("real", None, 0.97, False),
        ("real", None, 0.3, True),
        ("real", "reviews", 0.3, False),
        ("synthetic", None, None, False),
    ],
)
def test_a_cell_that_computes_something_else_fails(
    weights: str, task: str | None, cosine: float | None, fails: bool
) -> None:
    cell = Cell("m", "openvino", "sq-static", "vnni", "single:s8", task=task, weights=weights)  # type: ignore[arg-type]
    evidence = Evidence(12, 12, isa_effective="vnni", amx_permission=False, fp32_cosine=cosine)
    reason = runner.disproof(cell, evidence)
    assert (reason is not None) == fails
    assert reason is None or "cosine" in reason


# --- each on tiny encoders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "recipe"), PAIRS)
def test_a_peer_computes_the_model_and_proves_int8(engine: str, recipe: str, tmp_path: Path) -> None:
    if missing(engine):
        pytest.skip(f"{', '.join(missing(engine))} is not installed: run make peers")
    worker = WorkerHandle(spec(engine, recipe), tmp_path / "log")
    try:
        ready = worker.prepare()
        assert ready["seconds"]["load"] > 0
        scenario = "offline:b2:s16"
        evidence = worker.request("compile", scenario=scenario)["evidence"]
        quantized = recipes.get(recipe).quantized
        assert (evidence["linears"], evidence["quantized_linears"]) == (12, 12 if quantized else 0)
        assert evidence["fp32_cosine"] > (0.999 if quantized else 0.9999999)
        assert evidence["isa_effective"] == isa.best()
        memory = worker.request("evidence", scenario=scenario)["memory"]
        assert memory["linear_weight_bytes"] == (1 if quantized else 4) * 2 * (4 * 64 * 64 + 2 * 64 * 128)
        slices = worker.request("time", scenario=scenario, seconds=0.05, min_iterations=3, max_iterations=50)
        assert min(slices["samples_s"]) > 0
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("engine", "recipe", "model"),
    [
        ("openvino", "sq-static", "tiny-xlmr"),
        ("onnxruntime", "static", "tiny-distilbert"),
        ("ctranslate2", "dynamic", "tiny-xlmr"),
        ("ctranslate2", "dynamic", "tiny-distilbert"),
    ],
)
def test_a_peer_is_judged_on_padded_text_like_any_engine(engine: str, recipe: str, model: str, tmp_path: Path) -> None:
    if missing(engine):
        pytest.skip(f"{', '.join(missing(engine))} is not installed: run make peers")
    worker = WorkerHandle(spec(engine, recipe, model, "tiny-reviews"), tmp_path / "log")
    scenario = "offline:b2:s16"
    try:
        worker.prepare()
        evidence = worker.request("compile", scenario=scenario)["evidence"]
        assert evidence["quantized_linears"] == 12 and evidence["fp32_cosine"] is None
        answer = worker.request("evaluate", scenario=scenario, limit=32, path=str(tmp_path / "out.npz"))
        assert answer["accuracy"]["n"] == 32
        assert answer["accuracy"]["sqnr_db"] > 20
    finally:
        worker.kill()
