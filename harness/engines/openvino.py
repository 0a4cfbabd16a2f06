"""Engine ``openvino``: OpenVINO's CPU plugin, INT8 by NNCF's post-training quantization.

Set up as its documentation recommends for latency of one request at a time, which is what every scenario sends:

* The model is converted from torch itself and compiled for the scenario's static shape.
* ``PERFORMANCE_HINT`` LATENCY with one stream of all threads. Several streams serve several requests at once; one batch
  at a time would use one of them.
* INT8: ``nncf.quantize`` with the transformer model type, which brings the mixed preset and SmoothQuant. Where the
  ISA's kernels saturate (no VNNI), ``OverflowFix.ENABLE`` keeps all weights to 7 bits, as NNCF advises.
* ``INFERENCE_PRECISION_HINT`` follows the recipe: FP32, or BF16 where the ISA has it natively (INT8 as well).
* No pinning of its own: the worker is held to its CPUs from outside.

Its oneDNN and its own code generator both obey ``ONEDNN_MAX_CPU_ISA``; names of the kernels that ran are checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.engines import Batch, Clocks
from harness.engines.peer import Peer, arrays, calibration_arrays, check_mask, linear_names
from harness.errors import HarnessError
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel

_INT8 = ("i8", "u8")
#: A linear as the converter names it: the module's path, then the operator.
_LINEAR = re.compile(r"__module\.([\w.]+)/aten::linear")
_BYTES = {"f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "i64": 8, "i8": 1, "u8": 1, "boolean": 1}


class OpenvinoEngine:
    """FP32 and BF16 as converted, INT8 as NNCF quantizes transformers."""

    name = "openvino"
    peer = Peer("openvino", ("openvino", "nncf"))

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can."""
        if recipe.name == "bf16" and isa == "avx2":
            return "openvino runs bf16 as fp32 on avx2, without saying so"
        return self.peer.unsupported(recipe, isa, deploy)

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> OpenvinoPrepared:
        """Convert and, where the recipe says so, quantize. NNCF observes while it quantizes: that is one clock."""
        import openvino
        import torch

        with clock.measure("load"), torch.no_grad():
            converted = openvino.convert_model(model.module, example_input=_example(model))
        if recipe.quantized:
            with clock.measure("calibrate"):
                samples = calibration_arrays(calibration, self.name)
            with clock.measure("quantize"):
                converted = _quantize(converted, samples, recipe.resolve_weight_bits(isa))
        return OpenvinoPrepared(converted, linear_names(model.module), recipe, isa)


class OpenvinoPrepared:
    """A converted model, compiled once for each shape of a batch."""

    def __init__(self, model: Any, linears: frozenset[str], recipe: Recipe, isa: str) -> None:
        import torch

        self._model = model
        self._linears = linears
        self._recipe = recipe
        self._isa = isa
        self._threads = torch.get_num_threads()
        self._requests: dict[tuple[int, ...], Any] = {}
        self._memory = Memory()

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``. It lies in the request's own memory: the next call overwrites it."""
        import torch

        request = self._request(batch)
        outputs = request.infer(arrays(batch), share_inputs=True, share_outputs=True)
        return torch.from_numpy(outputs[0])

    def _request(self, batch: Batch) -> Any:
        shape = tuple(batch["input_ids"].shape)
        if shape not in self._requests:
            compiled = self._compile(batch)
            self._requests[shape] = compiled.create_infer_request()
            self._memory = _memory(compiled.get_runtime_model())
        return self._requests[shape]

    def _compile(self, batch: Batch) -> Any:
        """The model for the very shape of ``batch``. ``clone``: reshaping changes a model in place."""
        import openvino

        model = self._model.clone()
        model.reshape({node.get_any_name(): list(batch[node.get_any_name()].shape) for node in model.inputs})
        return openvino.Core().compile_model(model, "CPU", settings(self._recipe, self._isa, self._threads))

    def memory(self) -> Memory:
        """Bytes of the constants of the compiled model and of its linears' weights; unknown before compiling."""
        return self._memory

    def evidence(self, batch: Batch) -> Evidence:
        """The plugin's own account of the graph that it runs, layer by layer.

        Raises:
            HarnessError: linears run in a precision other than the recipe's, or kernels are beyond the mask.
        """
        from int8 import isa

        layers = _layers(self._request(batch).get_compiled_model().get_runtime_model())
        kernels = count_kernels(layers)
        check_mask("openvino", self._isa, kernels)
        wanted = _INT8 if self._recipe.quantized else (_precision(self._recipe, self._isa),)
        proven = linears_in(layers, wanted) & self._linears
        if not proven:
            raise HarnessError(f"openvino runs no linear in {' or '.join(wanted)}: {dict(kernels)}")
        return Evidence(
            linears=len(self._linears),
            quantized_linears=len(proven) if self._recipe.quantized else 0,
            kernels=kernels,
            isa_effective=isa.effective(),
            amx_permission=isa.amx_permission(),
            weight_bits=self._recipe.resolve_weight_bits(self._isa) if self._recipe.quantized else None,
        )


