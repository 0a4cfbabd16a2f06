"""Engines: what they support, their clocks, and upstream's path on a tiny model in a real worker."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import engines, processes
from harness.engines import Clocks
from harness.errors import UsageError
from harness.processes import WorkerHandle
from harness.worker import WorkerSpec
from int8 import isa
from int8 import recipe as recipes

torch = pytest.importorskip("torch")


def test_engines_are_listed_without_torch() -> None:
    code = (
        "import sys; from harness import engines; from int8 import recipe\n"
        "[engines.get(n).unsupported(recipe.get('fp32'), 'amx', 'jit') for n in engines.names()]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_engine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="known: int8, torchao"):
        engines.get("onednn")


@pytest.mark.parametrize("name", ["int8", "torchao"])
def test_every_engine_says_why_it_lacks_something(name: str) -> None:
    engine = engines.get(name)
    assert engine.name == name
    assert engine.unsupported(recipes.get("sq-static"), "vnni", "jit") is None
    assert ("aoti" in str(engine.unsupported(recipes.get("sq-static"), "vnni", "aoti"))) == (name != "int8")
    assert (engine.unsupported(recipes.get("bf16"), "amx", "jit") is None) == (name == "int8")


def test_clocks_keep_phases_apart() -> None:
    told: list[str] = []
    clock = Clocks(on_phase=told.append)
    with clock.measure("calibrate"):
        time.sleep(0.02)
        clock.switch("quantize")
    with clock.measure("quantize"):
        pass
    assert told == ["calibrate", "quantize", "quantize"]
    assert clock.seconds["calibrate"] >= 0.02 > clock.seconds["quantize"] >= 0
    with pytest.raises(RuntimeError, match="inside"), clock.measure("load"), clock.measure("compile"):
        pass
    with pytest.raises(RuntimeError, match="no running phase"):
        clock.switch("compile")


def test_a_failing_phase_stops_its_clock() -> None:
    clock = Clocks()
    with pytest.raises(ValueError, match="x"), clock.measure("load"):
        raise ValueError("x")
    with clock.measure("quantize"):
        pass
    assert set(clock.seconds) == {"load", "quantize"}


def test_calibration_batches_get_one_shape_for_upstreams_observer() -> None:
    from harness.engines.torchao import pad_to_one_shape

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(rows * length).reshape(rows, length) + 10
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    padded = pad_to_one_shape([batch(2, 4), batch(3, 2)], pad_id=7)
    assert {tuple(t.shape) for b in padded for t in b.values()} == {(3, 4)}
    assert torch.equal(padded[0]["input_ids"][2], padded[0]["input_ids"][0])  # filled up with its own first row
    assert padded[1]["input_ids"][0].tolist() == [10, 11, 7, 7]
    assert padded[1]["attention_mask"][0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-distilbert", "tiny-xlmr"])
def test_torchao_and_int8_quantize_the_same_linears(name: str) -> None:
    import int8
    from harness import models
    from harness.engines.torchao import encoder_linears
    from harness.matrix import Scenario

    model = models.load(name)
    batch = models.batch_inputs(model, Scenario.parse("offline:b2:s8"), 1)
    ours = int8.quantized_modules(int8.quantize(model.module, "dynamic", [batch]))
    assert sorted(encoder_linears(model.module)) == sorted(ours)
    assert len(ours) == 12


def test_memory_counts_tied_tensors_once_and_quantized_ones_inside() -> None:
    import int8
    from harness import models
    from harness.engines.int8 import module_memory
    from harness.matrix import Scenario

    model = models.load("tiny-bert")
    floats = module_memory(model.module)
    tied = copy.deepcopy(model.module)
    tied.second = tied.backbone  # type: ignore[assignment]
    assert module_memory(tied) == floats
    assert floats.linear_weight_bytes == 2 * (4 * 64 * 64 + 2 * 64 * 128) * 4
    batch = models.batch_inputs(model, Scenario.parse("offline:b2:s8"), 1)
    quantized = module_memory(int8.quantize(model.module, "sq-static", [batch]))
    assert quantized.linear_weight_bytes is not None
    # A byte a weight, and scales by row and factors by column, which weigh most on tiny models.
    assert 0.25 < quantized.linear_weight_bytes / floats.linear_weight_bytes < 0.32


@pytest.mark.parametrize("recipe", ["sq-static", "sq-dynamic"])
def test_upstreams_path_fuses_every_linear_and_stays_close_to_fp32(recipe: str, tmp_path: Path) -> None:
    scenario = "offline:b2:s16"
    spec = WorkerSpec(
        "tiny-bert",
        "torchao",
        recipe,
        isa.best(),
        "jit",
        "tiny-reviews",
        (scenario,),
        processes.worker_cpus(),
        scenario,
        32,
    )
    worker = WorkerHandle(spec, tmp_path / "log")
    try:
        ready = worker.prepare()
        assert {"load", "calibrate", "quantize"} <= set(ready["seconds"])
        evidence = worker.request("compile", scenario=scenario)["evidence"]
        assert evidence["fused_linears"] == evidence["quantized_linears"] == 12
        assert evidence["isa_effective"] == spec.isa
        assert evidence["weight_bits"] == recipes.get(recipe).resolve_weight_bits(spec.isa)
        answer = worker.request("evaluate", scenario=scenario, limit=32, path=str(tmp_path / "out.npz"))
        assert answer["accuracy"]["n"] == 32
        assert answer["accuracy"]["sqnr_db"] > 20
    finally:
        worker.kill()


def test_a_package_is_measured_and_judged_like_the_compiled_model(tmp_path: Path) -> None:
    scenario, cpus = "offline:b2:s16", processes.worker_cpus()
    spec = WorkerSpec(
        "tiny-bert", "int8", "sq-static", isa.best(), "aoti", "tiny-reviews", (scenario,), cpus, scenario, 32
    )
    assert spec.label.endswith("/aoti")
    worker = WorkerHandle(spec, tmp_path / "log")
    try:
        assert worker.prepare()["memory"]["linear_weight_bytes"] > 0
        compiled = worker.request("compile", scenario=scenario)
        assert compiled["seconds"] > 0
        evidence = compiled["evidence"]
        assert evidence["fused_linears"] == evidence["quantized_linears"] == 12
        assert evidence["isa_effective"] == spec.isa
        assert evidence["kernels"]
        samples = worker.request("time", scenario=scenario, seconds=0.1, min_iterations=2, max_iterations=4)
        assert len(samples["samples_s"]) >= 2
        answer = worker.request("evaluate", scenario=scenario, limit=32, path=str(tmp_path / "out.npz"))
        assert (answer["accuracy"]["n"], answer["accuracy"]["sqnr_db"] > 20) == (32, True)
    finally:
        worker.kill()
