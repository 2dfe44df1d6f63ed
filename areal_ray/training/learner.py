"""What changes parameters: the optimizer, its learning rate, and the clipped gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from areal_ray.config import LrSchedule, TrainerConfig
from areal_ray.errors import TrainingError
from areal_ray.training.ranks import Ranks
from areal_ray.weights.whole import whole


class Learner:
    """Gradients are added up by who computes them; `step` uses them once."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        config: TrainerConfig,
        *,
        lr: float,
        ranks: Ranks,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config = config
        self._lr = lr
        self._ranks = ranks
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, lr_scale: float) -> float:
        """One optimizer step at so much of the learning rate; returns the gradient's norm. A
        gradient that is not finite is not stepped on."""
        self._ranks.sum_gradients(self._parameters)
        norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(f"the gradient is not finite (norm {float(norm)})")
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def tensors(self) -> list[Tensor]:
        """Of the optimizer. There are none before the first step."""
        return [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]


def lr_scale(schedule: LrSchedule, step: int, *, warmup: int, total: int, floor: float) -> float:
    """What part of the learning rate step `step` of `total` has, counted from 1: a straight line up
    over `warmup` steps, then level, or down to `floor` at the last."""
    if step <= warmup:
        return step / max(1, warmup)
    done = (step - warmup) / max(1, total - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
