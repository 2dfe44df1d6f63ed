"""What a trainer is told, and what it tells. Without torch: the control plane knows these."""

from __future__ import annotations

import msgspec

from areal_ray.config import TrainerConfig
from areal_ray.types import WeightVersion


class TrainerSpec(msgspec.Struct, frozen=True):
    model_path: str
    trust_remote_code: bool
    device: str
    dtype: str
    """What the engines and the exported model get; training itself is in float32."""
    max_prompt_tokens: int
    temperature: float
    seed: int
    trainer: TrainerConfig
    steps: int
    """Of the whole run, for schedules."""
    packed_algorithm: bytes
    """An `algorithms.Algorithm`: a user's own functions exist in the driver alone."""
    ranks_timeout_s: float = 1800.0
    """For each wait of one rank for the others."""


class RankPlace(msgspec.Struct, frozen=True):
    """One rank among those of the trainer, and where they meet."""

    rank: int
    size: int
    host: str
    port: int
    timeout_s: float
    """For each wait of one rank for the others."""


class TrainerStart(msgspec.Struct, frozen=True):
    """What a trainer begins with, the first time or after its death."""

    version: WeightVersion
    """What its weights are called."""
    checkpoint: str | None = None
    """The directory of what it takes up again."""
    gpus: list[str] | None = None
    """Those to use, where they belong to an engine that it shares them with; otherwise it has its
    own."""


class MismatchDiagnostics(msgspec.Struct, frozen=True):
    """How far the engine's and the trainer's probabilities were apart, over a step's tokens."""

    kl_k1: float
    kl_k3: float
    """Two estimates of KL(engine || trainer) per token."""
    max_ratio: float
    """The largest of trainer / engine."""
    effective_sample_size: float
    """(sum of w)^2 / (n * sum of w^2) with the weights w of all n tokens, 0 where rejected: the
    part of the step that is left. 1: all weigh the same."""
    truncated: float
    rejected: float
    """Parts of the tokens."""
    rejected_sequences: float
    """The part of the sequences, of those with tokens, that lost all of them."""


class StepMetrics(msgspec.Struct, frozen=True):
    """What one step measured: sums over the batch as the reduction weighs them, and parts of the
    learned tokens. Of several passes over a batch, means."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    clipped: float
    kl_to_behaviour: float
    """k3 estimate of KL(behaviour || current) on the first pass: how far off-policy the batch
    was."""
    seconds: float
    kl_to_reference: float | None = None
    """As it is in the loss."""
    entropy: float | None = None
    value_loss: float | None = None
    mismatch: MismatchDiagnostics | None = None
