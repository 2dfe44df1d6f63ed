"""A checksum that is computed where the bytes lie, on a CPU or a GPU.

The bytes as 64-bit words, each times an odd number that belongs to its place, added up modulo
2**64. Any change of one word changes it, and so do words that changed places.
"""

from __future__ import annotations

import torch

WORD_BYTES = 8
CHUNK_WORDS = 1 << 17
"""Computed in pieces that fit a cache, so that a bucket's checksum needs no second bucket."""


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor of bytes: one number, on its device."""
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    places = 2 * torch.arange(CHUNK_WORDS, dtype=torch.int64, device=data.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, words in enumerate(data[:whole].view(torch.int64).split(CHUNK_WORDS)):
        before = 2 * CHUNK_WORDS * number
        total += (words * places[: len(words)]).sum() + words.sum() * before
    rest = data[whole:].to(torch.int64)
    return total + ((rest + 1) * places[: len(rest)]).sum()