def settings(recipe: Recipe, isa: str, threads: int) -> dict[str, Any]:
    """The CPU plugin's properties for one request at a time on ``threads`` threads."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": _precision(recipe, isa),
        "ENABLE_CPU_PINNING": False,
    }


def _precision(recipe: Recipe, isa: str) -> str:
    return {"fp32": "f32", "bf16": "bf16"}[recipe.resolve_compute_dtype(isa)]


def _example(model: LoadedModel) -> Batch:
    """A small batch to trace the module with; shapes stay open."""
    from harness import models
    from harness.matrix import Scenario

    return models.batch_inputs(model, Scenario("offline", 2, min(16, model.max_seq)), 0)


def _quantize(model: Any, samples: Sequence[Mapping[str, Any]], weight_bits: int) -> Any:
    import nncf

    overflow = nncf.OverflowFix.ENABLE if weight_bits == 7 else nncf.OverflowFix.DISABLE
    return nncf.quantize(
        model,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=overflow),
    )


def _layers(runtime_model: Any) -> list[dict[str, str]]:
    """Facts about each layer of the executed graph: its kind, kernel, precision and the layers it came from."""
    names = ("layerType", "primitiveType", "runtimePrecision", "originalLayersNames")
    return [{name: _fact(op.get_rt_info(), name) for name in names} for op in runtime_model.get_ordered_ops()]


def _fact(info: Any, name: str) -> str:
    if name not in info:
        return ""
    value = info[name]
    return str(getattr(value, "value", value))


def count_kernels(layers: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Layers with their kernels, as ``openvino:<layer>:<kernel>``, most used first."""
    quiet = ("Const", "Input", "Output", "Parameter", "Result", "Reshape")
    counts = Counter(
        f"openvino:{one['layerType']}:{one['primitiveType']}" for one in layers if one["layerType"] not in quiet
    )
    return dict(counts.most_common())


def linears_in(layers: Iterable[Mapping[str, str]], precisions: Iterable[str]) -> set[str]:
    """Names of the modules whose linear runs as a fully connected layer in one of ``precisions``."""
    wanted = tuple(precisions)
    found = (
        one["originalLayersNames"]
        for one in layers
        if one["layerType"] in ("FullyConnected", "MatMul") and one["runtimePrecision"] in wanted
    )
    return {name for names in found for name in _LINEAR.findall(names)}


def _memory(runtime_model: Any) -> Memory:
    """Bytes of all constants, and of those that a fully connected layer reads as its weights."""
    total = weights = 0
    for op in runtime_model.get_ordered_ops():
        kind = _fact(op.get_rt_info(), "layerType")
        if kind == "Const":
            total += _output_bytes(op.output(0))
        elif kind == "FullyConnected":
            weights += _output_bytes(op.input_value(1))
    return Memory(model_bytes=total or None, linear_weight_bytes=weights or None)


def _output_bytes(output: Any) -> int:
    """Bytes of a constant; of no type there are none (an empty bias)."""
    import math

    precision = _fact(output.get_node().get_rt_info(), "runtimePrecision")
    return int(math.prod(output.get_shape())) * _BYTES.get(precision, 0)


ENGINE = OpenvinoEngine()
