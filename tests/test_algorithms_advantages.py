from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from algorithm_steps import STEPS, flat, members, quickly, reordered, rows, step
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithm_config import KlConfig
from areal_ray.algorithms import ADVANTAGES, StepBatch
from areal_ray.algorithms.advantages import EPSILON, lambda_returns, whiten
from areal_ray.algorithms.rewards import token_rewards
from areal_ray.config import AlgorithmConfig
from areal_ray.errors import TrainingError

OPTIONS = AlgorithmConfig(gamma=0.9, gae_lambda=0.8)
COMPARING = [name for name in ADVANTAGES if ADVANTAGES.traits(name).compares]
KL_IN_REWARD = KlConfig(coefficient=0.1, estimator="k2", place="reward")


def advantages(name: str, batch: StepBatch, options: AlgorithmConfig = OPTIONS) -> torch.Tensor:
    return ADVANTAGES[name](batch, token_rewards(batch, options.kl), options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Group 7: rewards 1, 0, 0, mean 1/3, deviations 2/3, -1/3, -1/3; variance
        # (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735; 1.1547, -0.57735, -0.57735.
        # Group 2: all equal, so zero. Group 5: alone, so zero.
        ("grpo", [1.1547, 0.0, -0.57735, 0.0, -0.57735, 0.0]),
        # The deviations alone.
        ("dr_grpo", [2 / 3, 0.0, -1 / 3, 0.0, -1 / 3, 0.0]),
        # The others' means are 0, 1/2, 1/2.
        ("rloo", [1.0, 0.0, -0.5, 0.0, -0.5, 0.0]),
        # Lengths 1, 2, 3: the baseline is 1 * 1 / (1 + 2 + 3) = 1/6.
        ("opo", [5 / 6, 0.0, -1 / 6, 0.0, -1 / 6, 0.0]),
        # Deviations over the mean 1/3: 2, -1, -1.
        ("maxrl", [2.0, 0.0, -1.0, 0.0, -1.0, 0.0]),
    ],
)
def test_samples_are_compared_within_their_group(name: str, expected: list[float]) -> None:
    batch = step([(7, 1.0, 1), (2, 0.5, 1), (7, 0.0, 2), (2, 0.5, 1), (7, 0.0, 3), (5, 3.0, 1)])
    lengths = [1, 1, 2, 1, 3, 1]
    per_token = flat([[value] * length for value, length in zip(expected, lengths, strict=True)])
    torch.testing.assert_close(advantages(name, batch), per_token, atol=1e-4, rtol=0)


def test_reinforce_discounts_the_reward_back_from_the_last_token() -> None:
    # Discount 0.9: 2 * 0.81, 2 * 0.9, 2; then a sequence of its own.
    batch = step([(0, 2.0, 3), (0, 1.0, 1)])
    torch.testing.assert_close(advantages("reinforce", batch), flat([[1.62, 1.8, 2.0], [1.0]]))


def test_reinforce_plus_plus_whitens_over_all_tokens() -> None:
    # Without discount 1, 1, 1 and 0: mean 3/4, deviations 1/4, 1/4, 1/4, -3/4; variance
    # (3/16 + 9/16) / 3 = 1/4, std 1/2.
    batch = step([(0, 1.0, 3), (1, 0.0, 1)])
    torch.testing.assert_close(
        advantages("reinforce_plus_plus", batch, AlgorithmConfig()),
        flat([[0.5, 0.5, 0.5], [-1.5]]),
        atol=1e-5,
        rtol=0,
    )


def test_the_baseline_is_taken_off_before_whitening_and_one_alone_stays_zero() -> None:
    # Group 0: 1/2 for one token, -1/2 for three. Mean -1/4, deviations 3/4, -1/4 three times;
    # variance (9/16 + 3/16) / 3 = 1/4, std 1/2. Group 1 is alone: zero, and not in the mean.
    batch = step([(0, 1.0, 1), (0, 0.0, 3), (1, 1.0, 2)])
    torch.testing.assert_close(
        advantages("reinforce_plus_plus_baseline", batch, AlgorithmConfig()),
        flat([[1.5], [-0.5, -0.5, -0.5], [0.0, 0.0]]),
        atol=1e-5,
        rtol=0,
    )


def test_gae_sums_discounted_surprises() -> None:
    # Values 0.5, 1; reward 2 at the end; gamma 0.9, lambda 0.8. The last surprise is 2 - 1 = 1,
    # the first 0.9 * 1 - 0.5 = 0.4, its advantage 0.4 + 0.72 * 1 = 1.12.
    # Returns: 0.5 + 1.12 and 1 + 1.
    batch = replace(step([(0, 2.0, 2)]), values=flat([[0.5, 1.0]]))
    torch.testing.assert_close(advantages("gae", batch), flat([[1.12, 1.0]]))
    rewards = token_rewards(batch, OPTIONS.kl)
    torch.testing.assert_close(lambda_returns(batch, rewards, 0.9, 0.8), flat([[1.62, 2.0]]))


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(TrainingError, match="needs the values of a critic"):
        advantages("gae", replace(step([(0, 1.0, 2)]), values=None))


