"""The trainer's ranks: who we are among them, how work is shared out, and what they add up.

Every rank sees the whole step and computes its share of it; sums over all ranks make each number
what one rank alone would have got. So ranks go by the same data in the same order, and whatever
they decide from it, they decide alike. A rank that dies ends the waiting of the others with an
error, or with the time limit. Every method blocks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_ray.errors import TrainingError
from areal_ray.training.spec import RankPlace

T = TypeVar("T")

SUM_ELEMENTS = 2**25
"""Gradients are summed in buffers of this size: 128 MiB in float32."""


@dataclass(frozen=True)
class Ranks:
    """One process's place among them. Alone, everything here is free."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """What models are sharded over: each rank has a part of every parameter. None: all of it."""
    writers: dist.ProcessGroup | None = None
    """For checkpoints, which are written while the others' messages go to and fro."""

    @property
    def shards(self) -> bool:
        return self.mesh is not None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T], size_of: Callable[[T], int]) -> list[T]:
        """This rank's part of `items`: the largest first, each to who has least so far.

        With sizes 5, 4, 3, 3 and two ranks: 5 and 3 for the one, 4 and 3 for the other.
        """
        if self.size == 1:
            return list(items)
        loads = [0] * self.size
        mine = []
        for item in sorted(items, key=size_of, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += size_of(item)
            if rank == self.rank:
                mine.append(item)
        return mine

    def sum(self, tensor: Tensor) -> Tensor:
        """In its place, over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, number: int) -> int:
        """The largest that any rank has."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Unless they are sharded, where that comes with the backward pass. A rank without a share
        of the work has none."""
        if self.size == 1 or self.shards:
            return
        parameters = list(parameters)
        is_used = torch.tensor([parameter.grad is not None for parameter in parameters]).int()
        dist.all_reduce(is_used, dist.ReduceOp.MAX)
        together: list[Tensor] = []
        elements = 0
        for parameter in itertools.compress(parameters, is_used.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            together.append(parameter.grad)
            elements += parameter.numel()
            if elements >= SUM_ELEMENTS:
                self._sum_together(together)
                together, elements = [], 0
        self._sum_together(together)

    def _sum_together(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        flat = self.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, summed in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(summed.view_as(tensor))


def join(place: RankPlace, device: torch.device, *, address: str, shards: bool) -> Ranks:
    """Meet the other ranks; returns when all have come. Once in the life of a process.

    `address`: of this node. `shards`: each rank is to hold a part of every parameter.
    """
    # Or gloo takes the one that the host's name leads to, which is often the loopback's.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(address))
    timeout = timedelta(seconds=place.timeout_s)
    store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )
    return Ranks(
        rank=place.rank,
        size=place.size,
        mesh=init_device_mesh(device.type, (place.size,)) if shards else None,
        writers=dist.new_group(backend="gloo", timeout=timeout),
    )


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise TrainingError(f"no network interface of this node has the address {address}")
