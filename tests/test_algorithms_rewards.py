from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_steps import STEPS, flat, quickly, rows, step
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithm_config import KlConfig, KlEstimator, OverlongConfig
from areal_ray.algorithms import StepBatch
from areal_ray.algorithms.kl import estimate_kl
from areal_ray.algorithms.proximal import interpolated_proximal
from areal_ray.algorithms.rewards import shape_overlong, token_rewards
from areal_ray.algorithms.segments import discounted_suffix_sum
from areal_ray.errors import TrainingError

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3", "low_variance"]


def test_overlong_answers_lose_reward_in_a_straight_line() -> None:
    # At most 100 tokens, the last 20 punished, by up to 0.5: nothing at 80, 0.25 at 90, all at
    # 100 and beyond.
    options = OverlongConfig(buffer_tokens=20, penalty=0.5, max_tokens=100)
    lengths = torch.tensor([0, 80, 90, 100, 130])
    shaped = shape_overlong(torch.ones(5), lengths, options)
    assert shaped.tolist() == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_without_a_buffer_no_length_is_punished() -> None:
    rewards = torch.ones(2)
    assert shape_overlong(rewards, torch.tensor([5, 5000]), OverlongConfig()) is rewards


def test_the_reward_is_the_last_tokens_and_kl_is_taken_off_each() -> None:
    batch = replace(
        step([(0, 1.0, 2), (0, 3.0, 0), (0, 2.0, 1)]),
        proximal_logprobs=flat([[-1.0, -2.0], [-1.0]]),
        reference_logprobs=flat([[-1.5, -1.0], [-1.0]]),
    )
    assert token_rewards(batch, KlConfig(coefficient=0.1)).tolist() == [0.0, 1.0, 2.0]
    # k1 is 0.5, -1 and 0; a tenth of it comes off.
    in_reward = KlConfig(coefficient=0.1, estimator="k1", place="reward")
    torch.testing.assert_close(token_rewards(batch, in_reward), flat([[-0.05, 1.1], [2.0]]))
    # Without a proximal pass it is measured from the policy that sampled.
    sampled = replace(batch, proximal_logprobs=None, behaviour_logprobs=batch.reference_logprobs)
    torch.testing.assert_close(token_rewards(sampled, in_reward), flat([[0.0, 1.0], [2.0]]))
    with pytest.raises(TrainingError, match="no reference_logprobs"):
        token_rewards(replace(batch, reference_logprobs=None), in_reward)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # The policy's probability is twice the other's: d = log 2 = 0.6931.
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        # 1/2 - 1 + 0.6931
        ("k3", math.log(2) - 0.5),
        ("low_variance", math.log(2) - 0.5),
    ],
)
def test_kl_of_a_token_twice_as_likely(estimator: KlEstimator, expected: float) -> None:
    kl = estimate_kl(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), estimator)
    assert kl.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimates_have_the_kl_as_their_mean(estimator: KlEstimator) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    other = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (policy * (policy / other).log()).sum()
    mean = (policy * estimate_kl(policy.log(), other.log(), estimator)).sum()
    torch.testing.assert_close(mean, exact)


def test_the_low_variance_estimate_is_bounded_and_k3_is_not() -> None:
    policy, other = torch.tensor([-30.0]), torch.tensor([0.0])
    assert estimate_kl(policy, other, "low_variance").item() == 10.0
    assert estimate_kl(policy, other, "k3").item() > 1e12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_gradients_are_those_of_its_values(estimator: KlEstimator) -> None:
    batch = step([(0, 1.0, 5)])
    logprobs = batch.behaviour_logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: estimate_kl(x, batch.reference_logprobs, estimator), (logprobs,)
    )


def test_the_proximal_policy_is_exact_where_every_update_moves_a_logprob_alike() -> None:
    # Tokens sampled by versions 5, 4 and 2; the step begins at 5 and makes 6; every update adds
    # 0.1. So now it is 0.1, 0.2 and 0.4 above the sampling, and was 0, 0.1 and 0.3 at version 5.
    behaviour = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    now = behaviour + torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    now.requires_grad_()
    proximal = interpolated_proximal(now, behaviour, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(proximal, flat([[-1.0, -1.9, -2.7]]))
    assert not proximal.requires_grad


@quickly
@given(batch=STEPS, discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_suffix_sums_by_doubling_are_those_of_a_loop(batch: StepBatch, discount: float) -> None:
    lists = rows(batch, batch.behaviour_logprobs)
    for row in lists:
        for t in reversed(range(len(row) - 1)):
            row[t] += discount * row[t + 1]
    mine = discounted_suffix_sum(batch.behaviour_logprobs, batch.sequence_ids, discount)
    torch.testing.assert_close(mine, flat(lists))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3)}, r"rewards: expected \(2,\), one per sequence, got \(3,\)"),
        ({"values": torch.zeros(1)}, r"values: expected \(3,\), one per token, got \(1,\)"),
        ({"sequence_ids": torch.tensor([0, 1, 0])}, "ascending numbers from 0 to 1"),
        ({"sequence_ids": torch.tensor([0, 1, 2])}, "ascending numbers from 0 to 1"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(change: dict, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        replace(step([(0, 1.0, 2), (0, 0.0, 1)]), **change)
