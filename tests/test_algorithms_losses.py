from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import pytest
import torch
from algorithm_steps import STEPS, flat, quickly, rows, step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_ray.algorithm_config import CovarianceConfig, DppoConfig, SapoConfig
from areal_ray.algorithms import POLICY_LOSSES, LossInputs, LossOutputs, StepBatch
from areal_ray.algorithms.covariance import covariances, select_band, select_highest
from areal_ray.config import AlgorithmConfig
from areal_ray.errors import TrainingError

OPTIONS = AlgorithmConfig(
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=1.6,
    decoupled_max_weight=1.5,
    dppo=DppoConfig(threshold=0.1, max_ratio=1.5),
    covariance=CovarianceConfig(kl_coefficient=0.5),
)
SMOOTH = ["ppo", "decoupled_ppo", "sapo", "clip_cov", "kl_cov"]
"""Their gradient is that of their value; the others stop it somewhere."""


def inputs(batch: StepBatch, *, seed: int = 1, options: AlgorithmConfig = OPTIONS) -> LossInputs:
    random = torch.Generator().manual_seed(seed)
    count = batch.tokens
    noise = torch.randn(count, generator=random, dtype=torch.float64)
    return LossInputs(
        logprobs=(batch.old_logprobs + 0.3 * noise).clamp(max=-0.01).requires_grad_(),
        old_logprobs=batch.old_logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=torch.randn(count, generator=random, dtype=torch.float64),
        sequence_ids=batch.sequence_ids,
        keep=torch.rand(count, generator=random) > 0.2,
        selected=torch.rand(count, generator=random) > 0.5,
        entropy=None,
        options=options,
    )


def one_token(
    name: str, ratio: float, advantage: float, options: AlgorithmConfig, behaviour: float = 0.1
) -> tuple[LossOutputs, float]:
    """The outputs for one token, chosen by `select`, and its gradient by its logprob."""
    logprobs = torch.tensor([math.log(ratio * behaviour)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(behaviour)], dtype=torch.float64)
    outputs = POLICY_LOSSES[name](
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            behaviour_logprobs=old,
            advantages=torch.tensor([advantage], dtype=torch.float64),
            sequence_ids=torch.tensor([3]),
            keep=torch.tensor([True]),
            selected=torch.tensor([True]),
            entropy=None,
            options=options,
        )
    )
    outputs.per_token.sum().backward()
    return outputs, logprobs.grad.item()


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
    outputs, gradient = one_token("ppo", ratio, advantage, AlgorithmConfig())
    assert outputs.per_token.item() == pytest.approx(loss, abs=1e-6)
    assert outputs.clipped.item() is clipped
    assert (gradient == 0) is clipped


def test_a_dual_clip_ends_the_push_away_from_a_bad_token() -> None:
    # Ratio 5 with advantage -1: 5 without, 3 and no gradient with a dual clip of 3.
    options = AlgorithmConfig(dual_clip=3.0)
    outputs, gradient = one_token("ppo", 5.0, -1.0, options)
    assert outputs.per_token.item() == pytest.approx(3.0)
    assert (outputs.clipped.item(), gradient) == (True, 0.0)
    # Below it, and for good tokens, nothing changes.
    outputs, gradient = one_token("ppo", 2.0, -1.0, options)
    assert outputs.per_token.item() == pytest.approx(2.0)
    assert gradient == pytest.approx(2.0)


def test_decoupled_ppo_weighs_by_who_sampled_and_clips_by_where_the_step_began() -> None:
    # Behaviour 0.1, proximal 0.2, now 0.3: weight 2, ratio 1.5 clipped to 1.28.
    probabilities = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64).log()
    behaviour, proximal, now = probabilities
    given_inputs = replace(
        inputs(step([(0, 1.0, 1)]), options=AlgorithmConfig()),
        logprobs=now.clone().requires_grad_(),
        old_logprobs=proximal,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([1.0], dtype=torch.float64),
    )
    loss = POLICY_LOSSES["decoupled_ppo"]
    assert loss(given_inputs).per_token.item() == pytest.approx(-2 * 1.28)
    # And with the weight truncated at 1.5.
    capped = replace(given_inputs, options=AlgorithmConfig(decoupled_max_weight=1.5))
    assert loss(capped).per_token.item() == pytest.approx(-1.5 * 1.28)


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"),
    [(1.0, 1.0, False), (2.0, 1.28, True), (0.5, 0.8, True)],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, weight: float, clipped: bool
) -> None:
    # -weight * A * log p with A = 2 and p = ratio / 10; the gradient is -weight * A.
    outputs, gradient = one_token("cispo", ratio, 2.0, AlgorithmConfig())
    assert outputs.per_token.item() == pytest.approx(-weight * 2 * math.log(ratio / 10))
    assert outputs.clipped.item() is clipped
    assert gradient == pytest.approx(-weight * 2)


