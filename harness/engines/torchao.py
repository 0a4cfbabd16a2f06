"""Engine ``torchao``: upstream's SmoothQuant through Inductor, as a user would write it from upstream's documentation.

Upstream needs some care, each point of which a user has to know as well:

* Its fusion passes register when the x86 Inductor quantizer is imported, and only then (pytorch/ao#4823).
* Fusion also needs ``freezing`` and no grad.
* The static config's default granularity ties the activation's scale to the calibration batch; ``PerTensor`` does not.
* Its observer keeps every activation and concatenates them, so all calibration batches get one shape here: short ones
  are padded on the right with masked tokens, and those padded tokens are observed like any other.
* Without VNNI its matmul saturates unless weights and activations are reduced to 7 bits (pytorch/ao#4266).
* Importing it and calling ``quantize_`` change global Inductor settings, which is why each worker runs one engine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.engines import Batch, Clocks
from harness.engines.int8 import module_memory
from harness.errors import HarnessError
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models import LoadedModel

#: Upstream's default migration strength. The engine runs upstream as it is, whatever our recipe's alpha.
ALPHA = 0.5
#: Calibration batches that the observer keeps in memory; its scales hardly change with more.
CALIBRATION_BATCHES = 8

#: Linears inside an encoder's numbered layers; embeddings, poolers and heads are left alone.
_ENCODER_LINEAR = re.compile(r"(^|\.)layers?\.\d+\.")


class TorchaoEngine:
    """Upstream's static and dynamic INT8, with and without SmoothQuant."""

    name = "torchao"

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can."""
        if not recipe.quantized:
            return f"torchao has no {recipe.name} of its own: int8/{recipe.name} is torch.compile of the model as it is"
        if recipe.name not in ("static", "dynamic", "sq-static", "sq-dynamic"):
            return f"upstream has no recipe {recipe.name}"
        return None if deploy == "jit" else f"deploy {deploy} is measured for engine int8 alone"

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> TorchaoPrepared:
        """Observe, convert and wrap for compilation; the first call of each shape compiles."""
        module = model.module
        linears = encoder_linears(module)
        if not linears:
            raise HarnessError(f"torchao: model {model.name} has no linear in its encoder's layers to quantize")
        base = _base_config(recipe, reduce_range=recipe.resolve_weight_bits(isa) == 7)
        if recipe.smoothing or recipe.activation == "static":
            _smooth(module, base, ALPHA if recipe.smoothing else None, calibration, clock)
        else:
            with clock.measure("quantize"):
                _quantize(module, base)
        return TorchaoPrepared(module, len(linears), recipe, isa)


class TorchaoPrepared:
    """A model quantized by upstream, compiled as upstream recommends."""

    def __init__(self, module: nn.Module, linears: int, recipe: Recipe, isa: str) -> None:
        import torch
        from torch import nn

        self._module = module
        self._all_linears = sum(isinstance(m, nn.Linear) for m in module.modules())
        self._linears = linears
        self._bits = recipe.resolve_weight_bits(isa)
        self._bf16 = recipe.resolve_compute_dtype(isa) == "bf16"
        self._compiled = torch.compile(module, dynamic=False)
        self._fused: dict[tuple[int, ...], int] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``."""
        shape = tuple(batch["input_ids"].shape)
        if shape in self._fused:
            return self._run(batch)
        from torch._inductor import config

        before = _fused_counter()
        # Not as an option of torch.compile: Dynamo asks the global setting whether parameters are constants.
        with config.patch(freezing=True):
            output = self._run(batch)
        self._fused[shape] = _fused_counter() - before
        return output

    def _run(self, batch: Batch) -> Tensor:
        import torch

        autocast = torch.autocast("cpu", torch.bfloat16) if self._bf16 else contextlib.nullcontext()
        with torch.no_grad(), autocast:
            output: Tensor = self._compiled(**batch)
        return output

    def memory(self) -> Memory:
        """Bytes of the module's parameters and buffers and of its linears' weights."""
        return module_memory(self._module)

    def evidence(self, batch: Batch) -> Evidence:
        """Counts of linears, and the kernels of one forward pass as oneDNN names them."""
        from int8 import isa
        from int8.evidence import onednn_kernels

        fused = self._fused.get(tuple(batch["input_ids"].shape))
        short = fused is not None and fused < self._linears
        return Evidence(
            linears=self._all_linears,
            quantized_linears=_quantized(self._module),
            fused_linears=fused,
            kernels=onednn_kernels(lambda: self._run(batch)),
            isa_effective=isa.effective(),
            amx_permission=isa.amx_permission(),
            weight_bits=self._bits,
            notes=(f"upstream fused {fused} of {self._linears} linears",) if short else (),
        )


