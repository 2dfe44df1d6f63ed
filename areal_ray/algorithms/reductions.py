"""Reductions: a weight for each token, such that a step's loss is the sum of weight * loss.

The weights hold the denominators of the whole step, so micro-batches and ranks only ever add up.

A rejected token has weight 0 and is left out of the denominators too, as is a sequence or a group
with no token left. If it counted there, a step of which a correction rejected half would be half
a step: how far the engine is off would change the learning rate. A sequence without tokens counts
nowhere either.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithm_config import AlgorithmConfig
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.registry import Registry
from areal_ray.algorithms.segments import segment_sum
from areal_ray.errors import TrainingError


class Reduction(Protocol):
    def __call__(self, batch: StepBatch, keep: Tensor, options: AlgorithmConfig) -> Tensor: ...


REDUCTIONS: Registry[Reduction, None] = Registry("algorithm.reduction", default_traits=None)


@REDUCTIONS.register("token_mean")
def token_mean(batch: StepBatch, keep: Tensor, options: AlgorithmConfig) -> Tensor:
    """All tokens of the step alike. DAPO (arXiv:2503.14476), section 3.3."""
    counted = _counted(batch, keep)
    return counted / counted.sum().clamp(min=1)


@REDUCTIONS.register("sequence_mean")
def sequence_mean(batch: StepBatch, keep: Tensor, options: AlgorithmConfig) -> Tensor:
    """The mean over sequences of each one's mean. DeepSeekMath (arXiv:2402.03300), eq. 3."""
    counted = _counted(batch, keep)
    left = batch.sequence_sum(counted)
    return counted / batch.for_tokens(left).clamp(min=1) / _present(left)


@REDUCTIONS.register("sequence_mean_token_sum")
def sequence_mean_token_sum(batch: StepBatch, keep: Tensor, options: AlgorithmConfig) -> Tensor:
    """The mean over sequences of each one's sum: the policy gradient as it is written down."""
    counted = _counted(batch, keep)
    return counted / _present(batch.sequence_sum(counted))


@REDUCTIONS.register("sequence_mean_token_sum_norm")
def sequence_mean_token_sum_norm(
    batch: StepBatch, keep: Tensor, options: AlgorithmConfig
) -> Tensor:
    """The same, divided by `norm_tokens`: a constant, so that length makes no bias. Dr. GRPO, in
    Understanding R1-Zero-Like Training (arXiv:2503.20783).
    """
    if options.norm_tokens is None:
        raise TrainingError("algorithm.norm_tokens is derived by `resolve`, and is still open")
    return sequence_mean_token_sum(batch, keep, options) / options.norm_tokens


@REDUCTIONS.register("prompt_mean")
def prompt_mean(batch: StepBatch, keep: Tensor, options: AlgorithmConfig) -> Tensor:
    """The mean over prompts of the mean over all tokens of a prompt's samples. The Art of Scaling
    RL Compute (arXiv:2510.13786), on loss aggregation.
    """
    counted = _counted(batch, keep)
    groups = batch.for_tokens(batch.group_index)
    left = segment_sum(counted, groups, batch.groups)
    return counted / left[groups].clamp(min=1) / _present(left)


def _counted(batch: StepBatch, keep: Tensor) -> Tensor:
    return keep.to(batch.behaviour_logprobs.dtype)


def _present(left: Tensor) -> Tensor:
    """How many sequences or groups have tokens left; at least 1."""
    return torch.count_nonzero(left).clamp(min=1)
