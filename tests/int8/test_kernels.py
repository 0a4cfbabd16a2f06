"""The C++ kernels against plain torch: every kernel this CPU runs, and the others' arithmetic by emulation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from int8 import isa, kernels
from int8.errors import ToolchainError
from int8.kernels import build, check
from int8.kernels.layout import KERNELS, KERNELS_7BIT, layout_of, packed_bytes

NARROW = {name for names in KERNELS_7BIT.values() for name in names}
EVERY_KERNEL = [*dict.fromkeys(name for names in KERNELS.values() for name in names), *sorted(NARROW), "int8:portable"]
SUPPORTED = {name for one in isa.supported() for name in (*KERNELS[one], *KERNELS_7BIT.get(one, ()))} | {
    "int8:portable"
}

#: Tiny, ragged, of a block and beyond it; K that no vector divides.
SHAPES = [(1, 1, 1), (1, 3, 5), (4, 16, 64), (5, 2, 3), (6, 17, 130), (13, 33, 66), (33, 100, 770), (129, 48, 4096)]

kernels.load()


def gemm(levels: Tensor, weight: Tensor, kernel: str, **given: object) -> Tensor:
    packed = torch.ops.int8.pack(weight, layout_of(kernel))
    rows = weight.shape[0]
    arguments = {
        "scale": torch.ones(rows), "bias": None, "row_scale": None, "row_zero_point": None, "zero_point": None,
        "post": "none", "residual": None, "out_inverse": None, "out_shift": None, "out_zero_point": None,
        "out_full_range": False, "out_dtype": torch.float32,
    } | given  # fmt: skip
    result: Tensor = torch.ops.int8.gemm(levels, [packed], [rows], **arguments, kernel=kernel)
    return result


def exact(levels: Tensor, weight: Tensor) -> Tensor:
    return levels.double() @ weight.double().t()


def operands(m: int, n: int, k: int, seed: int = 0, kernel: str = "") -> tuple[Tensor, Tensor]:
    """Random levels of the full range; of 7 bits for the weights of a kernel that takes no more."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator)
    bound = 63 if kernel in NARROW else 128
    return levels, torch.randint(-bound, min(bound + 1, 128), (n, k), dtype=torch.int8, generator=generator)


@pytest.fixture(params=EVERY_KERNEL)
def kernel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in SUPPORTED:
        pytest.skip(f"this CPU cannot run {name}; its arithmetic is tested by emulation")
    return name


@pytest.mark.parametrize("shape", SHAPES)
def test_accumulators_are_exact(kernel: str, shape: tuple[int, int, int]) -> None:
    levels, weight = operands(*shape, kernel=kernel)
    assert torch.equal(gemm(levels, weight, kernel).double(), exact(levels, weight).float().double())


def test_one_row_whose_strides_say_nothing(kernel: str) -> None:
    """A size of 1 may have any stride; torch's product left the output unwritten then (pytorch/pytorch#195066)."""
    levels, weight = operands(1, 48, 512, kernel=kernel)
    for row in (levels.as_strided((1, 512), (0, 1)), levels.as_strided((1, 1, 512), (7, 0, 1))):
        for out_dtype in (torch.float32, torch.bfloat16):
            result = gemm(row, weight, kernel, out_dtype=out_dtype).view(1, 48)
            assert torch.equal(result, exact(levels, weight).float().to(out_dtype))
    one_column = weight[:1].as_strided((1, 512), (0, 1))
    residual = torch.ones(1, 1).as_strided((1, 1), (0, 0))
    row_scale = torch.full((1, 1), 2.0).as_strided((1, 1), (0, 0))
    result = gemm(levels, one_column, kernel, residual=residual, row_scale=row_scale)
    assert torch.equal(result, (2 * exact(levels, one_column) + 1).float())


def test_a_row_that_is_repeated_without_memory_of_its_own(kernel: str) -> None:
    levels, weight = operands(1, 16, 70, kernel=kernel)
    assert torch.equal(gemm(levels.expand(9, 70), weight, kernel), exact(levels, weight).float().expand(9, 16))