def test_sapos_gate_is_the_ratio_itself_near_one_and_closes_away_from_it() -> None:
    # tau 2: 4/2 * sigmoid(2 * (r - 1)). At 1: 2 * 1/2 = 1, gradient of r: 4 * 1/4 = 1.
    options = AlgorithmConfig(sapo=SapoConfig(tau_positive=2.0, tau_negative=4.0))
    outputs, gradient = one_token("sapo", 1.0, 3.0, options)
    assert outputs.per_token.item() == pytest.approx(-3.0)
    assert gradient == pytest.approx(-3.0)
    # At 2: 2 * sigmoid(2) = 1.76159, and sigmoid'(2) = 0.104994: 4 * 0.104994 * r = 0.83995.
    outputs, gradient = one_token("sapo", 2.0, 3.0, options)
    assert outputs.per_token.item() == pytest.approx(-3 * 1.7615942)
    assert gradient == pytest.approx(-3 * 0.8399487)
    # A negative advantage has its own tau: 4/4 * sigmoid(4) = 0.982014.
    outputs, _ = one_token("sapo", 2.0, -1.0, options)
    assert outputs.per_token.item() == pytest.approx(0.9820138)


@pytest.mark.parametrize(
    ("ratio", "advantage", "behaviour", "masked"),
    [
        # A rare token may double: 0.01 more is no divergence of 0.15.
        (2.0, 1.0, 0.01, False),
        # A common one may not go from 0.6 to 0.9, though its ratio is only 1.5.
        (1.5, 1.0, 0.6, True),
        # Unless the advantage brings it back.
        (1.5, -1.0, 0.6, False),
        # From 0.6 to 0.3, further down.
        (0.5, -1.0, 0.6, True),
        (0.5, 1.0, 0.6, False),
    ],
)
def test_dppo_masks_by_divergence_and_not_by_ratio(
    ratio: float, advantage: float, behaviour: float, masked: bool
) -> None:
    outputs, gradient = one_token("dppo", ratio, advantage, AlgorithmConfig(), behaviour)
    assert outputs.clipped.item() is masked
    assert gradient == pytest.approx(0.0 if masked else -ratio * advantage)


def test_dppo_by_kl_and_its_truncated_ratio() -> None:
    # p = 0.6, q = 0.9: 0.6 log(0.6 / 0.9) + 0.4 log(0.4 / 0.1) = -0.24328 + 0.55452 = 0.31124.
    for threshold, masked in ((0.312, False), (0.311, True)):
        options = AlgorithmConfig(dppo=DppoConfig(divergence="kl", threshold=threshold))
        outputs, _ = one_token("dppo", 1.5, 1.0, options, behaviour=0.6)
        assert outputs.clipped.item() is masked
    # A ratio of 40 for a token that is pushed down weighs 20.
    _, gradient = one_token("dppo", 40.0, -1.0, AlgorithmConfig(), behaviour=0.01)
    assert gradient == pytest.approx(20.0)


def test_gspo_has_the_ratio_of_the_whole_sequence() -> None:
    # Ratios 2, 1/2 and 2 with the third rejected: the geometric mean of the first two is 1.
    base = inputs(step([(0, 1.0, 3)]), options=AlgorithmConfig())
    ratios = torch.tensor([2.0, 0.5, 2.0], dtype=torch.float64)
    changed = replace(
        base,
        logprobs=(base.old_logprobs + ratios.log()).requires_grad_(),
        advantages=torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64),
        keep=torch.tensor([True, True, False]),
    )
    outputs = POLICY_LOSSES["gspo"](changed)
    assert outputs.per_token.tolist() == pytest.approx([-1.0, -1.0, -1.0])
    # With the third kept, the mean is 2^(1/3) = 1.26: still within 1.28. With [2, 2, 2] it is not.
    outputs = POLICY_LOSSES["gspo"](replace(changed, keep=torch.ones(3, dtype=torch.bool)))
    assert outputs.per_token.tolist() == pytest.approx([-(2 ** (1 / 3))] * 3)
    doubled = (base.old_logprobs + math.log(2)).requires_grad_()
    outputs = POLICY_LOSSES["gspo"](replace(changed, logprobs=doubled))
    assert outputs.per_token.tolist() == pytest.approx([-1.28] * 3)
    assert outputs.clipped.all()


