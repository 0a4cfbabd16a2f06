"""torch.compile with the settings that matter, and proof that every quantized linear was fused."""

from __future__ import annotations

import copy
import itertools
import shutil
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import config as inductor_config

from int8 import isa as isa_module
from int8 import kernels
from int8 import recipe as recipes
from int8.errors import FusionError, QuantizationError, ToolchainError
from int8.graph.fuse_attention import FuseAttention
from int8.graph.fuse_linear import FuseLinears
from int8.graph.lower_linear import FusionReport, reporting
from int8.graph.protect_inputs import ProtectInputs
from int8.kernels import selection
from int8.kernels.check import check
from int8.kernels.layout import layout_of
from int8.quantization import quantized_modules
from int8.recipe import Recipe
from int8.tensor import Int8Weight, LinearCall, output_dtype

#: Compiled graphs a model may have. Beyond it torch would run the model uncompiled without a word; we raise.
MAX_SHAPES = 64

#: Inductor's settings for every graph of ours, compiled now or packaged.
OPTIONS: Mapping[str, Any] = {
    # Constants are folded and weights packed once; without it no linear is fused, in INT8 or in floating point.
    "freezing": True,
    "joint_custom_pre_pass": FuseLinears(),
    "post_grad_custom_pre_pass": ProtectInputs(),
    "post_grad_custom_post_pass": FuseAttention(),
}


_entry_numbers = itertools.count()


class PackedLinear(nn.Module):
    """A quantized linear as the compiler sees it: plain tensors (its buffers) and one operator."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, pool: TensorPool) -> None:
        super().__init__()
        weight = linear.weight
        if not isinstance(weight, Int8Weight):
            raise QuantizationError("PackedLinear takes a linear with an Int8Weight")
        call = packed_call(weight)
        self._operator, self._constants = call.operator, dict(call.constants)
        self._operands = tuple(call.tensors)
        for name, tensor in call.tensors.items():
            self.register_buffer(name, None if tensor is None else pool.shared(tensor), persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        tensors = {name: getattr(self, name) for name in self._operands}
        result: Tensor = self._operator(
            input, bias=self.bias, out_dtype=output_dtype(input), **tensors, **self._constants
        )
        return result


def packed_call(weight: Int8Weight) -> LinearCall:
    """How ``weight`` is multiplied, packed for this process's ISA where a kernel of ours may run it."""
    call = weight.linear_call()
    isa = isa_module.effective()
    names = selection.own_kernels(isa, weight.bits)
    if call.operator is not torch.ops.int8.linear or not names:
        _refuse_saturation(weight, isa)
        return call
    kernels.load()
    check(names)
    layout = layout_of(names[0])
    packed = torch.ops.int8.pack(weight.qdata, layout)
    constants = {**call.constants, "layout": layout, "weight_bits": weight.bits}
    return LinearCall(call.operator, {**call.tensors, "qweight": packed}, constants)


def _refuse_saturation(weight: Int8Weight, isa: str) -> None:
    """oneDNN, which runs what our kernels do not, adds pairs of products in 16 bit where there is no VNNI."""
    bits = recipes.get("dynamic").resolve_weight_bits(isa)
    if weight.bits > bits:
        raise QuantizationError(
            f"{weight.bits}-bit weights would saturate in oneDNN's kernels without VNNI ({isa!r}); "
            f"quantize with weight_bits={bits}, or leave {selection.OVERRIDE} unset where it is set"
        )


class TensorPool:
    """Makes equal small tensors one object, so that linears that read one input quantize it once in the graph."""

    def __init__(self) -> None:
        self._pool: dict[tuple[Any, ...], Tensor] = {}

    def shared(self, tensor: Tensor) -> Tensor:
        """``tensor``, or an equal one seen before; weights are passed through."""
        if tensor.ndim > 1 or (tensor.ndim and tensor.dtype == torch.int8):
            return tensor
        value = tensor.detach().contiguous()
        return self._pool.setdefault((value.dtype, tuple(value.shape), value.numpy().tobytes()), value)


