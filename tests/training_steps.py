"""A tiny trainer and what it learns from, for tests of one rank and of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_ray.algorithm_config import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
)
from areal_ray.algorithms import Algorithm, PolicyLoss
from areal_ray.config import TrainerConfig
from areal_ray.plugins import pack as pack_function
from areal_ray.training.ranks import Ranks
from areal_ray.training.spec import TrainerSpec
from areal_ray.training.trainer import PolicyTrainer
from areal_ray.types import Prompt, Trajectory, TrajectoryGroup

EVERYTHING = AlgorithmConfig(
    advantage="gae",
    whiten="batch",
    loss="decoupled_ppo",
    proximal="recompute",
    reduction="prompt_mean",
    entropy_coefficient=0.01,
    critic=CriticConfig(enabled=True, lr=1e-2),
    kl=KlConfig(coefficient=0.1),
    correction=CorrectionConfig(apply=("geometric_rejection",), geometric_low=0.2),
)
"""Every pass that there is."""


def trainer(
    tiny_model: Path,
    loss: PolicyLoss | None = None,
    algorithm: AlgorithmConfig | None = None,
    ranks: Ranks | None = None,
    **changes: object,
) -> PolicyTrainer:
    named = Algorithm.of(algorithm or AlgorithmConfig())
    if loss is not None:
        named = replace(named, loss=loss)
    return PolicyTrainer(
        TrainerSpec(
            model_path=str(tiny_model),
            trust_remote_code=False,
            device="cpu",
            dtype="float32",
            max_prompt_tokens=8,
            temperature=1.0,
            seed=0,
            trainer=TrainerConfig(**({"lr": 1e-2, "lr_warmup_steps": 0} | changes)),
            steps=100,
            packed_algorithm=pack_function(named),
        ),
        ranks,
    )


def group(group_id: int, rewards: list[float]) -> TrajectoryGroup:
    rng = np.random.default_rng(group_id)
    trajectories = []
    for reward in rewards:
        count = int(rng.integers(1, 6))
        trajectories.append(
            Trajectory(
                prompt_ids=rng.integers(2, 14, size=6).astype(np.int32),
                response_ids=rng.integers(2, 14, size=count).astype(np.int32),
                response_mask=np.ones(count, dtype=np.bool_),
                logprobs=np.full(count, -2.6, dtype=np.float32),
                versions=np.zeros(count, dtype=np.int32),
                reward=reward,
                finish_reason="stop",
                text="",
            )
        )
    return TrajectoryGroup(group_id=group_id, prompt=Prompt(text="x"), trajectories=trajectories)
