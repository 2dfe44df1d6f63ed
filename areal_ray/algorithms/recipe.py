"""The whole algorithm: what a config names, composed. All that a trainer needs of this package.

    algorithm = Algorithm.of(config)             # in the driver, where a user's functions are
    algorithm.needs                              # which passes to make for a StepBatch
    step = prepare(batch, algorithm)             # the same on every rank, no gradient
    part = step.take(tokens).to(device)          # for each micro-batch of whole sequences
    policy_loss(part, algorithm, logprobs, entropy).total.backward()
    value_loss(part, algorithm, values).total.backward()

Totals of micro-batches and ranks add up to the step's loss: sum gradients over ranks, don't
average them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from areal_ray.algorithm_config import AlgorithmConfig
from areal_ray.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    AdvantageTraits,
    lambda_returns,
    whiten,
)
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.corrections import (
    CORRECTIONS,
    Correction,
    MismatchDiagnostics,
    correct,
    diagnose,
)
from areal_ray.algorithms.critic import clipped_value_loss
from areal_ray.algorithms.kl import estimate_kl
from areal_ray.algorithms.losses import POLICY_LOSSES, LossInputs, LossTraits, PolicyLoss
from areal_ray.algorithms.proximal import interpolated_proximal
from areal_ray.algorithms.reductions import REDUCTIONS, Reduction
from areal_ray.algorithms.rewards import shape_overlong, token_rewards
from areal_ray.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class Needs:
    """What a trainer must compute beside the policy's logprobs."""

    proximal: bool
    """`StepBatch.proximal_logprobs`: a pass at the beginning of the step."""
    reference: bool
    """`StepBatch.reference_logprobs`: a pass of the reference model."""
    values: bool
    """`StepBatch.values`, and a critic to train."""
    entropy: bool
    """The entropy at each token, in the pass with the gradient."""


@dataclass(frozen=True)
class Algorithm:
    """A config with the functions that it names. Pickles by value where those do: a user's own
    exist in the driver alone.
    """

    config: AlgorithmConfig
    advantage: Advantage
    advantage_traits: AdvantageTraits
    loss: PolicyLoss
    loss_traits: LossTraits
    corrections: tuple[Correction, ...]
    reduction: Reduction

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Algorithm:
        """Look the names up, and refuse what the functions can't work with."""
        algorithm = cls(
            config=config,
            advantage=ADVANTAGES[config.advantage],
            advantage_traits=ADVANTAGES.traits(config.advantage),
            loss=POLICY_LOSSES[config.loss],
            loss_traits=POLICY_LOSSES.traits(config.loss),
            corrections=tuple(CORRECTIONS[name] for name in config.correction.apply),
            reduction=REDUCTIONS[config.reduction],
        )
        if algorithm.advantage_traits.needs_values and not config.critic.enabled:
            raise ConfigError(
                f"algorithm.advantage: `{config.advantage}` needs `algorithm.critic.enabled: true`"
            )
        if algorithm.loss_traits.needs_proximal and config.proximal == "none":
            raise ConfigError(
                f"algorithm.proximal: expected recompute or interpolate with `loss: {config.loss}`"
            )
        weighing = [name for name in config.correction.apply if CORRECTIONS.traits(name).weighs]
        if algorithm.loss_traits.weighs:
            weighing.append(config.loss)
        if len(weighing) > 1:
            raise ConfigError(
                f"algorithm.correction.apply: {', '.join(weighing)} would each weigh by proximal "
                "over behaviour; expected at most one of them"
            )
        return algorithm

    @property
    def needs(self) -> Needs:
        config = self.config
        return Needs(
            proximal=config.proximal == "recompute",
            reference=config.kl.coefficient > 0,
            values=config.critic.enabled,
            entropy=config.entropy_coefficient > 0 or self.loss_traits.needs_entropy,
        )


@dataclass(frozen=True)
class PreparedStep:
    """All that micro-batches need, one entry per token of the step, or of a part of it."""

    sequence_ids: Tensor
    advantages: Tensor
    token_weights: Tensor
    """The reduction's: 0 where rejected."""
    correction_weights: Tensor
    keep: Tensor
    staleness: Tensor
    behaviour_logprobs: Tensor
    proximal_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    selected: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    """What the critic learns."""
    diagnostics: MismatchDiagnostics | None
    """Of the whole step, also in a part of it."""

    def take(self, token_indices: Tensor) -> PreparedStep:
        """These tokens, in this order: whole sequences of the step."""
        return self._each(lambda column: column[token_indices])

    def to(self, device: torch.device) -> PreparedStep:
        return self._each(lambda column: column.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PreparedStep:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: change(c) for name, c in columns.items() if isinstance(c, Tensor)}
        )


@dataclass(frozen=True)
class PartialLoss:
    """A micro-batch's share of the step's loss. Shares add up."""

    total: Tensor
    """With the gradient."""
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    """The terms, without one: total = policy + kl coefficient * kl - entropy coefficient *
    entropy. A term that the config does not have is 0."""
    clipped: Tensor
    """(tokens,) See LossOutputs."""


