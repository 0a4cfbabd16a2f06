"""`harness roofline`: measurements set against roofs, the file that the site reads, and the verb on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from samples import record

from harness import cli, roofline_report
from harness.errors import UsageError
from harness.peaks import Peaks, Rate, WorkingSets
from harness.records import Cell, Record, Speedup, TimeSplit
from harness.roofline import EncoderShape
from harness.roofline_report import Question, Report, Section
from harness.time_split import Kernel
from int8 import isa

SHAPE = EncoderShape(layers=6, hidden=384, intermediate=1536, heads=12)
PEAKS = Peaks(
    host="aaaaaaaaaaaa",
    isa="vnni",
    threads=2,
    measured_at=1.0,
    rates={
        "int8_vnni": Rate(1.6e12, 0.01),
        "fp32_avx512": Rate(0.4e12, 0.01),
        "l2_read": Rate(200e9, 0.02),
        "l3_read": Rate(50e9, 0.02),
        "memory_read": Rate(20e9, 0.02),
    },
    sets=WorkingSets(1, 1, 1),
    l2_bytes=4 << 20,
    l3_bytes=480 << 20,
)


def cell(recipe: str, isa_name: str = "vnni") -> Cell:
    return Cell("minilm", "int8", recipe, isa_name, "offline:b8:s128", compute_dtype="fp32")


def measured(recipe: str, split: TimeSplit | None, speedup: float, linear: float) -> Record:
    changes = {"speedup": Speedup(speedup), "linear_speedup": Speedup(linear, (linear / 2, linear * 2))}
    return dataclasses.replace(record(cell=cell(recipe)), time_split_s=split, **changes)  # type: ignore[arg-type]


FP32 = measured("fp32", TimeSplit(0.080, 0.012, 0.008), 1.0, 1.0)
STATIC = measured("sq-static", TimeSplit(0.025, 0.010, 0.006), 2.4, 3.2)
KERNELS = {
    "fp32": (Kernel("mkl::_mkl_linear", "linear", ((1024, 384), (9, 1), (1536, 384)), 6, 0.004),),
    "sq-static": (Kernel("onednn::qlinear_pointwise", "linear", ((1024, 384), (384, 1536), (1536,)), 6, 0.001),),
}


def report(*records: Record) -> Report:
    found = roofline_report.recipe_reports(records, KERNELS, SHAPE, roofline_report.machine(PEAKS))
    section = Section(PEAKS, "offline:b8:s128", "0123", 2.0, SHAPE, found)
    return Report("minilm", PEAKS.host, "a CPU", (section,))


def test_a_recipes_ceiling_takes_roofs_and_the_best_rest() -> None:
    fp32, static = report(FP32, STATIC).sections[0].recipes
    assert fp32.ceiling is None
    ceiling = static.ceiling
    assert ceiling is not None
    assert ceiling.linear_share == pytest.approx(0.8)
    assert ceiling.linear_gain == pytest.approx(4.0)  # both compute-bound: the ratio of the peaks
    assert ceiling.rest_gain == pytest.approx(0.020 / 0.016)
    assert ceiling.ceiling == pytest.approx(1 / (0.8 / 4 + 0.2 / 1.25))
    assert ceiling.reached == pytest.approx(2.4 / ceiling.ceiling)
    assert ceiling.linear_speedup == 3.2


def test_a_rest_that_got_slower_is_no_ceiling() -> None:
    slower = dataclasses.replace(STATIC, time_split_s=TimeSplit(0.025, 0.012, 0.020))
    assert roofline_report.rest_gain(slower, FP32, [FP32, slower]) == 1.0


def test_without_a_split_of_fp32_there_is_no_ceiling() -> None:
    unsplit = dataclasses.replace(FP32, time_split_s=None)
    assert report(unsplit, STATIC).sections[0].recipes[1].ceiling is None


def test_measured_products_stand_under_their_roofs_the_others_without_a_measurement() -> None:
    static = report(FP32, STATIC).sections[0].recipes[1]
    timed = [point for point in static.points if point.seconds is not None]
    assert [(point.product.label, point.dtype, point.peak) for point in timed] == [("first FFN linear", "int8", 1.6e12)]
    assert timed[0].measured == pytest.approx(2 * 1024 * 1536 * 384 / 0.001)
    assert timed[0].fraction == pytest.approx(timed[0].measured / timed[0].attainable)
    attention = [point for point in static.points if point.product.kind == "attention"]
    assert {point.dtype for point in attention} == {"fp32"}
    assert len(attention) == 3


def test_emulated_bf16_has_fp32s_roof_and_no_peak_of_its_own() -> None:
    assert roofline_report.machine(PEAKS).operations["bf16"] == 0.4e12
    peaks = roofline_report.as_json(report(FP32))["sections"][0]["peaks"]
    assert set(peaks["operations"]) == {"int8", "fp32"}


def test_the_file_has_what_its_description_names(tmp_path: Path) -> None:
    path = roofline_report.save(report(FP32, STATIC), tmp_path)
    assert path == tmp_path / "analyses" / "roofline-minilm-aaaaaaaaaaaa.json"
    data = json.loads(path.read_text())
    assert set(data) == {"schema_version", "model", "host", "cpu", "sections"}
    (section,) = data["sections"]
    assert set(section) == {"isa", "scenario", "threads", "commit", "measured_at", "shape", "peaks", "recipes"}
    assert set(section["peaks"]) == {"measured_at", "rates", "operations", "bandwidth", "capacity"}
    fp32, static = section["recipes"]
    assert static["time_split_s"] == {"linear": 0.025, "attention": 0.010, "other": 0.006}
    assert static["linear_speedup"] == {"value": 3.2, "ci95": [1.6, 6.4]}
    assert fp32["ceiling"] is None
    gains = {"linear_share", "linear_gain", "rest_gain"}
    assert set(static["ceiling"]) == gains | {"ceiling", "at_roof", "speedup", "linear_speedup", "reached"}
    wanted = (
        "label kind m n k batch calls dtype operations bytes intensity weights_from activations_from bandwidth peak "
        "balance attainable bound seconds ops_per_s fraction"
    )
    description = " ".join((roofline_report.__doc__ or "").split())
    for point in static["points"]:
        assert set(point) == set(wanted.split())
    for name in {*wanted.split(), *section, *section["peaks"], *static, *static["ceiling"]}:
        assert name in description


def test_sections_of_other_isas_stay_and_the_same_is_replaced(tmp_path: Path) -> None:
    first = report(FP32, STATIC)
    roofline_report.save(first, tmp_path)
    other = dataclasses.replace(PEAKS, isa="avx512")
    section = dataclasses.replace(first.sections[0], peaks=other)
    roofline_report.save(dataclasses.replace(first, sections=(section,)), tmp_path)
    again = dataclasses.replace(first.sections[0], commit="4567")
    path = roofline_report.save(dataclasses.replace(first, sections=(again,)), tmp_path)
    found = [(section["isa"], section["commit"]) for section in json.loads(path.read_text())["sections"]]
    assert found == [("avx512", "0123"), ("vnni", "4567")]
    path.write_text("{torn")
    assert len(json.loads(roofline_report.save(first, tmp_path).read_text())["sections"]) == 1


def test_a_models_folder_is_no_folder_of_the_store(tmp_path: Path) -> None:
    path = roofline_report.save(dataclasses.replace(report(FP32), model="../my/model"), tmp_path)
    assert path.parent == tmp_path / "analyses"


def test_the_tables_show_peaks_products_split_and_ceiling() -> None:
    console = Console(width=240)
    with console.capture() as captured:
        console.print(roofline_report.as_table(report(FP32, STATIC)))
    text = captured.get()
    for words in (
        "INT8, AVX512-VNNI",
        "1,600.0 GOP/s",
        "20.0 GB/s",
        "1024 x 1536 x 384",
        "25.00 ms (61%)",
        "2.78x",
        "86%",
    ):
        assert words in text
    assert "note: " not in text  # peaks whose windows agree


def test_disturbed_peaks_are_said() -> None:
    noisy = dataclasses.replace(PEAKS, rates={**PEAKS.rates, "int8_vnni": Rate(1.6e12, 0.3)})
    section = dataclasses.replace(report(FP32).sections[0], peaks=noisy)
    console = Console(width=240)
    with console.capture() as captured:
        console.print(roofline_report.as_table(dataclasses.replace(report(FP32), sections=(section,))))
    assert "differ by up to 30%" in captured.get()


def test_a_failed_cell_is_shown_with_its_reason_and_decides_the_exit_code() -> None:
    failed = dataclasses.replace(record(cell=cell("sq-static")), status="failed", reason="it died")
    found = report(FP32, failed)
    assert found.exit_code == 2
    assert report(FP32, STATIC).exit_code == 0
    assert report(FP32, dataclasses.replace(failed, status="invalid")).exit_code == 3
    console = Console(width=240)
    with console.capture() as captured:
        console.print(roofline_report.as_table(found))
    assert "failed: minilm/int8/sq-static/vnni/offline:b8:s128: it died" in captured.get()


def test_bf16_is_measured_by_itself_only_where_it_is_native() -> None:
    assert roofline_report.default_recipes("amx") == ("fp32", "bf16", "sq-static", "sq-dynamic")
    assert roofline_report.default_recipes("avx2") == ("fp32", "sq-static", "sq-dynamic")


def test_fp32_is_always_there_and_wrong_names_are_refused_before_anything_runs() -> None:
    (options,) = roofline_report.plans(Question("tiny-bert", ("avx2",), ("sq-dynamic",))).values()
    assert options.profile.recipes == {"int8": ("fp32", "sq-dynamic")}
    assert options.profile.split
    for wrong in (
        Question("tiny-bertt"),
        Question("tiny-bert", recipes=("sq",)),
        Question("tiny-bert", scenario="multi:2x1:b8:s128"),
        Question("tiny-bert", scenario="offline"),
    ):
        with pytest.raises(UsageError):
            roofline_report.plans(wrong)


def test_the_verb_measures_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["roofline", "--model", "tiny-bert", "--recipes", "fp32", "--scenario", "offline:b2:s16", "--format", "json"]
    assert cli.main([*line, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert "written to " in printed.err
    (path,) = (tmp_path / "analyses").iterdir()
    assert json.loads(path.read_text()) == data
    (section,) = data["sections"]
    assert section["isa"] == isa.best()
    assert section["shape"] == {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4}
    (fp32,) = section["recipes"]
    assert fp32["status"] == "ok"
    assert all(fp32["time_split_s"][part] > 0 for part in ("linear", "attention", "other"))
    assert fp32["linear_speedup"]["value"] == 1.0
    linears = [point for point in fp32["points"] if point["kind"] == "linear"]
    assert all(point["ops_per_s"] > 0 for point in linears)  # every linear of the model was found in the profile


@pytest.mark.parametrize("line", [["--model", "tiny-bertt"], ["--isa", "sse"], ["--recipes", "fp32,"]])
def test_wrong_use_exits_64(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["roofline", *line]) == 64
    assert capsys.readouterr().err.startswith("error: ")
