"""Models by name: the catalog's, a local folder, or a hub id.

Importing this module does not import torch, so listings and name checks are quick; ``load`` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from harness import assets
from harness.errors import AssetError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from harness.encoders import Encoder

Weights = Literal["real", "synthetic"]
Head = Literal["sequence-classification", "question-answering", "causal-lm"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT_S = 5


@dataclass(frozen=True)
class ModelInfo:
    """A row of the catalog. ``asset``: what has to be fetched. ``hidden``: for tests, not listed."""

    name: str
    family: str
    weights: Weights
    about: str
    asset: str | None
    hidden: bool


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory: FP32, eval mode, no gradients.

    ``module(**batch)`` returns one float32 tensor: (B, S, H) hidden states, or the logits of its head, (B, C),
    (B, S, 2) or (B, S, V). ``inputs`` names the tensors of a batch; ``max_seq`` is
    the longest sequence in tokens. ``tokenizer`` is a fast tokenizer of transformers, or None. ``source`` is the folder
    or hub id that the weights were read from, None for synthetic ones.
    """

    name: str
    family: str
    weights: Weights
    module: Encoder
    tokenizer: Any | None
    inputs: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    max_seq: int
    source: str | None = None


class Shape(Protocol):
    """What ``batch_inputs`` needs of a scenario."""

    @property
    def batch(self) -> int: ...
    @property
    def seq(self) -> int: ...


def known(*, hidden: bool = False) -> tuple[str, ...]:
    """Names of the catalog's models, in its order; the hidden ones of tests only if asked for."""
    return tuple(name for name, row in assets.catalog("models").items() if hidden or not row.get("hidden", False))


def info(name: str) -> ModelInfo | None:
    """The catalog's row for a name, or None for a local folder or a hub id. UsageError for a name that is neither."""
    table = assets.catalog("models")
    if name in table:
        row = table[name]
        origin = table[row["from"]] if "from" in row else row
        asset = origin.get("asset")
        weights: Weights = "real" if asset else "synthetic"
        return ModelInfo(name, row["family"], weights, row["about"], asset, row.get("hidden", False))
    if Path(name).is_dir() or (_HUB_ID.fullmatch(name) and not name.startswith(".")):
        return None
    if name.startswith((".", "/", "~")):
        raise UsageError(f"there is no folder {name}; give one that transformers' save_pretrained wrote")
    raise UsageError(f"{assets.nearest('model', name, known())}; a local folder or a hub id (owner/name) works too")


def load(
    name: str,
    *,
    offline: bool = False,
    progress: assets.Progress | None = None,
    head: Head | None = None,
    source: str | None = None,
) -> LoadedModel:
    """The named model, ready to run.

    ``name`` is one of ``known(hidden=True)``, a folder in transformers' format, or a hub id. ``offline`` neither
    fetches assets nor asks the hub. ``head`` asks for the checkpoint's own head, which the catalog's models do not
    have. ``source`` is a folder or hub id to read instead of what the name stands for; the name stays. Raises
    UsageError for an unknown name or a model that is no encoder, AssetError when the weights are missing or damaged.
    """
    row = info(name) if source is None else None
    if row is None:
        location = source or name
        if Path(location).is_dir():
            return _load_folder(name, location, head)
        return _load_hub(name, location, offline, head)
    if head is not None:
        raise UsageError(f"model {name} has no head for {head}; name a checkpoint in the file that --sources gives")
    return _load_catalog(name, row.weights, offline, progress)


def _load_catalog(name: str, weights: Weights, offline: bool, progress: assets.Progress | None) -> LoadedModel:
    table = assets.catalog("models")
    row = table[name]
    if "from" in row:
        from harness import encoders, rewrites

        base = _load_catalog(row["from"], weights, offline, progress)
        backbone = rewrites.apply(row["rewrites"], base.module.backbone)
        return _loaded(name, weights, encoders.finish(backbone), base.tokenizer, base.source)
    if "asset" in row:
        folder = assets.ensure(row["asset"], offline=offline, progress=progress)
        return _read(name, folder, None, local_only=True)
    return _synthetic(name, row)


def _synthetic(name: str, row: Mapping[str, Any]) -> LoadedModel:
    """A model of the row's shape with synthetic weights; with a tokenizer where the row names a task's words."""
    from harness import encoders

    shape: dict[str, Any] = dict(row["config"])
    tokenizer = None
    if "words" in row:
        words = task_words(row["words"])
        tokenizer = encoders.word_tokenizer(row["family"], words, int(shape["max_position_embeddings"]) - 2)
        shape["vocab_size"] = len(tokenizer)
    backbone = encoders.fill_synthetic(encoders.empty(row["family"], shape), int(row["seed"]))
    return _loaded(name, "synthetic", encoders.finish(backbone), tokenizer, None)


