"""The trainer's side of a weight update: parameters into buckets, buckets into the group.

The next bucket is packed while the last one is on its way. All methods block: call them off the
event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_ray.weights.layout import WeightManifest, as_bytes, pieces_of
from areal_ray.weights.transport import TransferGroup

BUCKETS_IN_FLIGHT = 2


def send(
    group: TransferGroup,
    manifest: WeightManifest,
    parameters: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Broadcast the parameters; returns once every receiver has said that it holds them all."""
    tensors = [tensor for _, tensor in parameters]
    device = tensors[0].device
    buffers = [
        torch.empty(min(manifest.bucket_bytes, manifest.total_bytes), dtype=torch.uint8).to(device)
        for _ in range(BUCKETS_IN_FLIGHT)
    ]
    on_the_way: list[torch.distributed.Work | None] = [None] * BUCKETS_IN_FLIGHT
    for number, bucket in enumerate(manifest.buckets()):
        slot = number % BUCKETS_IN_FLIGHT
        if (work := on_the_way[slot]) is not None:
            work.wait()
        buffer = buffers[slot][: len(bucket)]
        for piece in pieces_of(manifest, bucket):
            spec = manifest.tensors[piece.tensor_index]
            converted = tensors[piece.tensor_index].detach().to(spec.torch_dtype)
            buffer[piece.in_bucket].copy_(as_bytes(converted)[piece.in_tensor])
        on_the_way[slot] = group.broadcast(buffer)
    for work in on_the_way:
        if work is not None:
            work.wait()
    group.acknowledge(device)
