"""The critic: the policy's architecture and first weights, with one number at each token."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_ray.training.model import CausalModel
from areal_ray.training.packing import MicroBatch


class ValueModel:
    def __init__(self, backbone: CausalModel) -> None:
        """`backbone`: its own; its head is not used. All values begin as zero."""
        self.backbone = backbone
        width = backbone.module.get_output_embeddings().weight.shape[1]
        self._head = torch.nn.Linear(width, 1, device=backbone.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        # One module, so that all that there is to train and to save is in one place.
        self.module = torch.nn.ModuleDict(
            {"decoder": backbone.module.get_decoder(), "head": self._head}
        )

    def values(self, batch: MicroBatch) -> Tensor:
        """What the answer is worth so far, before each learned token."""
        hidden = self.backbone.hidden_before(batch)
        return self._head(hidden.to(self._head.weight.dtype)).squeeze(-1).float()
