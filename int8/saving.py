"""Saving and loading quantized models.

The files are ISA-neutral and readable without this library: ``model.safetensors`` holds the tensors as torchao
flattens its own ``Int8Tensor``, ``int8.json`` says what they were built for. What that class cannot express, the
outlier parts of a decomposed weight and the shift of an activation, are plain tensors beside it that ``int8.json``
lists. (torchao reads the zero
points of recipe ``zeropoint`` and dequantizes with them, but its own linear leaves the weight's out.)
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import Int8Tensor

import int8
from int8 import isa as isa_module
from int8.errors import ArtifactError
from int8.quantization import quantized_modules, set_weight, weight_bits
from int8.recipe import Recipe
from int8.schemes.llm_int8 import DecomposedWeight
from int8.tensor import Int8Weight

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "int8.json"

_OUTLIER_PARTS = ("outlier_weight", "outlier_index")
_SHIFT = "act_shift"


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a quantized model's tensors and what it was built for; returns the folder.

    Each file is written under another name and renamed, so an interrupted save never leaves a file that looks whole.

    Raises:
        ArtifactError: nothing in the model is quantized, or the folder cannot be written.
    """
    quantized = quantized_modules(model)
    if not quantized:
        raise ArtifactError("nothing in this model is quantized; save what int8.quantize returned")
    target = Path(folder)
    tensors, aliases = _unique_tensors(model)
    manifest = _manifest(model, list(quantized), aliases)
    parts, manifest["beside"] = _parts_beside(model, set(tensors))
    data, metadata = flatten_tensor_state_dict({**tensors, **parts})
    try:
        target.mkdir(parents=True, exist_ok=True)
        partial = target / (WEIGHTS_FILE + ".partial")
        save_file(data, str(partial), metadata=metadata)
        partial.replace(target / WEIGHTS_FILE)
        _write_text(target / MANIFEST_FILE, json.dumps(manifest, indent=1))
    except OSError as error:
        raise ArtifactError(f"cannot save to {target}: {error.strerror or error}") from error
    return target


def load(folder: str | os.PathLike[str], into: nn.Module, *, isa: str | None = None) -> nn.Module:
    """The model saved in ``folder``, on the architecture of ``into`` (which is not changed).

    Args:
        folder: what :func:`save` wrote.
        into: a model of the same architecture, for example ``AutoModel.from_config(config)``; its weights are replaced.
        isa: the ISA it will run on, by default this process's.

    Raises:
        ArtifactError: files missing or damaged, an architecture that does not fit, or 8-bit weights for an ISA whose
            kernels would saturate with them.
    """
    source = Path(folder)
    manifest = _read_manifest(source)
    _check_range(manifest, isa_module.resolve(isa) if isa else isa_module.effective(), source)
    tensors = _with_parts(_read_tensors(source), manifest.get("beside", {}), source)
    tensors.update({alias: tensors[name] for alias, name in manifest["aliases"].items()})
    model = copy.deepcopy(into)
    _check_names(model, tensors, source)
    _assign(model, tensors)
    recipe = manifest.get("recipe")
    model.int8_recipe = Recipe(**recipe) if recipe else None  # type: ignore[assignment]
    return model.eval()


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a quantized model of transformers as torchao's own, for ``AutoModel.from_pretrained(folder)``.

    The folder needs nothing of this library to load; :func:`adopt` then gives the loaded model our arithmetic and
    kernels back, with equal outputs. (Left as it is it runs by torchao's linears, which round activations by 127.5
    levels instead of 127.) Transformers' loader knows dynamic activations alone.

    Raises:
        ArtifactError: nothing is quantized, the model is not one of transformers, or a weight has parts that the
            loader would lose: :func:`save` keeps them.
    """
    quantized = quantized_modules(model)
    if not quantized or not hasattr(model, "save_pretrained"):
        raise ArtifactError("save_pretrained takes a quantized model of transformers; save others with int8.save")
    for name, module in quantized.items():
        weight = cast(Int8Weight, module.weight)
        plain = type(weight) is Int8Weight and weight.dynamic and not weight.act_affine and not weight.asymmetric
        if not plain:
            raise ArtifactError(
                f"{name} is {weight.describe()}: transformers' loader would lose a part of it. Save it with int8.save, "
                "or quantize with a dynamic recipe without search, such as int8.recipe.get('sq-dynamic')"
                ".replace(search=False, alpha=0.8)"
            )
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    written: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for module in quantized_modules(written).values():
        module.weight = nn.Parameter(cast(Int8Weight, module.weight).to_torchao(), requires_grad=False)
    written.config.quantization_config = config
    written.hf_quantizer = TorchAoHfQuantizer(config, pre_quantized=True)
    written.save_pretrained(folder)
    return Path(folder)


def adopt(model: nn.Module) -> nn.Module:
    """A copy of a model that torchao quantized, whose INT8 linears are ours: exact in eager mode, fused when compiled.

    It shares the original's tensors. The model may come from torchao's ``quantize_`` with a version 2 config, from
    ``AutoModel.from_pretrained`` of what transformers saved, or from :func:`save_pretrained`.

    Raises:
        ArtifactError: no linear has one of torchao's INT8 weights.
        QuantizationError: a weight represents what our operators do not compute.
    """
    adopted = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    found = 0
    for module in adopted.modules():
        weight = module.weight if isinstance(module, nn.Linear) else None
        if isinstance(weight, Int8Tensor) and not isinstance(weight, Int8Weight):
            set_weight(cast(nn.Linear, module), Int8Weight.from_torchao(weight))
            found += 1
    if not found:
        raise ArtifactError("no linear of this model has an INT8 weight of torchao; quantize it first")
    return adopted.eval()


def describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved model says of itself: recipe, ISA it was built for, weight bits, quantized modules, versions.

    Raises:
        ArtifactError: the manifest is missing or damaged.
    """
    return _read_manifest(Path(folder))


