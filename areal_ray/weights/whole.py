"""Weights that are whole only when they are asked for: sharded over ranks, or yet to compute."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Deferred(Protocol):
    """As FSDP2's shards are."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def detach(self) -> Deferred: ...

    def full_tensor(self) -> Tensor:
        """May be a collective of all ranks."""


Weight = Tensor | Deferred


def whole(weight: Weight) -> Tensor:
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
