"""The algorithm's part of the configuration, and which combinations of it can't work.

Without torch: the control plane reads it. A plain `str` is a name in a registry of
`areal_ray.algorithms`, to which a user's script can add; what a *registered* function needs is
checked against the config when it is looked up (`areal_ray.algorithms.Algorithm.of`). Here stands
what is known of the built-in names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from areal_ray.config_section import (
    Count,
    CountOrZero,
    Discount,
    Fraction,
    NotNegative,
    Positive,
    Section,
)

KlEstimator = Literal["k1", "k2", "k3", "low_variance"]
Whitening = Literal["none", "batch", "group"]

COMPARING_ADVANTAGES = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "opo"}
)
"""These compare the samples of a prompt: a group of one has an advantage of zero."""
WHITENED_ADVANTAGES = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
CRITICLESS_ADVANTAGES = COMPARING_ADVANTAGES | {"reinforce", "reinforce_plus_plus"}
WEIGHING_CORRECTIONS = frozenset({"token_tis", "sequence_tis", "icepop"})
"""These multiply the loss by proximal over behaviour; the others only reject."""
WEIGHED_LOSSES = frozenset({"decoupled_ppo", "dppo"})
"""The ratio to the behaviour policy is in these already."""


class SapoConfig(Section):
    tau_positive: Positive = 1.0
    """How fast the gate closes around a ratio of 1, where the advantage is positive."""
    tau_negative: Positive = 1.05
    """The same where it is not. Larger is stricter."""


class CovarianceConfig(Section):
    fraction: Fraction = 0.0002
    """The part of a step's tokens that `clip_cov` and `kl_cov` hold back."""
    low: float = 1.0
    """`clip_cov` chooses at random among the tokens whose covariance is above this"""
    high: float = 5.0
    """and below this."""
    kl_coefficient: NotNegative = 1.0
    """How much `kl_cov` weighs the KL of the tokens it chose."""


class DppoConfig(Section):
    divergence: Literal["tv", "kl"] = "tv"
    """Between what both policies give the sampled token and all others: total variation or KL."""
    threshold: Positive = 0.15
    """A token that diverged further gets no gradient that takes it further still. For `kl` choose
    about 0.05."""
    max_ratio: Positive = 20.0
    """The ratio's weight in the gradient is truncated here."""


class CorrectionConfig(Section):
    """Against the engine's probabilities differing from the trainer's, by numerics or by age.
    All compare the proximal policy with the behaviour policy, and need `proximal: recompute`."""

    apply: tuple[str, ...] = ()
    """Names, in order; each sees only what those before it kept."""
    token_max: Positive = 2.0
    """`token_tis` truncates a token's ratio here."""
    sequence_max: Positive = 2.0
    """`sequence_tis` truncates the product of a sequence's ratios here."""
    icepop_low: NotNegative = 0.5
    """`icepop` rejects a token whose ratio is below this"""
    icepop_high: Positive = 5.0
    """or above this."""
    geometric_low: NotNegative = 0.9
    """`geometric_rejection` rejects a sequence whose ratios' geometric mean is below this"""
    geometric_high: Positive = 1.1
    """or above this."""
    sequence_low: NotNegative = 0.5
    """`sequence_rejection` rejects a sequence whose ratios' product is below this"""
    sequence_high: Positive = 2.0
    """or above this."""


class KlConfig(Section):
    coefficient: NotNegative = 0.0
    """How much the KL to the reference policy, the model at the start, weighs. 0: there is none."""
    estimator: KlEstimator = "k3"
    """k1: unbiased, noisy. k2: half its square. k3: unbiased, never negative. low_variance: k3,
    bounded."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off each token's reward."""


class CriticConfig(Section):
    enabled: bool = False
    """Train a model of values beside the policy."""
    lr: Positive = 1e-5
    """The critic's own learning rate."""
    clip: Positive | None = 0.2
    """How far a value may move from that at the beginning of the step."""
    gae_lambda: Discount | None = None
    """For the returns that the critic learns. Derived: `algorithm.gae_lambda`."""


