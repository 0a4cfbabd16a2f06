"""Instruction sets: what this host can use, and holding a process to one of them.

One switch, the environment variable ``INT8_ISA`` (``amx``, ``vnni``, ``avx512``, ``avx2`` or ``native``), sets every
layer that chooses instructions: oneDNN, ATen, MKL, Inductor's compiler flags and its choice of vector ISA, torchao's
choice between signed and unsigned activations, and our own kernels. Most of these read their setting once, when torch
is loaded, so a process has one ISA for its whole life:

    INT8_ISA=vnni python serve.py            # import int8 before torch, or start with the variable set

Proof of a mask: Linux grants AMX a process at a time and on request. A process whose permission bit is still clear when
it ends cannot have executed an AMX instruction: it would have died of SIGILL.

Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from int8.errors import IsaError

VARIABLE = "INT8_ISA"

#: Every ISA, best first.
NAMES = ("amx", "vnni", "avx512", "avx2")

_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_ARCH_GET_XCOMP_PERM = 0x1022
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True)
class _Layers:
    """What one ISA needs of the CPU, and the settings that hold each layer to it.

    ``flags`` are names of /proc/cpuinfo. ``cleared`` are prefixes of the keys of ``torch.cpu.get_capabilities()`` that
    are reported as missing. An Ice Lake (``vnni``) has neither avx512_bf16 nor avx512_fp16, so they go with AMX.
    """

    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    cleared: tuple[str, ...]


_AVX512_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
_BEYOND_VNNI = ("amx_", "avx512_bf16", "avx512_fp16", "avx10", "avx_vnni_int", "avx_ne_convert")
_LAYERS: Mapping[str, _Layers] = MappingProxyType(
    {
        "amx": _Layers(
            (*_AVX512_FLAGS, "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"),
            (("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX"),),
            ("amx_fp16",),
        ),
        "vnni": _Layers(
            (*_AVX512_FLAGS, "avx512_vnni"),
            (
                ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI"),
                ("MKL_ENABLE_INSTRUCTIONS", "AVX512_E1"),
                ("TORCHINDUCTOR_CPP_MARCH", "cascadelake"),
            ),
            _BEYOND_VNNI,
        ),
        "avx512": _Layers(
            _AVX512_FLAGS,
            (
                ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
                ("MKL_ENABLE_INSTRUCTIONS", "AVX512"),
                ("ATEN_CPU_CAPABILITY", "avx512"),
                ("TORCHINDUCTOR_CPP_MARCH", "skylake-avx512"),
            ),
            (*_BEYOND_VNNI, "avx512_vnni", "avx_vnni"),
        ),
        "avx2": _Layers(
            ("avx2", "fma"),
            (
                ("ONEDNN_MAX_CPU_ISA", "AVX2"),
                ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
                ("ATEN_CPU_CAPABILITY", "avx2"),
                ("TORCHINDUCTOR_CPP_MARCH", "haswell"),
            ),
            (*_BEYOND_VNNI, "avx512", "avx_vnni"),
        ),
    }
)
_MASK_VARIABLES = frozenset(name for layers in _LAYERS.values() for name, _ in layers.environment)


def supported() -> tuple[str, ...]:
    """The ISAs that this CPU has and this process may use, best first."""
    return tuple(name for name in NAMES if why_unsupported(name) is None)


def best() -> str:
    """The best ISA of this host.

    Raises:
        IsaError: the CPU has not even AVX2.
    """
    names = supported()
    if not names:
        raise IsaError("this CPU has no AVX2; int8 needs an x86-64 CPU with AVX2 and FMA, or better")
    return names[0]


@functools.cache
def why_unsupported(name: str) -> str | None:
    """Why this host cannot use ISA ``name``; None if it can."""
    missing = [flag for flag in _LAYERS[name].flags if flag not in cpu_flags()]
    if missing:
        return f"this CPU ({cpu_model()}) lacks {', '.join(missing)}"
    if name == "amx" and not amx_grantable():
        return "the CPU has AMX, but the kernel denies this process its permission (container policy, VM or old kernel)"
    return None


def resolve(name: str) -> str:
    """The ISA that ``name`` stands for here: ``native`` is the best one, any other must be supported.

    Raises:
        IsaError: unknown name (with the nearest ones), or an ISA that this host lacks (with those it has).
    """
    if name == "native":
        return best()
    if name not in NAMES:
        near = difflib.get_close_matches(name, (*NAMES, "native"), n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(NAMES)}, native"
        raise IsaError(f"unknown ISA {name!r}; {hint}")
    reason = why_unsupported(name)
    if reason is not None:
        raise IsaError(f"ISA {name!r} is not available: {reason}; this host has: {', '.join(supported()) or 'none'}")
    return name


def environment(name: str) -> dict[str, str]:
    """Variables that hold a new process to ISA ``name`` (``native`` allowed).

    Merge them over :func:`clean_environment`, so that a setting for another ISA does not leak in.

    Raises:
        IsaError: as :func:`resolve`.
    """
    isa = resolve(name)
    return {VARIABLE: isa, **dict(_LAYERS[isa].environment)}


def clean_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (by default this process's environment) without any setting that chooses an ISA."""
    source = os.environ if base is None else base
    return {key: value for key, value in source.items() if key not in _MASK_VARIABLES and key != VARIABLE}


