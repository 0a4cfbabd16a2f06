"""Rewrites of an encoder that keep its function: another family's form of the same weights, and planted outliers.

Each takes a transformers backbone and returns a new one; the given one is not changed. They let the three families, and
the hard case of outlier channels, be judged on real weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from harness import encoders
from harness.errors import UsageError

OUTLIER_CHANNELS = 6
OUTLIER_RANGE = (10.0, 30.0)
VALUE_ROWS = 4
VALUE_FACTOR = 8.0  # a power of two, so that multiplying and dividing by it is exact
OUTLIER_SEED = 20240604


@dataclass(frozen=True)
class Block:
    """The parts of one post-LN layer, whatever its family calls them."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_out: nn.Linear
    attention_norm: nn.LayerNorm
    ffn_in: nn.Linear
    ffn_out: nn.Linear
    output_norm: nn.LayerNorm

    def parts(self) -> tuple[nn.Module, ...]:
        """All parts, in an order that does not depend on the family."""
        return (
            self.query,
            self.key,
            self.value,
            self.attention_out,
            self.attention_norm,
            self.ffn_in,
            self.ffn_out,
            self.output_norm,
        )


def apply(names: Iterable[str], backbone: nn.Module) -> nn.Module:
    """The rewrites of these names, one after the other."""
    for name in names:
        backbone = REWRITES[name](backbone)
    return backbone


def blocks(backbone: Any) -> list[Block]:
    """The layers of a BERT, DistilBERT or XLM-RoBERTa backbone. UsageError for other families."""
    family = backbone.config.model_type
    if family == "distilbert":
        return [_distilbert_block(layer) for layer in backbone.transformer.layer]
    if family in ("bert", "xlm-roberta"):
        return [_bert_block(layer) for layer in backbone.encoder.layer]
    raise UsageError(f"rewrites know the families {', '.join(encoders.FAMILIES)}, not {family}")


def _bert_block(layer: Any) -> Block:
    attention = layer.attention
    return Block(
        query=attention.self.query,
        key=attention.self.key,
        value=attention.self.value,
        attention_out=attention.output.dense,
        attention_norm=attention.output.LayerNorm,
        ffn_in=layer.intermediate.dense,
        ffn_out=layer.output.dense,
        output_norm=layer.output.LayerNorm,
    )


def _distilbert_block(layer: Any) -> Block:
    attention = layer.attention
    return Block(
        query=attention.q_lin,
        key=attention.k_lin,
        value=attention.v_lin,
        attention_out=attention.out_lin,
        attention_norm=layer.sa_layer_norm,
        ffn_in=layer.ffn.lin1,
        ffn_out=layer.ffn.lin2,
        output_norm=layer.output_layer_norm,
    )


def to_distilbert(bert: Any) -> nn.Module:
    """A BERT as a DistilBERT: the embedding of token type 0 goes into the positions; the layers map one to one.

    Equal up to rounding for inputs of token type 0. UsageError where DistilBERT cannot express the model.
    """
    config = _bert_config(bert)
    if config.layer_norm_eps != 1e-12:
        raise UsageError(f"a DistilBERT has layer_norm_eps 1e-12, this BERT {config.layer_norm_eps}: it cannot be one")
    shape = {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "activation": config.hidden_act,
        "pad_token_id": config.pad_token_id,
    }
    result: Any = encoders.empty("distilbert", shape)
    with torch.no_grad():
        _copy_common(bert, result)
        result.embeddings.position_embeddings.weight.copy_(_typed_positions(bert))
    return encoders.finish(result).backbone


def to_xlm_roberta(bert: Any) -> nn.Module:
    """A BERT as an XLM-RoBERTa encoder: positions move by pad_token_id + 1; one token type is left, of zeros.

    The embedding of token type 0 goes into the positions. Equal up to rounding for inputs of token type 0 padded at
    the end. UsageError for a model that is no BERT.
    """
    config = _bert_config(bert)
    first = config.pad_token_id + 1
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act layer_norm_eps"
    shape = {name: getattr(config, name) for name in [*names.split(), "pad_token_id"]}
    shape |= {"max_position_embeddings": config.max_position_embeddings + first, "type_vocab_size": 1}
    result: Any = encoders.empty("xlm-roberta", shape)
    with torch.no_grad():
        _copy_common(bert, result)
        result.embeddings.token_type_embeddings.weight.zero_()
        result.embeddings.position_embeddings.weight.zero_()
        result.embeddings.position_embeddings.weight[first:] = _typed_positions(bert)
    return encoders.finish(result).backbone