class OverlongConfig(Section):
    buffer_tokens: CountOrZero = 0
    """Over the last so many tokens before `max_tokens` the reward falls. 0: it does not."""
    penalty: Positive = 1.0
    """By how much at `max_tokens`."""
    max_tokens: Count | None = None
    """Derived: `generation.max_new_tokens`."""


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, gae,
    maxrl, opo, or one of your own."""
    whiten: Whitening = "none"
    """Bring advantages to mean 0 and deviation 1, over the tokens of a step or of each group."""
    gamma: Discount = 1.0
    """The discount per token, for reinforce, reinforce_plus_plus and gae."""
    gae_lambda: Discount = 0.95
    """For gae: 0 trusts the values, 1 the rewards."""
    loss: str = "ppo"
    """ppo, decoupled_ppo, gspo, cispo, sapo, geo_mean, clip_cov, kl_cov, dppo, or your own."""
    clip_low: Positive = 0.2
    """How far below 1 a ratio may be. `gspo` wants far less (0.0003); `geo_mean` bounds the log
    ratio (0.4); for `cispo`, 1 is no bound."""
    clip_high: Positive = 0.28
    """How far above 1 a ratio may be. `gspo`: 0.0004; `geo_mean`: 0.4, of the log ratio."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """For `ppo` and `decoupled_ppo`: with a negative advantage, no gradient past this ratio."""
    decoupled_max_weight: Positive | None = None
    """`decoupled_ppo` truncates its weight, proximal over behaviour, here."""
    proximal: Literal["none", "recompute", "interpolate"] = "none"
    """The policy that ratios are against: the one that sampled, as the engine reported (`none`);
    the weights at the beginning of the step, by a pass of the trainer (`recompute`) or estimated
    from the age of each token (`interpolate`)."""
    reduction: str = "token_mean"
    """token_mean, sequence_mean, sequence_mean_token_sum, sequence_mean_token_sum_norm,
    prompt_mean, or your own."""
    norm_tokens: Count | None = None
    """What sequence_mean_token_sum_norm divides by. Derived: `generation.max_new_tokens`."""
    entropy_coefficient: NotNegative = 0.0
    """How much the policy's entropy is rewarded."""
    sapo: SapoConfig = SapoConfig()
    """What `loss: sapo` reads."""
    covariance: CovarianceConfig = CovarianceConfig()
    """What `clip_cov` and `kl_cov` read."""
    dppo: DppoConfig = DppoConfig()
    """What `loss: dppo` reads."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    overlong: OverlongConfig = OverlongConfig()


def algorithm_problems(
    config: AlgorithmConfig, *, samples: int, max_staleness: int, max_new_tokens: int
) -> Iterator[str]:
    """What is well formed but can't work, each with the key at fault first."""
    yield from _advantage_problems(config, samples)
    yield from _proximal_problems(config, max_staleness)
    yield from _correction_problems(config)
    kl, overlong = config.kl, config.overlong
    if kl.coefficient and kl.place == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator: `k1` can't be a term of the loss, as its gradient is zero on "
            "average; expected k2, k3 or low_variance, or `place: reward`"
        )
    longest = overlong.max_tokens or max_new_tokens
    if overlong.buffer_tokens > longest:
        yield (
            f"algorithm.overlong.buffer_tokens: expected at most {longest}, the longest answer, "
            f"got {overlong.buffer_tokens}"
        )
    if config.covariance.low >= config.covariance.high:
        yield _not_below("covariance.low", config.covariance.low, config.covariance.high)


