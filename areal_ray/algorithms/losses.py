"""Policy losses: one number per token, before any reduction.

A loss sees a micro-batch of whole sequences. It never sees the step's size, its split, or the
corrections' weights: these are not negative, so a loss that is multiplied by one afterwards is
the loss of the weighted objective, clipping included, and `recipe.policy_loss` does that for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithm_config import AlgorithmConfig
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.kl import LOG_RATIO_LIMIT
from areal_ray.algorithms.registry import Registry
from areal_ray.errors import TrainingError


@dataclass(frozen=True)
class LossInputs:
    """One entry per token of the micro-batch. Only `logprobs` and `entropy` have a gradient."""

    logprobs: Tensor
    """Under the weights being trained."""
    old_logprobs: Tensor
    """Under the policy that ratios are against: the proximal one, or, with `proximal: none`, the
    one that sampled."""
    behaviour_logprobs: Tensor
    """Under the policy that sampled, as the engine reported."""
    advantages: Tensor
    sequence_ids: Tensor
    """Equal for tokens of the same sequence."""
    keep: Tensor
    """False: a correction rejected the token, and its loss is not counted. A ratio of a whole
    sequence leaves it out."""
    selected: Tensor | None
    """What the loss's `select` chose, from the whole step."""
    entropy: Tensor | None
    """Of the policy at the token; None unless the config or the loss's traits ask for it."""
    options: AlgorithmConfig


@dataclass(frozen=True)
class LossOutputs:
    per_token: Tensor
    clipped: Tensor
    """True where the loss held the token back: took its gradient away, or bounded its weight."""


class PolicyLoss(Protocol):
    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


class Select(Protocol):
    """Chooses tokens of the whole step, from what is known before its first pass."""

    def __call__(
        self, batch: StepBatch, advantages: Tensor, keep: Tensor, options: AlgorithmConfig
    ) -> Tensor: ...


@dataclass(frozen=True)
class LossTraits:
    needs_proximal: bool = False
    """Can't do with `proximal: none`."""
    needs_entropy: bool = False
    weighs: bool = False
    """Holds the ratio to the policy that sampled: a correction must not weigh by it again."""
    select: Select | None = None
    """Gives `LossInputs.selected`."""


POLICY_LOSSES: Registry[PolicyLoss, LossTraits] = Registry(
    "algorithm.loss", default_traits=LossTraits()
)


@POLICY_LOSSES.register("ppo")
def ppo(inputs: LossInputs) -> LossOutputs:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A). PPO (arXiv:1707.06347), eq. 7; the
    two bounds apart as in DAPO (arXiv:2503.14476), section 3.1. With `dual_clip` c and a negative
    A, at most -c * A: Mastering Complex Control in MOBA Games (arXiv:1912.09729), dual-clip PPO.
    """
    options, advantages = inputs.options, inputs.advantages
    ratio = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
    plain = -ratio * advantages
    limited = -ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    per_token, clipped = torch.maximum(plain, limited), limited > plain
    if options.dual_clip is not None:
        ceiling = -options.dual_clip * advantages
        beyond = (advantages < 0) & (per_token > ceiling)
        per_token, clipped = torch.where(beyond, ceiling, per_token), clipped | beyond
    return LossOutputs(per_token=per_token, clipped=clipped)


@POLICY_LOSSES.register("decoupled_ppo", LossTraits(needs_proximal=True, weighs=True))
def decoupled_ppo(inputs: LossInputs) -> LossOutputs:
    """`ppo` around the proximal policy, weighted by proximal / behaviour: how far the step may go
    and who sampled are told apart. Batch Size-Invariance for Policy Optimization
    (arXiv:2110.00641); for stale samples in AReaL (arXiv:2505.24298), section 5.2.
    `decoupled_max_weight` truncates the weight.
    """
    clipped_ppo = ppo(inputs)
    weight = bounded_ratio(inputs.old_logprobs, inputs.behaviour_logprobs)
    maximum = inputs.options.decoupled_max_weight
    if maximum is not None:
        weight = weight.clamp(max=maximum)
    return LossOutputs(per_token=weight * clipped_ppo.per_token, clipped=clipped_ppo.clipped)


@POLICY_LOSSES.register("cispo")
def cispo(inputs: LossInputs) -> LossOutputs:
    """-stop(clip(ratio, 1 - low, 1 + high)) * A * log p: the weight is bounded, and no token loses
    its gradient. MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5. The paper bounds from above only:
    `clip_low: 1` does the same.
    """
    options = inputs.options
    ratio = bounded_ratio(inputs.logprobs, inputs.old_logprobs).detach()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return LossOutputs(
        per_token=-weight * inputs.advantages * inputs.logprobs, clipped=weight != ratio
    )


@POLICY_LOSSES.register("sapo")
def sapo(inputs: LossInputs) -> LossOutputs:
    """-4 / tau * sigmoid(tau * (ratio - 1)) * A: a smooth gate in place of the clip, with one tau
    for positive advantages and one for the others. Soft Adaptive Policy Optimization
    (arXiv:2511.20347). Nothing is clipped.
    """
    options = inputs.options.sapo
    ratio = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
    positive = inputs.advantages > 0
    tau = torch.full_like(ratio, options.tau_negative).masked_fill(positive, options.tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return LossOutputs(per_token=-gate * inputs.advantages, clipped=torch.zeros_like(positive))


@POLICY_LOSSES.register("dppo", LossTraits(weighs=True))
def dppo(inputs: LossInputs) -> LossOutputs:
    """-stop(min(ratio, max_ratio)) * mask * A * log p, all against the policy that sampled.

    The mask is 0 where the policy would move further away (ratio > 1 and A > 0, or ratio < 1 and
    A < 0) and has already diverged by more than `threshold`. The divergence is between the two
    probabilities p (behaviour) and q (now) of the sampled token, against all others taken together:
    |p - q|, or p log(p / q) + (1 - p) log((1 - p) / (1 - q)). Rethinking the Trust Region in LLM
    Reinforcement Learning (arXiv:2602.04879), the binary approximations of DPPO.
    """
    options = inputs.options.dppo
    logprobs, behaviour = inputs.logprobs.detach(), inputs.behaviour_logprobs
    if options.divergence == "tv":
        divergence = (logprobs.exp() - behaviour.exp()).abs()
    else:
        divergence = _binary_kl(behaviour, logprobs)
    away = torch.where(inputs.advantages > 0, logprobs > behaviour, logprobs < behaviour)
    masked = away & (divergence > options.threshold) & (inputs.advantages != 0)
    ratio = bounded_ratio(logprobs, behaviour).clamp(max=options.max_ratio)
    weight = torch.where(masked, 0.0, ratio)
    return LossOutputs(per_token=-weight * inputs.advantages * inputs.logprobs, clipped=masked)


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(new - old), between e^-20 and e^20."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def selection(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise TrainingError("the loss chooses tokens from the whole step, and none were chosen")
    return inputs.selected


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between two coins. Near p = 1 the rest's logarithm is bounded, so that it stays finite."""
    tiny = torch.finfo(log_p.dtype).tiny
    rest_p, rest_q = (-torch.expm1(x.clamp(max=0)) for x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p * (
        rest_p.clamp(min=tiny).log() - rest_q.clamp(min=tiny).log()
    )
