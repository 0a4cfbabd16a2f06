"""Deny this process, and all that it starts, Linux's permission for AMX tiles: what containers and VMs may do.

A seccomp filter answers ``arch_prctl(ARCH_REQ_XCOMP_PERM)`` with EPERM and allows every other system call. It cannot be
taken back, so it belongs into a process of its own. It works on every x86-64 Linux, whether or not the CPU has AMX.
"""

from __future__ import annotations

import ctypes
import errno
import struct

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS = 38
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000

# Classic BPF: load a word of struct seccomp_data, jump if it equals, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data: number of the call, architecture, low half of the first argument.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16

#: (operation, instructions to skip if equal, if not, operand)
_FILTER = (
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_JUMP_IF_EQUAL, 0, 5, _AUDIT_ARCH_X86_64),
    (_LOAD, 0, 0, _NUMBER),
    (_JUMP_IF_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_JUMP_IF_EQUAL, 0, 1, _ARCH_REQ_XCOMP_PERM),
    (_RETURN, 0, 0, _FAIL | errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def deny() -> None:
    """Install the filter.

    Raises:
        OSError: this kernel has no seccomp filters.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER)
    memory = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(_FILTER), ctypes.addressof(memory))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel has no seccomp filters")


def is_denied() -> bool:
    """Whether asking for the permission fails with EPERM. Where it is granted, it stays with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) != 0 and ctypes.get_errno() == errno.EPERM
