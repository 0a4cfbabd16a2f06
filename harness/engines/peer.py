"""What the peers have in common: when they can be measured, and how their weights and outputs are named.

A peer is another runtime for the same weights, inputs and threads. Its packages are the extra ``peers``, installed by
``make peers`` into the environment that the harness runs in: their pins and ours do not conflict.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.engines import PEER_RECIPES, Batch
from harness.errors import HarnessError
from int8 import isa as isas
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

#: Calibration batches that a peer sees: its scales hardly change with more, and its calibration is slow.
CALIBRATION_BATCHES = 32


@dataclass(frozen=True)
class Peer:
    """When an engine of another project can be measured.

    Attributes:
        name: the engine's.
        packages: modules that have to be there.
        unmasked: why the peer cannot be held to an ISA below the host's best; None if it can.
    """

    name: str
    packages: tuple[str, ...]
    unmasked: str | None = None

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can. What no installation changes is said first."""
        if recipe.name not in PEER_RECIPES[self.name]:
            return f"{self.name} has no recipe {recipe.name}; it has {', '.join(PEER_RECIPES[self.name])}"
        if deploy != "jit":
            return f"deploy {deploy} is torch's: {self.name} has a format of its own"
        native = isas.supported()[:1]
        if self.unmasked is not None and (isa,) != native:
            return f"{self.unmasked}, so it is measured under {', '.join(native) or 'no ISA'} alone on this host"
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        return f"{', '.join(missing)} is not installed: run make peers" if missing else None


def arrays(batch: Batch) -> dict[str, Any]:
    """The tensors of ``batch`` as NumPy arrays over the same memory."""
    return {name: tensor.numpy() for name, tensor in batch.items()}


def calibration_arrays(calibration: Iterable[Batch], peer: str) -> list[dict[str, Any]]:
    """The first :data:`CALIBRATION_BATCHES` batches as arrays, kept because a peer reads them more than once.

    Raises:
        HarnessError: there is none.
    """
    import itertools

    found = [arrays(batch) for batch in itertools.islice(calibration, CALIBRATION_BATCHES)]
    if not found:
        raise HarnessError(f"{peer}: calibration gave no batch")
    return found


def linear_names(module: nn.Module) -> frozenset[str]:
    """Names of all linears of ``module``."""
    from torch import nn

    return frozenset(name for name, child in module.named_modules() if isinstance(child, nn.Linear))


def check_mask(peer: str, isa: str, kernels: Mapping[str, int]) -> None:
    """Refuse kernels whose names say that they need more than the mask allows.

    MLAS, which OpenVINO multiplies FP32 with on some shapes, goes by the CPU alone: up to AVX512, where it has it.

    Raises:
        HarnessError: with the kernels' names.
    """
    beyond: tuple[str, ...] = {"amx": (), "vnni": ("amx",), "avx512": ("amx", "vnni")}.get(isa, ())
    if isa == "avx2":
        beyond = ("amx", "vnni", "avx512") + (("mlas",) if isas.best() != "avx2" else ())
    wrong = sorted(name for name in kernels if any(word in name.lower() for word in beyond))
    if wrong:
        raise HarnessError(f"{peer} was not held to {isa}: it runs {', '.join(wrong)}")
