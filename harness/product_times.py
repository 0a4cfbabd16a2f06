"""INT8 products against floating point over hidden sizes, as appendix D of LLM.int8() does (arXiv 2208.07339).

One linear of an FFN, hidden size to four times it, on a batch of tokens some of whose features are outliers, through
the same compiled linears that models run: in the floating-point format that is native to the ISA (BF16 with AMX, FP32
elsewhere), vector-wise INT8, and LLM.int8() with the outlier dimensions found in each call and with fixed ones. Beside
them the quantization of the input alone, as a compiled function of its own, and what the decomposition adds. Memory is
that of the weights; LLM.int8() keeps outlier columns in floating point, all of them where it finds the dimensions at
run time, so it saves memory only with fixed ones.

``<results>/analyses/products-<host id>.json`` holds the fields of :class:`ProductReport`, its ``sizes`` those of
:class:`SizeTimes` with ``speedups`` over floating point added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from harness import fingerprint, timing
from harness.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

#: From MiniLM's hidden size to that of the paper's smallest model that gains.
SIZES = (384, 768, 1024, 2048, 3072, 4096, 5120)
#: Tokens of a batch: 8 sequences of 128.
TOKENS = 1024
#: Outlier dimensions planted: the paper finds up to 7 in its largest models.
OUTLIERS = 6
MAGNITUDE = 20.0
FLOAT = "float"
QUANTIZE = "quantize"
RECIPES = ("vectorwise", "llm-int8", "llm-int8-offline")

ROUNDS, SLICE_S, WARMUP_S, MOST = 4, 0.2, 1.0, 200

Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class SizeTimes:
    """One hidden size.

    Attributes:
        inner, outer: K and N of the product.
        seconds: median of one product: ``float``, each of ``RECIPES``; ``quantize`` is the input's quantization alone.
        decomposition_s: what ``llm-int8`` takes longer than ``vectorwise``; ``decomposition_offline_s`` with fixed
            dimensions. Negative where noise is larger than the difference.
        weight_bytes: of ``float`` and of each recipe, scales and kept columns included.
    """

    inner: int
    outer: int
    seconds: Mapping[str, float]
    decomposition_s: float
    decomposition_offline_s: float
    weight_bytes: Mapping[str, int]

    @property
    def speedups(self) -> dict[str, float]:
        """Of each recipe over floating point."""
        return {name: self.seconds[FLOAT] / self.seconds[name] for name in RECIPES}


@dataclass(frozen=True)
class ProductReport:
    """All sizes on one host. ``float_dtype``: of the floating-point product and of outlier dimensions."""

    isa: str
    threads: int
    tokens: int
    outliers: int
    float_dtype: str
    host: str
    sizes: tuple[SizeTimes, ...]


def check(sizes: Sequence[int]) -> None:
    """UsageError for a hidden size that cannot be measured."""
    from int8 import recipe as recipes

    if not sizes or min(sizes) <= OUTLIERS:
        raise UsageError(f"hidden sizes must be above {OUTLIERS}, the number of planted outliers")
    assert recipes.get("llm-int8").outlier_threshold is not None


def examine(sizes: Sequence[int], tell: Tell, *, slice_s: float = SLICE_S) -> ProductReport:
    """Measure each hidden size on this process's ISA and threads.

    Raises:
        UsageError: a size that cannot be measured.
        FusionError, ToolchainError: a product cannot be compiled.
    """
    check(sizes)
    from int8 import isa as isas
    from int8 import recipe as recipes

    isa = isas.enforce()
    import torch

    found = []
    for place, size in enumerate(sizes):
        tell(f"hidden size {size}: compiling", place, len(sizes))
        runs, weight_bytes = _products(size, isa)
        tell(f"hidden size {size}: timing", place + 0.5, len(sizes))
        seconds = _medians(runs, slice_s)
        plain, online, fixed = (seconds[name] for name in RECIPES)
        found.append(SizeTimes(size, 4 * size, seconds, online - plain, fixed - plain, weight_bytes))
    host = fingerprint.comparable_id(fingerprint.collect())
    dtype = recipes.outlier_dtype(isa)
    return ProductReport(isa, torch.get_num_threads(), TOKENS, OUTLIERS, dtype, host, tuple(found))


def _products(size: int, isa: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """What is timed, each ready to be called, and the bytes of its weights."""
    import torch

    import int8
    from harness.engines.int8 import tensor_bytes
    from int8 import recipe as recipes

    linear, x = _linear(size), _tokens(size)
    native = recipes.outlier_dtype(isa)
    runs: dict[str, Callable[[], object]] = {}
    weight_bytes: dict[str, int] = {}

    def add(name: str, module: nn.Module, recipe: str) -> None:
        compiled = int8.compile(module, recipe=recipe, dynamic=False)
        with torch.no_grad():
            compiled(input=x)
        runs[name] = lambda: compiled(input=x)

    add(FLOAT, linear, native)
    weight_bytes[FLOAT] = linear.weight.numel() * (2 if native == "bf16" else 4)
    for name in RECIPES:
        quantized: Any = int8.quantize(linear, name, [{"input": x}], accept=lambda _name, _module: True, isa=isa)
        weight_bytes[name] = tensor_bytes(quantized.product.weight)
        add(name, quantized, name)
    runs[QUANTIZE] = _quantization(x)
    return runs, weight_bytes


def _linear(size: int) -> Any:
    """A module ``product`` from ``size`` to four times it, the same for the same size."""
    import torch

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = torch.nn.Linear(size, 4 * size)

        def forward(self, input: Tensor) -> Tensor:
            result: Tensor = self.product(input)
            return result

        @property
        def weight(self) -> Tensor:
            return self.product.weight

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(size)
        return Product().eval().requires_grad_(False)


def _tokens(size: int) -> Tensor:
    """(TOKENS, size): normal values below the threshold, and OUTLIERS features above it, one-sided."""
    import torch

    generator = torch.Generator().manual_seed(size)
    x = torch.randn(TOKENS, size, generator=generator).clamp(-4.0, 4.0)
    chosen = torch.randperm(size, generator=generator)[:OUTLIERS]
    x[:, chosen] += MAGNITUDE
    return x


def _quantization(x: Tensor) -> Callable[[], object]:
    """One scale and INT8 levels a token of ``x``, compiled."""
    import torch

    from int8 import ops

    compiled = torch.compile(lambda value: ops.quantize_activation(value, None, None), dynamic=False)
    with torch.no_grad():
        compiled(x)
    return lambda: compiled(x)


def _medians(runs: Mapping[str, Callable[[], object]], slice_s: float) -> dict[str, float]:
    """Median seconds of each, measured in turns: A B C, C B A, ..."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            timing.warm_up(run, WARMUP_S)
        for turn in range(ROUNDS):
            for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
                samples[name] += timing.time_slice(runs[name], slice_s, 3, MOST).samples_s
    return {name: timing.percentile(found, 50) for name, found in samples.items()}


