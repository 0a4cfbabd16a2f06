"""Our attention against plain torch: the kernels, other ISAs' arithmetic by emulation, and the pass that puts it in."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

import int8
from int8 import isa, kernels
from int8.errors import QuantizationError
from int8.evidence import own_kernel_calls
from int8.graph.fuse_attention import FuseAttention, fuse_attention
from int8.kernels import attention, build
from int8.kernels.attention import AttentionProblem

KERNELS = ("int8:attention_amx", "int8:attention_avx512", "int8:attention_avx2", "int8:attention_portable")
DTYPES = (torch.float32, torch.bfloat16)
#: Largest error against FP64, of values of unit variance: rounding of the result, and of the weights.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

kernels.load()


def operands(
    queries: int, keys: int, dim: int, dtype: torch.dtype = torch.float32, batch: int = 2, heads: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of joint products, as a query/key/value GEMM leaves them."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys + dim)
    joint = torch.randn(batch, queries, 3, heads, dim, generator=generator).to(dtype)
    other = joint if queries == keys else torch.randn(batch, keys, 3, heads, dim, generator=generator).to(dtype)
    return joint[:, :, 0].transpose(1, 2), other[:, :, 1].transpose(1, 2), other[:, :, 2].transpose(1, 2)


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """In FP64. Zeros where a query attends nothing, as torch's own attention has it."""
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value.double()


def attended(lengths: list[int], keys: int) -> Tensor:
    """(batch, 1, 1, keys), true for the first tokens of each sequence."""
    return (torch.arange(keys) < torch.tensor(lengths)[:, None])[:, None, None]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not torch.ops.int8.attention_available(name):
        pytest.skip(f"this CPU cannot run {name}; its arithmetic is tested by emulation")
    return name


def dtypes_of(kernel: str) -> tuple[torch.dtype, ...]:
    return DTYPES[1:] if kernel == "int8:attention_amx" else DTYPES


# --- the operator ---------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 16), (7, 7, 20), (17, 17, 64), (127, 127, 32), (128, 128, 80), (5, 300, 128), (130, 33, 72)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(kernel: str, shape: tuple[int, int, int]) -> None:
    scale = shape[2] ** -0.5
    for dtype in dtypes_of(kernel):
        q, k, v = operands(*shape, dtype)
        result = torch.ops.int8.attention(q, k, v, None, scale, kernel)
        assert result.shape == q.shape and result.dtype == dtype
        assert result.transpose(1, 2).is_contiguous(), "the reshape behind it must cost nothing"
        assert (result.double() - reference(q, k, v, None, scale)).abs().max() < TOLERANCE[dtype]


