"""Steps for the tests of algorithms: small, ragged and in float64, with their parts as lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from areal_ray.algorithms import StepBatch

quickly = settings(max_examples=30, deadline=None)

Shape = Sequence[tuple[int, float, int]]
"""For each sequence its group, its reward, and how many tokens it has."""

SHAPES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0]),
        st.sampled_from([0, 1, 2, 5]),
    ),
    min_size=1,
    max_size=7,
).filter(lambda shape: any(tokens for _, _, tokens in shape))


def step(shape: Shape, *, seed: int = 0, version: int = 5) -> StepBatch:
    """All columns are there, and random: logprobs that differ by about 0.4, tokens up to 3 old."""
    random = torch.Generator().manual_seed(seed)
    groups, rewards, lengths = zip(*shape, strict=True)
    count = sum(lengths)

    def noise() -> Tensor:
        return torch.randn(count, generator=random, dtype=torch.float64)

    behaviour = -0.05 - 2 * torch.rand(count, generator=random, dtype=torch.float64)
    return StepBatch(
        sequence_ids=torch.repeat_interleave(torch.arange(len(shape)), torch.tensor(lengths)),
        group_ids=torch.tensor(groups),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        versions=version - torch.randint(0, 4, (count,), generator=random),
        version=version,
        behaviour_logprobs=behaviour,
        proximal_logprobs=(behaviour + 0.4 * noise()).clamp(max=-0.01),
        reference_logprobs=(behaviour + 0.4 * noise()).clamp(max=-0.01),
        values=noise(),
    )


STEPS = st.builds(step, SHAPES, seed=st.integers(0, 1000))


def rows(batch: StepBatch, column: Tensor) -> list[list[float]]:
    """A flat column as one list per sequence."""
    lists: list[list[float]] = [[] for _ in range(batch.sequences)]
    for sequence, value in zip(batch.sequence_ids.tolist(), column.tolist(), strict=True):
        lists[sequence].append(value)
    return lists


def flat(lists: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in lists for value in row], dtype=torch.float64)


def members(batch: StepBatch) -> dict[int, list[int]]:
    """The sequences of each group."""
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_ids.tolist()):
        groups.setdefault(group, []).append(sequence)
    return groups


def tokens_of(batch: StepBatch, sequences: Sequence[int]) -> Tensor:
    """The indices of all tokens of these sequences, in the order given."""
    return torch.cat(
        [torch.zeros(0, dtype=torch.int64)]
        + [(batch.sequence_ids == s).nonzero()[:, 0] for s in sequences]
    )


def reordered(batch: StepBatch, order: Sequence[int]) -> StepBatch:
    """The same sequences in another order."""
    tokens = tokens_of(batch, order)
    lengths = batch.lengths[list(order)]
    columns = {
        field.name: column
        for field in fields(batch)
        if isinstance(column := getattr(batch, field.name), Tensor)
    }
    per_sequence = {"group_ids", "rewards"}
    return replace(
        batch,
        **{n: c[list(order)] if n in per_sequence else c[tokens] for n, c in columns.items()}
        | {"sequence_ids": torch.repeat_interleave(torch.arange(len(lengths)), lengths)},
    )