def _bert_config(bert: Any) -> Any:
    if bert.config.model_type != "bert":
        raise UsageError(f"only a BERT can be rewritten as another family, not a {bert.config.model_type}")
    return bert.config


def _typed_positions(bert: Any) -> torch.Tensor:
    """(positions, H): position embeddings with the embedding of token type 0 added."""
    embeddings = bert.embeddings
    first_type: torch.Tensor = embeddings.token_type_embeddings.weight[0]
    positions: torch.Tensor = embeddings.position_embeddings.weight
    return positions + first_type


def _copy_common(source: Any, target: Any) -> None:
    """What all families share: word embeddings, the embeddings' LayerNorm, and the layers."""
    target.embeddings.word_embeddings.load_state_dict(source.embeddings.word_embeddings.state_dict())
    target.embeddings.LayerNorm.load_state_dict(source.embeddings.LayerNorm.state_dict())
    for old, new in zip(blocks(source), blocks(target), strict=True):
        for old_part, new_part in zip(old.parts(), new.parts(), strict=True):
            new_part.load_state_dict(old_part.state_dict())


def outlier_channels(hidden_size: int) -> tuple[int, ...]:
    """The channels in which ``plant_outliers`` plants, ascending; the same ones behind every LayerNorm."""
    generator = np.random.default_rng(OUTLIER_SEED)
    chosen = generator.choice(hidden_size, size=min(OUTLIER_CHANNELS, hidden_size), replace=False)
    return tuple(sorted(int(channel) for channel in chosen))


def plant_outliers(backbone: Any) -> nn.Module:
    """The same function with outlier channels in what the linears read.

    Behind every LayerNorm but the last, c of magnitude 10 to 30 is added to the bias of six channels, one-sided as
    outliers of trained models are (LLM.int8(), appendix C). The linears that read it lose c * W[:, j] from their bias,
    and the linear whose output is added to it loses c. In every layer a few value rows are multiplied by a power of two
    and the columns of the attention's output linear divided by it.
    """
    result: Any = copy.deepcopy(backbone)
    layers = blocks(result)
    generator = np.random.default_rng(OUTLIER_SEED)
    channels = list(outlier_channels(int(result.config.hidden_size)))
    signs = generator.choice([-1.0, 1.0], size=len(channels))
    norm = result.embeddings.LayerNorm
    with torch.no_grad():
        for layer in layers:
            for source, readers, added in (
                (norm, (layer.query, layer.key, layer.value), layer.attention_out),
                (layer.attention_norm, (layer.ffn_in,), layer.ffn_out),
            ):
                shift = torch.from_numpy(signs * generator.uniform(*OUTLIER_RANGE, size=len(channels)))
                _shift_channels(source, channels, shift, readers, added)
            width = layer.value.out_features
            _scale_values(layer, torch.from_numpy(generator.choice(width, size=min(VALUE_ROWS, width), replace=False)))
            norm = layer.output_norm
    return cast(nn.Module, result)


def _shift_channels(
    norm: nn.LayerNorm, channels: Sequence[int], shift: torch.Tensor, readers: Iterable[nn.Linear], added: nn.Linear
) -> None:
    """Adds ``shift`` (float64, one a channel) to the norm's bias and takes it back where that is used; in place."""
    index = torch.tensor(channels)
    before = norm.bias[index].double()
    norm.bias[index] = (before + shift).float()
    moved = norm.bias[index].double() - before  # what rounding to float32 left of the shift
    for reader in readers:
        reader.bias.copy_(reader.bias.double() - reader.weight[:, index].double() @ moved)
    added.bias[index] = (added.bias[index].double() - moved).float()


def _scale_values(layer: Block, rows: torch.Tensor) -> None:
    """Multiplies value rows and divides the columns of the output linear that read them; in place and exact."""
    layer.value.weight[rows] *= VALUE_FACTOR
    layer.value.bias[rows] *= VALUE_FACTOR
    layer.attention_out.weight[:, rows] /= VALUE_FACTOR


REWRITES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "distilbert": to_distilbert,
    "xlm-roberta": to_xlm_roberta,
    "outliers": plant_outliers,
}
