"""AOTInductor packages: a compiled model in one file, which a fresh process loads without the model's code.

Building traces the model (torch.export), lowers and freezes its graph with the same passes and settings as
:func:`int8.compile`, and compiles it to a shared library. Loading needs torch and this library, neither transformers
nor a compiler.

Loops take the number of threads of the process that runs them, not of the one that built them.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.export import Dim, ExportedProgram
from torch.export.pt2_archive._package import package_pt2
from torch.fx import GraphModule

import int8
from int8 import isa as isa_module
from int8 import ops, package_info
from int8 import recipe as recipes
from int8.compilation import OPTIONS, check_compilable, check_fusion, computing_in, pack
from int8.errors import Int8Error, PackageError
from int8.graph.lower_linear import FusionReport, reporting
from int8.package_info import InputSpec, Library, PackageInfo
from int8.quantization import quantized_modules, weight_bits
from int8.recipe import Recipe

#: The graph's name inside the archive.
_MODEL = "model"

#: One of our operators in the list of operators that a graph calls by name.
_OPERATOR = re.compile(r"\bint8::(\w+)")

#: Which sizes vary: True the first (batch) and second (sequence) of every input, a mapping those it names: input ->
#: dimension -> the size's name. Sizes of one name are equal in every call.
Dynamic = bool | Mapping[str, Mapping[int, str]]
_BATCH_AND_SEQUENCE = ("batch", "sequence")


class LoadedPackage:
    """A package, ready to run. Call it with the model's inputs by name; it answers tensors in the model's own
    structure, a dict where the model gives one of transformers' output classes.
    """

    def __init__(self, info: PackageInfo, loader: Any) -> None:
        self.info = info
        self._loader = loader
        self._names = tuple(one.name for one in info.inputs)

    @property
    def linears(self) -> int:
        """Linears of the model, quantized or not."""
        return self.info.linears

    @property
    def quantized_linears(self) -> int:
        """Linears whose weight is INT8."""
        return self.info.quantized_linears

    @property
    def fused_linears(self) -> int:
        """Quantized linears that run in a fused kernel."""
        return self.info.fused_linears

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the model.

        Raises:
            PackageError: inputs whose names, dtypes or shapes are not those that the package was built for.
        """
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        if inputs.keys() != set(self._names) or len(args) > len(self._names):
            raise PackageError(
                f"this package takes the inputs {', '.join(self._names)}, not {', '.join(inputs) or 'none'}"
            )
        sizes: dict[str, int] = {}
        for spec in self.info.inputs:
            self._check(spec, inputs[spec.name], sizes)
        flat = self._loader.boxed_run([inputs[name].contiguous() for name in self._names])
        return _restored(self.info.outputs, flat)

    def _check(self, spec: InputSpec, tensor: Tensor, sizes: dict[str, int]) -> None:
        """Generated code trusts its inputs, so what it was not built for must not reach it."""
        if str(tensor.dtype) != f"torch.{spec.dtype}" or tensor.device.type != "cpu":
            raise PackageError(f"input {spec.name!r} is {tensor.dtype} on {tensor.device}, not {spec.dtype} on cpu")
        fits = len(spec.shape) == tensor.ndim
        for wanted, size in zip(spec.shape, tensor.shape, strict=False):
            if isinstance(wanted, str):
                low, high = self.info.sizes[wanted]
                fits &= sizes.setdefault(wanted, size) == size and low <= size and (high is None or size <= high)
            else:
                fits &= wanted == size
        if not fits:
            raise PackageError(
                f"input {spec.name!r} has shape {tuple(tensor.shape)}; this package takes {self._said(spec)}"
            )

    def _said(self, spec: InputSpec) -> str:
        bounds = (
            f"{name} {low} to {'any' if high is None else high}"
            for name, (low, high) in self.info.sizes.items()
            if name in spec.shape
        )
        shape = ", ".join(map(str, spec.shape))
        return f"({shape})" + "".join(f", {bound}" for bound in bounds)


