"""From groups of trajectories to what one step learns from: sequences to pass through the model,
and the columns of `algorithms.StepBatch`, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_ray.algorithms import StepBatch
from areal_ray.training.packing import LearnedSequence
from areal_ray.types import TrajectoryGroup, WeightVersion


@dataclass(frozen=True)
class StepData:
    sequences: list[LearnedSequence]
    batch: StepBatch
    """Without what takes a pass of the model."""


def step_data(groups: Sequence[TrajectoryGroup], version: WeightVersion) -> StepData:
    """`version`: of the weights that are about to learn."""
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = [int(t.response_mask.sum()) for t in trajectories]
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    sequences = [
        LearnedSequence(
            token_ids=np.concatenate([t.prompt_ids, t.response_ids]),
            learned=np.concatenate([np.zeros(len(t.prompt_ids), dtype=np.bool_), t.response_mask]),
            first_column=first,
        )
        for t, first in zip(trajectories, firsts, strict=True)
    ]
    batch = StepBatch(
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        group_ids=torch.tensor([group.group_id for group in groups for _ in group.trajectories]),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        versions=_column([t.versions[t.response_mask] for t in trajectories], np.int64),
        version=version,
        behaviour_logprobs=_column([t.logprobs[t.response_mask] for t in trajectories], np.float32),
    )
    return StepData(sequences=sequences, batch=batch)


def _column(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
