from __future__ import annotations

from dataclasses import replace
from functools import cache

import cloudpickle
import msgspec
import pytest
import torch
from algorithm_steps import STEPS, flat, quickly, reordered, step, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_ray.algorithm_config import (
    CorrectionConfig,
    CovarianceConfig,
    CriticConfig,
    KlConfig,
    OverlongConfig,
)
from areal_ray.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageTraits,
    Algorithm,
    LossInputs,
    LossOutputs,
    LossTraits,
    Needs,
    PreparedStep,
    StepBatch,
    policy_loss,
    prepare,
    sequence_ids_of,
    value_loss,
)
from areal_ray.config import AlgorithmConfig
from areal_ray.errors import ConfigError, TrainingError

EVERYTHING = AlgorithmConfig(
    advantage="gae",
    whiten="batch",
    proximal="recompute",
    entropy_coefficient=0.01,
    norm_tokens=8,
    kl=KlConfig(coefficient=0.1),
    critic=CriticConfig(enabled=True, gae_lambda=1.0),
    correction=CorrectionConfig(apply=("geometric_rejection",)),
    overlong=OverlongConfig(buffer_tokens=4, max_tokens=5),
    covariance=CovarianceConfig(fraction=1.0, low=-9.0, high=9.0),
)
"""Of everything something. All tokens in the band are chosen, so that nothing is drawn."""


def changed(**changes: object) -> AlgorithmConfig:
    return msgspec.structs.replace(EVERYTHING, **changes)


@cache
def algorithm(config: AlgorithmConfig = EVERYTHING) -> Algorithm:
    return Algorithm.of(config)


def current(batch: StepBatch, seed: int = 3) -> Tensor:
    noise = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed))
    return (batch.old_logprobs + 0.2 * noise.double()).clamp(max=-0.01).requires_grad_()


def losses(
    prepared: PreparedStep, recipe: Algorithm, logprobs: Tensor, parts: list[Tensor]
) -> tuple[float, Tensor]:
    """The sum of the parts' losses, policy and critic, and its gradient by the logprobs."""
    total = 0.0
    logprobs.grad = None
    for at in parts:
        part, mine = prepared.take(at), logprobs[at]
        loss = policy_loss(part, recipe, mine, entropy=mine.exp()).total
        loss = loss + value_loss(part, recipe, mine + 1).total
        loss.backward()
        total += loss.item()
    return total, logprobs.grad.clone()


CONFIGS = st.builds(
    lambda reduction, changes: changed(reduction=reduction, **changes),
    st.sampled_from(["token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"]),
    st.sampled_from(
        [
            {},
            {"correction": CorrectionConfig(apply=("sequence_rejection", "geometric_rejection"))},
            {"correction": CorrectionConfig(), "proximal": "interpolate"},
        ]
    ),
)


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@quickly
@given(batch=STEPS, config=CONFIGS, data=st.data())
def test_a_step_does_not_depend_on_its_split_into_micro_batches(
    loss: str, batch: StepBatch, config: AlgorithmConfig, data: st.DataObject
) -> None:
    recipe = algorithm(msgspec.structs.replace(config, loss=loss))
    prepared, logprobs = prepare(batch, recipe), current(batch)
    whole = losses(prepared, recipe, logprobs, [torch.arange(batch.tokens)])
    order = data.draw(st.permutations(range(batch.sequences)))
    cut = data.draw(st.integers(0, batch.sequences))
    parts = [tokens_of(batch, order[:cut]), tokens_of(batch, order[cut:])]
    split = losses(prepared, recipe, logprobs, parts)
    assert split[0] == pytest.approx(whole[0])
    torch.testing.assert_close(split[1], whole[1])


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@quickly
@given(batch=STEPS, config=CONFIGS, data=st.data())
def test_a_step_does_not_depend_on_the_order_of_its_sequences(
    loss: str, batch: StepBatch, config: AlgorithmConfig, data: st.DataObject
) -> None:
    recipe = algorithm(msgspec.structs.replace(config, loss=loss))
    logprobs = current(batch)
    before = losses(prepare(batch, recipe), recipe, logprobs, [torch.arange(batch.tokens)])
    order = data.draw(st.permutations(range(batch.sequences)))
    at = tokens_of(batch, order)
    moved = logprobs.detach()[at].requires_grad_()
    other = prepare(reordered(batch, order), recipe)
    after = losses(other, recipe, moved, [torch.arange(batch.tokens)])
    assert after[0] == pytest.approx(before[0])
    torch.testing.assert_close(after[1], before[1][at])


def test_a_padded_layout_gives_the_same_loss() -> None:
    batch = step([(0, 1.0, 2), (0, 0.0, 0), (0, 0.0, 3)])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(sequence_ids_of(mask), batch.sequence_ids)
    recipe = algorithm(AlgorithmConfig(reduction="sequence_mean"))
    prepared, logprobs = prepare(batch, recipe), current(batch).detach()
    # The same on padded rows: PPO, the mean over each row's mask, the mean over rows with tokens.
    ratio, advantages = torch.zeros(2, 3, 4, dtype=torch.float64)
    ratio[mask] = (logprobs - batch.behaviour_logprobs).exp()
    advantages[mask] = prepared.advantages
    surrogate = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages) * mask
    padded = (surrogate[[0, 2]].sum(1) / mask[[0, 2]].sum(1)).mean()
    torch.testing.assert_close(policy_loss(prepared, recipe, logprobs).total, padded)


