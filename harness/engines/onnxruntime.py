"""Engine ``onnxruntime``: ONNX Runtime's CPU provider on the graph of its own transformer optimizer.

Set up as its documentation recommends for transformers on x86:

* The model is exported with plain attention, which the transformer optimizer recognizes and fuses (attention, embedding
  and skip layer norms, bias + GELU). Without the optimizer nothing of this is fused.
* ``dynamic``: ``quantize_dynamic``, INT8 weights per channel.
* ``static``: ``quantize_static`` as QDQ, unsigned activations, INT8 weights per channel. Three things decide whether it
  runs in INT8 at all. ONNX cannot infer the shapes of the optimizer's operators, and where a shape is missing the
  quantizer leaves the activation alone and only stores the weight in INT8: so shapes are inferred first. The fused
  attention operator takes no QDQ weights: the optimizer's other one leaves query, key and value to products of their
  own. And outputs stay in floating point, which every reader of a product in this graph wants, so that each product
  fuses with its scales (``MatMulIntegerToFloat``). CPU time of MiniLM, batch 8, length 128, on AVX2: FP32 330 ms; no
  shapes 450; quantized outputs 290 with the fused attention and 224 without; this 216, and closest to FP32.
* ``reduce_range`` keeps weights to 7 bits where the ISA's kernels saturate, as it advises.

Its kernels (MLAS) choose instructions by the CPU and nothing can restrict them, so it is measured under the host's own
ISA alone.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import Batch, Clocks
from harness.engines.peer import Peer, arrays, calibration_arrays, linear_names
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models import LoadedModel

#: The newest operator set whose layer norms and GELU the transformer optimizer recognizes in their parts.
OPSET = 17
#: Operators that multiply by a constant weight: which of their inputs it is, and how many linears one stands for.
_PRODUCTS = {
    "MatMul": (1, 1),
    "Gemm": (1, 1),
    "Attention": (1, 3),
    "MatMulNBits": (1, 1),
    "MatMulInteger": (1, 1),
    "MatMulIntegerToFloat": (1, 1),
    "DynamicQuantizeMatMul": (1, 1),
    "QAttention": (1, 3),
    "QLinearMatMul": (3, 1),
    "QGemm": (3, 1),
}
#: Those that read INT8 activations. MatMulNBits is none of them: it only stores its weights in few bits.
_INTEGER = frozenset(
    ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention", "QLinearMatMul", "QGemm")
)


class OnnxruntimeEngine:
    """The optimized graph in FP32, and quantized statically or dynamically."""

    name = "onnxruntime"
    peer = Peer("onnxruntime", ("onnx", "onnxruntime"), "onnxruntime's kernels go by the CPU and cannot be masked")

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can."""
        return self.peer.unsupported(recipe, isa, deploy)

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> OnnxruntimePrepared:
        """Export, optimize, quantize and load. Its quantizer observes while it quantizes: that is one clock."""
        with tempfile.TemporaryDirectory(prefix="harness-onnx-") as scratch:
            folder = Path(scratch)
            with clock.measure("load"):
                graph = _optimized(_exported(model, folder), model, folder, packed=recipe.activation != "static")
            if recipe.quantized:
                samples = []
                if recipe.needs_calibration:
                    with clock.measure("calibrate"):
                        samples = calibration_arrays(calibration, self.name)
                with clock.measure("quantize"):
                    graph = _quantized(graph, folder, samples, recipe.resolve_weight_bits(isa))
            with clock.measure("load"):
                return OnnxruntimePrepared(graph, len(linear_names(model.module)), recipe, isa)