def encoder_linears(module: nn.Module) -> list[str]:
    """Names of the linears in the numbered layers of ``module``."""
    from torch import nn

    return [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and _ENCODER_LINEAR.search(n)]


def pad_to_one_shape(batches: Sequence[Batch], pad_id: int = 0) -> list[dict[str, Tensor]]:
    """``batches`` of (B, S) tensors, each padded on the right to the longest S and cut or filled up to one B.

    Rows are filled up by repeating the batch's first ones, which leaves maxima as they are. Padded tokens get
    ``pad_id`` and attention mask 0.
    """
    import torch
    from torch.nn import functional

    rows = max(batch["input_ids"].shape[0] for batch in batches)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    padded = []
    for batch in batches:
        index = torch.arange(rows) % batch["input_ids"].shape[0]
        padded.append(
            {
                key: functional.pad(
                    value[index], (0, length - value.shape[1]), value=pad_id if key == "input_ids" else 0
                )
                for key, value in batch.items()
            }
        )
    return padded


def _base_config(recipe: Recipe, reduce_range: bool) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8StaticActivationInt8WeightConfig
    from torchao.quantization.granularity import PerRow, PerTensor
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer  # noqa: F401 - registers the fusion passes

    if recipe.activation == "static":
        granularity = [PerTensor(), PerRow()]
        return Int8StaticActivationInt8WeightConfig(granularity=granularity, reduce_range=reduce_range)
    return Int8DynamicActivationInt8WeightConfig(version=2, reduce_range=reduce_range)


def _smooth(module: nn.Module, base: Any, alpha: float | None, calibration: Iterable[Batch], clock: Clocks) -> None:
    """Upstream's prepare, calibrate, convert. ``alpha`` None: scales without smoothing."""
    import itertools

    import torch
    from torchao.prototype.smoothquant import SmoothQuantConfig

    with clock.measure("calibrate"):
        _quantize(module, SmoothQuantConfig(base_config=base, step="prepare", alpha=alpha))
        batches = list(itertools.islice(calibration, CALIBRATION_BATCHES))
        if not batches:
            raise HarnessError("torchao: calibration gave no batch")
        with torch.no_grad():
            for batch in pad_to_one_shape(batches, _pad_id(module)):
                module(**batch)
    with clock.measure("quantize"):
        _quantize(module, SmoothQuantConfig(base_config=base, step="convert", alpha=alpha))


def _quantize(module: nn.Module, config: Any) -> None:
    from torch import nn
    from torchao.quantization import quantize_

    def encoder_linear(child: nn.Module, name: str) -> bool:
        return isinstance(child, nn.Linear) and _ENCODER_LINEAR.search(name) is not None

    quantize_(module, config, encoder_linear)


def _quantized(module: nn.Module) -> int:
    from torch import nn
    from torchao.utils import TorchAOBaseTensor

    return sum(isinstance(m, nn.Linear) and isinstance(m.weight, TorchAOBaseTensor) for m in module.modules())


def _pad_id(module: nn.Module) -> int:
    from torch import nn

    indices = (m.padding_idx for m in module.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None)
    return next(indices, 0)


def _fused_counter() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["qlinear_weight_prepack_matcher_count"])


ENGINE = TorchaoEngine()
