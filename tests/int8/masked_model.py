"""A small quantized encoder in a process of its own, under that process's ISA; prints as JSON what it used and gave.

Started by test_masks.py. With ``deny-amx`` the process first gives up the right to ask for AMX tiles.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import amx_denial

if "deny-amx" in sys.argv:
    amx_denial.deny()

from int8 import isa
from int8.errors import IsaError

isa.enforce()

import torch  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

BEFORE = inductor_config.get_config_copy()

from small_encoders import Encoder, make_batch, sqnr_db  # noqa: E402

import int8  # noqa: E402
from int8 import evidence, kernels  # noqa: E402
from int8.kernels.layout import KERNELS, KERNELS_7BIT, layout_of  # noqa: E402

M, N, K = 65, 70, 772


def encoder() -> dict[str, Any]:
    """Compiled against eager, and both against floating point."""
    torch.manual_seed(0)
    model, calibration = Encoder().eval(), [make_batch(4, 12, seed=1)]
    quantized = int8.quantize(model, "sq-static", calibration)
    compiled, batch = int8.compile(quantized, dynamic=False), make_batch(3, 9, seed=5)
    found = evidence.collect(quantized, compiled, batch)
    result, reference = compiled(**batch).float(), model(**batch)
    return {
        "isa_effective": found.isa_effective,
        "amx_permission": found.amx_permission,
        "weight_bits": found.weight_bits,
        "linears": [found.quantized_linears, found.fused_linears],
        "kernels": dict(found.kernels),
        "sqnr_db": {
            "compiled against eager": sqnr_db(quantized(**batch), result),
            "compiled": sqnr_db(reference, result),
            "eager": sqnr_db(reference, quantized(**batch)),
        },
    }


def wrong_products() -> dict[str, int]:
    """How many products of each kernel differ from whole-number arithmetic, at random and at the ends of the range."""
    kernels.load()
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator)
    wide = torch.randint(-128, 128, (N, K), dtype=torch.int8, generator=generator)
    levels[0], levels[1] = 127, -128
    wide[0], wide[1] = 127, -128
    # What adds pairs of unsigned x signed products in 16 bit is given 7-bit weights.
    narrow, mask = wide.clamp(-63, 63), isa.effective()
    wrong = {name: _differences(levels, wide, _own(levels, wide, name)) for name in KERNELS[mask]}
    wrong |= {name: _differences(levels, narrow, _own(levels, narrow, name)) for name in KERNELS_7BIT.get(mask, ())}
    weight = wide if mask in ("amx", "vnni") else narrow
    return wrong | {"onednn": _differences(levels, weight, _onednn((levels.int() + 128).to(torch.uint8), weight))}


def _differences(levels: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> int:
    return int((result != levels.double() @ weight.double().t()).sum())


def _own(levels: torch.Tensor, weight: torch.Tensor, kernel: str) -> torch.Tensor:
    packed = torch.ops.int8.pack(weight, layout_of(kernel))
    nothing = (None, None, None, None, "none", None, None, None, None, False)
    result: torch.Tensor = torch.ops.int8.gemm(
        levels, [packed], [weight.shape[0]], torch.ones(weight.shape[0]), *nothing, torch.float32, kernel
    )
    return result


def _onednn(unsigned: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed = torch.ops.onednn.qlinear_prepack(weight, list(unsigned.shape))
    result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, packed, torch.ones(weight.shape[0]), None, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


def capabilities() -> dict[str, Any]:
    """What each layer says of this process's instructions."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torchao.utils import should_reduce_range

    return {
        "report": isa.describe(),
        "native": isa.resolve("native"),
        "torchao reduces the range": should_reduce_range(torch.device("cpu")),
        "inductor": str(pick_vec_isa()),
        "amx by name": _refusal(),
        "amx kernel": _kernel_refusal(),
    }


def _refusal() -> str | None:
    try:
        isa.resolve("amx")
    except IsaError as error:
        return str(error)
    return None


def _kernel_refusal() -> str | None:
    if isa.effective() == "amx":
        return None
    try:
        _own(torch.zeros(1, 64, dtype=torch.int8), torch.zeros(16, 64, dtype=torch.int8), "int8:amx")
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def main() -> None:
    found: dict[str, Any] = encoder()
    # The kernel would ask for the permission whose absence is the proof of a mask: only where it is denied anyway.
    after = inductor_config.get_config_copy()
    found["settings changed"] = [name for name, value in BEFORE.items() if after[name] != value]
    found["wrong products"] = wrong_products()
    found["permission at the end"] = isa.amx_permission()
    found["denied"] = "deny-amx" in sys.argv and amx_denial.is_denied()
    if found["denied"]:
        found["capabilities"] = capabilities()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