def _manifest(model: nn.Module, quantized: list[str], aliases: dict[str, str]) -> dict[str, Any]:
    recipe = getattr(model, "int8_recipe", None)
    return {
        "format": FORMAT,
        "recipe": dataclasses.asdict(recipe) if isinstance(recipe, Recipe) else None,
        "built_for_isa": isa_module.effective(),
        "weight_bits": weight_bits(model),
        "quantized": quantized,
        "aliases": aliases,
        "versions": {"int8-harness": int8.__version__, "torch": str(torch.__version__)},
    }


def _unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """State of ``model`` with tied tensors once, and the other names of those: alias -> kept name."""
    state = model.state_dict(keep_vars=True)
    kept: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        first = kept.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
            continue
        plain = tensor.detach()
        tensors[name] = plain.to_torchao() if isinstance(plain, Int8Weight) else _own_memory(plain)
    return tensors, aliases


def _own_memory(tensor: Tensor) -> Tensor:
    """A contiguous copy: parameters may be views of one storage, and safetensors refuses shared memory."""
    return tensor.data.clone(memory_format=torch.contiguous_format)


def _parts_beside(model: nn.Module, kept: set[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors of weights that torchao's class has no field for, and what the manifest says of them, by weight."""
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, module in quantized_modules(model).items():
        weight, key = cast(Int8Weight, module.weight), f"{name}.weight"
        decomposed = isinstance(weight, DecomposedWeight)
        parts = {part: getattr(weight, part) for part in (_OUTLIER_PARTS if decomposed else (_SHIFT,))}
        # Copies, because linears that read one input share its shift, and safetensors refuses shared memory.
        found = {f"{key}_{part}": tensor.detach().clone() for part, tensor in parts.items() if tensor is not None}
        if key not in kept or not (found or decomposed):
            continue
        tensors |= found
        described[key] = {"tensors": sorted(found)}
        if isinstance(weight, DecomposedWeight):
            described[key]["threshold"] = weight.outlier_threshold
    return tensors, described


def _with_parts(tensors: dict[str, Tensor], described: dict[str, Any], source: Path) -> dict[str, Tensor]:
    """``tensors`` with the parts beside put back into the weights they belong to."""
    result = dict(tensors)
    for key, said in described.items():
        lacking = [name for name in (key, *said["tensors"]) if name not in result]
        if lacking:
            raise ArtifactError(f"{source / WEIGHTS_FILE} lacks {lacking[0]!r}; save the model again")
        weight = cast(Any, result[key])
        if "threshold" in said:
            parts = {part: result.pop(f"{key}_{part}", None) for part in _OUTLIER_PARTS}
            result[key] = DecomposedWeight.decomposed(weight, float(said["threshold"]), **parts)
        else:
            result[key] = Int8Weight.from_torchao(weight).shifted(result.pop(f"{key}_{_SHIFT}"))
    return result


def _read_manifest(source: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((source / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{source} holds no {MANIFEST_FILE}; it is not a model saved by int8.save") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{source / MANIFEST_FILE} cannot be read ({error}); save the model again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ArtifactError(
            f"{source} has format {found}, this version reads {FORMAT}; save the model again with this version"
        )
    return manifest


def _check_range(manifest: dict[str, Any], isa: str, source: Path) -> None:
    allowed = Recipe("range", "dynamic").resolve_weight_bits(isa)
    bits = int(manifest["weight_bits"])
    if bits > allowed:
        raise ArtifactError(
            f"{source} has {bits}-bit weights, built for ISA {manifest['built_for_isa']!r}; without VNNI ({isa!r}) "
            f"kernels would saturate with them. Quantize it again with isa={isa!r}, which keeps to {allowed} bits"
        )
    if bits < allowed:
        warnings.warn(
            f"{source} has {bits}-bit weights, built for {manifest['built_for_isa']!r}; "
            f"{isa!r} takes {allowed}-bit ones, which lose less accuracy",
            stacklevel=3,
        )


def _read_tensors(source: Path) -> dict[str, Tensor]:
    path = source / WEIGHTS_FILE
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            data = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        tensors, left = unflatten_tensor_state_dict(data, metadata)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; save the model again") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactError(f"{path} is damaged ({error}); save the model again") from error
    if left:
        raise ArtifactError(f"{path} holds tensors that its own index does not name: {', '.join(sorted(left)[:3])}")
    return dict(tensors)


def _check_names(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    wanted = set(model.state_dict(keep_vars=True))
    missing, extra = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
    if missing or extra:
        raise ArtifactError(
            f"{source} does not fit {type(model).__name__}: {len(missing)} tensors missing ({', '.join(missing[:3])}), "
            f"{len(extra)} not in the model ({', '.join(extra[:3])}); build the same architecture first"
        )


def _assign(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    shared: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
        if hasattr(tensor, "act_quant_kwargs"):
            weight = tensor if isinstance(tensor, Int8Weight) else Int8Weight.from_torchao(tensor)
            set_weight(cast(nn.Linear, owner), weight)
        elif leaf in owner._parameters:
            parameter = shared.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
            owner._parameters[leaf] = parameter
        else:
            owner._buffers[leaf] = tensor


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
