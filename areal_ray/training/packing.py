"""Sequences of many lengths into rows without much padding, and without leaks between them.

Each row holds several whole sequences, one behind the other; position ids begin at zero with
each, and the model's attention stops there. A micro-batch holds at most a budget of tokens, or
one sequence if that alone is longer.

    row 0   |a a a a a a a|b b b|          positions 0 1 2 3 4 5 6 0 1 2
    row 1   |c c c c c|d d d d| pad        positions 0 1 2 3 4 0 1 2 3 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LearnedSequence:
    """One sequence to learn from. `learned[i]` tells whether token i is a target."""

    token_ids: np.ndarray
    learned: np.ndarray
    behaviour_logprobs: np.ndarray
    """One per learned token."""
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one pass. The last four are flat, one entry per learned token."""

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    """Where in the flattened rows the token before each learned one stands."""
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(getattr(self, name).to(device) for name in self.__annotations__))


def pack(sequences: Sequence[LearnedSequence], *, budget_tokens: int) -> Iterator[MicroBatch]:
    """All sequences, each once, in micro-batches of at most `budget_tokens` positions."""
    longest_first = sorted(sequences, key=lambda s: -len(s.token_ids))
    begin = 0
    while begin < len(longest_first):
        width = len(longest_first[begin].token_ids)
        rows: list[list[LearnedSequence]] = []
        room: list[int] = []
        end = begin
        while end < len(longest_first):
            sequence = longest_first[end]
            size = len(sequence.token_ids)
            row = next((i for i, free in enumerate(room) if free >= size), None)
            if row is None:
                if rows and (len(rows) + 1) * width > budget_tokens:
                    break
                rows.append([])
                room.append(width)
                row = len(rows) - 1
            rows[row].append(sequence)
            room[row] -= size
            end += 1
        yield _lay_out(rows, width)
        begin = end


def _lay_out(rows: list[list[LearnedSequence]], width: int) -> MicroBatch:
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    predictors, targets, logprobs, advantages = [], [], [], []
    for row_number, row in enumerate(rows):
        at = 0
        for sequence in row:
            size = len(sequence.token_ids)
            input_ids[row_number, at : at + size] = sequence.token_ids
            position_ids[row_number, at : at + size] = np.arange(size)
            learned = np.flatnonzero(sequence.learned)
            predictors.append(row_number * width + at + learned - 1)
            targets.append(sequence.token_ids[learned])
            logprobs.append(sequence.behaviour_logprobs)
            advantages.append(np.full(len(learned), sequence.advantage, dtype=np.float32))
            at += size
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        behaviour_logprobs=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
        advantages=torch.from_numpy(np.concatenate(advantages)),
    )
