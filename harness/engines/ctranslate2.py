"""Engine ``ctranslate2``: CTranslate2's encoder, FP32 or its dynamic INT8.

Set up as its documentation recommends for one batch at a time: one replica with all threads, ``compute_type`` chosen
by the recipe, token ids as a dense array with lengths. Its own converters read fields of configurations that newer
transformers no longer have, so the model's specification is filled here from the weights: one layout a family.

It is held to an ISA on each of its layers: ``CT2_FORCE_CPU_ISA`` for its own kernels, which stop at AVX512, and the
variables of oneDNN and MKL, one of which multiplies for it. It has no BF16 of its own on CPUs: the operations around
its INT8 products run in FP32 on every ISA.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import Batch, Clocks
from harness.engines.peer import Peer, linear_names
from harness.errors import HarnessError
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models import LoadedModel

_FORCED_ISA = {"amx": "AVX512", "vnni": "AVX512", "avx512": "AVX512", "avx2": "AVX2"}
#: By recipe: the weights' type in the converted model (None: as they are), and the compute type asked for.
_TYPES = {"fp32": (None, "float32"), "dynamic": ("int8", "int8")}


@dataclass(frozen=True)
class _Layout:
    """Where a family keeps its parts: paths below the backbone, and below one layer."""

    layers: str
    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    inner: str
    outer: str
    output_norm: str


_BERT = _Layout(
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    inner="intermediate.dense",
    outer="output.dense",
    output_norm="output.LayerNorm",
)
_LAYOUTS = {
    "bert": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _Layout(
        layers="transformer.layer",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        inner="ffn.lin1",
        outer="ffn.lin2",
        output_norm="output_layer_norm",
    ),
}


class Ctranslate2Engine:
    """FP32, and INT8 with a scale a row computed at run time."""

    name = "ctranslate2"
    peer = Peer("ctranslate2", ("ctranslate2",))

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can."""
        return self.peer.unsupported(recipe, isa, deploy)

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> Ctranslate2Prepared:
        """Convert the weights, quantize them where the recipe does, and load the result."""
        os.environ["CT2_FORCE_CPU_ISA"] = _FORCED_ISA[isa]  # read when the library is loaded, which is now
        stored, compute = _TYPES[recipe.name]
        with tempfile.TemporaryDirectory(prefix="harness-ct2-") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            with clock.measure("load"):
                specification = _specification(model)
            with clock.measure("quantize" if recipe.quantized else "load"):
                specification.validate()
                specification.optimize(quantization=stored)
                specification.save(str(folder))
            with clock.measure("load"):
                return Ctranslate2Prepared(folder, compute, model, recipe, specification)


class Ctranslate2Prepared:
    """A loaded encoder, which serves batches of any shape."""

    def __init__(self, folder: Path, compute: str, model: LoadedModel, recipe: Recipe, specification: Any) -> None:
        import ctranslate2
        import torch

        threads = torch.get_num_threads()
        self._encoder = ctranslate2.Encoder(
            str(folder), device="cpu", compute_type=compute, inter_threads=1, intra_threads=threads
        )
        self._token_types = "token_type_ids" in model.inputs
        self._linears = len(linear_names(model.module))
        self._quantized = recipe.quantized
        self._integer, self._weight_bytes = _stored_linears(specification)
        self._model_bytes = (folder / "model.bin").stat().st_size

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states for ``batch``, whose padding must be on the right."""
        import ctranslate2
        import numpy as np
        import torch

        ids = np.ascontiguousarray(batch["input_ids"].numpy(), dtype=np.int32)
        lengths = batch["attention_mask"].sum(dim=1).to(torch.int32).numpy()
        types = batch["token_type_ids"].tolist() if self._token_types else None
        output = self._encoder.forward_batch(
            ctranslate2.StorageView.from_array(ids), ctranslate2.StorageView.from_array(lengths), token_type_ids=types
        )
        return torch.from_numpy(np.asarray(output.last_hidden_state))

    def memory(self) -> Memory:
        """Bytes of the converted model and of its linears' weights."""
        return Memory(model_bytes=self._model_bytes, linear_weight_bytes=self._weight_bytes)

    def evidence(self, batch: Batch) -> Evidence:
        """What the library says that it computes in; it names no kernels.

        Raises:
            HarnessError: it computes in something else than the recipe's type.
        """
        from int8 import isa

        compute = str(self._encoder.compute_type)
        if compute.startswith("int8") != self._quantized:
            raise HarnessError(f"ctranslate2 computes in {compute}: this CPU has no efficient kernel for the recipe")
        return Evidence(
            linears=self._linears,
            quantized_linears=self._integer,
            isa_effective=isa.effective(),
            amx_permission=isa.amx_permission(),
            weight_bits=8 if self._quantized else None,
            notes=(f"ctranslate2 computes in {compute}",),
        )


