"""Policy losses whose ratio is of the whole sequence: the geometric mean of its tokens' ratios.

Every token carries its sequence's ratio in value, and its own logprob in the gradient. With one
advantage for the sequence, the gradients of its tokens add up to that of the sequence's ratio;
with an advantage for each token, each gets its own. Rejected tokens are not in the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.algorithms.kl import LOG_RATIO_LIMIT
from areal_ray.algorithms.losses import POLICY_LOSSES, LossInputs, LossOutputs
from areal_ray.algorithms.segments import numbered, segment_mean


@POLICY_LOSSES.register("gspo")
def gspo(inputs: LossInputs) -> LossOutputs:
    """-min(s * A, clip(s, 1 - low, 1 + high) * A) with s the sequence's ratio. GSPO
    (arXiv:2507.18071), eq. 5 to 7; the gradient as in its token-level variant, section 4.3. Goes
    with `reduction: sequence_mean`.
    """
    options = inputs.options
    ratio = _sequence_ratio(inputs.logprobs - inputs.old_logprobs, inputs)
    plain = -ratio * inputs.advantages
    limited = -ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * inputs.advantages
    return LossOutputs(per_token=torch.maximum(plain, limited), clipped=limited > plain)


@POLICY_LOSSES.register("geo_mean")
def geo_mean(inputs: LossInputs) -> LossOutputs:
    """-s * A with s the geometric mean of the clipped ratios of the sequence's tokens: each log
    ratio is clipped to [-clip_low, clip_high], on the side where the advantage pushes it, before
    the mean. GMPO (arXiv:2507.20673). Goes with `reduction: sequence_mean`.
    """
    options, advantages = inputs.options, inputs.advantages
    log_ratio = inputs.logprobs - inputs.old_logprobs
    limited = torch.where(
        advantages > 0,
        log_ratio.clamp(max=options.clip_high),
        log_ratio.clamp(min=-options.clip_low),
    )
    per_token = -_sequence_ratio(limited, inputs) * advantages
    return LossOutputs(per_token=per_token, clipped=(limited != log_ratio) & (advantages != 0))


def _sequence_ratio(log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    index, count = numbered(inputs.sequence_ids)
    mean = segment_mean(log_ratio.detach(), index, count, inputs.keep)[index]
    bounded = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # The value is the mean's alone; the gradient that of this token's own log ratio.
    return torch.exp(bounded + log_ratio - log_ratio.detach())