@torch.no_grad()
def prepare(batch: StepBatch, algorithm: Algorithm) -> PreparedStep:
    """Everything that depends on more than one sequence."""
    config = algorithm.config
    batch = _with_columns(batch, algorithm.needs)
    batch = replace(batch, rewards=shape_overlong(batch.rewards, batch.lengths, config.overlong))
    rewards = token_rewards(batch, config.kl)
    traits = algorithm.advantage_traits
    advantages = whiten(
        batch,
        algorithm.advantage(batch, rewards, config),
        config.whiten,
        where=batch.for_tokens(batch.compared) if traits.compares else None,
    )
    corrected = correct(batch, algorithm.corrections, config.correction)
    select = algorithm.loss_traits.select
    return PreparedStep(
        sequence_ids=batch.sequence_ids,
        advantages=advantages,
        token_weights=algorithm.reduction(batch, corrected.keep, config),
        correction_weights=corrected.weights,
        keep=corrected.keep,
        staleness=batch.staleness,
        behaviour_logprobs=batch.behaviour_logprobs,
        proximal_logprobs=batch.proximal_logprobs,
        reference_logprobs=batch.reference_logprobs,
        selected=select(batch, advantages, corrected.keep, config) if select else None,
        old_values=batch.values,
        returns=_returns(batch, rewards, config) if config.critic.enabled else None,
        diagnostics=diagnose(batch, corrected),
    )


def policy_loss(
    part: PreparedStep, algorithm: Algorithm, logprobs: Tensor, entropy: Tensor | None = None
) -> PartialLoss:
    """The policy's loss on a part of the step. Corrections weigh the policy term; rejected tokens
    are in no term.
    """
    config = algorithm.config
    outputs = algorithm.loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=_old_logprobs(part, config, logprobs),
            behaviour_logprobs=part.behaviour_logprobs,
            advantages=part.advantages,
            sequence_ids=part.sequence_ids,
            keep=part.keep,
            selected=part.selected,
            entropy=entropy,
            options=config,
        )
    )
    policy = _weighted(part, part.correction_weights * outputs.per_token)
    total, kl, bonus = policy, torch.zeros_like(policy), torch.zeros_like(policy)
    if config.kl.coefficient and config.kl.place == "loss":
        if part.reference_logprobs is None:
            raise TrainingError("KL is in the loss, and the step has no reference_logprobs")
        kl = _weighted(part, estimate_kl(logprobs, part.reference_logprobs, config.kl.estimator))
        total = total + config.kl.coefficient * kl
    if config.entropy_coefficient:
        if entropy is None:
            raise TrainingError("the loss has an entropy bonus, and the pass gave no entropy")
        bonus = _weighted(part, entropy)
        total = total - config.entropy_coefficient * bonus
    return PartialLoss(
        total=total,
        policy=policy.detach(),
        kl=kl.detach(),
        entropy=bonus.detach(),
        clipped=outputs.clipped,
    )


@dataclass(frozen=True)
class PartialValueLoss:
    """A micro-batch's share of the critic's loss. Shares add up."""

    total: Tensor
    clipped: Tensor


def value_loss(part: PreparedStep, algorithm: Algorithm, values: Tensor) -> PartialValueLoss:
    """The critic's loss on a part of the step, with the same weights as the policy's."""
    if part.old_values is None or part.returns is None:
        raise TrainingError("a critic's loss needs values and returns, and the step has none")
    outputs = clipped_value_loss(
        values, part.old_values, part.returns, algorithm.config.critic.clip
    )
    return PartialValueLoss(total=_weighted(part, outputs.per_token), clipped=outputs.clipped)


def _weighted(part: PreparedStep, per_token: Tensor) -> Tensor:
    # A rejected token's loss may be infinite, and 0 * inf is not 0.
    return (part.token_weights * torch.where(part.keep, per_token, 0.0)).sum()


def _old_logprobs(part: PreparedStep, config: AlgorithmConfig, logprobs: Tensor) -> Tensor:
    if config.proximal == "interpolate":
        return interpolated_proximal(logprobs, part.behaviour_logprobs, part.staleness)
    if part.proximal_logprobs is not None:
        return part.proximal_logprobs
    return part.behaviour_logprobs


def _returns(batch: StepBatch, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """The critic may have a lambda of its own: the decoupled GAE of VC-PPO (arXiv:2503.01491)."""
    own = config.critic.gae_lambda
    gae_lambda = config.gae_lambda if own is None else own
    return lambda_returns(batch, rewards, config.gamma, gae_lambda)


def _with_columns(batch: StepBatch, needs: Needs) -> StepBatch:
    """The columns that the config asks for, and no others: what a trainer computed for its own
    sake must not change the step.
    """
    unused: dict[str, None] = {}
    for needed, name in (
        (needs.proximal, "proximal_logprobs"),
        (needs.reference, "reference_logprobs"),
        (needs.values, "values"),
    ):
        if needed and getattr(batch, name) is None:
            raise TrainingError(f"the algorithm needs {name}, and the step's batch has none")
        if not needed:
            unused[name] = None
    return replace(batch, **unused)
