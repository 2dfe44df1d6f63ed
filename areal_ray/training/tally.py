"""What a step measures, added up over its micro-batches: alike however it was split."""

from __future__ import annotations

from torch import Tensor

from areal_ray.algorithms import PartialLoss, PartialValueLoss


class Tally:
    def __init__(self, *, updates: int) -> None:
        """`updates`: optimizer steps on the batch, over which means are taken."""
        self._updates = updates
        self._tokens = self._first_tokens = 0
        self._loss = self._kl = self._entropy = self._values = 0.0
        self._clipped = self._kl_to_behaviour = self._grad_norm = 0.0
        self._has_critic = False

    def policy(self, share: PartialLoss, parts: int) -> None:
        """`parts`: of the batch, of which this is in one."""
        self._tokens += share.clipped.numel()
        self._clipped += float(share.clipped.sum())
        self._loss += parts * float(share.total.detach())
        self._kl += parts * float(share.kl)
        self._entropy += parts * float(share.entropy)

    def critic(self, share: PartialValueLoss, parts: int) -> None:
        self._has_critic = True
        self._values += parts * float(share.total.detach())

    def off_policy(self, log_ratio: Tensor) -> None:
        """Of the current policy to the one that sampled, on the first pass over the batch."""
        self._first_tokens += log_ratio.numel()
        self._kl_to_behaviour += float((log_ratio.exp() - 1 - log_ratio).sum())

    def stepped(self, grad_norm: float) -> None:
        self._grad_norm += grad_norm

    def means(self, *, has_kl: bool, has_entropy: bool) -> dict[str, float | None]:
        """Fields of `StepMetrics`."""
        updates = self._updates
        return {
            "loss": self._loss / updates,
            "grad_norm": self._grad_norm / updates,
            "clipped": self._clipped / max(1, self._tokens),
            "kl_to_behaviour": self._kl_to_behaviour / max(1, self._first_tokens),
            "kl_to_reference": self._kl / updates if has_kl else None,
            "entropy": self._entropy / updates if has_entropy else None,
            "value_loss": self._values / updates if self._has_critic else None,
        }
