"""The trainer's side of a weight update: parameters into buckets, buckets into the group.

On a CPU, parameters that are sent as they are (whole, in the right dtype) are moved once, to lie
in memory as they lie in the stream: then a bucket is a slice of it, and nothing is packed, which
there takes a third of the transfer's time again. Others are converted into buckets, the next while
the last is on its way; a sharded one (FSDP2) is gathered, one with an adapter merged, when its
first bucket is packed, and let go after its last: never the whole model at once. Gathering is a
collective of the trainer's ranks, so the others `gather_along`. All methods block: call them off
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.checksum import checksum
from areal_ray.weights.layout import Piece, StreamLayout, manifest_of
from areal_ray.weights.transport import Rendezvous, Transport, hang_up, join
from areal_ray.weights.update import GroupMember, SendingPlan
from areal_ray.weights.whole import Weight, whole

BUCKETS_IN_FLIGHT = 3
"""Two on their way, while the next is packed."""

Parameters = Sequence[tuple[str, Weight]]


class Sender:
    """Keeps the meeting point, and the group of the last update for as long as it serves."""

    def __init__(
        self,
        host: str,
        parameters: Parameters,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
        verify: bool = False,
        join: Callable[[GroupMember, torch.distributed.Store], Transport] = join,
    ) -> None:
        self._rendezvous = Rendezvous(host, timeout_s=timeout_s)
        self._verify = verify
        self._join = join
        manifest = manifest_of(parameters, dtype=dtype, bucket_bytes=bucket_bytes)
        self._source = Source(StreamLayout(manifest), parameters)
        self.plan = SendingPlan(host=host, port=self._rendezvous.port, manifest=manifest)
        self._group: Transport | None = None

    def send(self, member: GroupMember) -> None:
        """Broadcast the parameters as they are now to the group in which we are `member`."""
        if self._group is not None and self._group.member != member:
            self._hang_up()
        try:
            self._group = self._group or self._join(member, self._rendezvous.store)
            send(self._group, self._source, verify=self._verify)
        except BaseException as error:
            # So that the engines which still wait for more hear that none will come.
            group, self._group = self._group, None
            if group is not None:
                hang_up(group, error)
            raise
        finally:
            self._source.gather_the_rest()

    def call_off(self, group_id: str) -> None:
        """End a `send` that still waits for a member of this group. From any thread."""
        group = self._group
        if group is not None and group.member.group_id == group_id:
            group.interrupt()
        self._rendezvous.call_off(group_id)

    def _hang_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def send(group: Transport, source: Source, *, verify: bool = False) -> None:
    """Broadcast the parameters; returns once every receiver has said that it holds them all."""
    sums = []
    on_the_way: list[torch.distributed.Work | None] = [None] * BUCKETS_IN_FLIGHT
    for number, bucket in enumerate(source.layout.buckets):
        slot = number % BUCKETS_IN_FLIGHT
        if (work := on_the_way[slot]) is not None:
            work.wait()
        data = source.bucket(bucket, slot)
        on_the_way[slot] = group.broadcast(data)
        if verify:
            sums.append(checksum(data))
    for work in on_the_way:
        if work is not None:
            work.wait()
    if verify:
        group.broadcast(torch.stack(sums)).wait()
    source.let_go()
    if not group.acknowledge(source.device, is_right=True):
        raise WeightUpdateError("what an engine received is not what was sent: checksum mismatch")


def gather_along(parameters: Parameters) -> None:
    """On every rank of a sharded trainer but the one that sends, while that one does."""
    for _, tensor in parameters:
        whole(tensor)


class Source:
    """The stream's bytes, bucket by bucket and in order. Keeps its buffers: memory that is new each
    time costs more than the copy into it."""

    def __init__(self, layout: StreamLayout, parameters: Parameters) -> None:
        self.layout = layout
        self._tensors = [tensor for _, tensor in parameters]
        self.device = self._tensors[0].device
        self._stream = self._move_into_a_stream() if self._go_as_they_are() else None
        self._buffers: list[torch.Tensor | None] = [None] * BUCKETS_IN_FLIGHT
        self._gathered: tuple[int, torch.Tensor] | None = None
        self._gathered_so_far = 0

    def bucket(self, bucket: range, slot: int) -> torch.Tensor:
        """Its bytes: where they lie, or packed into the buffer of this slot."""
        if self._stream is not None:
            return self._stream[bucket.start : bucket.stop]
        if self._buffers[slot] is None:
            longest = len(self.layout.buckets[0])
            self._buffers[slot] = torch.empty(longest, dtype=torch.uint8, device=self.device)
        buffer = self._buffers[slot][: len(bucket)]
        for piece in self.layout.pieces(bucket):
            dtype = self.layout.manifest.tensors[piece.tensor_index].torch_dtype
            buffer[piece.in_bucket].view(dtype).copy_(self._elements(piece, dtype.itemsize))
        return buffer

    def let_go(self) -> None:
        """Of the last tensor that was gathered."""
        self._gathered = None

    def gather_the_rest(self) -> None:
        """After a stream that ended early: the other ranks gather along to its end, and the next
        begins anew."""
        self.let_go()
        for tensor in self._tensors[self._gathered_so_far :]:
            whole(tensor.detach())
        self._gathered_so_far = 0

    def _elements(self, piece: Piece, size: int) -> torch.Tensor:
        """This part of a tensor, flat, in the dtype that it has here."""
        index = piece.tensor_index
        if self._gathered is None or self._gathered[0] != index:
            self._gathered = index, whole(self._tensors[index].detach()).reshape(-1)
            self._gathered_so_far = index + 1
        return self._gathered[1][piece.in_tensor.start // size : piece.in_tensor.stop // size]

    def _go_as_they_are(self) -> bool:
        specs = self.layout.manifest.tensors
        return self.device.type == "cpu" and all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.dtype == spec.torch_dtype
            and tensor.is_contiguous()
            for tensor, spec in zip(self._tensors, specs, strict=True)
        )

    def _move_into_a_stream(self) -> torch.Tensor:
        stream = torch.empty(self.layout.total_bytes, dtype=torch.uint8, device=self.device)
        for tensor, (_, place) in zip(self._tensors, self.layout.tensors(stream), strict=True):
            place.copy_(tensor.detach())
            tensor.data = place
        return stream
