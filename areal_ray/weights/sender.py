"""The trainer's side of a weight update: parameters into buckets, buckets into the group.

The next bucket is packed while the last one is on its way. All methods block: call them off the
event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_ray.weights.layout import WeightManifest, as_bytes, manifest_of, pieces_of
from areal_ray.weights.transport import Rendezvous, TransferGroup
from areal_ray.weights.update import GroupMember, SendingPlan

BUCKETS_IN_FLIGHT = 2


class Sender:
    """Keeps the meeting point, and the group of the last update for as long as it serves."""

    def __init__(
        self,
        host: str,
        parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._rendezvous = Rendezvous(host, timeout_s=timeout_s)
        self._parameters = parameters
        manifest = manifest_of(parameters, dtype=dtype, bucket_bytes=bucket_bytes)
        self.plan = SendingPlan(host=host, port=self._rendezvous.port, manifest=manifest)
        self._group: TransferGroup | None = None

    def send(self, member: GroupMember) -> None:
        """Broadcast the parameters as they are now to the group in which we are `member`."""
        if self._group is not None and self._group.member != member:
            self._hang_up()
        if self._group is None:
            self._group = TransferGroup(member, self._rendezvous.store)
        try:
            send(self._group, self.plan.manifest, self._parameters)
        except BaseException:
            # So that the engines which still wait for more hear that none will come.
            self._hang_up()
            raise

    def call_off(self, group_id: str) -> None:
        """End a `send` that still waits for a member of this group. From any thread."""
        self._rendezvous.call_off(group_id)

    def _hang_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


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
