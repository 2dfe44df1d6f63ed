"""Off-policy corrections: what to do with tokens that the engine and the trainer rate differently.

The engine sampled from the behaviour policy; the step is computed as if from the proximal one, the
trainer's weights at the beginning of the step. They differ by numerics and by age. With
r = proximal / behaviour of each token, a correction gives a weight for the policy loss of each
token, and says which tokens to keep. A rejected token takes no part in the step: not in the loss,
not in what the reduction divides by (see reductions.py), not in a later correction's means.
The names are applied in their order in `algorithm.correction.apply`; weights multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithm_config import CorrectionConfig
from areal_ray.algorithms.batch import StepBatch
from areal_ray.algorithms.kl import LOG_RATIO_LIMIT, estimate_kl
from areal_ray.algorithms.registry import Registry
from areal_ray.algorithms.segments import segment_mean
from areal_ray.errors import TrainingError
from areal_ray.training.spec import MismatchDiagnostics


@dataclass(frozen=True)
class Corrected:
    """One number per token, over the whole step."""

    weights: Tensor
    """Not negative. The policy loss of each token is multiplied by it."""
    keep: Tensor
    """False: rejected."""
    truncated: Tensor
    """True where the weight would have been larger."""

    @classmethod
    def nothing(cls, batch: StepBatch) -> Corrected:
        ones = torch.ones_like(batch.behaviour_logprobs)
        return cls(weights=ones, keep=ones.bool(), truncated=~ones.bool())


@dataclass(frozen=True)
class Mismatch:
    """What a correction sees."""

    batch: StepBatch
    log_ratios: Tensor
    """(N,) log proximal - log behaviour."""
    keep: Tensor
    """(N,) What the corrections before this one kept."""

    def sequence_mean(self) -> Tensor:
        """(S,) Of the log ratios of each sequence's kept tokens; 0 where there are none."""
        batch = self.batch
        return segment_mean(self.log_ratios, batch.sequence_ids, batch.sequences, self.keep)

    def sequence_sum(self) -> Tensor:
        """(S,) Of the log ratios of each sequence's kept tokens."""
        return self.batch.sequence_sum(torch.where(self.keep, self.log_ratios, 0.0))


class Correction(Protocol):
    def __call__(self, mismatch: Mismatch, options: CorrectionConfig) -> Corrected: ...


@dataclass(frozen=True)
class CorrectionTraits:
    weighs: bool = False
    """Its weights hold the ratio proximal / behaviour: two of them would do so twice."""


CORRECTIONS: Registry[Correction, CorrectionTraits] = Registry(
    "algorithm.correction.apply", default_traits=CorrectionTraits()
)
_WEIGHS = CorrectionTraits(weighs=True)


@CORRECTIONS.register("token_tis", _WEIGHS)
def token_tis(mismatch: Mismatch, options: CorrectionConfig) -> Corrected:
    """Truncated importance sampling by token: min(r, token_max). Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training" (2025); Ionides (2008).
    """
    return _truncated(_ratio(mismatch.log_ratios), options.token_max)


@CORRECTIONS.register("sequence_tis", _WEIGHS)
def sequence_tis(mismatch: Mismatch, options: CorrectionConfig) -> Corrected:
    """Truncated importance sampling by sequence: min(product of r, sequence_max), for all of its
    tokens. Unbiased but for the truncation, and noisy. Liu et al., "When speed kills stability"
    (2025).
    """
    products = _ratio(mismatch.batch.for_tokens(mismatch.sequence_sum()))
    return _truncated(products, options.sequence_max)


@CORRECTIONS.register("icepop", _WEIGHS)
def icepop(mismatch: Mismatch, options: CorrectionConfig) -> Corrected:
    """Masking on two sides: weight r where icepop_low <= r <= icepop_high, else the token is
    rejected. IcePop, in Ring-1T (arXiv:2510.18855).
    """
    ratio = _ratio(mismatch.log_ratios)
    keep = (ratio >= options.icepop_low) & (ratio <= options.icepop_high)
    return Corrected(weights=ratio, keep=keep, truncated=torch.zeros_like(keep))


@CORRECTIONS.register("geometric_rejection")
def geometric_rejection(mismatch: Mismatch, options: CorrectionConfig) -> Corrected:
    """Reject a sequence whose geometric mean of r is not in [geometric_low, geometric_high]; its
    length plays no part. Liu et al., "When speed kills stability" (2025).
    """
    means = _ratio(mismatch.sequence_mean())
    return _kept(mismatch, (means >= options.geometric_low) & (means <= options.geometric_high))


@CORRECTIONS.register("sequence_rejection")
def sequence_rejection(mismatch: Mismatch, options: CorrectionConfig) -> Corrected:
    """Reject a sequence whose product of r is not in [sequence_low, sequence_high]. Liu et al.,
    "When speed kills stability" (2025).
    """
    products = _ratio(mismatch.sequence_sum())
    return _kept(mismatch, (products >= options.sequence_low) & (products <= options.sequence_high))


def correct(
    batch: StepBatch, corrections: Sequence[Correction], options: CorrectionConfig
) -> Corrected:
    """All corrections, one after the other."""
    total = Corrected.nothing(batch)
    if not corrections:
        return total
    for correction in corrections:
        one = correction(Mismatch(batch, _log_ratios(batch), total.keep), options)
        total = Corrected(
            weights=total.weights * one.weights,
            keep=total.keep & one.keep,
            truncated=total.truncated | one.truncated,
        )
    return total


def diagnose(batch: StepBatch, corrected: Corrected) -> MismatchDiagnostics | None:
    """None if there was no proximal pass, or if there is not a token."""
    if batch.proximal_logprobs is None or not batch.tokens:
        return None
    log_ratios = _log_ratios(batch)
    weights = torch.where(corrected.keep, corrected.weights, 0.0)
    left = batch.sequence_sum(corrected.keep.to(weights.dtype))[batch.lengths > 0]
    squares = batch.tokens * (weights**2).sum()
    engine, trainer = batch.behaviour_logprobs, batch.behaviour_logprobs + log_ratios
    return MismatchDiagnostics(
        kl_k1=float(estimate_kl(engine, trainer, "k1").mean()),
        kl_k3=float(estimate_kl(engine, trainer, "k3").mean()),
        max_ratio=float(_ratio(log_ratios).max()),
        effective_sample_size=float(weights.sum() ** 2 / squares) if squares > 0 else 0.0,
        truncated=float(corrected.truncated.double().mean()),
        rejected=float((~corrected.keep).double().mean()),
        rejected_sequences=float((left == 0).double().mean()),
    )


def _log_ratios(batch: StepBatch) -> Tensor:
    if batch.proximal_logprobs is None:
        raise TrainingError("a correction needs proximal_logprobs, and the batch has none")
    difference = batch.proximal_logprobs - batch.behaviour_logprobs
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _ratio(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _truncated(ratio: Tensor, maximum: float) -> Corrected:
    return Corrected(
        weights=ratio.clamp(max=maximum),
        keep=torch.ones_like(ratio, dtype=torch.bool),
        truncated=ratio > maximum,
    )


def _kept(mismatch: Mismatch, keep_sequence: Tensor) -> Corrected:
    keep = mismatch.batch.for_tokens(keep_sequence)
    return Corrected(
        weights=torch.ones_like(mismatch.log_ratios), keep=keep, truncated=torch.zeros_like(keep)
    )