def test_products_beyond_half_precision_stay_finite(kernel: str) -> None:
    """Accumulators times scales exceed what FP16 holds; scaling is FP32, the cast comes last
    (bitsandbytes-foundation/bitsandbytes#165).
    """
    level = 63 if kernel in NARROW else 127
    levels, weight = torch.full((2, 4096), 127, dtype=torch.int8), torch.full((3, 4096), level, dtype=torch.int8)
    given = {"scale": torch.full((3,), 1 / 127), "row_scale": torch.full((2, 1), 60 / 127)}
    for out_dtype in (torch.float32, torch.bfloat16):
        result = gemm(levels, weight, kernel, **given, out_dtype=out_dtype)
        assert torch.allclose(result.float(), torch.full((2, 3), 60.0 * 4096 * level / 127), rtol=2**-8)


def test_extremes_do_not_saturate(kernel: str) -> None:
    """Adjacent products of 127 x 127 overflow 16 bit where a kernel adds pairs there (microsoft/onnxruntime#5849,
    pytorch/pytorch#136746, pytorch/FBGEMM#125).
    """
    low, high = (-63, 63) if kernel in NARROW else (-128, 127)
    for a, b in ((-128, low), (-128, high), (127, high), (127, low)):
        levels, weight = torch.full((7, 1024), a, dtype=torch.int8), torch.full((33, 1024), b, dtype=torch.int8)
        assert torch.equal(gemm(levels, weight, kernel), torch.full((7, 33), float(1024 * a * b)))