def apply() -> str:
    """Hold this process to the ISA in ``INT8_ISA`` (``native`` where unset) and return its resolved name.

    Sets the variables that torch's layers read when they load, so it must come before the first import of torch.

    Raises:
        IsaError: torch is loaded already and its variables do not say this ISA, or as :func:`resolve`.
    """
    requested = os.environ.get(VARIABLE, "native")
    wanted = environment(requested)
    masks = {key: value for key, value in wanted.items() if key != VARIABLE}
    if "torch" in sys.modules and _loaded_isa() != wanted[VARIABLE]:
        if requested == "native":
            # An unmasked process imported torch first: every layer already uses the best ISA by itself.
            return wanted[VARIABLE]
        raise IsaError(
            f"{VARIABLE}={requested} came too late: torch is imported already and has chosen its instructions; "
            f"set {VARIABLE} before the process starts, or import int8 before torch"
        )
    if "torch" not in sys.modules:
        os.environ.update(masks)
        os.environ[VARIABLE] = wanted[VARIABLE]
        _State.applied = wanted[VARIABLE]
    return wanted[VARIABLE]


class _State:
    """The ISA that :func:`apply` set in this process before torch was loaded, and the one torch now reports."""

    applied: str | None = None
    enforced: str | None = None


def _loaded_isa() -> str | None:
    """The ISA whose settings torch was loaded with: set by :func:`apply`, or by whoever started this process."""
    if _State.applied is not None:
        return _State.applied
    initial = _initial_environment()
    named = initial.get(VARIABLE)
    complete = named in NAMES and all(initial.get(key) == value for key, value in _LAYERS[named].environment)
    return named if complete else None


def _initial_environment() -> dict[str, str]:
    """The environment this process was started with, whatever it has set since."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0") if entry)
    return {key: value for key, _, value in pairs}


def enforce() -> str:
    """Import torch under the mask, make it report only the mask's capabilities, and return the effective ISA.

    Inductor picks its vector ISA and torchao picks signed or unsigned activations by asking
    ``torch.cpu.get_capabilities()``; no environment variable changes that answer, so the function is replaced by one
    that reports the capabilities beyond the mask as missing. Calling it again is harmless.

    Raises:
        IsaError: as :func:`apply`.
    """
    isa = apply()
    if _State.enforced == isa:
        return isa
    import torch

    real = dict(torch.cpu.get_capabilities())
    masked = MappingProxyType(_masked_capabilities(real, isa))

    @functools.lru_cache(None)
    def get_capabilities() -> Mapping[str, Any]:
        return masked

    get_capabilities.__doc__ = f"CPU capabilities under INT8_ISA={isa}."
    torch.cpu.get_capabilities = get_capabilities
    _State.enforced = isa
    return isa


def _masked_capabilities(real: Mapping[str, Any], isa: str) -> dict[str, Any]:
    """``real`` with every boolean capability beyond ``isa`` set to False."""
    cleared = _LAYERS[isa].cleared
    return {key: False if value is True and key.startswith(cleared) else value for key, value in real.items()}


def effective() -> str:
    """The ISA that this process is held to: that of :func:`enforce`, else what :func:`apply` would choose."""
    return _State.enforced or apply()


def amx_permission() -> bool | None:
    """Whether this process holds Linux's permission to use AMX tiles now; None where the kernel cannot say."""
    return _xcomp_bit(_ARCH_GET_XCOMP_PERM)


@functools.cache
def amx_grantable() -> bool:
    """Whether the kernel would grant AMX tiles to a process like this one.

    Asked in a child, because permission once granted stays with the process and would spoil the proof of a mask. A
    filter that denies the request (seccomp) is inherited by the child, so its answer holds for this process.
    """
    if "amx_tile" not in cpu_flags() or not _xcomp_bit(_ARCH_GET_XCOMP_SUPP):
        return False
    request = f"{_SYS_ARCH_PRCTL}, {_ARCH_REQ_XCOMP_PERM}, {_XFEATURE_XTILEDATA}"
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall({request}) != 0)"
    return subprocess.run([sys.executable, "-S", "-E", "-c", code], check=False, capture_output=True).returncode == 0


def _xcomp_bit(request: int) -> bool | None:
    """Bit 18 (tile data) of the mask that arch_prctl answers to ``request``; None if the kernel knows no such call."""
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        return None
    mask = ctypes.c_uint64(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, request, ctypes.byref(mask)) != 0:
        return None
    return bool(mask.value >> _XFEATURE_XTILEDATA & 1)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Feature names of the first CPU, as /proc/cpuinfo spells them."""
    return frozenset(_cpuinfo("flags").split())


def cpu_model() -> str:
    """The CPU's name as the kernel gives it."""
    return _cpuinfo("model name") or platform.processor() or "unknown CPU"


@functools.cache
def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return ""


def describe() -> dict[str, Any]:
    """What ``harness doctor`` and the fingerprint say about this host's instruction sets."""
    reasons = {name: why_unsupported(name) for name in NAMES}
    return {
        "cpu": cpu_model(),
        "supported": list(supported()),
        "unsupported": {name: reason for name, reason in reasons.items() if reason is not None},
        "amx": "granted" if reasons["amx"] is None else ("denied" if "amx_tile" in cpu_flags() else "absent"),
        "amx_permission": amx_permission(),
    }