def to_json(report: ProductReport) -> dict[str, Any]:
    """The report as its file has it; see the module."""
    data = dataclasses.asdict(report)
    for one, size in zip(data["sizes"], report.sizes, strict=True):
        one["speedups"] = size.speedups
    return data


def as_table(report: ProductReport) -> RenderableType:
    """The report for people."""
    name = report.float_dtype.upper()
    table = Table(
        title=f"{report.tokens} tokens, {report.outliers} outlier features, ISA {report.isa}, {report.threads} threads",
        title_justify="left",
    )
    columns = [f"{name} ms", "vector-wise ms", "LLM.int8() ms", "fixed ms", "vector-wise", "LLM.int8()", "fixed"]
    columns += ["quantize ms", "decompose ms", "fixed ms", f"{name} MB", "vector-wise MB", "LLM.int8() MB", "fixed MB"]
    table.add_column("hidden", justify="right")
    for column in columns:
        table.add_column(column, justify="right")
    for one in report.sizes:
        times = [f"{1e3 * one.seconds[key]:.3f}" for key in (FLOAT, *RECIPES)]
        ratios = [f"{value:.2f}x" for value in one.speedups.values()]
        overhead = [one.seconds[QUANTIZE], one.decomposition_s, one.decomposition_offline_s]
        memory = [f"{one.weight_bytes[key] / 1e6:.2f}" for key in (FLOAT, *RECIPES)]
        table.add_row(str(one.inner), *times, *ratios, *(f"{1e3 * value:.3f}" for value in overhead), *memory)
    note = (
        "fixed: outlier dimensions from calibration. Overheads: quantizing the input alone; what decomposition adds to "
        "vector-wise. Without fixed dimensions every column is kept in floating point too."
    )
    return Group(table, note)
