"""Our own INT8 kernels: C++ operators, built on first use (see :mod:`int8.kernels.build`)."""

from int8.kernels.build import load

__all__ = ["load"]