def test_the_largest_inner_size(kernel: str) -> None:
    """K = 65,793 is where unsigned x signed products still fit 32 bit (int8.ops.max_inner_size)."""
    levels, weight = (
        torch.full((2, 65_793), 127, dtype=torch.int8),
        torch.full((3, 65_793), -63 if kernel in NARROW else -128, dtype=torch.int8),
    )
    assert torch.equal(gemm(levels, weight, kernel).double(), exact(levels, weight).float().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_bias_and_zero_points(kernel: str, dtype: torch.dtype) -> None:
    levels, weight = operands(19, 37, 90, kernel=kernel)
    scale, bias = torch.rand(37) / 1000, torch.randn(37)
    row_scale, row_zero = torch.rand(19, 1), torch.randint(-128, 128, (19, 1)).float()
    zero = torch.tensor(-7, dtype=torch.int8)
    product = exact(levels, weight) - (row_zero.double() - 7) * weight.double().sum(1)
    expected = (product * scale * row_scale + bias).float()
    given = {"scale": scale, "bias": bias, "row_scale": row_scale, "row_zero_point": row_zero, "zero_point": zero}
    result = gemm(levels, weight, kernel, **given, out_dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    assert result.dtype == dtype
    assert torch.allclose(result.float(), expected, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("post", ["gelu", "gelu_tanh", "relu"])
def test_activation_functions(kernel: str, post: str) -> None:
    levels = torch.arange(-128, 128).to(torch.int8).reshape(4, 64)
    identity = torch.eye(64, dtype=torch.int8)
    x = levels.float() / 12
    function = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "relu": torch.relu,
    }[post]
    result = gemm(levels, identity, kernel, scale=torch.full((64,), 1 / 12), post=post)
    assert torch.allclose(result, function(x), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_and_levels_for_the_next_linear(kernel: str, dtype: torch.dtype) -> None:
    levels, weight = operands(9, 21, 40, kernel=kernel)
    residual = torch.randn(9, 21).to(dtype)
    scale, inverse, shift = torch.full((21,), 1e-3), torch.rand(21) * 20, torch.randn(21)
    value = (exact(levels, weight) * 1e-3).float() + residual.float()
    assert torch.allclose(gemm(levels, weight, kernel, scale=scale, residual=residual), value, atol=1e-5)
    given = {"out_inverse": inverse, "out_shift": shift, "out_zero_point": torch.tensor(3), "out_full_range": True}
    result = gemm(levels, weight, kernel, scale=scale, residual=residual, **given, out_dtype=torch.int8)
    expected = (torch.round((value - shift) * inverse) + 3).clamp(-128, 127)
    # A value that lies on the border of two levels may fall on either side.
    assert (result.float() - expected).abs().max() <= 1
    assert (result.float() != expected).float().mean() < 0.02
    assert result.min() == -128 and result.max() == 127


def test_symmetric_levels_never_reach_minus_128(kernel: str) -> None:
    levels, weight = operands(9, 21, 40, kernel=kernel)
    result = gemm(levels, weight, kernel, out_inverse=torch.ones(21), out_dtype=torch.int8)
    assert result.min() == -127 and result.max() == 127


def test_several_weights_in_one_call(kernel: str) -> None:
    """Query, key and value: the activation is packed once, results lie side by side."""
    levels, _ = operands(11, 1, 70, kernel=kernel)
    weights = [operands(1, n, 70, n, kernel)[1] for n in (16, 5, 40)]
    packed = [torch.ops.int8.pack(weight, layout_of(kernel)) for weight in weights]
    scale, bias = torch.rand(61), torch.rand(61)
    result = torch.ops.int8.gemm(
        levels, packed, [16, 5, 40], scale, bias, None, None, None, "none", None, None, None, None, False,
        torch.float32, kernel,
    )  # fmt: skip
    assert torch.allclose(result, (exact(levels, torch.cat(weights)) * scale + bias).float(), rtol=1e-6, atol=1e-4)


def test_not_a_number_and_infinity_stay(kernel: str) -> None:
    levels, weight = operands(3, 16, 8, kernel=kernel)
    bias = torch.zeros(16)
    bias[0], bias[1] = float("nan"), float("inf")
    for dtype in (torch.float32, torch.bfloat16):
        result = gemm(levels, weight, kernel, bias=bias, out_dtype=dtype).float()
        assert result[:, 0].isnan().all() and result[:, 1].isinf().all() and result[:, 2:].isfinite().all()


def test_no_row_and_more_dimensions(kernel: str) -> None:
    levels, weight = operands(12, 7, 10, kernel=kernel)
    assert gemm(levels[:0], weight, kernel).shape == (0, 7)
    assert torch.equal(gemm(levels.view(2, 3, 2, 10), weight, kernel).view(12, 7), gemm(levels, weight, kernel))
    assert torch.equal(gemm(levels[::2], weight, kernel), gemm(levels, weight, kernel)[::2])


@pytest.mark.parametrize("layout", ["k2", "k4"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (40, 130)])
def test_packing_is_undone_exactly(layout: str, shape: tuple[int, int]) -> None:
    weight = operands(1, *shape)[1]
    packed = torch.ops.int8.pack(weight, layout)
    assert packed.numel() == packed_bytes(*shape)
    assert torch.equal(torch.ops.int8.unpack(packed, *shape, layout), weight)


def test_what_does_not_fit_is_refused(kernel: str) -> None:
    levels, weight = operands(3, 16, 8, kernel=kernel)
    with pytest.raises(RuntimeError, match="does not fit"):
        gemm(torch.zeros(3, 100, dtype=torch.int8), weight, kernel)
    with pytest.raises(RuntimeError, match="scale must be 16"):
        gemm(levels, weight, kernel, scale=torch.ones(3))
    with pytest.raises(RuntimeError, match="no kernel named"):
        torch.ops.int8.gemm(levels, [weight], [16], torch.ones(16), None, None, None, None, "none", None, None, None,
                            None, False, torch.float32, "int8:none")  # fmt: skip


def test_calls_are_counted(kernel: str) -> None:
    levels, weight = operands(3, 16, 8, kernel=kernel)
    before = torch.ops.int8.kernel_calls().get(kernel, 0)
    gemm(levels, weight, kernel)
    assert torch.ops.int8.kernel_calls()[kernel] == before + 1


def test_a_kernel_that_the_cpu_lacks_is_refused() -> None:
    lacking = sorted(set(EVERY_KERNEL) - SUPPORTED)
    if not lacking:
        pytest.skip("this CPU runs every kernel")
    with pytest.raises(RuntimeError, match="this CPU cannot run"):
        gemm(*operands(3, 16, 8), lacking[0])


def test_no_kernel_of_this_cpu_is_skipped() -> None:
    """What is tested above is what the C++ side says this CPU runs (pytorch/ao#4309)."""
    runs = {name for name in EVERY_KERNEL if torch.ops.int8.kernel_available(name)}
    if isa.describe()["amx"] == "denied":
        runs -= set(KERNELS["amx"])
    assert runs == SUPPORTED


def test_a_kernel_is_checked_before_it_is_trusted(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check.check.cache_clear()
    check.check((kernel,))
    # What a miscompiled kernel does: weights that are read in another order than they were packed in.
    monkeypatch.setattr(check, "layout_of", lambda name: "k2" if layout_of(name) == "k4" else "k4")
    check.check.cache_clear()
    with pytest.raises(ToolchainError, match=f"{kernel} computes wrong numbers"):
        check.check((kernel,))
    check.check.cache_clear()


# --- emulation ------------------------------------------------------------------------------------------------------

EMULATED = {"avx512": ("int8:avx512",), "vnni": ("int8:vnni",), "amx": ("int8:amx", "int8:amx_stream")}
CSRC = build.SOURCES


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A program for each ISA, compiled for this CPU with the ISA's intrinsics emulated."""
    if not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("SIMDe is not installed (Debian: apt-get install libsimde-dev)")
    folder = tmp_path_factory.mktemp("emulated")
    symbols = {"avx512": "&kGemmAvx512", "vnni": "&kGemmVnni", "amx": "&kGemmAmx, &kGemmAmxStream"}
    programs = {}
    for name, kernel_list in symbols.items():
        programs[name] = folder / name
        command = [
            build.compiler(), "-std=c++17", "-O1", "-Wno-psabi", "-DINT8_EMULATE_ISA",
            f"-DEMULATED_KERNELS={kernel_list}",
            f"-I{CSRC}", str(Path(__file__).parent / "kernels" / "emulated_gemm.cpp"), str(CSRC / f"gemm_{name}.cpp"),
            "-o", str(programs[name]),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return programs


@pytest.mark.parametrize("name", [kernel for names in EMULATED.values() for kernel in names])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 70), (13, 33, 66), (33, 100, 130), (70, 48, 256)])
@pytest.mark.parametrize("post", ["none", "gelu"])
def test_arithmetic_of_other_isas(
    emulator: dict[str, Path], tmp_path: Path, name: str, shape: tuple[int, int, int], post: str
) -> None:
    m, n, k = shape
    levels, weight = operands(m, n, k, seed=3)
    scale, bias, row_scale = torch.rand(n) / 2000, torch.randn(n), torch.rand(m)
    files = {"levels": levels, "weights": weight, "scale": scale, "bias": bias, "row_scale": row_scale}
    for file, tensor in files.items():
        (tmp_path / file).write_bytes(tensor.numpy().tobytes())
    program = emulator[next(one for one, names in EMULATED.items() if name in names)]
    done = subprocess.run(
        [program, str(m), str(n), str(k), post, tmp_path, name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    y = torch.frombuffer(bytearray((tmp_path / "y").read_bytes()), dtype=torch.float32).view(m, n)
    product = exact(levels, weight) - 5 * weight.double().sum(1)
    expected = (product * scale * row_scale[:, None] + bias).float()
    expected = torch.nn.functional.gelu(expected) if post == "gelu" else expected
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


# --- building -------------------------------------------------------------------------------------------------------


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="install one"):
        build.compiler()


def test_a_compiler_without_an_isa_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that compiles to nothing must not pass for one that was slower (pytorch/pytorch#147895)."""
    refusing = tmp_path / "c++"
    refusing.write_text(
        '#!/bin/sh\ncase " $* " in\n*" -mamx-int8 "*) echo "unrecognized option -mamx-int8" >&2; exit 1;;\n'
        '*" --version "*) echo "refusing 1.0"; exit 0;;\nesac\nfor last; do :; done\n: > "$last"\n'
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("CXX", str(refusing))
    monkeypatch.setenv("INT8_CACHE", str(tmp_path / "cache"))
    build.library_key.cache_clear()
    try:
        with pytest.raises(ToolchainError, match="unrecognized option -mamx-int8"):
            build.build()
    finally:
        build.library_key.cache_clear()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("INT8_CACHE", str(blocked))
    with pytest.raises(ToolchainError, match="INT8_CACHE"):
        build.build()


def test_each_isa_has_its_own_instructions() -> None:
    flags = {source.stem: build.flags_of(source) for source in CSRC.glob("gemm_*.cpp")}
    assert "-mamx-int8" in flags["gemm_amx"] and "-mamx-int8" not in flags["gemm_vnni"]
    assert "-mavx512vnni" in flags["gemm_vnni"] and "-mavx512vnni" not in flags["gemm_avx512"]
    plain = (flags["gemm_op"], flags["gemm_portable"])
    assert not any(flag.startswith("-mavx") for one in plain for flag in one)