def export(
    model: nn.Module,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    path: str | os.PathLike[str],
    *,
    recipe: Recipe | str | None = None,
    dynamic: Dynamic = False,
    allow_unfused: bool = False,
) -> PackageInfo:
    """Compile ``model`` for this process's ISA into a package.

    Args:
        model: what :func:`int8.compile` takes; it is not changed.
        example_inputs: tensors by the names of the model's arguments, or in their order.
        path: the file to write, ``*.pt2``. It appears when it is whole, never half.
        recipe: as for :func:`int8.compile`.
        dynamic: False fixes the shapes of the examples. True lets the first (batch) and second (sequence) dimension of
            every input vary, the same in all of them. A mapping says which dimensions of which input vary, such as
            ``{"input_ids": {0: "batch"}, "attention_mask": {0: "batch"}}``; sizes of one name are equal in every call.
        allow_unfused: warn instead of raising when a quantized linear is not fused.

    Returns:
        What the package says of itself.

    Raises:
        ToolchainError, QuantizationError: as :func:`int8.compile`.
        FusionError: a quantized linear was not fused.
        PackageError: the model cannot be traced or compiled as one graph, or the file cannot be written.
    """
    target = Path(path)
    if target.suffix != ".pt2":
        raise PackageError(f"{target}: a package's name ends in .pt2")
    chosen = check_compilable(model, recipe)
    compute_dtype = (chosen or recipes.get("fp32")).resolve_compute_dtype(isa_module.effective())
    given = _named_tensors(model, example_inputs)
    varying = _dynamic_dims(given, dynamic)
    inputs = _long_enough(given, varying)
    entry = _Entry(pack(model), tuple(inputs))
    report = FusionReport()
    with tempfile.TemporaryDirectory(prefix="int8-package-") as build, torch.no_grad(), reporting(report):
        with computing_in(compute_dtype):
            program = _traced(entry, inputs, varying)
            files = _compiled(program, Path(build))
        check_fusion(report, len(quantized_modules(model)), allow_unfused=allow_unfused)
        libraries = _libraries_of(files)
        info = replace(
            _describe(model, chosen, compute_dtype, report),
            **_signature(program, inputs, varying),
            outputs=entry.output.structure,
            libraries=tuple(libraries),
        )
        _write(target, files, info, libraries)
    return info


def load_package(path: str | os.PathLike[str], *, runners: int = 1) -> LoadedPackage:
    """The package at ``path``, after it has been found whole and right for this host.

    Loading runs the package's native code: load what you trust.

    Args:
        path: what :func:`export` wrote.
        runners: calls, from different threads, that may run at the same time; more wait.

    Raises:
        PackageError: it is missing or damaged, or it was built for an ISA, CPU or torch that this process is not.
    """
    info = package_info.describe(path)
    package_info.check_host(info, path, str(torch.__version__))
    package_info.check_whole(path)
    isa_module.enforce()
    for library in info.libraries:
        _load_library(path, library)
    try:
        # What torch's own load_package calls, after it has compiled small programs to learn the CPU's instructions,
        # which takes a compiler and some seconds. The manifest has told us.
        aoti: Any = torch._C._aoti
        loader = aoti.AOTIModelPackageLoader(os.fspath(path), _MODEL, False, runners, -1)
    except (RuntimeError, OSError) as error:
        raise PackageError(f"{path} cannot be loaded: {_first_line(error)}") from error
    return LoadedPackage(info, loader)


class _Output:
    """How tensors make up a model's output. Not a list or dict, which torch.export would restore after tracing."""

    structure: Any = None