def task_words(task: str) -> tuple[str, ...]:
    """All words of a task of generated text, in the catalog's order."""
    groups: Mapping[str, list[str]] = assets.catalog("tasks")[task]["words"]
    return tuple(word for group in groups.values() for word in group)


def _load_folder(name: str, location: str, head: Head | None) -> LoadedModel:
    folder = Path(location)
    if not (folder / "config.json").is_file():
        raise AssetError(f"{folder} has no config.json; give a folder that transformers' save_pretrained wrote")
    return _read(name, folder, head, local_only=True)


def _load_hub(name: str, location: str, offline: bool, head: Head | None) -> LoadedModel:
    """From the hub's local cache, else from the hub where it answers."""
    try:
        return _read(name, location, head, local_only=True)
    except AssetError as error:
        if offline or not hub_answers():
            raise AssetError(
                f"model {location} is not in the local hub cache and the model hub cannot be reached; download it "
                "where there is a hub and give the folder instead of the id"
            ) from error
    return _read(name, location, head, local_only=False)


def hub_answers() -> bool:
    """Whether the hub answers within a few seconds; its client alone would retry for minutes."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # it answered, if not kindly; the client's own error will say more
    except (OSError, ValueError):
        return False


def _read(name: str, source: str | Path, head: Head | None, *, local_only: bool) -> LoadedModel:
    """A checkpoint read by transformers, its many kinds of error turned into one line."""
    from harness import encoders

    try:
        if head is None:
            module = encoders.finish(encoders.read_folder(source, local_only=local_only))
        else:
            module = encoders.finish_headed(encoders.read_headed(source, head, local_only=local_only))
        tokenizer = encoders.read_tokenizer(source, local_only=local_only)
    except KeyError as error:
        raise UsageError(f"model {name}: transformers has no encoder for its configuration ({error})") from error
    except encoders.MissingHeadError as error:
        raise UsageError(f"model {name} has no trained head for {head}: {error}; give a checkpoint that has") from error
    except Exception as error:  # transformers raises nearly every kind for a damaged or missing checkpoint
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise AssetError(f"model {name} cannot be read: {first.strip()}; check its files") from error
    return _loaded(name, "real", module, tokenizer, str(source))


def _loaded(name: str, weights: Weights, module: Encoder, tokenizer: Any | None, source: str | None) -> LoadedModel:
    from harness import encoders

    config: Any = module.backbone.config
    return LoadedModel(
        name=name,
        family=str(config.model_type),
        weights=weights,
        module=module,
        tokenizer=tokenizer,
        inputs=module.inputs,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        max_seq=encoders.max_seq(config),
        source=source,
    )


def encoder_shape(model: LoadedModel) -> dict[str, int]:
    """``layers``, ``hidden``, ``intermediate`` and ``heads`` of the model's encoder: what its GEMMs follow from."""
    config: Any = model.module.backbone.config
    inner = getattr(config, "intermediate_size", None) or config.hidden_dim  # DistilBERT's name for it
    return {
        "layers": int(config.num_hidden_layers),
        "hidden": int(config.hidden_size),
        "intermediate": int(inner),
        "heads": int(config.num_attention_heads),
    }


def batch_inputs(model: LoadedModel, scenario: Shape, seed: int) -> dict[str, Tensor]:
    """A batch of random tokens, all of full length: what speed is measured on.

    The tensors of ``model.inputs``, each (batch, seq) int64: ids drawn evenly from the vocabulary without its special
    tokens, a mask of ones, token types of zero. The same seed gives the same batch. UsageError if seq is too long.
    """
    import torch

    if scenario.seq > model.max_seq:
        raise UsageError(f"model {model.name} takes at most {model.max_seq} tokens; choose a scenario with a shorter s")
    generator = torch.Generator().manual_seed(seed)
    ordinary = _ordinary_ids(model)
    shape = (scenario.batch, scenario.seq)
    ids = ordinary[torch.randint(len(ordinary), shape, generator=generator)]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {name: batch[name] for name in model.inputs}


def _ordinary_ids(model: LoadedModel) -> Tensor:
    """Ids of the vocabulary that are no special tokens."""
    import torch

    config: Any = model.module.backbone.config
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else {config.pad_token_id}
    return torch.tensor([index for index in range(model.vocab_size) if index not in special])
