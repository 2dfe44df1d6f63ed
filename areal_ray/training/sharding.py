"""A model over many ranks, each with a part of every parameter (FSDP2).

The layers are whole one after the other, while they compute; what is outside of them for the whole
pass. Gradients are summed over the ranks, not averaged: a rank's loss is its share of the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

P = ParamSpec("P")
T = TypeVar("T")


def settle(
    module: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    device: torch.device,
    mesh: DeviceMesh | None,
) -> None:
    """On its device: all of it, or this rank's part."""
    if mesh is None:
        module.to(device)
    else:
        _shard(module, layers, mesh)


def _shard(module: torch.nn.Module, layers: Sequence[torch.nn.Module], mesh: DeviceMesh) -> None:
    """What is in host memory goes to the mesh's device, a layer at a time."""
    in_layers = MixedPrecisionPolicy()
    if mesh.device_type == "cuda":
        # What is outside of the layers, the head above all, computes in float32 as on one rank.
        in_layers = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*layers, module):
        precision = MixedPrecisionPolicy() if part is module else in_layers
        fully_shard(part, mesh=mesh, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def with_whole_weights(module: torch.nn.Module, compute: Callable[P, T]) -> Callable[P, T]:
    """`compute`, a pass through `module` that is not its own `forward`. If that is sharded, its
    weights are whole meanwhile."""
    if not isinstance(module, FSDPModule):
        return compute
    module.compute = compute
    register_fsdp_forward_method(module, "compute")
    return module.compute


def let_go(module: torch.nn.Module) -> None:
    """Of what a pass without gradients has left whole."""
    if isinstance(module, FSDPModule):
        module.reshard()
