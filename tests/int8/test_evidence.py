from __future__ import annotations

import torch
from small_encoders import Encoder

import int8
from int8 import evidence, isa


def test_evidence_of_a_quantized_model(encoder: Encoder, calibration: list[dict[str, torch.Tensor]]) -> None:
    quantized = int8.quantize(encoder, "sq-static", calibration)
    compiled = int8.compile(quantized, dynamic=False)
    found = evidence.collect(quantized, compiled, calibration[0])
    assert (found.linears, found.quantized_linears, found.fused_linears) == (5, 4, 4)
    assert found.isa_effective == isa.effective()
    assert found.weight_bits == (8 if isa.effective() in ("amx", "vnni") else 7)
    assert sum(found.kernels.values()) >= 4
    assert not any("ref" in name for name in found.kernels), "a reference kernel ran"
    if isa.effective() != "amx":
        assert not found.amx_permission
        assert not any("amx" in name for name in found.kernels)


def test_kernels_are_counted_by_name() -> None:
    weight = torch.randint(-63, 64, (16, 32), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    levels = torch.randint(0, 255, (4, 32), dtype=torch.uint8)

    def run() -> None:
        for _ in range(3):
            torch.ops.onednn.qlinear_pointwise(
                levels, 1.0, 128, packed, torch.ones(16), None, None, 1.0, 0, torch.float32, "none", [], ""
            )

    assert sum(evidence.onednn_kernels(run).values()) == 3


def test_standard_output_comes_back(capfd: object) -> None:
    evidence.onednn_kernels(lambda: print("inside"))
    print("after")
    assert "after" in capfd.readouterr().out  # type: ignore[attr-defined]
