"""Advantages: how much better than expected each token was.

An advantage takes the whole step and gives one number per token. Those that compare the samples
of a prompt give zero to a group of one, which has nothing to compare with; none gives a NaN.
Rejected tokens (see corrections.py) count like all others here: a reward says how good a sample
was, whatever the loss does with it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithm_config import AlgorithmConfig, Whitening
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.registry import Registry
from areal_ray.algorithms.rewards import sequence_scores
from areal_ray.algorithms.segments import discounted_suffix_sum, segment_mean, segment_std
from areal_ray.errors import TrainingError

EPSILON = 1e-6


class Advantage(Protocol):
    def __call__(
        self, batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig
    ) -> Tensor: ...


@dataclass(frozen=True)
class AdvantageTraits:
    needs_values: bool = False
    """Reads `batch.values`: there must be a critic."""
    compares: bool = False
    """Compares the samples of a prompt: one alone gets zero, and is left out of whitening."""


ADVANTAGES: Registry[Advantage, AdvantageTraits] = Registry(
    "algorithm.advantage", default_traits=AdvantageTraits()
)
_COMPARES = AdvantageTraits(compares=True)


@ADVANTAGES.register("grpo", _COMPARES)
def grpo(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """(r - mean) / (std + eps) within the group. DeepSeekMath (arXiv:2402.03300), section 4.1.2.

    The standard deviation is the unbiased one (n - 1).
    """
    scores = sequence_scores(batch, token_rewards)
    std = segment_std(scores, batch.group_index, batch.groups)[batch.group_index]
    return _for_tokens(batch, (scores - batch.group_mean(scores)) / (std + EPSILON))


@ADVANTAGES.register("dr_grpo", _COMPARES)
def dr_grpo(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """r - mean within the group. Dr. GRPO, in Understanding R1-Zero-Like Training
    (arXiv:2503.20783). Goes with `reduction: sequence_mean_token_sum_norm`.
    """
    scores = sequence_scores(batch, token_rewards)
    return _for_tokens(batch, scores - batch.group_mean(scores))


@ADVANTAGES.register("rloo", _COMPARES)
def rloo(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """r - mean of the others in the group. Back to Basics (arXiv:2402.14740), the REINFORCE
    leave-one-out estimator. With n samples that is n / (n - 1) * (r - mean).
    """
    scores = sequence_scores(batch, token_rewards)
    sizes = batch.group_sum(torch.ones_like(scores))
    others = (sizes - 1).clamp(min=1)
    return _for_tokens(batch, (scores - batch.group_mean(scores)) * sizes / others)


@ADVANTAGES.register("opo", _COMPARES)
def opo(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """r - sum(length * r) / sum(length) within the group: the baseline of least variance, if the
    square of a sequence's gradient grows with its length. OPO (arXiv:2505.23585).
    """
    scores = sequence_scores(batch, token_rewards)
    lengths = batch.lengths.to(scores.dtype)
    baseline = batch.group_sum(lengths * scores) / batch.group_sum(lengths).clamp(min=1)
    return _for_tokens(batch, torch.where(batch.compared, scores - baseline, 0.0))


@ADVANTAGES.register("maxrl", _COMPARES)
def maxrl(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """(r - mean) / mean within the group: a prompt that is seldom solved weighs the more, as it
    would in maximum likelihood. MaxRL (arXiv:2602.02710), for rewards of 0 and 1; others must
    not be negative. A group without any reward gets zero.
    """
    scores = sequence_scores(batch, token_rewards)
    mean = batch.group_mean(scores)
    some = mean > EPSILON
    centred = (scores - mean) / torch.where(some, mean, 1.0)
    return _for_tokens(batch, torch.where(some, centred, 0.0))


@ADVANTAGES.register("reinforce")
def reinforce(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """The discounted sum of the rewards from the token on, without a baseline. Williams, "Simple
    statistical gradient-following algorithms" (1992).
    """
    return discounted_suffix_sum(token_rewards, batch.sequence_ids, options.gamma)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(
    batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig
) -> Tensor:
    """`reinforce`, whitened over all tokens of the step. REINFORCE++ (arXiv:2501.03262), which has
    the KL in the reward, by k1.
    """
    return whiten(batch, reinforce(batch, token_rewards, options), "batch")


@ADVANTAGES.register("reinforce_plus_plus_baseline", _COMPARES)
def reinforce_plus_plus_baseline(
    batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig
) -> Tensor:
    """`dr_grpo`, whitened over all tokens of the step. REINFORCE++ (arXiv:2501.03262), the variant
    with baseline.
    """
    return whiten(
        batch,
        dr_grpo(batch, token_rewards, options),
        "batch",
        where=batch.for_tokens(batch.compared),
    )


@ADVANTAGES.register("gae", AdvantageTraits(needs_values=True))
def gae(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438), eq. 16. What follows the last token of
    a sequence is worth 0, also where the answer was cut off.
    """
    return lambda_advantages(batch, token_rewards, options.gamma, options.gae_lambda)


def lambda_advantages(
    batch: StepBatch, token_rewards: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """sum over k of (gamma * lambda)^k * delta[t + k], with delta[t] = r[t] + gamma * V[t + 1] -
    V[t].
    """
    if batch.values is None:
        raise TrainingError("`gae` needs the values of a critic, and the batch has none")
    following = torch.cat([batch.values[1:], batch.values[:1]])
    following = torch.where(batch.is_last(), 0.0, following)
    delta = token_rewards + gamma * following - batch.values
    return discounted_suffix_sum(delta, batch.sequence_ids, gamma * gae_lambda)


def lambda_returns(
    batch: StepBatch, token_rewards: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """What a critic learns: the values plus their advantages, never whitened."""
    return lambda_advantages(batch, token_rewards, gamma, gae_lambda) + batch.values


def whiten(
    batch: StepBatch, advantages: Tensor, over: Whitening, where: Tensor | None = None
) -> Tensor:
    """Mean 0 and unbiased deviation 1 over the tokens of the step, or of each group.

    Tokens outside `where` count for nothing and become 0.
    """
    if over == "none":
        return advantages
    if over == "batch":
        ids, count = torch.zeros_like(batch.sequence_ids), 1
    else:
        ids, count = batch.for_tokens(batch.group_index), batch.groups
    exact = advantages.double()
    mean = segment_mean(exact, ids, count, where)[ids]
    std = segment_std(exact, ids, count, where)[ids]
    whitened = ((exact - mean) / (std + EPSILON)).to(advantages.dtype)
    return whitened if where is None else torch.where(where, whitened, 0.0)


def _for_tokens(batch: StepBatch, per_sequence: Tensor) -> Tensor:
    return batch.for_tokens(per_sequence).to(batch.rewards.dtype)
