"""Estimates of KL(policy || other) from the tokens that the policy sampled, one number per token.

With d = log policy - log other of the sampled token: k1 = d is unbiased and noisy; k2 = d^2 / 2
is biased, never negative, and has the right gradient on-policy; k3 = exp(-d) - 1 + d is unbiased
and never negative. John Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from areal_ray.algorithm_config import KlEstimator

LOG_RATIO_LIMIT = 20.0
"""e^20 is 5e8: a ratio beyond says only that something is broken, and must not overflow."""
LOW_VARIANCE_LIMIT = 10.0
"""A single token's `low_variance` KL is at most this."""


def estimate_kl(logprobs: Tensor, other_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    difference = logprobs - other_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
        case "k3":
            return torch.exp(-difference) - 1 + difference
        case "low_variance":
            bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (torch.exp(-bounded) - 1 + bounded).clamp(max=LOW_VARIANCE_LIMIT)
    assert_never(estimator)
