from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.layout import WeightManifest, as_bytes, manifest_of, pieces_of, tensors_in
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.sender import send
from areal_ray.weights.transport import Rendezvous, TransferGroup
from areal_ray.weights.update import GroupMember, WeightUpdate

CPU = torch.device("cpu")


def parameters(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(17, 5), (1,), (300, 7), (2, 3, 4), (129,)]
    return [
        (f"layer.{index}.weight", torch.randn(shape, generator=generator))
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("bucket_bytes", [64, 100, 1000, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_cut_into_buckets_comes_out_whole(bucket_bytes: int, dtype: torch.dtype) -> None:
    weights = parameters()
    manifest = manifest_of(weights, dtype=dtype, bucket_bytes=bucket_bytes)
    stream = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for bucket in manifest.buckets():
        assert len(bucket) <= bucket_bytes
        for piece in pieces_of(manifest, bucket):
            source = as_bytes(weights[piece.tensor_index][1].to(dtype))[piece.in_tensor]
            stream[bucket.start : bucket.stop][piece.in_bucket].copy_(source)
    for (name, tensor), (expected_name, expected) in zip(
        tensors_in(stream, manifest), weights, strict=True
    ):
        assert name == expected_name
        assert torch.equal(tensor, expected.to(dtype))


def test_a_manifest_travels_as_msgpack() -> None:
    manifest = manifest_of(parameters(), dtype=torch.bfloat16, bucket_bytes=77)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest) == manifest
    member = GroupMember("127.0.0.1", 1, "127.0.0.1", "g", 1, 2, "gloo", 5.0)
    update = WeightUpdate(member=member, manifest=manifest)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=WeightUpdate) == update


class Group:
    """A sender and two receivers in one process, over real gloo."""

    def __init__(self, timeout_s: float) -> None:
        self._rendezvous = Rendezvous("127.0.0.1", timeout_s=timeout_s)
        self._sender = GroupMember(
            host="127.0.0.1",
            port=self._rendezvous.port,
            address="127.0.0.1",
            group_id="test",
            rank=0,
            world_size=3,
            backend="gloo",
            timeout_s=timeout_s,
        )
        self.receivers = [StagingReceiver(CPU), StagingReceiver(CPU)]
        self._group: TransferGroup | None = None

    def begin_receiving(
        self, weights: list[tuple[str, torch.Tensor]], *, receivers: int = 2
    ) -> WeightManifest:
        manifest = manifest_of(weights, dtype=torch.float32, bucket_bytes=500)
        for rank, receiver in enumerate(self.receivers[:receivers], start=1):
            receiver.start(msgspec.structs.replace(self._sender, rank=rank), manifest)
        return manifest

    def call_off(self) -> None:
        self._rendezvous.call_off(self._sender.group_id)

    def hang_up(self) -> None:
        self._group.close()

    def update(self, weights: list[tuple[str, torch.Tensor]], *, receivers: int = 2) -> None:
        manifest = self.begin_receiving(weights, receivers=receivers)
        if self._group is None:
            self._group = TransferGroup(self._sender, self._rendezvous.store)
        send(self._group, manifest, weights)


@pytest.fixture
def group() -> Iterator[Group]:
    joined = Group(timeout_s=20.0)
    yield joined
    for receiver in joined.receivers:
        receiver.discard()


def test_every_receiver_stages_what_was_sent_update_after_update(group: Group) -> None:
    for seed in range(3):
        weights = parameters(seed)
        group.update(weights)
        for receiver in group.receivers:
            staged = dict(receiver.take())
            assert all(torch.equal(staged[name], tensor) for name, tensor in weights)


def test_staged_weights_are_handed_over_once(group: Group) -> None:
    group.update(parameters())
    group.receivers[0].take()
    with pytest.raises(WeightUpdateError, match="no weights were staged"):
        group.receivers[0].take()


def test_a_second_update_may_not_begin_before_the_first_has_ended(group: Group) -> None:
    group.update(parameters())
    with pytest.raises(WeightUpdateError, match="before the last one ended"):
        group.update(parameters())


def test_a_member_that_never_comes_ends_the_update_at_the_deadline() -> None:
    group = Group(timeout_s=2.0)
    with pytest.raises(WeightUpdateError, match="not everybody came to .* within 2 s"):
        group.update(parameters(), receivers=1)
    with pytest.raises(WeightUpdateError, match="did not arrive whole"):
        group.receivers[0].take()


def test_those_who_wait_for_a_member_that_died_go_as_soon_as_the_group_is_called_off(
    group: Group,
) -> None:
    began = time.monotonic()
    calling_off = threading.Timer(0.2, group.call_off)
    calling_off.start()
    with pytest.raises(WeightUpdateError, match="was called off"):
        group.update(parameters(), receivers=1)
    with pytest.raises(WeightUpdateError, match="was called off"):
        group.receivers[0].take()
    assert time.monotonic() - began < 15.0, "the time limit of 20 s ended it"
    calling_off.join()


def test_a_receiver_that_waits_hears_when_the_sender_hangs_up(group: Group) -> None:
    group.update(parameters())
    for receiver in group.receivers:
        receiver.take()
    group.begin_receiving(parameters())
    began = time.monotonic()
    group.hang_up()
    for receiver in group.receivers:
        with pytest.raises(WeightUpdateError, match="Connection (closed|reset) by peer"):
            receiver.take()
    assert time.monotonic() - began < 15.0, "the time limit of 20 s ended it"


def test_discarding_does_not_wait_for_what_hangs(group: Group) -> None:
    group.begin_receiving(parameters())
    began = time.monotonic()
    assert group.receivers[0].discard() == "it was still receiving"
    assert time.monotonic() - began < 5.0


def test_the_meeting_point_listens_on_its_own_address_only() -> None:
    rendezvous = Rendezvous("127.0.0.1", timeout_s=5.0)
    port = f"{rendezvous.port:04X}"
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if f":{port} 00000000:0000 0A" in line]
    assert listening == [f"0100007F:{port}"]


def test_discarding_twice_is_harmless() -> None:
    receiver = StagingReceiver(CPU)
    assert receiver.discard() == ""
    assert receiver.discard() == ""
