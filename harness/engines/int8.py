"""Engine ``int8``: this project's library; ``fp32`` and ``bf16`` are plain torch.compile of the model as it is."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import Batch, Clocks
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models import LoadedModel
    from int8.compilation import CompiledModel
    from int8.packaging import LoadedPackage


class Int8Engine:
    """Recipes of :mod:`int8.recipe`, compiled by torch.compile or as AOTInductor packages."""

    name = "int8"

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can."""
        return None

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> Int8Prepared:
        """Quantize (where the recipe does) and wrap for compilation; the first call of each shape compiles."""
        import int8

        module: nn.Module = model.module
        if recipe.quantized:
            with clock.measure("calibrate" if recipe.needs_calibration else "quantize"):
                module = int8.quantize(module, recipe, _then_quantize(calibration, clock), isa=isa)
            if hasattr(module, "int8_plan"):
                print(module.int8_plan)  # into the worker's log
        # allow_unfused: the worker compares the counts itself and fails the cell with them, so they reach the record.
        return Int8Prepared(module, int8.compile(module, recipe=recipe, dynamic=False, allow_unfused=True))


class Int8Prepared:
    """A model of ours, ready to run."""

    def __init__(self, module: nn.Module, compiled: CompiledModel) -> None:
        self._module = module
        self._compiled = compiled

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``."""
        output: Tensor = self._compiled(**batch)
        return output

    def packaged(self) -> Int8Packaged:
        """The same model as it is deployed: written as a package and loaded again, once for each shape it meets."""
        return Int8Packaged(self._module, self._compiled.recipe)

    def memory(self) -> Memory:
        """Bytes of the module's parameters and buffers and of its linears' weights."""
        return module_memory(self._module)

    def evidence(self, batch: Batch) -> Evidence:
        """Counts, kernels and ISA of one forward pass of ``batch``."""
        return _evidence(self._module, self._compiled, batch)


class Int8Packaged:
    """AOTInductor packages of a model of ours, one for each shape of input, in a folder that ends with the process."""

    def __init__(self, module: nn.Module, recipe: Recipe | None) -> None:
        self._module = module
        self._recipe = recipe
        self._folder = tempfile.TemporaryDirectory(prefix="harness-packages-")
        self._packages: dict[tuple[object, ...], LoadedPackage] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``; a new shape is exported and loaded first."""
        output: Tensor = self._package(batch)(**batch)
        return output

    def memory(self) -> Memory:
        """As of the model that was packaged."""
        return module_memory(self._module)

    def evidence(self, batch: Batch) -> Evidence:
        """Counts of the package for ``batch``, kernels and ISA of one forward pass."""
        return _evidence(self._module, self._package(batch), batch)

    def _package(self, batch: Batch) -> LoadedPackage:
        import int8

        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(batch.items()))
        if shapes not in self._packages:
            path = Path(self._folder.name) / f"{len(self._packages)}.pt2"
            int8.export(self._module, batch, path, recipe=self._recipe, allow_unfused=True)
            self._packages[shapes] = int8.load_package(path)
        return self._packages[shapes]


def _evidence(module: nn.Module, run: CompiledModel | LoadedPackage, batch: Batch) -> Evidence:
    from int8 import evidence

    found = evidence.collect(module, run, batch)
    kept = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    plan = getattr(module, "int8_plan", None)
    notes = () if plan is None else plan.summary()
    return Evidence(**{**kept, "kernels": dict(found.kernels), "notes": notes})


def _then_quantize(calibration: Iterable[Batch], clock: Clocks) -> Iterator[Batch]:
    """``calibration``; the clock goes on to ``quantize`` when its last batch has been used."""
    yield from calibration
    clock.switch("quantize")


def module_memory(module: nn.Module) -> Memory:
    """Bytes of parameters and buffers, and of the weights of ``nn.Linear`` modules with the scales inside them."""
    from torch import nn

    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    weights = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Linear)}
    return Memory(
        model_bytes=sum(tensor_bytes(t) for t in tensors.values()),
        linear_weight_bytes=sum(tensor_bytes(t) for t in weights.values()),
    )


def tensor_bytes(tensor: Any) -> int:
    """Bytes that a tensor holds; a subclass holds those of the tensors inside it."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return sum(tensor_bytes(getattr(tensor, name)) for name in inner)
    return int(tensor.numel() * tensor.element_size())


ENGINE = Int8Engine()