def test_geo_mean_clips_each_token_before_the_mean() -> None:
    # Log ratios 1 and 0.1 with bounds of 0.4: clipped to 0.4 and 0.1, mean 0.25, e^0.25 = 1.284.
    base = inputs(step([(0, 1.0, 2)]), options=AlgorithmConfig(clip_low=0.4, clip_high=0.4))
    changed = replace(
        base,
        logprobs=(base.old_logprobs + flat([[1.0, 0.1]])).requires_grad_(),
        advantages=flat([[2.0, 2.0]]),
        keep=torch.ones(2, dtype=torch.bool),
    )
    outputs = POLICY_LOSSES["geo_mean"](changed)
    assert outputs.per_token.tolist() == pytest.approx([-2 * math.exp(0.25)] * 2)
    assert outputs.clipped.tolist() == [True, False]
    # A negative advantage is clipped from below only: mean 0.55.
    outputs = POLICY_LOSSES["geo_mean"](replace(changed, advantages=flat([[-1.0, -1.0]])))
    assert outputs.per_token.tolist() == pytest.approx([math.exp(0.55)] * 2)
    assert not outputs.clipped.any()


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_the_gradient_of_a_sequences_ratio_is_that_of_its_definition(name: str) -> None:
    # One advantage for the sequence, a mean over its tokens: the derivative of -s * A, with s
    # written out as one formula.
    base = inputs(step([(0, 1.0, 4)]), options=AlgorithmConfig(clip_low=0.4, clip_high=0.4))
    logprobs = (base.old_logprobs + flat([[0.1, -0.2, 0.3, 0.05]])).requires_grad_()
    changed = replace(
        base,
        logprobs=logprobs,
        advantages=torch.full((4,), 1.5, dtype=torch.float64),
        keep=torch.ones(4, dtype=torch.bool),
    )
    (mine,) = torch.autograd.grad(POLICY_LOSSES[name](changed).per_token.mean(), logprobs)
    written_out = -1.5 * torch.exp((logprobs - base.old_logprobs).mean())
    (expected,) = torch.autograd.grad(written_out, logprobs)
    torch.testing.assert_close(mine, expected)


def test_clip_cov_takes_the_loss_of_chosen_tokens_away() -> None:
    outputs, gradient = one_token("clip_cov", 1.1, 1.0, AlgorithmConfig())
    assert (outputs.per_token.item(), outputs.clipped.item(), gradient) == (0.0, True, 0.0)


def test_kl_cov_makes_chosen_tokens_pay_for_moving() -> None:
    # Ratio 2, A = 1, coefficient 0.5: -2 + 0.5 * (2 - 1 - log 2).
    options = AlgorithmConfig(covariance=CovarianceConfig(kl_coefficient=0.5))
    outputs, _ = one_token("kl_cov", 2.0, 1.0, options)
    assert outputs.per_token.item() == pytest.approx(-2 + 0.5 * (1 - math.log(2)))


def test_tokens_are_chosen_by_their_covariance_over_the_whole_step() -> None:
    # Logprobs -1, -2, -3, -4 (mean -2.5) and advantages 3, 1, -1, -3 (mean 0):
    # 1.5 * 3 = 4.5, 0.5 * 1 = 0.5, -0.5 * -1 = 0.5, -1.5 * -3 = 4.5.
    batch = replace(
        step([(0, 1.0, 2), (0, 0.0, 2)]), proximal_logprobs=flat([[-1.0, -2.0, -3.0, -4.0]])
    )
    advantages, keep = flat([[3.0, 1.0, -1.0, -3.0]]), torch.ones(4, dtype=torch.bool)
    assert covariances(batch, advantages, keep).tolist() == [4.5, 0.5, 0.5, 4.5]
    half = AlgorithmConfig(covariance=CovarianceConfig(fraction=0.5))
    assert select_highest(batch, advantages, keep, half).tolist() == [True, False, False, True]
    band = AlgorithmConfig(covariance=CovarianceConfig(fraction=0.5, low=0.1, high=1.0))
    assert select_band(batch, advantages, keep, band).tolist() == [False, True, True, False]
    # A quarter is one token, of the two in the band, drawn by the version: the same everywhere.
    quarter = AlgorithmConfig(covariance=CovarianceConfig(fraction=0.25, low=0.1, high=1.0))
    drawn = select_band(batch, advantages, keep, quarter)
    assert drawn.sum() == 1
    assert torch.equal(drawn, select_band(batch, advantages, keep, quarter))
    # Rejected tokens are not chosen.
    kept = torch.tensor([False, True, True, True])
    assert not select_highest(batch, advantages, kept, half)[0]


def test_a_loss_that_chooses_needs_a_choice() -> None:
    base = replace(inputs(step([(0, 1.0, 2)])), selected=None)
    with pytest.raises(TrainingError, match="none were chosen"):
        POLICY_LOSSES["clip_cov"](base)


