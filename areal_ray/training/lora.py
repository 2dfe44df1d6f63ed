"""Low-rank adapters: the model's own weights stay as they are, and small ones beside them learn.

A linear layer of weight W then computes with W + alpha / rank * B @ A. Each has two pairs of A and
B: the policy's, which is trained, and the reference's, which holds still; so a reference is not
another model in memory. Outside of the trainer there are no adapters: engines and exports get
merged weights under the model's own names, each merged when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import peft
import torch
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor
from transformers import PreTrainedModel

from areal_ray.config import LoraConfig
from areal_ray.errors import ModelError
from areal_ray.weights.whole import Weight, whole

POLICY, REFERENCE = "policy", "reference"
KINDS = ("lora_A", "lora_B")
"""What peft calls A and B."""


@dataclass(frozen=True, eq=False)
class MergedWeight:
    """A layer's weight and its adapter, as they are when it is asked for. Any may be sharded."""

    base: Tensor
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def device(self) -> torch.device:
        return self.base.device

    def detach(self) -> MergedWeight:
        return self

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        return torch.addmm(whole(self.base), whole(self.b), whole(self.a), alpha=self.scale)


class Adapter:
    """One pair of A and B in every layer that has any."""

    def __init__(self, module: PreTrainedModel, name: str, scale: float) -> None:
        self._module = module
        self._name = name
        self._scale = scale

    @property
    def names(self) -> frozenset[str]:
        """Of its tensors, in the module's state."""
        return frozenset(self._name_of(path, kind) for path, _ in self._layers() for kind in KINDS)

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
        """The module's tensors, by the names that they have without adapters."""
        weights: dict[str, Weight] = {}
        for name, tensor in tensors.items():
            path, is_adapted, leaf = name.rpartition(".base_layer.")
            if is_adapted and leaf == "weight":
                a, b = (tensors[self._name_of(path, kind)] for kind in KINDS)
                weights[f"{path}.weight"] = MergedWeight(tensor, a, b, self._scale)
            elif is_adapted:
                weights[f"{path}.{leaf}"] = tensor
            elif not any(f".{kind}." in name for kind in KINDS):
                weights[name] = tensor
        return weights

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The module computes with this one. At rest it does with the policy's."""
        if self._name == POLICY:
            yield
            return
        self._switch_to(self._name)
        try:
            yield
        finally:
            self._switch_to(POLICY)

    @torch.no_grad()
    def copied_to_reference(self) -> Adapter:
        """The reference's, as this one is now."""
        for _, layer in self._layers():
            for pairs in (layer.lora_A, layer.lora_B):
                pairs[REFERENCE].weight.copy_(pairs[self._name].weight)
        return Adapter(self._module, REFERENCE, self._scale)

    def _switch_to(self, name: str) -> None:
        """Not by peft's `set_adapter`, which also changes who gets gradients: of parameters that
        are gathered just now, and not of those that are trained."""
        for _, layer in self._layers():
            layer._active_adapter = [name]

    def _name_of(self, path: str, kind: str) -> str:
        return f"{path}.{kind}.{self._name}.weight"

    def _layers(self) -> Iterator[tuple[str, AdaptedLinear]]:
        for path, part in self._module.named_modules():
            if isinstance(part, AdaptedLinear):
                yield path, part


def adapt(module: PreTrainedModel, config: LoraConfig) -> Adapter:
    """Put adapters into the model, in place. The policy's are all that is trained then; what the
    model computes does not change yet, since B begins as zero."""
    wanted = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=_chosen(module, config)
    )
    tuner = peft.LoraModel(module, {POLICY: wanted, REFERENCE: wanted}, POLICY)
    tuner.inject_adapter(module, REFERENCE)
    return Adapter(module, POLICY, config.alpha / config.rank)


def _chosen(module: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The paths of the layers to adapt. Never the head: logprobs are computed from its weight."""
    head = module.get_output_embeddings()
    linear = [
        path
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and part is not head
    ]
    if config.targets == "all-linear":
        if not linear:
            raise ModelError(
                f"trainer.lora: {module.config.model_type} models have no linear layers to adapt"
            )
        return linear
    for target in config.targets:
        if not any(_is_named(path, target) for path in linear):
            there = sorted({path.rpartition(".")[2] for path in linear})
            raise ModelError(
                f"trainer.lora.targets: `{target}` is no linear layer that can have an adapter; "
                f"there are: {', '.join(there)}"
            )
    return [path for path in linear if any(_is_named(path, t) for t in config.targets)]


def _is_named(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")
