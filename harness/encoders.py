"""The modules behind the catalog's models: transformers encoders, wrapped so that a batch gives one tensor.

Everything here needs torch; ``models.py`` is the part that can be read without it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

FAMILIES = ("bert", "distilbert", "xlm-roberta")

_TOKEN_TYPES = "token_type_ids"
_WEIGHT_STD = 0.04
_NORM_STD = 0.1


class Encoder(nn.Module):
    """A transformers encoder whose forward returns ``last_hidden_state`` alone.

    ``inputs`` names what ``forward`` takes. Shapes: ``input_ids``, ``attention_mask`` and, where the family tells
    segments apart, ``token_type_ids`` are (B, S) int64; the result is (B, S, H) float32.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.inputs = input_names(cast(Any, backbone).config)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last layer's hidden states; see the class."""
        if token_type_ids is None:
            output = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        else:
            output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return cast(torch.Tensor, output.last_hidden_state)


class Headed(Encoder):
    """An encoder with a task's head, as transformers makes it; ``backbone`` is the whole of it.

    The result is float32: (B, C) logits of C classes (``sequence-classification``), (B, S, 2) logits of an answer's
    first and last token (``question-answering``), or (B, S, V) logits of each next token (``causal-lm``, a decoder).
    """

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The head's logits; see the class."""
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            batch["token_type_ids"] = token_type_ids
        output = self.backbone(**batch)
        if hasattr(output, "start_logits"):
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        return cast(torch.Tensor, output.logits)


def input_names(config: Any) -> tuple[str, ...]:
    """Names of a batch's tensors for a transformers configuration. One token type is the same as none."""
    names = ("input_ids", "attention_mask")
    return (*names, _TOKEN_TYPES) if int(getattr(config, "type_vocab_size", 0) or 0) > 1 else names


def max_seq(config: Any) -> int:
    """Longest sequence in tokens. Families after RoBERTa count positions from ``pad_token_id`` + 1."""
    positions = int(config.max_position_embeddings)
    return positions - int(config.pad_token_id) - 1 if "roberta" in config.model_type else positions


def finish(backbone: nn.Module) -> Encoder:
    """The backbone wrapped, in FP32 and eval mode, without gradients."""
    return Encoder(backbone).float().eval().requires_grad_(False)


def finish_headed(backbone: nn.Module) -> Headed:
    """An encoder with its head wrapped, in FP32 and eval mode, without gradients."""
    return Headed(backbone).float().eval().requires_grad_(False)


def empty(family: str, config: Mapping[str, Any]) -> nn.Module:
    """A backbone of a family and shape whose parameters hold no values worth keeping."""
    return from_config(new_config(family, config))


def new_config(family: str, config: Mapping[str, Any]) -> Any:
    """A transformers configuration of the family with scaled-dot-product attention."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **config, attn_implementation="sdpa")


def from_config(config: Any) -> nn.Module:
    """A backbone for a transformers configuration, its parameters not initialised, without a pooler."""
    from transformers.initialization import no_init_weights

    kind = backbone_class(config)
    with no_init_weights():
        return cast(nn.Module, kind(config, **pooler_off(kind)))


def backbone_class(config: Any) -> Any:
    """The bare encoder class for a configuration. Raises KeyError for one that transformers has no model for."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return MODEL_MAPPING[type(config)]


def pooler_off(kind: Any) -> dict[str, bool]:
    """Keyword arguments that leave the pooler out, where the class has one."""
    import inspect

    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


def fill_synthetic(backbone: nn.Module, seed: int) -> nn.Module:
    """Fills the parameters with values at the scale of trained encoders; in place.

    Each parameter has a generator of its own, seeded by ``seed`` and its name, so a model of fewer layers has the first
    layers of the deeper one, and the values do not depend on the CPU's instruction set. No outliers, no meaning.
    """
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
            values = generator.standard_normal(parameter.numel(), dtype=np.float32).reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(_scaled(name, values)))
        for module in backbone.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0
    return backbone


def _scaled(name: str, normal: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Unit normal values brought to the scale of the parameter's kind; in place."""
    is_norm_gain = normal.ndim == 1 and name.endswith("weight")
    normal *= _NORM_STD if is_norm_gain else _WEIGHT_STD
    if is_norm_gain:
        normal += 1.0
    return normal


def read_folder(source: str | Path, *, local_only: bool) -> nn.Module:
    """The bare encoder of a checkpoint in transformers' format; heads are left behind. Errors are transformers' own."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, local_files_only=local_only)
    kind = backbone_class(config)
    options: dict[str, Any] = {"local_files_only": local_only, "dtype": torch.float32, "attn_implementation": "sdpa"}
    with _quiet_transformers():
        return cast(nn.Module, kind.from_pretrained(source, config=config, **options, **pooler_off(kind)))


def read_headed(source: str | Path, head: str, *, local_only: bool) -> nn.Module:
    """The encoder and head of a checkpoint in transformers' format. Errors are transformers' own.

    Raises MissingHeadError where the checkpoint lacks weights: a head that was never trained says nothing.
    """
    import transformers

    kind = getattr(transformers, _HEADS[head])
    options: dict[str, Any] = {"local_files_only": local_only, "dtype": torch.float32, "attn_implementation": "sdpa"}
    with _quiet_transformers():
        module, loading = kind.from_pretrained(source, output_loading_info=True, **options)
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading.get("mismatched_keys", ()))
    if missing:
        raise MissingHeadError(f"the checkpoint has no weights for {missing[0]} ({len(missing)} missing)")
    if head == "causal-lm":
        module.config.use_cache = False  # whole texts are read at once; a cache would only be one more output
    return cast(nn.Module, module)


class MissingHeadError(ValueError):
    """A checkpoint holds an encoder, but not the head that was asked for."""


#: Kinds of heads -> the class of transformers that reads any family's.
_HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "causal-lm": "AutoModelForCausalLM",
}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Holds back the progress bar and the report about heads and poolers, which are left behind on purpose."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_tokenizer(source: str | Path, *, local_only: bool) -> Any | None:
    """The fast tokenizer beside a checkpoint, or None where the folder has none."""
    from transformers import AutoTokenizer

    if isinstance(source, Path) and not any((source / name).exists() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source, local_files_only=local_only)


_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "sentencepiece.bpe.model", "spiece.model", "vocab.json")


def word_tokenizer(family: str, words: Sequence[str], max_length: int) -> Any:
    """A tokenizer that splits at spaces and knows ``words``, with the special tokens at the family's usual ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    roles = _SPECIAL_TOKENS["roberta" if "roberta" in family else "bert"]
    vocabulary = {token: index for index, token in enumerate([*roles.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=roles["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    first, last = roles["cls_token"], roles["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **roles)


_SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "bert": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "roberta": {
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    },
}


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of the module's state, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