class _Entry(nn.Module):
    """The model with tensors in and tensors out, so that nothing of its own classes reaches the package.

    Tracing it fills ``output``.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.output = _Output()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.model(**dict(zip(self.names, tensors, strict=True)))
        flat: list[Tensor] = []
        self.output.structure = _flattened(result, flat)
        return tuple(flat)


def _flattened(value: Any, flat: list[Tensor]) -> Any:
    """The structure of an output, its tensors replaced by their place in ``flat``, to which they are added."""
    if isinstance(value, Tensor):
        flat.append(value)
        return len(flat) - 1
    if isinstance(value, Mapping):
        return {str(key): _flattened(one, flat) for key, one in value.items() if one is not None}
    if isinstance(value, (tuple, list)):
        return [_flattened(one, flat) for one in value]
    raise PackageError(f"the model returns {type(value).__name__}; packages return tensors, tuples and dicts of them")


def _restored(structure: Any, flat: Sequence[Tensor]) -> Any:
    if isinstance(structure, int):
        return flat[structure]
    if isinstance(structure, dict):
        return {key: _restored(one, flat) for key, one in structure.items()}
    return tuple(_restored(one, flat) for one in structure)


def _named_tensors(model: nn.Module, given: Any) -> dict[str, Tensor]:
    """The example inputs by name."""
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        values = (given,) if isinstance(given, Tensor) else tuple(given)
        try:
            named = dict(inspect.signature(model.forward).bind(*values).arguments)
        except TypeError as error:
            raise PackageError(f"example inputs do not fit {type(model).__name__}: {error}") from None
    other = [name for name, value in named.items() if not isinstance(value, Tensor)]
    if other or not named:
        raise PackageError(f"packages take tensors only, at least one; {', '.join(other) or 'no input'} is none")
    return named


def _long_enough(inputs: Mapping[str, Tensor], varying: Mapping[str, Mapping[int, str]]) -> dict[str, Tensor]:
    """``inputs`` with varying sizes of at least 2, because tracing takes a 1 for a constant."""
    result = {}
    for name, tensor in inputs.items():
        for dim in varying[name]:
            tensor = tensor.repeat_interleave(2, dim) if tensor.shape[dim] == 1 else tensor
        result[name] = tensor.detach().contiguous()
    return result


def _dynamic_dims(inputs: Mapping[str, Tensor], dynamic: Dynamic) -> dict[str, dict[int, str]]:
    """Input -> dimension -> name of its varying size."""
    if isinstance(dynamic, bool):
        names = _BATCH_AND_SEQUENCE if dynamic else ()
        return {name: dict(enumerate(names[: tensor.ndim])) for name, tensor in inputs.items()}
    wrong = [name for name, dims in dynamic.items() if name not in inputs or max(dims, default=0) >= inputs[name].ndim]
    if wrong:
        raise PackageError(f"dynamic names a dimension of {wrong[0]!r} that is not there; inputs: {', '.join(inputs)}")
    return {name: dict(dynamic.get(name, {})) for name in inputs}


def _traced(entry: _Entry, inputs: Mapping[str, Tensor], varying: Mapping[str, Mapping[int, str]]) -> ExportedProgram:
    marks = tuple(dict.fromkeys(dims, Dim.DYNAMIC) for dims in varying.values())
    with _said_as(f"{type(entry.model).__name__} cannot be traced as one graph"):
        return torch.export.export(entry, tuple(inputs.values()), dynamic_shapes=(marks,), strict=False)


def _compiled(program: ExportedProgram, folder: Path) -> list[Any]:
    """The files that AOTInductor makes of ``program``."""
    module = program.module(check_guards=False)
    _flatten_constants(module)
    options = {
        **OPTIONS,
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        # A server's threads are not the build machine's.
        "cpp.dynamic_threads": True,
    }
    args, kwargs = program.example_inputs
    with _said_as("AOTInductor cannot compile this model"):
        files = cast("list[Any]", torch._inductor.aot_compile(module, args, kwargs, options=options))
    return [file for file in files if not str(file).endswith(".cpp")]  # sources are for debugging alone


def _flatten_constants(module: GraphModule) -> None:
    """Give every constant one plain name at the root of ``module``.

    torch.compile does so, and the graph passes rely on it: they read constants by name, and constants that linears
    share (a smoothing factor of query, key and value) must be one node for their quantization to be done once.
    """
    names: dict[tuple[Any, ...], str] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = attrgetter(node.target)(module)
        if not isinstance(value, Tensor):
            continue
        same = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if same not in names:
            names[same] = "constant_" + node.target.replace(".", "_") + f"_{len(names)}"
            module.register_buffer(names[same], value.detach())
        node.target = names[same]
    for name, _ in list(module.named_children()):
        if not module.graph.find_nodes(op="call_module", target=name):
            delattr(module, name)
    module.recompile()


def _describe(model: nn.Module, recipe: Recipe | None, compute_dtype: str, report: FusionReport) -> PackageInfo:
    """All of the manifest but inputs, outputs and libraries."""
    return PackageInfo(
        isa=isa_module.effective(),
        cpu_model=isa_module.cpu_model(),
        cpu_flags=package_info.instruction_sets() if inductor_config.cpp.march is None else (),
        torch=str(torch.__version__),
        int8=int8.__version__,
        threads=torch.get_num_threads(),
        recipe=None if recipe is None else asdict(recipe),
        weight_bits=weight_bits(model),
        compute_dtype=compute_dtype,
        linears=sum(isinstance(module, nn.Linear) for module in model.modules()),
        quantized_linears=len(quantized_modules(model)),
        fused_linears=len(report.fused_weights),
    )


def _signature(
    program: ExportedProgram, inputs: Mapping[str, Tensor], varying: Mapping[str, Mapping[int, str]]
) -> dict[str, Any]:
    """``inputs`` and ``sizes`` of the manifest."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs, sizes = [], dict[str, tuple[int, int | None]]()
    for (name, tensor), placeholder in zip(inputs.items(), program.graph_signature.user_inputs, strict=True):
        traced, shape = placeholders[placeholder].meta["val"], list[int | str](tensor.shape)
        for dim, size_name in varying[name].items():
            shape[dim] = size_name
            high = _largest(program, traced.shape[dim], size_name)
            known = sizes.get(size_name, (1, None))[1]
            sizes[size_name] = 1, min((one for one in (high, known) if one is not None), default=None)
        specs.append(InputSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape)))
    return {"inputs": tuple(specs), "sizes": sizes}