def test_the_example_that_explains_the_layout_is_true() -> None:
    batch = StepBatch(
        sequence_ids=torch.tensor([0, 0, 2, 2, 2, 3]),
        group_ids=torch.tensor([7, 7, 7, 9]),
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0]),
        versions=torch.tensor([4, 4, 4, 5, 5, 5]),
        version=6,
        behaviour_logprobs=torch.full((6,), -1.0),
    )
    assert batch.staleness.tolist() == [2, 2, 2, 1, 1, 1]
    assert batch.lengths.tolist() == [2, 0, 3, 1]
    assert batch.group_mean(batch.rewards).tolist() == [0.5, 0.5, 0.5, 1.0]
    prepared = prepare(batch, algorithm(AlgorithmConfig()))
    assert prepared.advantages.tolist() == pytest.approx([1, 1, 0, 0, 0, 0], abs=1e-5)
    assert prepared.token_weights.tolist() == pytest.approx([1 / 6] * 6)


def test_the_loss_of_a_step_worked_by_hand() -> None:
    # Two samples of a prompt, rewards 1 and 0, of 1 and 2 tokens; dr_grpo: 1/2, -1/2, -1/2.
    # Proximal over behaviour is 1, 1, 2; token_tis truncates the last at 1.5. Now over proximal
    # is 1.1 for all: losses -0.55, 0.55, 0.55, weighed 1, 1, 1.5: 0.825 in all, 0.275 a token.
    # KL to the reference by k2, log ratio 0.2 each: 0.02, times 0.5. Entropy 3 each, times 0.1.
    config = AlgorithmConfig(
        advantage="dr_grpo",
        proximal="recompute",
        entropy_coefficient=0.1,
        kl=KlConfig(coefficient=0.5, estimator="k2"),
        correction=CorrectionConfig(apply=("token_tis",), token_max=1.5),
    )
    batch = step([(0, 1.0, 1), (0, 0.0, 2)])
    proximal = batch.behaviour_logprobs + flat([[1.0, 1.0, 2.0]]).log()
    now = proximal + torch.tensor(1.1, dtype=torch.float64).log()
    batch = replace(batch, proximal_logprobs=proximal, reference_logprobs=now - 0.2)
    recipe = algorithm(config)
    prepared = prepare(batch, recipe)
    loss = policy_loss(prepared, recipe, now, entropy=torch.full_like(now, 3.0))
    assert loss.policy.item() == pytest.approx(0.275)
    assert loss.kl.item() == pytest.approx(0.02)
    assert loss.entropy.item() == pytest.approx(3.0)
    assert loss.total.item() == pytest.approx(0.275 + 0.5 * 0.02 - 0.1 * 3)
    assert not loss.clipped.any()
    assert prepared.diagnostics.truncated == pytest.approx(1 / 3)


def test_a_rejected_token_is_in_no_term_of_the_loss() -> None:
    config = changed(correction=CorrectionConfig(apply=("icepop",)), overlong=OverlongConfig())
    batch = step([(0, 1.0, 2), (0, 0.0, 2)])
    batch = replace(batch, proximal_logprobs=batch.behaviour_logprobs + flat([[0, 0, 0, 9.0]]))
    recipe, logprobs = algorithm(config), current(batch)
    _, gradient = losses(prepare(batch, recipe), recipe, logprobs, [torch.arange(4)])
    assert gradient[3].item() == 0.0
    assert (gradient[:3] != 0).all()


def test_returns_have_the_critics_own_lambda_and_are_not_whitened() -> None:
    # Lambda 1 and no discount: whatever the values, the return of every token is the reward.
    batch = step([(0, 1.0, 3), (0, 0.5, 1)])
    prepared = prepare(batch, algorithm(changed(overlong=OverlongConfig())))
    torch.testing.assert_close(prepared.returns, flat([[1.0] * 3, [0.5]]))
    assert prepared.advantages.mean().item() == pytest.approx(0, abs=1e-9)
    # None of its own: the policy's.
    shared = prepare(
        batch, algorithm(changed(critic=CriticConfig(enabled=True), overlong=OverlongConfig()))
    )
    assert shared.returns[0].item() != pytest.approx(1.0)


def test_overlong_answers_have_smaller_advantages() -> None:
    # Buffer 4 of 5: 5 tokens cost all of 1, 1 token nothing. Rewards 0 and 1.
    config = AlgorithmConfig(advantage="dr_grpo", overlong=EVERYTHING.overlong)
    prepared = prepare(step([(0, 1.0, 5), (0, 1.0, 1)]), algorithm(config))
    assert prepared.advantages.tolist() == [-0.5] * 5 + [0.5]


