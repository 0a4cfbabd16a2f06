"""INT8 inference of BERT-family encoders on Xeon CPUs, in plain PyTorch.

    import int8
    model = int8.quantize(model, "sq-static", calibration)
    model = int8.compile(model)

Names load on first use: ``import int8`` itself imports no torch, so that a process can be held to an ISA first
(see :mod:`int8.isa`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "quantize": "int8.quantization",
    "SmoothQuant": "int8.quantization",
    "quantized_modules": "int8.quantization",
    "compile": "int8.compilation",
    "export": "int8.packaging",
    "load_package": "int8.packaging",
    "save": "int8.saving",
    "load": "int8.saving",
    "save_pretrained": "int8.saving",
    "adopt": "int8.saving",
    "Recipe": "int8.recipe",
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from int8.compilation import compile as compile
    from int8.packaging import export as export
    from int8.packaging import load_package as load_package
    from int8.quantization import SmoothQuant as SmoothQuant
    from int8.quantization import quantize as quantize
    from int8.quantization import quantized_modules as quantized_modules
    from int8.recipe import Recipe as Recipe
    from int8.saving import adopt as adopt
    from int8.saving import load as load
    from int8.saving import save as save
    from int8.saving import save_pretrained as save_pretrained


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
