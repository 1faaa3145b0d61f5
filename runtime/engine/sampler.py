"""From logits to the next tokens."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row; logits: [num_rows, vocab_size]. Waits for the device."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens
