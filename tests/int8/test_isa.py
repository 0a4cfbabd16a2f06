from __future__ import annotations

import os
import subprocess
import sys
from types import MappingProxyType

import pytest

from int8 import isa
from int8.errors import IsaError


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = isa.clean_environment() | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_best_is_first_and_native_resolves_to_it() -> None:
    assert isa.supported()[0] == isa.best() == isa.resolve("native")
    assert set(isa.supported()) <= set(isa.NAMES)


def test_unknown_isa_names_the_nearest() -> None:
    with pytest.raises(IsaError, match="did you mean amx"):
        isa.resolve("amxx")


def test_missing_isa_says_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    isa.why_unsupported.cache_clear()
    try:
        with pytest.raises(IsaError, match=r"lacks .*avx512_vnni.*this host has: avx2"):
            isa.resolve("vnni")
    finally:
        isa.why_unsupported.cache_clear()


def test_denied_amx_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX in CPUID without the kernel's permission must fall back, not die of SIGILL."""
    every = frozenset(flag for layers in isa._LAYERS.values() for flag in layers.flags)
    monkeypatch.setattr(isa, "cpu_flags", lambda: every)
    monkeypatch.setattr(isa, "amx_grantable", lambda: False)
    isa.why_unsupported.cache_clear()
    try:
        assert isa.best() == "vnni"
        assert isa.describe()["amx"] == "denied"
    finally:
        isa.why_unsupported.cache_clear()


def test_environment_sets_each_layer() -> None:
    environment = isa.environment("avx2")
    assert environment["INT8_ISA"] == "avx2"
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
    assert environment["TORCHINDUCTOR_CPP_MARCH"] == "haswell"


def test_clean_environment_forgets_another_mask() -> None:
    dirty = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "INT8_ISA": "amx", "HOME": "x"}
    assert isa.clean_environment(dirty) == {"HOME": "x"}


REAL = MappingProxyType(
    {
        "amx_tile": True,
        "amx_int8": True,
        "amx_fp16": True,
        "avx512_f": True,
        "avx512_bw": True,
        "avx512_vnni": True,
        "avx512_bf16": True,
        "avx512_fp16": True,
        "avx_vnni": True,
        "avx2": True,
        "l2_cache_size": 2097152,
    }
)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("amx", {"amx_tile", "amx_int8", "avx512_vnni", "avx512_bf16", "avx512_f", "avx_vnni", "avx2"}),
        ("vnni", {"avx512_vnni", "avx512_f", "avx_vnni", "avx2"}),
        ("avx512", {"avx512_f", "avx2"}),
        ("avx2", {"avx2"}),
    ],
)
def test_capabilities_beyond_the_mask_are_missing(name: str, kept: set[str]) -> None:
    masked = isa._masked_capabilities(REAL, name)
    assert kept <= {key for key, value in masked.items() if value is True}
    others = {"amx_tile", "amx_int8", "amx_fp16", "avx512_vnni", "avx512_bf16", "avx512_f"} - kept
    assert not any(masked[key] for key in others)
    assert masked["avx512_fp16"] == (name == "amx"), "an Ice Lake has none"
    assert masked["l2_cache_size"] == 2097152


@pytest.mark.parametrize("name", isa.supported())
def test_a_process_is_held_to_the_mask(name: str) -> None:
    """All of torch's own answers agree with the mask; without AMX the permission bit stays clear through a matmul."""
    code = (
        "from int8 import isa; print(isa.enforce()); import torch;"
        "torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64));"
        "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(pick_vec_isa());"
        "from torchao.utils import should_reduce_range; print(should_reduce_range(torch.device('cpu')));"
        "print(isa.amx_permission())"
    )
    result = run(code, INT8_ISA=name)
    assert result.returncode == 0, result.stderr
    effective, vector, reduced, permission = result.stdout.split("\n")[:4]
    assert effective == name
    assert vector.startswith("avx2") == (name == "avx2")
    assert ("amx" in vector) == (name == "amx")
    assert reduced == str(name not in ("amx", "vnni"))
    if name != "amx":
        assert permission in ("False", "None")


def test_masking_after_torch_is_an_error() -> None:
    result = run("import torch; from int8 import isa; isa.enforce()", INT8_ISA="avx2")
    if isa.best() == "avx2":
        assert "too late" in result.stderr
    assert result.returncode != 0
    assert "set INT8_ISA before the process starts" in result.stderr


def test_a_mask_set_before_the_process_started_may_meet_torch_first() -> None:
    name = isa.supported()[-1]
    result = run("import torch; from int8 import isa; print(isa.enforce())", **isa.environment(name))
    assert result.stdout.strip() == name, result.stderr


def test_asking_for_what_the_cpu_lacks_is_an_error() -> None:
    lacking = [name for name in isa.NAMES if name not in isa.supported()]
    if not lacking:
        pytest.skip("this host has every ISA")
    result = run("from int8 import isa; isa.enforce()", INT8_ISA=lacking[0])
    assert result.returncode != 0
    assert "not available" in result.stderr


def test_amx_permission_is_read_not_requested() -> None:
    result = run("from int8 import isa; print(isa.amx_permission()); print(isa.amx_permission())", **os.environ)
    assert result.stdout.split("\n")[0] in ("False", "None")
