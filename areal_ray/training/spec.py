"""What a trainer is told, and what it tells. Without torch: the control plane knows these."""

from __future__ import annotations

import msgspec

from areal_ray.config import AlgorithmConfig, TrainerConfig


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
    algorithm: AlgorithmConfig
    packed_advantage: bytes
    packed_loss: bytes
    """The functions that `algorithm` names: a user's own exist in the driver alone."""


class StepMetrics(msgspec.Struct, frozen=True):
    """What one policy step measured. Means are over samples, fractions over learned tokens."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    clipped: float
    kl_to_behaviour: float
    """k3 estimate of KL(behaviour || current): how far off-policy the batch was."""
    seconds: float
