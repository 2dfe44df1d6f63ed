from __future__ import annotations

import pytest
import torch
from algorithm_steps import flat

from areal_ray.algorithms.critic import clipped_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        # Within 0.2 of the old value: (1.1 - 2)^2 / 2.
        (1.1, 1.0, 2.0, 0.405, False),
        # It moved 0.5 towards the target: as if 0.2, (1.2 - 2)^2 / 2, and no gradient.
        (1.5, 1.0, 2.0, 0.32, True),
        # It moved away from the target: the larger loss is its own.
        (0.5, 1.0, 2.0, 1.125, False),
    ],
)
def test_a_value_gains_nothing_by_moving_further_than_the_clip(
    value: float, old: float, target: float, loss: float, clipped: bool
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    outputs = clipped_value_loss(values, flat([[old]]), flat([[target]]), clip=0.2)
    assert outputs.per_token.item() == pytest.approx(loss)
    assert outputs.clipped.item() is clipped
    outputs.per_token.sum().backward()
    assert (values.grad.item() == 0) is clipped
    plain = clipped_value_loss(values, flat([[old]]), flat([[target]]), clip=None)
    assert plain.per_token.item() == pytest.approx((value - target) ** 2 / 2)
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, flat([[old]]), flat([[target]]), 0.2).per_token, (values,)
    )
