"""Outlier features and what they do: the analysis of the LLM.int8() paper (arXiv 2208.07339, section 4).

A feature is a dimension j of the hidden states that the attention projections and the FFN's first linear read. It is
an outlier feature if its magnitude reaches 6.0 in at least 25 % of the layers, and in at least 6 % of the sequence
positions over all those hidden states. The FFN's second linear reads another space and does not count, nor does
attention itself.

Two points that the paper leaves open are decided so: a layer is affected if any token of the analysed texts reaches the
threshold in any hidden state that the layer's linears read, and positions count once in every hidden state. Query, key
and value read one hidden state; padding does not count. Memory is O(features * layers), whatever the amount of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from int8.calibrate import Batch
from int8.errors import CalibrationError

#: Section 4.1: from this magnitude on, in this share of layers and of positions.
MAGNITUDE = 6.0
LAYER_SHARE = 0.25
POSITION_SHARE = 0.06

#: Outlier values of one feature that are kept for its quartiles.
SAMPLE_VALUES = 2048

_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
_QUERY = re.compile(r"(?:^|\.)(?:query|q_lin|q_proj)$")
_KEY = re.compile(r"(?:^|\.)(?:key|k_lin|k_proj)$")


@dataclass(frozen=True)
class OutlierFeature:
    """One outlier feature.

    Attributes:
        dimension: its index j in the hidden state.
        layers: layers in which it reaches the threshold.
        layer_share: the same as a share of all layers, 0 to 1.
        position_share: share of sequence positions, over all hidden states, in which it does.
        values_per_sequence: how many of its values do, in one sequence and all hidden states together.
        quartiles: of the values at or above the threshold in magnitude, with their sign.
        low, high: its smallest and largest value anywhere.
        one_sided: whether all its values at or above the threshold have one sign.
    """

    dimension: int
    layers: int
    layer_share: float
    position_share: float
    values_per_sequence: float
    quartiles: tuple[float, float, float]
    low: float
    high: float
    one_sided: bool


@dataclass(frozen=True)
class OutlierAnalysis:
    """Outlier features of a model, the most common first, and what was looked at.

    Attributes:
        magnitude, min_layer_share, min_position_share: the criteria.
        layers, hidden_states, hidden_size: layers of the model, hidden states looked at in them, and their features.
        sequences, tokens: texts looked at and their real tokens.
        features: the outlier features.
        reached: dimensions in which any value reached the magnitude, outlier features or not.
        largest_other: the largest magnitude in all other dimensions.
    """

    magnitude: float
    min_layer_share: float
    min_position_share: float
    layers: int
    hidden_states: int
    hidden_size: int
    sequences: int
    tokens: int
    features: tuple[OutlierFeature, ...]
    reached: int
    largest_other: float

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The outlier features' dimensions, ascending."""
        return tuple(sorted(feature.dimension for feature in self.features))

    @property
    def one_sided(self) -> int:
        """How many outlier features are one-sided."""
        return sum(feature.one_sided for feature in self.features)

    @property
    def values_per_sequence(self) -> float:
        """Outlier values of all outlier features in one sequence."""
        return sum(feature.values_per_sequence for feature in self.features)