def slow_advantages(name: str, batch: StepBatch, options: AlgorithmConfig) -> list[list[float]]:
    """The definitions, sequence by sequence and token by token."""
    per_token = rows(batch, token_rewards(batch, options.kl))
    scores = [
        sum(row) if row else reward
        for row, reward in zip(per_token, batch.rewards.tolist(), strict=True)
    ]
    result: list[list[float]] = [[0.0] * len(row) for row in per_token]
    if name == "gae":
        values = rows(batch, batch.values)
        for row, (rewards, value) in enumerate(zip(per_token, values, strict=True)):
            after, value_after = 0.0, 0.0
            for t in reversed(range(len(rewards))):
                surprise = rewards[t] + options.gamma * value_after - value[t]
                after = surprise + options.gamma * options.gae_lambda * after
                result[row][t], value_after = after, value[t]
        return result
    if name in ("reinforce", "reinforce_plus_plus"):
        for row, rewards in enumerate(per_token):
            after = 0.0
            for t in reversed(range(len(rewards))):
                after = rewards[t] + options.gamma * after
                result[row][t] = after
        everyone = list(range(batch.sequences))
        return result if name == "reinforce" else slow_whiten(result, [everyone])
    for group in members(batch).values():
        if len(group) == 1:
            continue
        mine = [scores[i] for i in group]
        mean = statistics.fmean(mine)
        for i in group:
            lengths = [len(result[j]) for j in group]
            match name:
                case "grpo":
                    value = (scores[i] - mean) / (statistics.stdev(mine) + EPSILON)
                case "dr_grpo" | "reinforce_plus_plus_baseline":
                    value = scores[i] - mean
                case "rloo":
                    value = scores[i] - statistics.fmean(scores[j] for j in group if j != i)
                case "opo":
                    weighted = sum(n * r for n, r in zip(lengths, mine, strict=True))
                    value = scores[i] - weighted / max(1, sum(lengths))
                case "maxrl":
                    value = (scores[i] - mean) / mean if mean > EPSILON else 0.0
            result[i] = [value] * len(result[i])
    if name == "reinforce_plus_plus_baseline":
        compared = [i for group in members(batch).values() if len(group) > 1 for i in group]
        return slow_whiten(result, [compared])
    return result


def slow_whiten(lists: list[list[float]], together: list[list[int]]) -> list[list[float]]:
    result = [[0.0] * len(row) for row in lists]
    for sequences in together:
        tokens = [value for i in sequences for value in lists[i]]
        if not tokens:
            continue
        mean = statistics.fmean(tokens)
        std = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
        for i in sequences:
            result[i] = [(value - mean) / (std + EPSILON) for value in lists[i]]
    return result


@quickly
@given(batch=STEPS, kl=st.sampled_from([KlConfig(), KL_IN_REWARD]))
def test_each_agrees_with_its_definition_in_a_loop(batch: StepBatch, kl: KlConfig) -> None:
    options = AlgorithmConfig(gamma=0.9, gae_lambda=0.8, kl=kl)
    for name in ADVANTAGES:
        mine = advantages(name, batch, options)
        assert torch.isfinite(mine).all(), name
        expected = flat(slow_advantages(name, batch, options))
        assert torch.allclose(mine, expected, atol=1e-6, rtol=1e-6), name


@quickly
@given(batch=STEPS, data=st.data())
def test_sequences_in_another_order_have_the_same_advantages(
    batch: StepBatch, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(batch.sequences)))
    other = reordered(batch, order)
    for name in ADVANTAGES:
        before = rows(batch, advantages(name, batch))
        assert torch.allclose(advantages(name, other), flat([before[i] for i in order])), name


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_have_no_advantage_even_if_rounded(name: str) -> None:
    batch = step([(0, 0.1, 1), (0, 0.1, 2), (0, 0.1, 4)])
    batch = replace(batch, rewards=batch.rewards.float())
    mine = advantages(name, batch, AlgorithmConfig())
    assert mine.dtype == torch.float32
    assert mine.abs().max().item() < 1e-6


@pytest.mark.parametrize("name", COMPARING)
def test_one_sample_alone_has_an_advantage_of_zero(name: str) -> None:
    batch = step([(0, 1.0, 2), (1, 0.0, 3), (2, 1.0, 0)])
    assert advantages(name, batch).tolist() == [0.0] * 5


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_step_without_any_token_has_no_advantages(name: str) -> None:
    assert advantages(name, step([(0, 1.0, 0), (0, 0.0, 0)])).shape == (0,)


def test_a_sample_without_tokens_counts_in_the_mean_of_its_group() -> None:
    # Rewards 1 and 0 (no tokens): the mean is 1/2.
    batch = step([(0, 1.0, 2), (0, 0.0, 0)])
    assert advantages("dr_grpo", batch).tolist() == [0.5, 0.5]


@quickly
@given(batch=STEPS)
def test_whitening_over_groups_agrees_with_a_loop(batch: StepBatch) -> None:
    raw = advantages("gae", batch)
    expected = slow_whiten(rows(batch, raw), list(members(batch).values()))
    torch.testing.assert_close(whiten(batch, raw, "group"), flat(expected), atol=1e-6, rtol=1e-6)
    assert whiten(batch, raw, "none") is raw


def test_a_whitened_step_has_mean_zero_and_deviation_one() -> None:
    batch = step([(0, 1.0, 4), (1, 0.0, 5), (0, 0.0, 3)])
    whitened = whiten(batch, advantages("gae", batch), "batch")
    assert whitened.mean().item() == pytest.approx(0, abs=1e-9)
    assert whitened.std().item() == pytest.approx(1, abs=1e-5)
