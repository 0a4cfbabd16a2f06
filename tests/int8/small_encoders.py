"""Small encoders for the library's tests. They compile in a second or two."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two linears with a GELU, a residual and a post-LayerNorm, as in BERT."""

    def __init__(self, width: int, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Embeddings, blocks in a numbered list, and a head outside of it. Takes a mask only to look like the real ones."""

    def __init__(self, width: int = 32, inner: int = 48, layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width, inner, bias) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_batch(batch: int, length: int, pads: int = 0, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(batch, length, dtype=torch.long)
    if pads:
        mask[:, -pads:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def sqnr_db(reference: Tensor, value: Tensor) -> float:
    noise = (reference - value).square().sum()
    return float(10 * torch.log10(reference.square().sum() / noise))