def analysed_linears(model: nn.Module) -> dict[str, dict[str, nn.Linear]]:
    """The linears whose input counts, by layer and qualified name: all of a layer but the FFN's second.

    That one is the last of its layer in BERT-like and GPT-like models alike; a linear that reads anything but the
    hidden size is left out too.

    Raises:
        CalibrationError: the model has no linear in a numbered layer.
    """
    layers: dict[str, dict[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        layer = _LAYER.match(name)
        if isinstance(module, nn.Linear) and layer:
            layers.setdefault(layer[0], {})[name] = module
    if not layers:
        raise CalibrationError(f"{type(model).__name__} has no nn.Linear in a numbered layer; nothing can be analysed")
    hidden = next(iter(next(iter(layers.values())).values())).in_features
    return {layer: _readers_of_hidden(linears, hidden) for layer, linears in layers.items()}


def _readers_of_hidden(linears: Mapping[str, nn.Linear], hidden: int) -> dict[str, nn.Linear]:
    counted = list(linears.items())
    counted = counted[:-1] if len(counted) > 1 else counted
    return {name: linear for name, linear in counted if linear.in_features == hidden}


def analyse(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    magnitude: float = MAGNITUDE,
    min_layer_share: float = LAYER_SHARE,
    min_position_share: float = POSITION_SHARE,
    progress: Callable[[int], None] | None = None,
) -> OutlierAnalysis:
    """Find the outlier features of ``model`` on ``batches``.

    Args:
        model: floating-point, in eval mode; called as ``model(**batch)`` without gradients.
        batches: dicts of the model's inputs. ``attention_mask`` (B, S), where present, marks real tokens.
        magnitude, min_layer_share, min_position_share: the criteria, by default the paper's.
        progress: called with the number of batches done.

    Raises:
        CalibrationError: no batch, no real token, or no linear that could be looked at.
    """
    layers = analysed_linears(model)
    seen = _Seen(layers, magnitude)
    for done, batch in enumerate(_run(model, seen, batches), start=1):
        seen.sequences += _batch_size(batch)
        if progress is not None:
            progress(done)
    if not seen.positions:
        raise CalibrationError("no real token reached a linear: pass texts, and check that attention_mask is not all 0")
    found = tuple(seen.features(min_layer_share, min_position_share))
    others = torch.ones(seen.size, dtype=torch.bool)
    others[[feature.dimension for feature in found]] = False
    widest = torch.maximum(seen.low.abs(), seen.high.abs())[others]
    return OutlierAnalysis(
        magnitude=magnitude,
        min_layer_share=min_layer_share,
        min_position_share=min_position_share,
        layers=len(layers),
        hidden_states=len(seen.states),
        hidden_size=seen.size,
        sequences=seen.sequences,
        tokens=seen.positions // len(seen.states),
        features=found,
        reached=int((seen.values > 0).sum()),
        largest_other=float(widest.max()) if widest.numel() else 0.0,
    )


def _run(model: nn.Module, seen: _Seen, batches: Iterable[Batch]) -> Iterator[Batch]:
    with _hooked(seen.hooks()), torch.no_grad():
        for batch in batches:
            seen.mask = real_tokens(batch)
            model(**batch)
            seen.last = None
            yield batch


def real_tokens(batch: Batch) -> Tensor | None:
    """(B, S) bool, true for real tokens; None where the batch does not say."""
    mask = batch.get("attention_mask")
    return None if mask is None or mask.ndim != 2 else mask.bool()


def _batch_size(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


class _Seen:
    """Running counts: one value a feature, one a feature and layer, and a bounded sample of outlier values."""

    def __init__(self, layers: Mapping[str, Mapping[str, nn.Linear]], magnitude: float) -> None:
        self.layers = layers
        self.size = next(linear.in_features for linears in layers.values() for linear in linears.values())
        self.magnitude = magnitude
        self.reached = {layer: torch.zeros(self.size, dtype=torch.bool) for layer in layers}
        self.values = torch.zeros(self.size, dtype=torch.int64)
        self.positive = torch.zeros(self.size, dtype=torch.int64)
        self.low = torch.full((self.size,), float("inf"))
        self.high = -self.low
        self.positions = 0
        self.sequences = 0
        self.states: set[str] = set()
        self.mask: Tensor | None = None
        self.last: tuple[str, Tensor] | None = None
        self._samples: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def hooks(self) -> list[tuple[nn.Linear, Callable[[Tensor], None]]]:
        return [
            (linear, self._observer(layer, name))
            for layer, linears in self.layers.items()
            for name, linear in linears.items()
        ]

    def _observer(self, layer: str, name: str) -> Callable[[Tensor], None]:
        def observe(x: Tensor) -> None:
            if self.last is not None and self.last[0] == layer and self.last[1] is x:
                return  # key and value read what the query read
            self.last = (layer, x)
            self.states.add(name)
            self._update(layer, _real_rows(x, self.mask))

        return observe

    def _update(self, layer: str, rows: Tensor) -> None:
        if not rows.shape[0]:
            return
        over = rows.abs() >= self.magnitude
        before = self.values.clone()
        self.values += over.sum(dim=0)
        self.positive += (over & (rows > 0)).sum(dim=0)
        self.reached[layer] |= over.any(dim=0)
        self.low = torch.minimum(self.low, rows.amin(dim=0))
        self.high = torch.maximum(self.high, rows.amax(dim=0))
        self.positions += rows.shape[0]
        for dimension in over.any(dim=0).nonzero().reshape(-1).tolist():
            self._sample(dimension, int(before[dimension]), rows[over[:, dimension], dimension])

    def _sample(self, dimension: int, before: int, values: Tensor) -> None:
        """Keep each value with the same chance (reservoir sampling, Vitter 1985); ``before`` were seen earlier."""
        kept = self._samples.get(dimension, torch.empty(0))
        free = max(0, SAMPLE_VALUES - kept.numel())
        kept = torch.cat([kept, values[:free]])
        rest = values[free:]
        order = torch.arange(before + free + 1, before + free + 1 + rest.numel(), dtype=torch.float64)
        slots = (torch.rand(rest.numel(), generator=self._generator, dtype=torch.float64) * order).long()
        kept[slots[slots < SAMPLE_VALUES]] = rest[slots < SAMPLE_VALUES]
        self._samples[dimension] = kept

    def features(self, min_layer_share: float, min_position_share: float) -> Iterator[OutlierFeature]:
        layer_counts = torch.stack(list(self.reached.values())).sum(dim=0)
        enough = (layer_counts >= min_layer_share * len(self.layers)) & (self.values > 0)
        enough &= self.values >= min_position_share * self.positions
        order = torch.argsort(self.values, descending=True, stable=True)
        for dimension in order[enough[order]].tolist():
            yield self._feature(dimension, int(layer_counts[dimension]))

    def _feature(self, dimension: int, layers: int) -> OutlierFeature:
        values, positive = int(self.values[dimension]), int(self.positive[dimension])
        quartiles = torch.quantile(self._samples[dimension], torch.tensor([0.25, 0.5, 0.75])).tolist()
        return OutlierFeature(
            dimension=dimension,
            layers=layers,
            layer_share=layers / len(self.layers),
            position_share=values / self.positions,
            values_per_sequence=values / max(1, self.sequences),
            quartiles=(quartiles[0], quartiles[1], quartiles[2]),
            low=float(self.low[dimension]),
            high=float(self.high[dimension]),
            one_sided=positive in (0, values),
        )


def _real_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """(T, K) FP32 rows of ``x`` that are no padding."""
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    return rows[mask.reshape(-1)] if mask is not None and x.shape[:-1] == mask.shape else rows


@contextmanager
def _hooked(hooks: Sequence[tuple[nn.Linear, Callable[[Tensor], Tensor | None]]]) -> Iterator[None]:
    """Call each function with what its linear is about to read; a tensor that it returns is read instead."""
    handles = [linear.register_forward_pre_hook(_pre_hook(look), with_kwargs=True) for linear, look in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pre_hook(look: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        changed = look(args[0] if args else kwargs["input"])
        return None if changed is None else ((changed,), {})

    return hook


@contextmanager
def zeroed(model: nn.Module, dimensions: Sequence[int]) -> Iterator[None]:
    """Within the ``with``, set ``dimensions`` to zero in every hidden state that the analysis counts (section 4.2).

    The altered values go on through the model. What the residual carries stays as it is.
    """
    index = torch.tensor(list(dimensions), dtype=torch.int64)
    linears = [linear for layer in analysed_linears(model).values() for linear in layer.values()]
    with _hooked([(linear, lambda x: x.index_fill(-1, index, 0.0)) for linear in linears]):
        yield


def random_dimensions(size: int, excluded: Sequence[int], count: int, seed: int) -> tuple[int, ...]:
    """``count`` dimensions below ``size`` that are not ``excluded``, ascending; the control of section 4.2.

    Fewer where so many are not left.
    """
    others = torch.tensor(sorted(set(range(size)) - set(excluded)))
    order = torch.randperm(others.numel(), generator=torch.Generator().manual_seed(seed))
    return tuple(sorted(others[order[:count]].tolist()))


def attention_mass(
    model: nn.Module,
    batches: Iterable[Batch],
    sets: Sequence[Sequence[int]],
    *,
    heads: int,
    causal: bool = False,
) -> tuple[float, ...]:
    """Mean top-1 softmax probability of attention with each set of dimensions zeroed (section 4.2).

    Each layer is looked at by itself: its query and key projections read the altered hidden state, while the model goes
    on with the regular one, so effects do not add up from layer to layer. Position terms inside attention (rotary,
    relative) are not applied; BERT, DistilBERT, RoBERTa and OPT have none.

    Args:
        model: floating-point, in eval mode.
        batches: dicts of the model's inputs, with ``attention_mask`` (B, S) where there is padding.
        sets: for each result, the dimensions to zero; an empty one gives the regular mass.
        heads: attention heads of a layer.
        causal: whether a token attends to earlier ones alone.

    Returns:
        For each set the mean over layers, heads and real query positions, 0 to 1.

    Raises:
        CalibrationError: no query and key projections of the names known here, or no batch.
    """
    projections = _query_key(model)
    indices = [torch.tensor(list(chosen), dtype=torch.int64) for chosen in sets]
    sums = torch.zeros(len(sets), dtype=torch.float64)
    count, mask = 0, None

    def look(query: nn.Linear, key: nn.Linear) -> Callable[[Tensor], None]:
        def observe(x: Tensor) -> None:
            nonlocal count
            for place, index in enumerate(indices):
                altered = x.index_fill(-1, index, 0.0)
                top = _top_probability(altered, query, key, heads, mask, causal)
                sums[place] += top.double().sum()
            count += top.numel()

        return observe

    with _hooked([(query, look(query, key)) for query, key in projections]), torch.no_grad():
        for batch in batches:
            mask = real_tokens(batch)
            model(**batch)
    if not count:
        raise CalibrationError("no attention was seen: pass at least one batch with real tokens")
    return tuple((sums / count).tolist())


def _query_key(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    pairs = []
    for linears in analysed_linears(model).values():
        query = [linear for name, linear in linears.items() if _QUERY.search(name)]
        key = [linear for name, linear in linears.items() if _KEY.search(name)]
        pairs += list(zip(query, key, strict=True)) if len(query) == len(key) else []
    if not pairs:
        raise CalibrationError(
            f"{type(model).__name__} has no query and key linears named query, q_lin or q_proj; its attention mass "
            "cannot be measured"
        )
    return pairs


def _top_probability(
    x: Tensor, query: nn.Linear, key: nn.Linear, heads: int, mask: Tensor | None, causal: bool
) -> Tensor:
    """(heads, real query positions): the largest attention probability of each."""
    batch, seq, _ = x.shape
    width = query.out_features // heads
    queries = functional.linear(x, query.weight, query.bias).view(batch, seq, heads, width).transpose(1, 2)
    keys = functional.linear(x, key.weight, key.bias).view(batch, seq, heads, width).transpose(1, 2)
    scores = queries @ keys.transpose(-1, -2) / width**0.5
    hidden = torch.zeros(batch, 1, seq, seq, dtype=torch.bool)
    if mask is not None:
        hidden = hidden | ~mask[:, None, None, :]
    if causal:
        hidden = hidden | torch.ones(seq, seq, dtype=torch.bool).triu(1)
    top = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).amax(dim=-1)
    rows: Tensor = top.transpose(0, 1).reshape(heads, -1)
    return rows if mask is None else rows[:, mask.reshape(-1)]
