"""A quantized model under every ISA that this host has, in a process for each, and without permission for AMX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from int8 import isa
from int8.kernels.layout import KERNELS, KERNELS_7BIT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: Masks whose test passed in this session.
PASSED: set[str] = set()


def kernel_of(mask: str) -> str:
    """Our likeliest kernel for weights as they are quantized for ``mask``."""
    return KERNELS_7BIT.get(mask, KERNELS[mask])[0]


def run(mask: str, *arguments: str) -> dict[str, Any]:
    """What masked_model.py prints in a process held to ``mask``, with our kernel of that ISA."""
    environment = isa.clean_environment() | isa.environment(mask)
    environment |= {
        "INT8_KERNEL": kernel_of(mask),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, str(HERE / "masked_model.py"), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], mask: str) -> None:
    """That our kernels of ``mask`` computed every quantized linear, and rightly."""
    assert found["isa_effective"] == mask
    assert found["linears"] == [4, 4]
    assert found["kernels"].get(kernel_of(mask)) == 4
    assert not any("ref" in name for name in found["kernels"]), "a reference kernel ran"
    others = {name.removeprefix("int8:").split("_")[0] for name in found["kernels"] if name.startswith("int8:")}
    assert others == {mask}, "a kernel of another ISA ran"
    assert set(found["wrong products"].values()) == {0}
    assert found["settings changed"] == []
    sqnr_db = found["sqnr_db"]
    assert sqnr_db["compiled against eager"] > (30 if mask == "amx" else 80)  # AMX recipes compute the rest in BF16
    assert abs(sqnr_db["compiled"] - sqnr_db["eager"]) < 1
    if mask != "amx":
        assert not found["permission at the end"], "an AMX instruction may have run"


@pytest.mark.parametrize("mask", isa.NAMES)
def test_a_quantized_encoder_under_each_mask(mask: str) -> None:
    """Kernels that are right on the tested ISA alone: pytorch/ao#4309, microsoft/onnxruntime#5849,
    pytorch/pytorch#136746, pytorch/FBGEMM#125; compiled and eager differ: pytorch/ao#4266; fusion that depends on what
    else was imported: pytorch/ao#4823; a reference kernel, or global settings, that nobody asked for.
    """
    reason = isa.why_unsupported(mask)
    if reason is not None:
        pytest.skip(reason)
    found = run(mask)
    check(found, mask)
    assert found["weight_bits"] == (8 if mask in ("amx", "vnni") else 7)
    PASSED.add(mask)


def test_no_mask_that_the_host_has_was_skipped(request: pytest.FixtureRequest) -> None:
    """CI that tried two of three ISAs let a broken third one pass: pytorch/ao#4309."""
    name = test_a_quantized_encoder_under_each_mask.__name__
    selected = {item.name for item in request.session.items}
    if not {f"{name}[{mask}]" for mask in isa.NAMES} <= selected:
        pytest.skip("only some of the masks were asked for")
    assert PASSED == _masks_of_this_cpu() == set(isa.supported())


def _masks_of_this_cpu() -> set[str]:
    """Read from the kernel's own words, beside :mod:`int8.isa`, so that a mistake there skips nothing silently."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    needs = {"avx2": "avx2", "avx512": "avx512bw", "vnni": "avx512_vnni", "amx": "amx_int8"}
    found = {mask for mask, flag in needs.items() if flag in flags}
    return found if isa.amx_grantable() else found - {"amx"}


def test_without_permission_for_amx_the_next_isa_runs() -> None:
    """AMX in CPUID that Linux does not grant ended others in SIGILL: kvcache-ai/ktransformers#320,
    ggml-org/llama.cpp#26954, uxlfoundation/oneDNN#5689. Where torchao asks CPUID and Inductor the kernel, they
    disagree; here all have one answer.
    """
    if not _has_seccomp():
        pytest.skip("this kernel has no seccomp filters")
    mask = next(name for name in isa.supported() if name != "amx")
    found = run(mask, "deny-amx")
    check(found, mask)
    assert found["denied"], "the filter does not work"
    capabilities = found["capabilities"]
    report = capabilities["report"]
    assert report["amx"] == ("denied" if "amx_tile" in isa.cpu_flags() else "absent")
    assert report["supported"] == [name for name in isa.supported() if name != "amx"]
    assert capabilities["native"] == mask
    assert "not available" in capabilities["amx by name"]
    assert capabilities["amx kernel"] is not None
    assert capabilities["torchao reduces the range"] == (mask != "vnni")
    assert "amx" not in capabilities["inductor"]


def _has_seccomp() -> bool:
    code = "import amx_denial; amx_denial.deny(); raise SystemExit(not amx_denial.is_denied())"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, check=False)
    return done.returncode == 0 or b"no seccomp filters" not in done.stderr


def test_denial_denies_nothing_else() -> None:
    """The filter leaves the question whether the permission is held, and every other call, alone."""
    if not _has_seccomp():
        pytest.skip("this kernel has no seccomp filters")
    code = (
        "import amx_denial; from int8 import isa; amx_denial.deny();"
        "print(isa.amx_permission(), isa.amx_grantable(), isa.describe()['amx'])"
    )
    environment = isa.clean_environment() | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    permission, grantable, said = done.stdout.split() or pytest.fail(done.stderr)
    assert (permission == "None") == (isa.amx_permission() is None), "the question itself was denied"
    assert grantable == "False"
    assert said == ("denied" if "amx_tile" in isa.cpu_flags() else "absent")