def _largest(program: ExportedProgram, size: Any, name: str) -> int | None:
    """The largest value of a varying size, as tracing found it; None for no bound."""
    constraint = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
    if constraint is None:
        raise PackageError(f"size {name!r} cannot vary: tracing made it {size}; fix it, or vary another dimension")
    return int(constraint.upper) if constraint.upper.is_Integer and constraint.upper < 2**31 else None


def _libraries_of(files: Sequence[Any]) -> dict[Library, Path]:
    """The C++ operator libraries that a compiled graph calls, with their files."""
    defined_in_python = {name.removeprefix("int8::") for name in ops._library._op_defs}
    if not _operators_called(files) - defined_in_python:
        return {}
    from int8.kernels import load

    path = load()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {Library(path.name, path.parent.name, digest): path}


def _operators_called(files: Sequence[Any]) -> set[str]:
    """Names of our operators that the graph calls, from AOTInductor's list of what it calls outside of itself."""
    texts = [Path(file).read_text(encoding="utf-8") for file in files if str(file).endswith(".json")]
    return {name for text in texts for name in _OPERATOR.findall(text)}


def _load_library(path: str | os.PathLike[str], library: Library) -> None:
    """Register a package's operators, from the cache where this build of them is known there.

    Raises:
        PackageError: this process has operators of another build, and torch cannot hold two.
    """
    from int8.kernels.build import cache_folder

    name = Path(library.file).name
    loaded = {Path(one).parent.name for one in torch.ops.loaded_libraries if Path(one).name == name}
    if library.key in loaded:
        return
    if loaded:
        raise PackageError(
            f"{path} needs {name} of build {library.key}, and this process has loaded that of {', '.join(loaded)}; "
            "load it in a process of its own, or build it again with this version of int8"
        )
    kept = cache_folder() / "kernels" / library.key / name
    if not kept.exists():
        _extract(path, library, kept)
    cast(Any, torch.ops).load_library(str(kept))


def _extract(path: str | os.PathLike[str], library: Library, target: Path) -> None:
    with package_info.open_archive(path) as archive:
        data = archive.read(package_info.library_path(archive, library))
    if hashlib.sha256(data).hexdigest() != library.sha256:
        raise PackageError(f"{path} is damaged: {library.file} is not what was packed; copy or build it again")
    with _replacing(target) as partial:
        partial.write_bytes(data)


def _write(target: Path, files: list[Any], info: PackageInfo, libraries: Mapping[Library, Path]) -> None:
    with _replacing(target) as partial:
        with partial.open("wb") as archive:
            package_pt2(archive, aoti_files={_MODEL: files}, extra_files={package_info.MANIFEST_FILE: info.to_json()})
        with zipfile.ZipFile(partial, "a") as opened:
            for library, path in libraries.items():
                opened.write(path, package_info.library_path(opened, library))


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file beside ``target`` that takes its place when the block ends well, and is removed when it does not."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise PackageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _said_as(what: str) -> Iterator[None]:
    try:
        yield
    except Int8Error:
        raise
    except Exception as error:
        raise PackageError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
