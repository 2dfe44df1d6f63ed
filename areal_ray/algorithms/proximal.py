"""The proximal policy, estimated without a pass of its own."""

from __future__ import annotations

from torch import Tensor


def interpolated_proximal(
    logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor
) -> Tensor:
    """log p_proximal = log p_behaviour + alpha * (log p - log p_behaviour), without a gradient.

    Take a token that version b sampled, trained on from version v on: it is d = v - b versions
    old, and the step makes version v + 1. Suppose that every update moved the token's logprob by
    the same amount m. Then it has moved by (d + 1) * m when the step is made, and had moved by
    d * m when the step began, which is where the proximal policy stands:

        alpha = (v - b) / (v + 1 - b) = d / (d + 1)
        ratio to the proximal policy = (p / p_behaviour)^(1 / (d + 1))

    A token of the present version (d = 0) has alpha 0: the weights that sampled it are the proximal
    ones. One of 3 versions ago has alpha 3/4: of what lies between the sampling and now, a quarter
    is this step's doing, and only that is clipped. The suppositions cost something: drift is not
    even, a step's first pass is still at v (where the true ratio is 1), and the engine's numerics
    are shared out as if they were drift. A-3PO (arXiv:2512.06547) takes 1 / age for the share of
    the step; its age of one is the present step's.
    """
    age = staleness.to(logprobs.dtype)
    moved = logprobs.detach() - behaviour_logprobs
    return behaviour_logprobs + age / (age + 1) * moved
