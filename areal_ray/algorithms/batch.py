"""The layout that all algorithms share: flat columns over the tokens of one optimizer step.

N tokens that the policy made, sequence after sequence; prompts, padding and tool answers are not
among them. S sequences, numbered in that order; each belongs to the group of its prompt. Where
tool answers stood, the tokens before and after are neighbours. For example two prompts, the first
with samples of 2, 0 and 3 tokens, the second with one sample of 1 token:

    sequence_ids   0    0         2    2    2    3      N = 6
    versions       4    4         4    5    5    5      the engine got version 5 meanwhile
    group_ids      7         7    7              9      S = 4
    rewards        1.0       0.0  0.5            1.0
    version        6                                    staleness of the tokens: 2 2 2 1 1 1
    lengths        2         0    3              1
    mean reward of each sample's group:  0.5  0.5  0.5  1.0

What depends on more than one sequence (advantages, whitening, corrections, weights of the
reduction, choice by covariance) is computed once, from the whole step (`recipe.prepare`), by every
rank from the same gathered columns: a few bytes a token. So no result depends on micro-batches,
packing or the number of ranks. Gather them on CPUs: there, sums come out alike to the last bit on
every rank, and a threshold can't part them. Only the policy loss sees a micro-batch, of whole
sequences, and it gives one number per token.

In the example, `grpo` gives sequence 0 the advantage (1.0 - 0.5) / 0.5 = 1, and both of its tokens
get it; sequence 3 has nobody to be compared with and gets 0. With `token_mean` every token weighs
1/6, and the step's loss is the sum over all micro-batches of weight * loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from areal_ray.algorithms.segments import numbered, segment_count, segment_mean, segment_sum
from areal_ray.errors import TrainingError


@dataclass(frozen=True)
class StepBatch:
    sequence_ids: Tensor
    """(N,) int64, ascending, from 0 to S - 1. A sequence may have no tokens."""
    group_ids: Tensor
    """(S,)"""
    rewards: Tensor
    """(S,)"""
    versions: Tensor
    """(N,) The version of the weights that made each token."""
    version: int
    """Of the weights being trained, at the beginning of the step."""
    behaviour_logprobs: Tensor
    """(N,) Under the weights that sampled, as the engine reported."""
    proximal_logprobs: Tensor | None = None
    """(N,) Under the weights at the beginning of the step."""
    reference_logprobs: Tensor | None = None
    """(N,) Under the model that KL is measured to."""
    values: Tensor | None = None
    """(N,) What the critic gave at the beginning of the step."""

    def __post_init__(self) -> None:
        tokens, sequences = self.tokens, self.sequences
        for name, size in _SIZES.items():
            column: Tensor | None = getattr(self, name)
            expected = tokens if size == "N" else sequences
            if column is not None and tuple(column.shape) != (expected,):
                raise TrainingError(
                    f"a step's {name}: expected ({expected},), one per "
                    f"{'token' if size == 'N' else 'sequence'}, got {tuple(column.shape)}"
                )
        ids = self.sequence_ids
        if tokens and (ids[0] < 0 or ids[-1] >= sequences or (ids[1:] < ids[:-1]).any()):
            raise TrainingError(
                f"a step's sequence_ids: expected ascending numbers from 0 to {sequences - 1}"
            )

    @property
    def tokens(self) -> int:
        return len(self.sequence_ids)

    @property
    def sequences(self) -> int:
        return len(self.group_ids)

    @cached_property
    def lengths(self) -> Tensor:
        """(S,)"""
        return segment_count(self.sequence_ids, self.sequences)

    @cached_property
    def group_index(self) -> Tensor:
        """(S,) The groups as 0, 1, 2, ..."""
        return numbered(self.group_ids)[0]

    @cached_property
    def groups(self) -> int:
        return numbered(self.group_ids)[1]

    @cached_property
    def compared(self) -> Tensor:
        """(S,) Whether the group has another sample to compare with."""
        return segment_count(self.group_index, self.groups)[self.group_index] > 1

    @property
    def staleness(self) -> Tensor:
        """(N,) How many versions old each token is."""
        return self.version - self.versions

    @property
    def old_logprobs(self) -> Tensor:
        """(N,) Under the proximal policy if a pass gave them, else under the one that sampled."""
        return self.behaviour_logprobs if self.proximal_logprobs is None else self.proximal_logprobs

    def is_last(self) -> Tensor:
        """(N,) Whether a token is the last of its sequence."""
        ids = self.sequence_ids
        return torch.cat([ids[1:] != ids[:-1], ids.new_ones(min(1, len(ids)), dtype=torch.bool)])

    def sequence_sum(self, per_token: Tensor) -> Tensor:
        """(N,) -> (S,)"""
        return segment_sum(per_token, self.sequence_ids, self.sequences)

    def group_mean(self, per_sequence: Tensor) -> Tensor:
        """(S,) -> (S,): the mean of each sample's group, itself included."""
        return segment_mean(per_sequence, self.group_index, self.groups)[self.group_index]

    def group_sum(self, per_sequence: Tensor) -> Tensor:
        """(S,) -> (S,): the sum over each sample's group, itself included."""
        return segment_sum(per_sequence, self.group_index, self.groups)[self.group_index]

    def for_tokens(self, per_sequence: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets what its sequence has."""
        return per_sequence[self.sequence_ids]


_SIZES = {
    "sequence_ids": "N",
    "group_ids": "S",
    "rewards": "S",
    "versions": "N",
    "behaviour_logprobs": "N",
    "proximal_logprobs": "N",
    "reference_logprobs": "N",
    "values": "N",
}


def sequence_ids_of(mask: Tensor) -> Tensor:
    """From a padded layout, (B, T) with a mask of the policy's tokens, to the flat one: the ids
    of the rows. Any column follows as `column[mask]`.
    """
    return mask.nonzero()[:, 0]