def masks(dtype: torch.dtype, queries: int, keys: int) -> dict[str, Tensor]:
    """Every kind of mask, for two sequences of three heads."""
    keep = attended([keys * 2 // 3, keys], keys)
    generator = torch.Generator().manual_seed(0)
    infinite = torch.zeros(2, 1, 1, keys, dtype=dtype).masked_fill(~keep, float("-inf"))
    left = keep.flip(-1)
    return {
        "padding": keep,
        "padding, a row for each query": keep.expand(2, 1, queries, keys).contiguous(),
        "padding on the left": left,
        "infinite, expanded": infinite.expand(2, 3, queries, keys),
        "lowest number": torch.zeros(2, 1, 1, keys, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min),
        "any bias": torch.randn(2, 1, queries, keys, generator=generator).to(dtype),
        "of each head": torch.rand(2, 3, queries, keys, generator=generator) > 0.5,
        "of no batch": torch.rand(queries, keys, generator=generator) > 0.3,
        "one value for all keys": torch.full((2, 1, 1, 1), -3.0, dtype=dtype),
        "strided": torch.randn(2, 1, keys, queries, generator=generator).to(dtype).transpose(2, 3),
    }


@pytest.mark.parametrize("name", masks(torch.float32, 4, 4))
def test_masks(kernel: str, name: str) -> None:
    for dtype in dtypes_of(kernel):
        q, k, v = operands(40, 37, 24, dtype)
        mask = masks(dtype, 40, 37)[name]
        result = torch.ops.int8.attention(q, k, v, mask, 0.2, kernel)
        assert (result.double() - reference(q, k, v, mask, 0.2)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("fill", ["bool", "infinite", "lowest"])
@pytest.mark.parametrize("rows", [1, 9])
def test_queries_that_attend_nothing_give_what_torch_gives(kernel: str, fill: str, rows: int) -> None:
    """Zeros for -inf, the mean of all values for the lowest finite number."""
    for dtype in dtypes_of(kernel):
        q, k, v = operands(9, 9, 16, dtype)
        keep = attended([0, 6], 9).expand(2, 1, rows, 9).clone()
        keep[1, 0, 0] = rows == 1
        value = torch.finfo(dtype).min if fill == "lowest" else float("-inf")
        mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, value)
        expected = scaled_dot_product_attention(q, k, v, mask.expand(2, 1, 9, 9), scale=0.25)
        result = torch.ops.int8.attention(q, k, v, keep if fill == "bool" else mask, 0.25, kernel)
        assert (result.double() - expected.double()).abs().max() < TOLERANCE[dtype]
        assert bool(result[0].float().abs().max() == 0) == (fill != "lowest")


def test_what_lies_in_padding_does_not_matter(kernel: str) -> None:
    for dtype in dtypes_of(kernel):
        q, k, v = (operand.clone() for operand in operands(50, 50, 32, dtype))
        keep = attended([20, 50], 50)
        before = torch.ops.int8.attention(q, k, v, keep, 0.2, kernel)
        k[0, :, 20:], v[0, :, 20:] = 1e4, -1e4
        assert torch.equal(torch.ops.int8.attention(q, k, v, keep, 0.2, kernel), before)


def test_nan_and_extreme_scores(kernel: str) -> None:
    for dtype in dtypes_of(kernel):
        q, k, v = (operand.clone() for operand in operands(20, 20, 16, dtype))
        q[0, 0] *= 1e4  # one key takes all
        q[1, 2, 5] = float("nan")
        result = torch.ops.int8.attention(q, k, v, None, 0.25, kernel)
        expected = reference(q, k, v, None, 0.25)
        assert result[1, 2, 5].isnan().all()
        assert not result[1, 2, 6].isnan().any()
        assert (result[0].double() - expected[0]).abs().max() < TOLERANCE[dtype]


def test_few_heads_are_split_among_threads(kernel: str) -> None:
    """One sequence of one head, and more threads than heads: parts of the queries share the packed keys."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for dtype in dtypes_of(kernel):
            q, k, v = operands(200, 200, 32, dtype, batch=1, heads=2)
            mask = torch.randn(200, 200).to(dtype)
            result = torch.ops.int8.attention(q, k, v, mask, 0.2, kernel)
            assert (result.double() - reference(q, k, v, mask, 0.2)).abs().max() < TOLERANCE[dtype]
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_computed_is_refused() -> None:
    q, k, v = operands(4, 4, 8)
    run = torch.ops.int8.attention
    name = "int8:attention_portable"
    with pytest.raises(RuntimeError, match="no kernel named"):
        run(q, k, v, None, 1.0, "int8:attention_mmx")
    with pytest.raises(RuntimeError, match="does not compute"):
        run(q.double(), k.double(), v.double(), None, 1.0, name)
    with pytest.raises(RuntimeError, match="one dtype"):
        run(q, k.bfloat16(), v, None, 1.0, name)
    with pytest.raises(RuntimeError, match="do not fit"):
        run(q, k[:, :2], v[:, :2], None, 1.0, name)
    with pytest.raises(RuntimeError, match="positive scale"):
        run(q, k, v, None, -1.0, name)
    with pytest.raises(RuntimeError, match="masks of bool"):
        run(q, k, v, torch.zeros(4, 4, dtype=torch.long), 1.0, name)


def test_empty_batches_are_empty() -> None:
    q, k, v = operands(3, 3, 8)
    assert torch.ops.int8.attention(q[:0], k[:0], v[:0], None, 1.0, "int8:attention_portable").shape == (0, 3, 3, 8)


# --- emulation ------------------------------------------------------------------------------------------------------

EMULATED = {"avx512": "kAttentionAvx512", "amx": "kAttentionAmx"}


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A program for each ISA, compiled for this CPU with the ISA's intrinsics emulated."""
    if not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("SIMDe is not installed (Debian: apt-get install libsimde-dev)")
    folder, programs = tmp_path_factory.mktemp("emulated"), {}
    for name, symbol in EMULATED.items():
        programs[name] = folder / name
        sources = (
            Path(__file__).parent / "kernels" / "emulated_attention.cpp",
            build.SOURCES / f"attention_{name}.cpp",
        )
        flags = ("-std=c++17", "-O1", "-w", "-DINT8_EMULATE_ISA", f"-DEMULATED_KERNEL={symbol}", f"-I{build.SOURCES}")
        command = [build.compiler(), *flags, *map(str, sources), "-o", str(programs[name])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return programs


@pytest.mark.parametrize(("name", "dtype"), [("avx512", DTYPES[0]), ("avx512", DTYPES[1]), ("amx", DTYPES[1])])
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 17, 20), (33, 70, 64), (50, 127, 40), (20, 20, 128)])
@pytest.mark.parametrize("mask_rows", ["none", "one", "all"])
def test_arithmetic_of_other_isas(
    emulators: dict[str, Path],
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    mask_rows: str,
) -> None:
    queries, keys, dim = shape
    stride, scale = dim + 5, dim**-0.5
    rows = {"none": 0, "one": 1, "all": queries}[mask_rows]
    torch.manual_seed(queries)
    padded = [torch.randn(tokens, stride).to(dtype) for tokens in (queries, keys, keys)]
    mask = torch.randn(rows, keys) if rows else None
    if mask is not None:
        mask[:, keys // 2 + 1 :: 3] = float("-inf")
        (tmp_path / "mask").write_bytes(mask.numpy().tobytes())
    for file, tensor in zip(("query", "key", "value"), padded, strict=True):
        (tmp_path / file).write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    arguments = (*shape, stride, rows, padded[0].element_size(), scale, tmp_path)
    done = subprocess.run(
        [emulators[name], *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=dtype).view(queries, dim)
    query, key, value = (tensor[:, :dim] for tensor in padded)
    assert (result.double() - reference(query, key, value, mask, scale)).abs().max() < TOLERANCE[dtype]


# --- the pass -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.OVERRIDE, "ours")


class _Fuse(CustomGraphPass):
    """The pass on any graph, quantized or not, with what it found."""

    def __init__(self) -> None:
        self.fused: list[int] = []
        self.mask_sizes: list[int] = []

    def __call__(self, graph: Graph) -> None:
        self.fused.append(fuse_attention(graph))
        for node in graph.find_nodes(op="call_function", target=torch.ops.int8.attention.default):
            if node.args[3] is not None:
                self.mask_sizes.append(node.args[3].meta["val"].numel())

    def uuid(self) -> Any:
        return None


def encoder(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40
    }  # fmt: skip
    if family == "distilbert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 40}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=50, max_position_embeddings=24, attn_implementation="sdpa", **sizes
    )
    model: nn.Module = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    return model


def batch_of(masked: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


@pytest.mark.parametrize(
    ("family", "autocast", "masked"),
    [
        ("bert", False, True),
        ("bert", True, True),
        ("bert", False, False),
        ("distilbert", False, True),
        ("distilbert", True, False),
        ("xlm-roberta", False, True),
        ("xlm-roberta", True, True),
    ],
)
def test_every_attention_of_an_encoder_becomes_ours(ours: None, family: str, autocast: bool, masked: bool) -> None:
    model, batch, found = encoder(family), batch_of(masked), _Fuse()
    compiled = torch.compile(model, dynamic=False, options={"freezing": True, "post_grad_custom_post_pass": found})
    before = own_kernel_calls()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(**batch).last_hidden_state
        result = compiled(**batch).last_hidden_state
    name = attention.kernel_for(isa.effective(), torch.bfloat16 if autocast else torch.float32)
    assert found.fused == [2]
    assert found.mask_sizes == ([2 * 9] * 2 if masked else []), "the mask still has a row for each query"
    assert own_kernel_calls()[name] - before.get(name, 0) == 2
    assert torch.allclose(result.float(), expected.float(), atol=0.1 if autocast else 1e-5)


def test_quantized_models_run_it_and_baselines_do_not(ours: None) -> None:
    model, batch = encoder("bert"), batch_of(True)
    quantized = int8.quantize(model, "sq-static", [batch])
    compiled = int8.compile(quantized, dynamic=False)
    with inductor_config.patch(fx_graph_cache=False):  # a graph from the cache on disk is not passed through again
        result = compiled(**batch).last_hidden_state
    assert torch.allclose(result.float(), quantized(**batch).last_hidden_state.float(), atol=0.05)
    assert compiled.reports[0].attention_calls == 2
    baseline = int8.compile(model, recipe="fp32", dynamic=False)
    baseline(**batch)
    assert [report.attention_calls for report in baseline.reports] == [0]


def test_a_cached_graph_keeps_to_its_isa_and_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache on disk knows this pass by its identity alone: a graph cached under another ISA, or before the
    override, would bring that one's kernel along.
    """
    seen = []
    for effective, override in (("amx", "auto"), ("avx512", "auto"), ("avx2", "auto"), ("avx2", "torch")):
        monkeypatch.setattr(isa._State, "enforced", effective)
        monkeypatch.setenv(attention.OVERRIDE, override)
        seen.append(FuseAttention().uuid())
    assert len(set(seen)) == 4
    assert FuseAttention().uuid() == seen[-1]


def traced(function: Callable[..., Any], *tensors: Tensor) -> Graph:
    graph: Graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    return graph


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: flash(q, k, v, 0.0, True)[0],
        lambda q, k, v: flash(q, k, v, 0.5)[0],
        lambda q, k, v: flash(q, k, v),
        lambda q, k, v: flash(q, k, v)[1],
        lambda q, k, v: flash(q.double(), k.double(), v.double())[0],
    ],
    ids=["causal", "dropout", "both outputs", "log-sum-exp", "float64"],
)
def test_what_it_must_not_touch(ours: None, function: Callable[..., Any]) -> None:
    graph = traced(function, *operands(6, 6, 8))
    before = [str(node) for node in graph.nodes]
    assert fuse_attention(graph) == 0
    assert [str(node) for node in graph.nodes] == before


def test_a_mask_that_depends_on_the_query_stays_whole(ours: None) -> None:
    """Causal and padded at once: only the constant part may go."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        index = torch.arange(6)
        causal = index[None, None, :, None] >= index[None, None, None, :]
        mask = (causal & keep).expand(2, 1, 6, 6)
        result: Tensor = flash(q, k, v, attn_mask=torch.where(mask, 0.0, float("-inf")))[0]
        return result

    q, k, v = operands(6, 6, 8)
    keep = attended([4, 6], 6)
    module = make_fx(attend, tracing_mode="fake")(q, k, v, keep)
    expected = module(q, k, v, keep)
    assert fuse_attention(module.graph) == 1
    module.recompile()
    assert torch.allclose(module(q, k, v, keep), expected, atol=1e-6)


# --- choosing -------------------------------------------------------------------------------------------------------

PROBLEM = AttentionProblem(1, 2, 8, 8, 16, torch.float32, "rows")


def test_a_choice_is_measured_once_and_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.load()  # before the cache moves
    monkeypatch.setattr(build, "load", lambda: library)
    monkeypatch.setenv("INT8_CACHE", str(tmp_path))
    monkeypatch.setattr(attention, "_chosen", {})
    first = attention.choose(PROBLEM, "avx2")
    assert set(first.times_s) == {"int8:attention_avx2", "torch"}
    assert first.kernel in first.times_s
    monkeypatch.setattr(attention, "_chosen", {})
    monkeypatch.setattr(attention, "_measured", lambda *_: pytest.fail("measured again"))
    assert attention.choose(PROBLEM, "avx2") == first


def test_the_override_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.OVERRIDE, "torch")
    assert attention.choose(PROBLEM, "avx2").kernel == "torch"
    assert fuse_attention(traced(lambda q, k, v: flash(q, k, v)[0], *operands(6, 6, 8))) == 0
    monkeypatch.setenv(attention.OVERRIDE, "ours")
    assert attention.choose(PROBLEM, "avx512").kernel == "int8:attention_avx512"
    monkeypatch.setenv(attention.OVERRIDE, "mine")
    with pytest.raises(QuantizationError, match="auto, ours or torch"):
        attention.choose(PROBLEM, "avx2")


def test_each_isa_has_a_kernel_for_both_dtypes() -> None:
    for name in isa.NAMES:
        assert {attention.kernel_for(name, dtype) for dtype in DTYPES} <= set(KERNELS)
    assert attention.kernel_for("amx", torch.bfloat16) == "int8:attention_amx"
    assert attention.kernel_for("avx2", torch.float16) is None
