"""Packages: equal outputs in a process that knows neither transformers nor the model, and refusals in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from small_encoders import Encoder, make_batch
from torch import Tensor, nn

import int8
from int8 import evidence, package_info, packaging
from int8.errors import FusionError, PackageError, QuantizationError

#: One package a recipe is built for the whole file: building is what takes long.
CALIBRATION = [make_batch(4, 12, pads=3, seed=1), make_batch(3, 7, seed=2)]
BATCH = make_batch(4, 12, pads=3, seed=3)


class Named(nn.Module):
    """An encoder that answers in a dict, with a tuple inside, as transformers' output classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, object]:
        logits = self.encoder(input_ids)
        masked = logits * attention_mask[..., None]
        return {"logits": logits, "nothing": None, "states": (masked, masked.sum(dim=1))}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def static(model: nn.Module) -> nn.Module:
    return int8.quantize(model, "sq-static", CALIBRATION)


@pytest.fixture(scope="module")
def package(static: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "static.pt2"
    int8.export(static, BATCH, path)
    return path


@pytest.fixture
def copied(package: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copied.pt2"
    target.write_bytes(package.read_bytes())
    return target


def run_in_a_fresh_process(package: Path, inputs: dict[str, Tensor], folder: Path) -> tuple[object, str]:
    """The package's output in a process without the model's code, a compiler, or anything in int8's cache; and what
    that process counts of its linears.
    """
    torch.save(inputs, folder / "inputs.pt")
    script = f"""
        import sys
        import torch, int8
        package = int8.load_package({str(package)!r})
        torch.save(package(**torch.load({str(folder / "inputs.pt")!r}, weights_only=True)), {str(folder / "out.pt")!r})
        assert not {{"transformers", "small_encoders"}} & set(sys.modules), "the model's code was imported"
        print(package.fused_linears, "of", package.quantized_linears)
    """
    environment = {**os.environ, "INT8_CACHE": str(folder / "cache"), "PATH": ""}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt", weights_only=True), done.stdout.strip()


def test_a_fresh_process_needs_no_model_code(static: nn.Module, package: Path, tmp_path: Path) -> None:
    output, counts = run_in_a_fresh_process(package, BATCH, tmp_path)
    # The same passes, kernels and levels: what remains is the order in which FP32 sums are taken.
    torch.testing.assert_close(output, int8.compile(static, dynamic=False)(**BATCH), atol=1e-6, rtol=0)
    assert counts == "4 of 4"


def test_it_says_what_it_is(package: Path, static: nn.Module) -> None:
    info = package_info.describe(package)
    assert (info.isa, info.torch) == (int8.isa.effective(), torch.__version__)  # type: ignore[attr-defined]
    assert info.recipe is not None and info.recipe["name"] == "sq-static"
    assert info.weight_bits == static.layers[0].up.weight.bits  # type: ignore[union-attr,index]
    assert (info.linears, info.quantized_linears, info.fused_linears) == (5, 4, 4)
    assert info.inputs == tuple(package_info.InputSpec(name, "int64", (4, 12)) for name in BATCH)
    assert info.cpu_model and info.threads >= 1 and info.compute_dtype in ("fp32", "bf16")


def test_evidence_names_its_kernels(package: Path, static: nn.Module) -> None:
    found = evidence.collect(static, int8.load_package(package), BATCH)
    assert found.fused_linears == found.quantized_linears == 4
    assert sum(found.kernels.values()) >= 4
    assert not any("ref" in name for name in found.kernels)


def test_what_it_was_not_built_for_is_refused(package: Path) -> None:
    loaded = int8.load_package(package)
    with pytest.raises(PackageError, match="takes the inputs input_ids, attention_mask, not input_ids"):
        loaded(input_ids=BATCH["input_ids"])
    with pytest.raises(PackageError, match=r"shape \(4, 11\); this package takes \(4, 12\)"):
        loaded(**{name: tensor[:, 1:] for name, tensor in BATCH.items()})
    with pytest.raises(PackageError, match=r"is torch\.int32"):
        loaded(**{name: tensor.int() for name, tensor in BATCH.items()})
    turned = {name: tensor.t().contiguous().t() for name, tensor in BATCH.items()}
    assert torch.equal(loaded(**turned), loaded(**BATCH))
    assert torch.equal(loaded(*BATCH.values()), loaded(**BATCH))


def test_any_batch_and_length_in_one_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized = int8.quantize(Named().eval(), "sq-dynamic", CALIBRATION)
    info = int8.export(quantized, make_batch(1, 9), tmp_path / "dynamic.pt2", dynamic=True)
    assert info.inputs[0].shape == ("batch", "sequence")
    loaded = int8.load_package(tmp_path / "dynamic.pt2")
    for batch, length in ((1, 9), (5, 3), (2, 40), (1, 1)):
        inputs = make_batch(batch, length, pads=length // 3, seed=length)
        found, expected = loaded(**inputs), quantized(**inputs)
        assert found.keys() == {"logits", "states"}
        torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-5, rtol=0)
        torch.testing.assert_close(found["states"], expected["states"], atol=1e-5, rtol=1e-5)
    with pytest.raises(PackageError, match=r"takes \(batch, sequence\)"):
        loaded(input_ids=make_batch(2, 9)["input_ids"], attention_mask=make_batch(1, 9)["attention_mask"])
    inputs = make_batch(3, 6)
    output, counts = run_in_a_fresh_process(tmp_path / "dynamic.pt2", inputs, tmp_path)
    torch.testing.assert_close(output["logits"], loaded(**inputs)["logits"], atol=1e-6, rtol=0)
    assert counts == "4 of 4"


def test_operators_of_another_build_are_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/somewhere/kernels/0123/int8_ops.so"})
    library = package_info.Library("int8_ops.so", "4567", "0" * 64)
    with pytest.raises(
        PackageError, match=r"needs int8_ops\.so of build 4567, and this process has loaded that of 0123"
    ):
        packaging._load_library(copied, library)
    packaging._load_library(copied, dataclasses.replace(library, key="0123"))


def test_floating_point_models_are_packaged_as_well(model: nn.Module, tmp_path: Path) -> None:
    info = int8.export(model, BATCH, tmp_path / "float.pt2", recipe="fp32")
    assert (info.quantized_linears, info.weight_bits) == (0, None)
    torch.testing.assert_close(int8.load_package(tmp_path / "float.pt2")(**BATCH), model(**BATCH), atol=1e-5, rtol=1e-5)


def restate(path: Path, **changes: object) -> None:
    """The package with other words in its manifest."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = next(name for name in parts if name.endswith(package_info.MANIFEST_FILE))
    parts[manifest] = json.dumps(json.loads(parts[manifest]) | changes).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.1.0"}, "built with torch 2.1.0, this is torch"),
        ({"isa": "avx1024"}, "ISA 'avx1024', which this version does not know"),
        ({"cpu_flags": ["avx512_from_tomorrow"]}, "lacks avx512_from_tomorrow"),
        ({"schema": 99}, "schema 99, this version reads 1"),
        ({"inputs": None}, "manifest cannot be read"),
    ],
)
def test_foreign_packages_are_refused_with_the_reason(copied: Path, changes: dict[str, object], said: str) -> None:
    restate(copied, **changes)
    with pytest.raises(PackageError, match=said):
        int8.load_package(copied)


def test_an_isa_that_the_host_lacks_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: "this CPU lacks amx_tile" if name == "amx" else None)
    restate(copied, isa="amx")
    with pytest.raises(PackageError, match="built for ISA 'amx': this CPU lacks amx_tile"):
        int8.load_package(copied)


def test_a_process_held_to_another_isa_is_told_how(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    monkeypatch.setattr("int8.isa.effective", lambda: "amx")
    restate(copied, isa="vnni")
    with pytest.raises(PackageError, match="runs 'amx'; start it with INT8_ISA=vnni"):
        int8.load_package(copied)


def test_damage_is_one_clear_line(copied: Path, tmp_path: Path) -> None:
    whole = copied.read_bytes()
    copied.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PackageError, match="not a whole package"):
        int8.load_package(copied)
    middle = len(whole) // 2
    copied.write_bytes(
        whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 64]) + whole[middle + 64 :]
    )
    with pytest.raises(PackageError, match=r"is damaged"):
        int8.load_package(copied)
    with zipfile.ZipFile(copied, "w") as archive:
        archive.writestr("archive/archive_format", "pt2")
    with pytest.raises(PackageError, match=r"holds no int8\.json"):
        int8.load_package(copied)
    with pytest.raises(PackageError, match="there is no package"):
        int8.load_package(tmp_path / "nothing.pt2")


class Branching(nn.Module):
    """Decides by its values, which no single graph can."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


def test_a_failed_build_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"of yesterday")
    with pytest.raises(PackageError, match="Branching cannot be traced as one graph"):
        int8.export(Branching().eval(), torch.randn(2, 3), path)
    with pytest.raises(PackageError, match=r"name ends in \.pt2"):
        int8.export(Encoder().eval(), BATCH, tmp_path / "model.bin")
    with pytest.raises(QuantizationError, match="training mode"):
        int8.export(Encoder(), BATCH, path)
    with pytest.raises(PackageError, match="tensors only"):
        int8.export(Encoder().eval(), {"input_ids": BATCH["input_ids"], "attention_mask": None}, path)  # type: ignore[dict-item]
    assert path.read_bytes() == b"of yesterday"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unfused_linear_fails_the_build(tmp_path: Path) -> None:
    model = int8.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), "dynamic")
    x = torch.randn(2, 8).double()
    with warnings.catch_warnings(), pytest.raises(FusionError, match="1 of 1 calls"):
        warnings.simplefilter("ignore")
        int8.export(model, x, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