class OnnxruntimePrepared:
    """A session, which serves batches of any shape."""

    def __init__(self, graph: Path, linears: int, recipe: Recipe, isa: str) -> None:
        import onnx
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        final = graph.with_suffix(".final.onnx")  # what the session made of the graph, for the evidence
        options.optimized_model_filepath = str(final)
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._products = products(onnx.load(str(final)).graph)
        self._kernels = Counter(f"onnxruntime:{node.op_type}" for node in onnx.load(str(final)).graph.node)
        self._model_bytes = final.stat().st_size
        self._linears = linears
        self._bits = recipe.resolve_weight_bits(isa) if recipe.quantized else None

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``."""
        import torch

        return torch.from_numpy(self._session.run(None, arrays(batch))[0])

    def memory(self) -> Memory:
        """Bytes of the session's model as a file, which is its weights, and of its linears' weights."""
        weights = sum(size for _, _, size in self._products)
        return Memory(model_bytes=self._model_bytes, linear_weight_bytes=weights)

    def evidence(self, batch: Batch) -> Evidence:
        """The operators of the session's final graph; those that multiply in INT8 are told by their names."""
        from int8 import isa

        return Evidence(
            linears=self._linears,
            quantized_linears=sum(linears for name, linears, _ in self._products if name in _INTEGER),
            kernels=dict(self._kernels.most_common()),
            isa_effective=isa.effective(),
            amx_permission=isa.amx_permission(),
            weight_bits=self._bits,
        )


def products(graph: Any) -> list[tuple[str, int, int]]:
    """(operator, linears that it stands for, bytes of its weight) of each product with a constant."""
    sizes = {one.name: _tensor_bytes(one) for one in graph.initializer}
    found = []
    for node in graph.node:
        place, linears = _PRODUCTS.get(node.op_type, (0, 0))
        if linears and node.input[place] in sizes:
            found.append((node.op_type, linears, sizes[node.input[place]]))
    return found


def _tensor_bytes(tensor: Any) -> int:
    import onnx

    return int(math.prod(tensor.dims)) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _exported(model: LoadedModel, folder: Path) -> Path:
    """The module as ONNX with open batch and length. The exporter by tracing: the newer one needs one more package."""
    import torch

    from harness import models
    from harness.matrix import Scenario

    path = folder / "exported.onnx"
    batch = models.batch_inputs(model, Scenario("offline", 2, min(16, model.max_seq)), 0)
    axes = {name: {0: "batch", 1: "length"} for name in (*batch, "output")}
    _plain_attention(model.module)
    with torch.no_grad():
        torch.onnx.export(
            model.module,
            (),
            str(path),
            kwargs=dict(batch),
            input_names=list(batch),
            output_names=["output"],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )
    return path


def _plain_attention(module: nn.Module) -> None:
    """Attention as its formula: the optimizer knows no other. The values stay; the module is the engine's to change."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"


def _optimized(exported: Path, model: LoadedModel, folder: Path, packed: bool) -> Path:
    """The transformer optimizer's graph, with shapes. ``packed``: query, key and value in the attention operator."""
    import onnx
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    config: Any = model.module.backbone.config
    options = FusionOptions("bert")
    options.use_multi_head_attention = not packed
    found = optimizer.optimize_model(
        str(exported),
        model_type="bert",
        num_heads=int(config.num_attention_heads),
        hidden_size=int(config.hidden_size),
        optimization_options=options,
        opt_level=0,
    ).model
    if all(entry.domain != "com.microsoft" for entry in found.opset_import):
        found.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    path = folder / "optimized.onnx"
    onnx.save(SymbolicShapeInference.infer_shapes(found, auto_merge=True), str(path))
    return path


def _quantized(graph: Path, folder: Path, samples: Sequence[Mapping[str, Any]], weight_bits: int) -> Path:
    """``graph`` quantized: statically where there are ``samples``, else dynamically."""
    from onnxruntime import quantization

    path = folder / "quantized.onnx"
    weights = {
        "per_channel": True,
        "reduce_range": weight_bits == 7,
        "weight_type": quantization.QuantType.QInt8,
    }
    if not samples:
        quantization.quantize_dynamic(str(graph), str(path), **weights)
        return path
    quantization.quantize_static(
        str(graph),
        str(path),
        _Reader(samples),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
        extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        **weights,
    )
    return path


class _Reader:
    """Calibration samples as the quantizer asks for them: one a call, None at the end."""

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> Mapping[str, Any] | None:
        """The next sample."""
        return next(self._samples, None)


ENGINE = OnnxruntimeEngine()
