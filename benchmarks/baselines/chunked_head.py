"""Cross-entropy without all [tokens, vocabulary] logits in memory: the LM head runs in chunks and is recomputed."""

import torch
from torch.utils.checkpoint import checkpoint

CHUNK = 2048
"""Rows of the head at a time."""


def chunked_cross_entropy(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over rows of -log p(label). `hidden` [T, H], `labels` int64 [T]."""

    def of(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="sum")

    parts = [
        checkpoint(of, rows, targets, use_reentrant=False)
        for rows, targets in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    ]
    return torch.stack(parts).sum()
