"""The critic: the policy's architecture and first weights, with one number at each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from areal_ray.training.model import CausalModel, hidden_before
from areal_ray.training.packing import MicroBatch
from areal_ray.training.sharding import settle


class ValueModel:
    def __init__(self, backbone: CausalModel, mesh: DeviceMesh | None = None) -> None:
        """`backbone`: its own, and not settled; its head is not used. All values begin as zero.
        `mesh`: the ranks to shard it over, if it is to be sharded."""
        self.module = _Critic(backbone)
        settle(self.module, backbone.layers, backbone.device, mesh)

    def values(self, batch: MicroBatch) -> Tensor:
        """What the answer is worth so far, before each learned token."""
        return self.module(batch)


class _Critic(torch.nn.Module):
    """All that there is to train and to save, in one place."""

    def __init__(self, backbone: CausalModel) -> None:
        super().__init__()
        self.decoder = backbone.module.get_decoder()
        self.head = torch.nn.Linear(self.decoder.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden = hidden_before(self.decoder, batch)
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
