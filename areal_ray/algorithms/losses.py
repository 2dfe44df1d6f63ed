"""Policy losses: one number per token, before any reduction.

All inputs are flat, one entry per token that the policy made; prompts, padding and tool answers
are not among them. The trainer divides the sum by the number of tokens in the whole step, so a
loss never sees how the step was split into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithms.registry import Registry


@dataclass(frozen=True)
class LossInputs:
    logprobs: Tensor
    """Of the tokens under the weights being trained, with a gradient."""
    behaviour_logprobs: Tensor
    """Of the same tokens under the weights that sampled them, as the engine reported."""
    advantages: Tensor
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class LossOutputs:
    per_token: Tensor
    clipped: Tensor
    """True where the clip took the gradient away."""


class PolicyLoss(Protocol):
    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


POLICY_LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")


@POLICY_LOSSES.register("ppo")
def ppo(inputs: LossInputs) -> LossOutputs:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A). PPO (arXiv:1707.06347), eq. 7; the
    two bounds apart as in DAPO (arXiv:2503.14476), section 3.1.
    """
    ratio = torch.exp(inputs.logprobs - inputs.behaviour_logprobs)
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    plain, limited = -ratio * inputs.advantages, -bounded * inputs.advantages
    return LossOutputs(per_token=torch.maximum(plain, limited), clipped=limited > plain)