def _stored_linears(specification: Any) -> tuple[int, int]:
    """How many linears a specification stores in INT8 (three where one weight joins three), and the bytes of all."""
    integer = size = 0
    for layer in specification.encoder.layer:
        for linear, parts in (
            (layer.self_attention.linear[0], 3),
            (layer.self_attention.linear[1], 1),
            (layer.ffn.linear_0, 1),
            (layer.ffn.linear_1, 1),
        ):
            weight = linear.weight.numpy()
            integer += parts * (weight.dtype.itemsize == 1)
            size += weight.nbytes
    return integer, size


def _specification(model: LoadedModel) -> Any:
    """The model as CTranslate2 describes one: post-norm layers with an embedding norm and no pooler.

    Raises:
        HarnessError: a family, a head or an activation that it has no place for.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    backbone: Any = model.module.backbone
    config = backbone.config
    layout = _LAYOUTS.get(model.family)
    activation = {"gelu": "GELU", "relu": "RELU"}.get(getattr(config, "hidden_act", None) or config.activation)
    if layout is None or not hasattr(backbone, layout.layers.partition(".")[0]) or activation is None:
        raise HarnessError(f"ctranslate2: no converter for {model.name} ({model.family}); encoders without a head only")
    segments = "token_type_ids" in model.inputs
    layers = _at(backbone, layout.layers)
    encoder = transformer_spec.TransformerEncoderSpec(
        len(layers),
        int(config.num_attention_heads),
        pre_norm=False,
        activation=common_spec.Activation.__members__[activation],
        layernorm_embedding=True,
        num_source_embeddings=2 if segments else 1,
        embeddings_merge=common_spec.EmbeddingsMerge.ADD,
    )
    _fill_embeddings(encoder, backbone.embeddings, segments)
    for target, layer in zip(encoder.layer, layers, strict=True):
        _fill_layer(target, layer, layout)
    found = transformer_spec.TransformerEncoderModelSpec(encoder)
    # Ids are served, never tokens: any distinct names will do.
    found.register_vocabulary([f"<{index}>" for index in range(int(config.vocab_size))])
    for name in ("unk_token", "bos_token", "eos_token"):
        setattr(found.config, name, "<0>")
    found.config.layer_norm_epsilon = float(_at(layers[0], layout.output_norm).eps)
    return found


def _fill_embeddings(encoder: Any, embeddings: Any, segments: bool) -> None:
    """Word, position and segment embeddings. One segment alone is the same vector everywhere: positions take it in."""
    encoder.scale_embeddings = False
    encoder.embeddings[0].weight = embeddings.word_embeddings.weight.numpy()
    positions = embeddings.position_embeddings.weight
    padding = getattr(embeddings.position_embeddings, "padding_idx", None)
    if padding is not None:  # positions of RoBERTa's descendants count from behind the padding's
        positions = positions[padding + 1 :]
    types: Any = getattr(embeddings, "token_type_embeddings", None)
    if segments:
        encoder.embeddings[1].weight = types.weight.numpy()
    elif types is not None:
        positions = positions + types.weight[0]
    encoder.position_encodings.encodings = positions.contiguous().numpy()
    _fill_norm(encoder.layernorm_embedding, embeddings.LayerNorm)


def _fill_layer(target: Any, layer: nn.Module, layout: _Layout) -> None:
    from ctranslate2.converters import utils
    from ctranslate2.specs import common_spec

    joint = []
    for path in (layout.query, layout.key, layout.value):
        joint.append(common_spec.LinearSpec())
        _fill_linear(joint[-1], _at(layer, path))
    utils.fuse_linear(target.self_attention.linear[0], joint)
    _fill_linear(target.self_attention.linear[1], _at(layer, layout.output))
    _fill_norm(target.self_attention.layer_norm, _at(layer, layout.attention_norm))
    _fill_linear(target.ffn.linear_0, _at(layer, layout.inner))
    _fill_linear(target.ffn.linear_1, _at(layer, layout.outer))
    _fill_norm(target.ffn.layer_norm, _at(layer, layout.output_norm))


def _fill_linear(target: Any, linear: Any) -> None:
    target.weight = linear.weight.numpy()
    target.bias = linear.bias.numpy()


def _fill_norm(target: Any, norm: Any) -> None:
    target.gamma = norm.weight.numpy()
    target.beta = norm.bias.numpy()


def _at(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path)


ENGINE = Ctranslate2Engine()