def algorithm_resolved(config: AlgorithmConfig, *, max_new_tokens: int) -> AlgorithmConfig:
    """The same with everything derived that was left open."""
    replace = msgspec.structs.replace
    critic, overlong = config.critic, config.overlong
    if critic.gae_lambda is None:
        critic = replace(critic, gae_lambda=config.gae_lambda)
    if overlong.max_tokens is None:
        overlong = replace(overlong, max_tokens=max_new_tokens)
    return replace(
        config,
        critic=critic,
        overlong=overlong,
        norm_tokens=config.norm_tokens or max_new_tokens,
    )


def _advantage_problems(config: AlgorithmConfig, samples: int) -> Iterator[str]:
    name = config.advantage
    if samples == 1 and name in COMPARING_ADVANTAGES:
        yield (
            f"rollout.samples: expected an integer >= 2, got 1: `{name}` compares the samples of a "
            "prompt with each other, and one alone has an advantage of zero"
        )
    if samples == 1 and config.whiten == "group":
        yield "algorithm.whiten: `group` needs `rollout.samples` >= 2; expected none or batch"
    if name == "gae" and not config.critic.enabled:
        yield "algorithm.advantage: `gae` needs `algorithm.critic.enabled: true`"
    if config.critic.enabled and name in CRITICLESS_ADVANTAGES:
        yield f"algorithm.critic.enabled: `{name}` reads no values; expected `advantage: gae`"
    if name in WHITENED_ADVANTAGES and config.whiten != "none":
        yield f"algorithm.whiten: `{name}` whitens over the batch already; expected none"
    if name == "maxrl" and (config.overlong.buffer_tokens or _kl_in_reward(config)):
        yield (
            "algorithm.advantage: `maxrl` divides by the mean reward, which must not be negative: "
            "expected no `overlong.buffer_tokens` and no KL in the reward"
        )


def _proximal_problems(config: AlgorithmConfig, max_staleness: int) -> Iterator[str]:
    if config.loss == "decoupled_ppo" and config.proximal == "none":
        yield (
            "algorithm.proximal: expected recompute or interpolate with `loss: decoupled_ppo`, "
            "which tells the proximal policy from the one that sampled"
        )
    if config.proximal == "interpolate" and max_staleness == 0:
        yield (
            "algorithm.proximal: `interpolate` estimates from the age of tokens, and with "
            "`rollout.max_staleness: 0` all are new; expected none or recompute"
        )
    if config.loss == "dppo" and config.proximal != "none" and not config.correction.apply:
        yield (
            "algorithm.proximal: `dppo` measures against the policy that sampled; expected none, "
            "unless a correction needs recompute"
        )


def _correction_problems(config: AlgorithmConfig) -> Iterator[str]:
    correction = config.correction
    names = correction.apply
    if names and config.proximal != "recompute":
        yield (
            "algorithm.correction.apply: needs `algorithm.proximal: recompute`, the trainer's own "
            "probabilities to compare the engine's with"
        )
    for name, times in Counter(names).items():
        if times > 1:
            yield f"algorithm.correction.apply: `{name}` is given {times} times"
    weighing = [name for name in names if name in WEIGHING_CORRECTIONS]
    if len(set(weighing)) > 1:
        yield (
            f"algorithm.correction.apply: {', '.join(weighing)} would each weigh by the same "
            "ratio; expected at most one of them"
        )
    if weighing and config.loss in WEIGHED_LOSSES:
        yield (
            f"algorithm.correction.apply: `{weighing[0]}` would weigh twice, as `{config.loss}` "
            "holds the ratio to the policy that sampled already"
        )
    for key in ("icepop", "geometric", "sequence"):
        low, high = getattr(correction, f"{key}_low"), getattr(correction, f"{key}_high")
        if low >= high:
            yield _not_below(f"correction.{key}_low", low, high)


def _kl_in_reward(config: AlgorithmConfig) -> bool:
    return config.kl.coefficient > 0 and config.kl.place == "reward"


def _not_below(key: str, low: float, high: float) -> str:
    upper = key.replace("low", "high")
    return f"algorithm.{key}: expected less than algorithm.{upper} ({high:g}), got {low:g}"
