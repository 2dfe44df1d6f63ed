"""Policy losses that hold back the few tokens which drive the policy's entropy down.

The entropy falls with the covariance of logprob and advantage, and a small part of the tokens
makes most of it. The Entropy Mechanism of RL for Reasoning LMs (arXiv:2505.22617). A
token's covariance is (log p - mean log p) * (A - mean A), with the means over the whole step and
log p of the policy that ratios are against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.algorithm_config import AlgorithmConfig
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.losses import (
    POLICY_LOSSES,
    LossInputs,
    LossOutputs,
    LossTraits,
    bounded_ratio,
    ppo,
    selection,
)


def covariances(batch: StepBatch, advantages: Tensor, keep: Tensor) -> Tensor:
    """(N,) Rejected tokens are in no mean, and have a covariance of 0."""
    kept = keep.to(advantages.dtype)
    size = kept.sum().clamp(min=1)
    log_p = batch.old_logprobs
    centred_log_p = log_p - (log_p * kept).sum() / size
    centred_advantage = advantages - (advantages * kept).sum() / size
    return centred_log_p * centred_advantage * kept


def select_band(
    batch: StepBatch, advantages: Tensor, keep: Tensor, options: AlgorithmConfig
) -> Tensor:
    """At random `fraction` of all tokens, of those with a covariance between `low` and `high`.

    The draw depends on the version alone, so all ranks choose the same tokens.
    """
    band = options.covariance
    covariance = covariances(batch, advantages, keep)
    inside = (keep & (covariance > band.low) & (covariance < band.high)).nonzero()[:, 0]
    draw = torch.randperm(len(inside), generator=torch.Generator().manual_seed(batch.version))
    chosen = inside[draw[: _how_many(keep, band.fraction)].to(inside.device)]
    return torch.zeros_like(keep).index_fill(0, chosen, True)


def select_highest(
    batch: StepBatch, advantages: Tensor, keep: Tensor, options: AlgorithmConfig
) -> Tensor:
    """The `fraction` of all tokens with the highest covariance."""
    covariance = covariances(batch, advantages, keep).masked_fill(~keep, -torch.inf)
    chosen = covariance.topk(_how_many(keep, options.covariance.fraction)).indices
    return torch.zeros_like(keep).index_fill(0, chosen, True)


@POLICY_LOSSES.register("clip_cov", LossTraits(select=select_band))
def clip_cov(inputs: LossInputs) -> LossOutputs:
    """`ppo`, and no loss for the chosen tokens. Clip-Cov."""
    plain, chosen = ppo(inputs), selection(inputs)
    return LossOutputs(
        per_token=torch.where(chosen, 0.0, plain.per_token), clipped=plain.clipped | chosen
    )


@POLICY_LOSSES.register("kl_cov", LossTraits(select=select_highest))
def kl_cov(inputs: LossInputs) -> LossOutputs:
    """-ratio * A without a clip; the chosen tokens also pay `kl_coefficient` times KL(old ||
    current). KL-Cov, with the KL by k3: of samples from the old policy, ratio - 1 - log ratio.
    """
    ratio = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
    plain, penalty = -ratio * inputs.advantages, ratio - 1 - ratio.log()
    chosen = selection(inputs)
    coefficient = inputs.options.covariance.kl_coefficient
    per_token = torch.where(chosen, plain + coefficient * penalty, plain)
    return LossOutputs(per_token=per_token, clipped=chosen)


def _how_many(keep: Tensor, fraction: float) -> int:
    """At least one, if there is any."""
    kept = int(keep.sum())
    return min(kept, max(1, int(kept * fraction)))