def test_interpolation_needs_no_pass_and_shares_the_movement_by_age() -> None:
    # One version old: of log 4 between sampling and now, half is this step's, a ratio of 2.
    config = AlgorithmConfig(advantage="reinforce", loss="ppo", proximal="interpolate")
    batch = replace(step([(0, 1.0, 1)]), proximal_logprobs=None, versions=torch.tensor([4]))
    recipe = algorithm(config)
    assert not recipe.needs.proximal
    now = batch.behaviour_logprobs + torch.tensor(4.0, dtype=torch.float64).log()
    loss = policy_loss(prepare(batch, recipe), recipe, now)
    assert loss.total.item() == pytest.approx(-1.28)
    wide = algorithm(msgspec.structs.replace(config, clip_high=5.0))
    assert policy_loss(prepare(batch, wide), wide, now).total.item() == pytest.approx(-2.0)


def test_only_what_is_used_has_to_be_computed() -> None:
    assert algorithm(AlgorithmConfig()).needs == Needs(
        proximal=False, reference=False, values=False, entropy=False
    )
    assert algorithm().needs == Needs(proximal=True, reference=True, values=True, entropy=True)


@pytest.mark.parametrize("missing", ["proximal_logprobs", "reference_logprobs", "values"])
def test_a_step_without_a_column_that_is_needed_is_refused(missing: str) -> None:
    batch = replace(step([(0, 1.0, 2)]), **{missing: None})
    with pytest.raises(TrainingError, match=f"the algorithm needs {missing}"):
        prepare(batch, algorithm())


def test_a_loss_without_what_it_needs_is_refused() -> None:
    batch = step([(0, 1.0, 2)])
    prepared = prepare(batch, algorithm())
    with pytest.raises(TrainingError, match="the pass gave no entropy"):
        policy_loss(prepared, algorithm(), current(batch))
    with pytest.raises(TrainingError, match="no reference_logprobs"):
        policy_loss(replace(prepared, reference_logprobs=None), algorithm(), current(batch))
    with pytest.raises(TrainingError, match="needs values and returns"):
        value_loss(replace(prepared, returns=None), algorithm(), current(batch))


def test_a_step_of_empty_sequences_has_a_loss_of_zero() -> None:
    batch = step([(0, 1.0, 0), (0, 0.0, 0)])
    for name in POLICY_LOSSES:
        recipe = algorithm(changed(loss=name))
        logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
        loss = policy_loss(prepare(batch, recipe), recipe, logprobs, logprobs).total
        loss.backward()
        assert loss.item() == 0.0


def test_functions_of_the_users_own_are_used_and_travel_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))
        monkeypatch.setattr(registry, "_traits", dict(registry._traits))

    def always_two(batch: StepBatch, token_rewards: Tensor, options: AlgorithmConfig) -> Tensor:
        return 2 + 0 * batch.values

    def shy(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            per_token=inputs.entropy * inputs.advantages * inputs.logprobs.exp() / 2,
            clipped=torch.zeros_like(inputs.keep),
        )

    ADVANTAGES.register("always_two", AdvantageTraits(needs_values=True))(always_two)
    POLICY_LOSSES.register("shy", LossTraits(needs_entropy=True, needs_proximal=True))(shy)
    config = AlgorithmConfig(advantage="always_two", loss="shy")
    with pytest.raises(ConfigError, match="`always_two` needs `algorithm.critic.enabled: true`"):
        Algorithm.of(config)
    config = msgspec.structs.replace(config, critic=CriticConfig(enabled=True))
    with pytest.raises(ConfigError, match="expected recompute or interpolate with `loss: shy`"):
        Algorithm.of(config)
    config = msgspec.structs.replace(config, proximal="recompute")
    recipe = cloudpickle.loads(cloudpickle.dumps(Algorithm.of(config)))
    assert recipe.needs == Needs(proximal=True, reference=False, values=True, entropy=True)
    batch = step([(0, 1.0, 2)])
    prepared = prepare(batch, recipe)
    logprobs = batch.behaviour_logprobs
    loss = policy_loss(prepared, recipe, logprobs, entropy=torch.full_like(logprobs, 3.0))
    assert loss.total.item() == pytest.approx(3 * logprobs.exp().mean().item())


def test_two_that_weigh_by_the_same_ratio_are_refused() -> None:
    twice = CorrectionConfig(apply=("token_tis", "icepop"))
    with pytest.raises(ConfigError, match="token_tis, icepop would each weigh"):
        Algorithm.of(changed(correction=twice))
    once = CorrectionConfig(apply=("icepop",))
    with pytest.raises(ConfigError, match="icepop, dppo would each weigh"):
        Algorithm.of(changed(correction=once, loss="dppo"))


def test_a_part_keeps_the_order_it_was_asked_for_and_moves_as_a_whole() -> None:
    batch = step([(0, 1.0, 2), (1, 0.0, 1)])
    prepared = prepare(batch, algorithm())
    part = prepared.take(torch.tensor([2, 0, 1]))
    assert part.sequence_ids.tolist() == [1, 0, 0]
    assert torch.equal(part.advantages, prepared.advantages[[2, 0, 1]])
    assert part.diagnostics == prepared.diagnostics
    assert part.to(torch.device("meta")).token_weights.device.type == "meta"
