from __future__ import annotations

import math

import pytest
import torch

from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES, LossInputs
from areal_ray.errors import ConfigError


def test_grpo_whitens_within_each_group() -> None:
    # Group 7: rewards 1, 0, 0, mean 1/3, deviations 2/3, -1/3, -1/3;
    # variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735; advantages 1.1547, -0.57735, -0.57735.
    # Group 2: all equal, so zero. Group 5: alone, so zero.
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.0, 3.0])
    groups = torch.tensor([7, 2, 7, 2, 7, 5])
    expected = torch.tensor([1.1547, 0.0, -0.57735, 0.0, -0.57735, 0.0])
    torch.testing.assert_close(ADVANTAGES["grpo"](rewards, groups), expected, atol=1e-4, rtol=0)


def test_dr_grpo_only_centres() -> None:
    # Mean of group 0 is 1/4: 3/4, -1/4, -1/4, -1/4.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(ADVANTAGES["dr_grpo"](rewards, torch.zeros(4)), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        # Above 1 + 0.28 with a positive advantage: -1.28 * 2, and no gradient.
        (1.5, 2.0, -2.56, True),
        # Below 1 - 0.2 with a negative advantage: 0.8 * 1, and no gradient.
        (0.5, -1.0, 0.8, True),
        # Moving back towards 1 is never clipped.
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
    ],
)
def test_ppo_clips_only_what_moves_further_away(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    logprobs = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    outputs = POLICY_LOSSES["ppo"](
        LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=torch.tensor([-1.0]),
            advantages=torch.tensor([advantage]),
            clip_low=0.2,
            clip_high=0.28,
        )
    )
    assert outputs.per_token.item() == pytest.approx(loss, abs=1e-6)
    assert outputs.clipped.item() is clipped
    outputs.per_token.sum().backward()
    assert (logprobs.grad.item() == 0) is clipped


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as refused:
        _ = ADVANTAGES["grppo"]
    assert str(refused.value) == (
        'algorithm.advantage: expected one of grpo, dr_grpo, got "grppo"; did you mean `grpo`?'
    )


def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(ValueError, match="`ppo` is registered already"):
        POLICY_LOSSES.register("ppo")(lambda inputs: inputs)
