"""From a sequence's reward to those of its tokens: the length's part in it, and the KL's."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.algorithm_config import KlConfig, OverlongConfig
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.kl import estimate_kl
from areal_ray.errors import TrainingError


def shape_overlong(rewards: Tensor, lengths: Tensor, options: OverlongConfig) -> Tensor:
    """The soft punishment of DAPO (arXiv:2503.14476), section 3.4: no change up to `max_tokens -
    buffer_tokens`, from there a straight line down, `penalty` less at `max_tokens` and beyond.
    """
    if not options.buffer_tokens:
        return rewards
    if options.max_tokens is None:
        raise TrainingError("overlong.max_tokens is derived by `resolve`, and is still open")
    free = options.max_tokens - options.buffer_tokens
    over = ((lengths - free) / options.buffer_tokens).clamp(0, 1)
    return rewards - options.penalty * over.to(rewards.dtype)


def token_rewards(batch: StepBatch, kl: KlConfig) -> Tensor:
    """(N,) Each sequence's reward at its last token; with `kl.place: reward`, every token's KL to
    the reference is taken off. InstructGPT (arXiv:2203.02155), eq. 2, token by token.
    """
    at_end = torch.where(batch.is_last(), batch.for_tokens(batch.rewards), 0.0)
    if not kl.coefficient or kl.place != "reward":
        return at_end
    if batch.reference_logprobs is None:
        raise TrainingError("KL is in the reward, and the batch has no reference_logprobs")
    return at_end - kl.coefficient * estimate_kl(
        batch.old_logprobs, batch.reference_logprobs, kl.estimator
    )


def sequence_scores(batch: StepBatch, token_rewards: Tensor) -> Tensor:
    """(S,) The sum of each sequence's token rewards. One without tokens has its reward: it counts
    in the mean of its group.

    In float64: in float32, the mean of three rewards of 0.1 is not 0.1, and what is left over
    would be divided by a deviation that ought to be zero.
    """
    sums = batch.sequence_sum(token_rewards.double())
    return torch.where(batch.lengths > 0, sums, batch.rewards.double())