class CompiledModel(nn.Module):
    """A model that compiles itself for the shapes it meets and knows what became of its linears.

    Call it like the model. The first call with a new shape compiles; ``compile_s`` adds up that time.
    """

    def __init__(self, model: nn.Module, recipe: Recipe | None, *, dynamic: bool | None, allow_unfused: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self.compute_dtype = (recipe or recipes.get("fp32")).resolve_compute_dtype(isa_module.effective())
        self.quantized_linears = len(quantized_modules(model))
        self.linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        self.reports: list[FusionReport] = []
        self.compile_s = 0.0
        self._allow_unfused = allow_unfused
        self._packed = pack(model)
        self._run = torch.compile(_entry(self._packed), dynamic=dynamic, options=dict(OPTIONS))

    @property
    def fused_linears(self) -> int:
        """Quantized linears that run in a fused kernel, in every shape compiled so far; 0 before the first call."""
        counts = [len(report.fused_weights) for report in self.reports]
        # A compilation of only a part of the model (after a graph break) fuses fewer, completely.
        worst = [count for count, report in zip(counts, self.reports, strict=True) if not report.complete]
        return min(worst) if worst else max(counts, default=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        report = FusionReport()
        with torch.no_grad(), _compiling_settings(), reporting(report), computing_in(self.compute_dtype):
            start = time.perf_counter()
            result = self._call(*args, **kwargs)
        if report.graphs:
            self.compile_s += time.perf_counter() - start
            self.reports.append(report)
            check_fusion(report, self.quantized_linears, allow_unfused=self._allow_unfused)
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise FusionError(
                f"this model was compiled for {MAX_SHAPES} different shapes and would now run uncompiled; "
                "pad inputs to a few lengths, or compile with dynamic=True"
            ) from error


def computing_in(compute_dtype: str) -> AbstractContextManager[Any]:
    """A context in which everything but INT8 linears computes in ``compute_dtype``."""
    return torch.autocast("cpu", torch.bfloat16) if compute_dtype == "bf16" else nullcontext()


def check_fusion(report: FusionReport, quantized_linears: int, *, allow_unfused: bool) -> None:
    """Hold a compilation to its purpose: every call of a quantized linear became a fused kernel.

    Raises:
        FusionError: one did not, or the graph calls none of the model's; ``allow_unfused`` makes it a warning.
    """
    if report.complete and bool(report.calls) == bool(quantized_linears):
        return
    message = (
        f"{report.calls - report.fused_calls} of {report.calls} calls of quantized linears run outside the "
        f"fused kernel ({quantized_linears} linears are quantized); they would be slow. "
        "Models in float32 or bfloat16 fuse; pass allow_unfused=True to run all the same"
    )
    if not allow_unfused:
        raise FusionError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _entry(model: nn.Module) -> Callable[..., Any]:
    """A function that calls ``model``, with a code object of its own.

    Dynamo counts recompilations by code object, and all models of a class share their ``forward``: without this, the
    ninth compiled model of a process would run uncompiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"int8_model_{next(_entry_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


@contextmanager
def _compiling_settings() -> Iterator[None]:
    """Global settings that Dynamo reads whenever it compiles; the caller's come back afterwards.

    It looks at the global ``freezing``, not at the compile options: without it weights stay inputs and are never
    packed.
    """
    with (
        inductor_config.patch(freezing=True),
        dynamo_config.patch(recompile_limit=MAX_SHAPES, fail_on_recompile_limit_hit=True),
    ):
        yield


def compile(
    model: nn.Module, *, recipe: Recipe | str | None = None, dynamic: bool | None = None, allow_unfused: bool = False
) -> CompiledModel:
    """Compile ``model`` for this process's ISA.

    Args:
        model: a quantized model, or a floating-point one for the baselines ``fp32`` and ``bf16``. It is not changed.
        recipe: the recipe the model was quantized with (found by itself where :func:`int8.quantize` or
            :func:`int8.load` made the model), or ``fp32`` or ``bf16``.
        dynamic: as ``torch.compile``: False compiles every shape for itself, True makes sizes symbolic, None decides.
        allow_unfused: warn instead of raising when a quantized linear is not fused.

    Returns:
        A module that is called like ``model``. Everything but INT8 linears runs in the recipe's compute dtype: BF16
        where the ISA multiplies it natively, FP32 elsewhere.

    Raises:
        ToolchainError: there is no C++ compiler.
        QuantizationError: the model is in training mode or in FP16, or recipe and model do not fit.
        FusionError: on the first call, if a quantized linear was not fused.
    """
    chosen = check_compilable(model, recipe)
    return CompiledModel(model, chosen, dynamic=dynamic, allow_unfused=allow_unfused).eval()


def check_compilable(model: nn.Module, recipe: Recipe | str | None) -> Recipe | None:
    """The recipe that ``model`` is compiled by; None for a floating-point model as it is.

    Raises:
        ToolchainError, QuantizationError: as :func:`compile`.
    """
    _require_compiler()
    chosen = _recipe_of(model, recipe)
    if model.training:
        raise QuantizationError("the model is in training mode; call model.eval() first")
    half = next((name for name, tensor in model.named_parameters() if tensor.dtype == torch.float16), None)
    if half is not None:
        raise QuantizationError(
            f"parameter {half!r} is float16, which CPUs emulate; convert the model with model.float() first"
        )
    return chosen


def pack(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that shares its tensors, with quantized linears as :class:`PackedLinear`."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = copy.deepcopy(model, dict(tensors))
    pool, seen = TensorPool(), dict[int, PackedLinear]()
    for parent in list(packed.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and isinstance(child.weight, Int8Weight):
                setattr(parent, name, seen.setdefault(id(child), PackedLinear(child, pool)))
    return packed


def _recipe_of(model: nn.Module, recipe: Recipe | str | None) -> Recipe | None:
    chosen = recipes.get(recipe) if isinstance(recipe, str) else recipe
    stored = getattr(model, "int8_recipe", None)
    chosen = chosen or (stored if isinstance(stored, Recipe) else None)
    quantized = bool(quantized_modules(model))
    if chosen is not None and chosen.quantized != quantized:
        state = "quantized" if quantized else "not quantized"
        raise QuantizationError(
            f"recipe {chosen.name!r} does not fit: the model is {state}; "
            "call int8.quantize first, or pass the other recipe"
        )
    if chosen is None and quantized:
        chosen = recipes.get("sq-dynamic")
    return chosen


def _require_compiler() -> None:
    configured = inductor_config.cpp.cxx
    candidates = configured if isinstance(configured, (list, tuple)) else (configured,)
    if not any(shutil.which(str(name)) for name in (*candidates, "g++", "clang++") if name):
        raise ToolchainError("no C++ compiler found; install one (Debian: apt-get install g++) or name it in CXX")