@dataclass(frozen=True)
class Token:
    log_p: float
    old: float
    behaviour: float
    advantage: float
    chosen: bool
    sequence_log_ratio: float
    """The mean over the kept tokens of its sequence."""
    sequence_limited: float
    """The same of clipped log ratios."""


def slow_loss(name: str, token: Token, options: AlgorithmConfig) -> float:
    ratio, advantage = math.exp(token.log_p - token.old), token.advantage

    def clip(value: float) -> float:
        return min(max(value, 1 - options.clip_low), 1 + options.clip_high)

    clipped = max(-ratio * advantage, -clip(ratio) * advantage)
    if advantage < 0:
        clipped = min(clipped, -options.dual_clip * advantage)
    match name:
        case "ppo":
            return clipped
        case "decoupled_ppo":
            weight = math.exp(token.old - token.behaviour)
            return min(weight, options.decoupled_max_weight) * clipped
        case "cispo":
            return -clip(ratio) * advantage * token.log_p
        case "sapo":
            tau = options.sapo.tau_positive if advantage > 0 else options.sapo.tau_negative
            return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        case "dppo":
            p, q = math.exp(token.behaviour), math.exp(token.log_p)
            away = q > p if advantage > 0 else q < p
            far = abs(p - q) > options.dppo.threshold
            weight = 0.0 if away and far else min(q / p, options.dppo.max_ratio)
            return -weight * advantage * token.log_p
        case "clip_cov":
            return 0.0 if token.chosen else clipped
        case "kl_cov":
            penalty = options.covariance.kl_coefficient * (ratio - 1 - math.log(ratio))
            return -ratio * advantage + (penalty if token.chosen else 0.0)
        case "gspo":
            s = math.exp(token.sequence_log_ratio)
            return max(-s * advantage, -clip(s) * advantage)
        case "geo_mean":
            return -math.exp(token.sequence_limited) * advantage
    raise AssertionError(name)


def tokens(batch: StepBatch, given_inputs: LossInputs, options: AlgorithmConfig) -> list[Token]:
    def by_sequence(column: Tensor) -> list[list[float]]:
        return rows(batch, column)

    result = []
    for log_p, old, behaviour, advantage, chosen, keep in zip(
        by_sequence(given_inputs.logprobs.detach()),
        by_sequence(given_inputs.old_logprobs),
        by_sequence(given_inputs.behaviour_logprobs),
        by_sequence(given_inputs.advantages),
        by_sequence(given_inputs.selected),
        by_sequence(given_inputs.keep),
        strict=True,
    ):
        moved = [new - before for new, before in zip(log_p, old, strict=True)]
        limited = [
            min(m, options.clip_high) if a > 0 else max(m, -options.clip_low)
            for m, a in zip(moved, advantage, strict=True)
        ]
        kept = [m for m, k in zip(moved, keep, strict=True) if k]
        kept_limited = [m for m, k in zip(limited, keep, strict=True) if k]
        means = [statistics.fmean(values) if values else 0.0 for values in (kept, kept_limited)]
        result += [
            Token(*columns, *means)
            for columns in zip(log_p, old, behaviour, advantage, chosen, strict=True)
        ]
    return result


@quickly
@given(batch=STEPS, seed=st.integers(0, 1000))
def test_each_loss_agrees_with_its_definition_in_a_loop(batch: StepBatch, seed: int) -> None:
    given_inputs = inputs(batch, seed=seed)
    parts = tokens(batch, given_inputs, OPTIONS)
    for name in POLICY_LOSSES:
        expected = flat([[slow_loss(name, token, OPTIONS) for token in parts]])
        mine = POLICY_LOSSES[name](given_inputs).per_token
        assert torch.allclose(mine, expected, atol=1e-9), name


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_the_values(name: str) -> None:
    base = inputs(step([(0, 1.0, 5), (0, 0.0, 3)]))
    assert torch.autograd.gradcheck(
        lambda logprobs: POLICY_LOSSES[name](replace(base, logprobs=logprobs)).per_token,
        (base.logprobs,),
    )


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_an_absurd_ratio_is_large_and_finite(name: str) -> None:
    base = inputs(step([(0, 1.0, 2)]), options=AlgorithmConfig())
    far = torch.full((2,), -200.0, dtype=torch.float64, requires_grad=True)
    for logprobs, old in ((base.logprobs, far), (far, base.old_logprobs)):
        outputs = POLICY_LOSSES[name](
            replace(
                base,
                logprobs=logprobs,
                old_logprobs=old.detach(),
                behaviour_logprobs=old.detach(),
            )
        )
        (gradient,) = torch.autograd.grad(outputs.per_token.sum(), logprobs)
        assert torch.isfinite(outputs.per_token).all()
        assert torch.isfinite(gradient).all()
