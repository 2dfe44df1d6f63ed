"""Sequences of many lengths into rows without much padding, and without leaks between them.

Each row holds several whole sequences, one behind the other; position ids begin at zero with
each, and the model's attention stops there. A micro-batch holds at most a budget of tokens, or
one sequence if that alone is longer. For attention kernels that take a mask, rows are as wide as
the longest sequence, so that the mask stays small; flash-attn, which takes boundaries instead,
wants everything in one row (`one_row`), and there is no padding at all.

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
    first_column: int = 0
    """Where its learned tokens begin in the columns of the step."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one pass. The last three are flat, one entry per learned token."""

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    """Where in the flattened rows the token before each learned one stands."""
    targets: Tensor
    columns: Tensor
    """Where each stands in the columns of the step."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(getattr(self, name).to(device) for name in self.__annotations__))


NOTHING = MicroBatch(
    input_ids=torch.zeros((1, 2), dtype=torch.int64),
    position_ids=torch.arange(2)[None],
    predictors=torch.zeros(0, dtype=torch.int64),
    targets=torch.zeros(0, dtype=torch.int64),
    columns=torch.zeros(0, dtype=torch.int64),
)
"""For a rank that must pass along with others, and has nothing left."""


def pack(
    sequences: Sequence[LearnedSequence], *, budget_tokens: int, one_row: bool = False
) -> Iterator[MicroBatch]:
    """All sequences, each once, in micro-batches of at most `budget_tokens` positions."""
    longest_first = sorted(sequences, key=lambda s: -len(s.token_ids))
    begin = 0
    while begin < len(longest_first):
        longest = len(longest_first[begin].token_ids)
        row_tokens = max(longest, budget_tokens) if one_row else longest
        rows = _fill_rows(longest_first[begin:], row_tokens, budget_tokens)
        begin += sum(len(row) for row in rows)
        yield _lay_out(rows)


def _fill_rows(
    sequences: Sequence[LearnedSequence], row_tokens: int, budget_tokens: int
) -> list[list[LearnedSequence]]:
    """As many sequences as fit from the front, each in the first row with room for it."""
    rows: list[list[LearnedSequence]] = []
    room: list[int] = []
    for sequence in sequences:
        size = len(sequence.token_ids)
        row = next((i for i, free in enumerate(room) if free >= size), None)
        if row is None:
            if rows and (len(rows) + 1) * row_tokens > budget_tokens:
                break
            rows.append([])
            room.append(row_tokens)
            row = len(rows) - 1
        rows[row].append(sequence)
        room[row] -= size
    return rows


def _lay_out(rows: list[list[LearnedSequence]]) -> MicroBatch:
    width = max(sum(len(sequence.token_ids) for sequence in row) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    predictors, targets, columns = [], [], []
    for row_number, row in enumerate(rows):
        at = 0
        for sequence in row:
            size = len(sequence.token_ids)
            input_ids[row_number, at : at + size] = sequence.token_ids
            position_ids[row_number, at : at + size] = np.arange(size)
            learned = np.flatnonzero(sequence.learned)
            predictors.append(row_number * width + at + learned - 1)
            targets.append(sequence.token_ids[learned])
            columns.append(sequence.first_column + np.arange(len(learned)))
            at += size
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        columns=torch.from_numpy(np.concatenate(columns)),
    )
