"""The critic's loss: one number per token, before any reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.algorithms.losses import LossOutputs


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> LossOutputs:
    """max((V - R)^2, (V_clipped - R)^2) / 2, with V at most `clip` from what it was at the
    beginning of the step; without a clip, the first alone. The value loss of PPO (arXiv:1707.06347,
    eq. 9), clipped like the policy's.
    """
    plain = (values - returns) ** 2 / 2
    if clip is None:
        return LossOutputs(per_token=plain, clipped=torch.zeros_like(plain, dtype=torch.bool))
    near = old_values + (values - old_values).clamp(-clip, clip)
    limited = (near - returns) ** 2 / 2
    return LossOutputs(per_token=torch.maximum(plain, limited), clipped=limited > plain)
