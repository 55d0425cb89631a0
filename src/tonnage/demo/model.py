"""A small, real GPT over bytes: pre-norm blocks, causal attention, GELU.

At its defaults (width 256, 4 layers, context 128) it has 3.3 million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256
"""One token a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Sizes of the model."""

    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    context: int = 128


class Gpt(nn.Module):
    """Next-byte logits ``(batch, seq, 256)`` from bytes ``(batch, seq)``."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the byte after each of ``tokens``."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        heads = (batch, seq, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + down


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicting bytes 1.. of each window ``(batch, seq + 1)`` from those before."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
