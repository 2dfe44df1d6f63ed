"""What a step measures, added up over its micro-batches: alike however it was split."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.algorithms import PartialLoss, PartialValueLoss
from areal_ray.training.ranks import Ranks


class Tally:
    def __init__(self, *, updates: int) -> None:
        """`updates`: optimizer steps on the batch, over which means are taken."""
        self._updates = updates
        self._tokens = self._first_tokens = 0
        self._loss = self._kl = self._entropy = self._values = 0.0
        self._clipped = self._kl_to_behaviour = self._grad_norm = 0.0

    def policy(self, share: PartialLoss, parts: int) -> None:
        """`parts`: of the batch, of which this is in one."""
        self._tokens += share.clipped.numel()
        self._clipped += float(share.clipped.sum())
        self._loss += parts * float(share.total.detach())
        self._kl += parts * float(share.kl)
        self._entropy += parts * float(share.entropy)

    def critic(self, share: PartialValueLoss, parts: int) -> None:
        self._values += parts * float(share.total.detach())

    def off_policy(self, log_ratio: Tensor) -> None:
        """Of the current policy to the one that sampled, on the first pass over the batch."""
        self._first_tokens += log_ratio.numel()
        self._kl_to_behaviour += float((log_ratio.exp() - 1 - log_ratio).sum())

    def stepped(self, grad_norm: float) -> None:
        self._grad_norm += grad_norm

    def means(
        self, ranks: Ranks, *, has_kl: bool, has_entropy: bool, has_critic: bool
    ) -> dict[str, float | None]:
        """Fields of `StepMetrics`, from what all ranks have seen."""
        seen = [
            self._loss,
            self._kl,
            self._entropy,
            self._values,
            self._clipped,
            self._tokens,
            self._kl_to_behaviour,
            self._first_tokens,
        ]
        loss, kl, entropy, values, clipped, tokens, kl_to_behaviour, first_tokens = ranks.sum(
            torch.tensor(seen, dtype=torch.float64)
        ).tolist()
        updates = self._updates
        return {
            "loss": loss / updates,
            "grad_norm": self._grad_norm / updates,
            "clipped": clipped / max(1, tokens),
            "kl_to_behaviour": kl_to_behaviour / max(1, first_tokens),
            "kl_to_reference": kl / updates if has_kl else None,
            "entropy": entropy / updates if has_entropy else None,
            "value_loss": values / updates if has_critic else None,
        }
