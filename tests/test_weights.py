"""The weights' way from the trainer's parameters into an engine's model, over real gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.errors import TornWeights, WeightUpdateError
from areal_ray.weights import receiver as receiving
from areal_ray.weights.checksum import CHUNK_WORDS, checksum
from areal_ray.weights.layout import StreamLayout, WeightManifest, manifest_of
from areal_ray.weights.load_plan import derive
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.sender import Source, send
from areal_ray.weights.staging import StreamStaging, staging_for
from areal_ray.weights.transport import Rendezvous, Transport, join
from areal_ray.weights.update import GroupMember, WeightUpdate

CPU = torch.device("cpu")


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(17, 5), (1,), (300, 7), (2, 3, 4), (129,)]
    return [
        (f"layer.{index}.weight", torch.randn(shape, generator=generator).to(dtype))
        for index, shape in enumerate(shapes)
    ]


class PlainModel:
    """Holds what it is sent, under the same names."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.held = {name: torch.zeros_like(tensor) for name, tensor in weights}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.held.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].data.copy_(tensor)


class FusedModel:
    """One of two tensor-parallel workers: q and k in one parameter by rows, o by columns, a tied
    embedding with padding that is no weight. As vLLM's layers do it."""

    ROWS, COLUMNS, PADDED = 8, 6, 12

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self.held = {
            "qk": torch.full((self.ROWS, self.COLUMNS), 7.0),
            "o": torch.full((self.ROWS, self.COLUMNS // 2), 7.0),
            "embed": torch.full((self.PADDED, self.COLUMNS), 7.0),
        }

    @classmethod
    def sent(cls, seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embed": (10, 6), "q": (8, 6), "k": (8, 6), "o": (8, 6)}
        return [(name, torch.randn(s, generator=generator)) for name, s in shapes.items()]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.held.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half = self.ROWS // 2
        for name, tensor in weights:
            if name == "embed":
                self.held["embed"][: len(tensor)].data.copy_(tensor)
                self.held["embed"][len(tensor) :].data.fill_(0)
            elif name == "o":
                mine = tensor.narrow(1, self._worker * 3, 3)
                self.held["o"].data.copy_(mine)
            else:
                place = self.held["qk"].narrow(0, half * "qk".index(name), half)
                place.data.copy_(tensor.narrow(0, self._worker * half, half))

    def expected(self, weights: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = slice(4 * self._worker, 4 * self._worker + 4)
        by_name = dict(weights)
        return {
            "qk": torch.cat([by_name["q"][rows], by_name["k"][rows]]),
            "o": by_name["o"][:, 3 * self._worker : 3 * self._worker + 3],
            "embed": by_name["embed"],
        }


class TransposingModel(PlainModel):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor.flip(0)) for name, tensor in weights)


class Loopback:
    """A group of one sender and one receiver, in one thread: buckets are handed over by hand."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]], layout: StreamLayout) -> None:
        self.stream = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        self._at = 0
        self.member = None
        send(self, Source(layout, weights))

    def broadcast(self, data: torch.Tensor) -> Loopback:
        self.stream[self._at : self._at + len(data)].copy_(data)
        self._at += len(data)
        return self

    def wait(self) -> None:
        pass

    def acknowledge(self, device: torch.device, *, is_right: bool) -> bool:
        return is_right


@pytest.mark.parametrize("bucket_bytes", [64, 100, 1000, 10**6])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_what_is_cut_into_buckets_comes_out_whole(
    bucket_bytes: int, wire: torch.dtype, held: torch.dtype
) -> None:
    weights = parameters(dtype=held)
    layout = StreamLayout(manifest_of(weights, dtype=wire, bucket_bytes=bucket_bytes))
    assert all(len(bucket) < bucket_bytes + 64 for bucket in layout.buckets)
    received = dict(layout.tensors(Loopback(weights, layout).stream))
    assert list(received) == [name for name, _ in weights]
    assert all(torch.equal(received[name], tensor.to(wire)) for name, tensor in weights)


def test_a_manifest_travels_as_msgpack() -> None:
    manifest = manifest_of(parameters(), dtype=torch.bfloat16, bucket_bytes=77)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest) == manifest
    member = GroupMember("127.0.0.1", 1, "127.0.0.1", "g", 1, 2, "gloo", 5.0)
    update = WeightUpdate(member=member, manifest=manifest, verify=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=WeightUpdate) == update


@given(
    size=st.integers(1, 300) | st.integers(8 * CHUNK_WORDS - 9, 8 * CHUNK_WORDS + 9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_checksum_sees_any_changed_byte_and_any_exchanged_words(size: int, data) -> None:
    generator = torch.Generator().manual_seed(size)
    right = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    wrong = right.clone()
    wrong[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(right) == checksum(right.clone())
    assert checksum(right) != checksum(wrong)
    words = right[: size // 8 * 8].view(torch.int64).clone()
    if len(words) > 1 and words[0] != words[-1]:
        words[0], words[-1] = words[-1].clone(), words[0].clone()
        swapped = torch.cat([words.view(torch.uint8), right[size // 8 * 8 :]])
        assert checksum(right) != checksum(swapped)


@pytest.mark.parametrize("mode", ["device", "host", "none"])
@pytest.mark.parametrize("bucket_bytes", [64, 128, 10**6])
@pytest.mark.parametrize("worker", [0, 1])
def test_fused_tied_and_sharded_weights_land_where_the_model_puts_them(
    mode: str, bucket_bytes: int, worker: int
) -> None:
    model = FusedModel(worker)
    manifest = manifest_of(FusedModel.sent(0), dtype=torch.float32, bucket_bytes=bucket_bytes)
    layout = StreamLayout(manifest)
    staging = staging_for(model, layout, mode, is_shard=True)
    for seed in (1, 2):
        weights = FusedModel.sent(seed)
        stream = Loopback(weights, layout).stream
        before = {name: tensor.clone() for name, tensor in model.held.items()}
        for bucket in layout.buckets:
            buffer = staging.buffer(bucket)
            buffer.copy_(stream[bucket.start : bucket.stop])
            staging.arrived(bucket, buffer)
        if mode != "none":
            assert all(torch.equal(model.held[name], before[name]) for name in before)
        staging.apply()
        for name, tensor in model.expected(weights).items():
            assert torch.equal(model.held[name][: len(tensor)], tensor), name
        # What no update writes is as it was.
        assert (model.held["embed"][10:] == 7.0).all()


def test_finding_the_plan_changes_no_weight() -> None:
    model = FusedModel(0)
    layout = StreamLayout(manifest_of(FusedModel.sent(0), dtype=torch.float32, bucket_bytes=64))
    plan = derive(model, layout)
    assert [len(moves) for moves in plan.moves] == [1, 1, 1, 1]
    assert all((tensor == 7.0).all() for tensor in model.held.values())


def test_a_model_that_transforms_its_weights_loads_them_itself() -> None:
    weights = parameters()
    model = TransposingModel(weights)
    layout = StreamLayout(manifest_of(weights, dtype=torch.float32, bucket_bytes=500))
    assert derive(model, layout) is None
    assert all((tensor == 0).all() for tensor in model.held.values())
    staging = staging_for(model, layout, "device", is_shard=False)
    assert isinstance(staging, StreamStaging)
    stream = Loopback(weights, layout).stream
    for bucket in layout.buckets:
        staging.buffer(bucket).copy_(stream[bucket.start : bucket.stop])
    staging.apply()
    assert all(torch.equal(model.held[name], tensor.flip(0)) for name, tensor in weights)
    with pytest.raises(WeightUpdateError, match="`none` needs a model .* TransposingModel"):
        staging_for(model, layout, "none", is_shard=False)


class Group:
    """A sender and two receivers in one process, over real gloo."""

    def __init__(self, timeout_s: float, mode: str = "device") -> None:
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
        self.models = [PlainModel(parameters()), PlainModel(parameters())]
        self.receivers = [
            StagingReceiver(
                CPU, lambda layout, m=model: staging_for(m, layout, mode, is_shard=False)
            )
            for model in self.models
        ]
        self._group: Transport | None = None

    def begin_receiving(
        self, weights: list[tuple[str, torch.Tensor]], *, receivers: int = 2, verify: bool = False
    ) -> StreamLayout:
        manifest = manifest_of(weights, dtype=torch.float32, bucket_bytes=500)
        for rank, receiver in enumerate(self.receivers[:receivers], start=1):
            member = msgspec.structs.replace(self._sender, rank=rank)
            receiver.start(WeightUpdate(member=member, manifest=manifest, verify=verify))
        return StreamLayout(manifest)

    def call_off(self) -> None:
        self._rendezvous.call_off(self._sender.group_id)

    def hang_up(self) -> None:
        self._group.close()

    def update(
        self, weights: list[tuple[str, torch.Tensor]], *, receivers: int = 2, verify: bool = False
    ) -> None:
        layout = self.begin_receiving(weights, receivers=receivers, verify=verify)
        if self._group is None:
            self._group = join(self._sender, self._rendezvous.store)
        send(self._group, Source(layout, weights), verify=verify)


@pytest.fixture
def group() -> Iterator[Group]:
    joined = Group(timeout_s=20.0)
    yield joined
    for receiver in joined.receivers:
        receiver.discard()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("mode", ["device", "none"])
def test_every_engine_gets_what_was_sent_update_after_update(mode: str, verify: bool) -> None:
    group = Group(timeout_s=20.0, mode=mode)
    for seed in range(3):
        weights = parameters(seed)
        group.update(weights, verify=verify)
        for receiver, model in zip(group.receivers, group.models, strict=True):
            receiver.apply()
            assert all(torch.equal(model.held[name], tensor) for name, tensor in weights)


def test_until_they_are_applied_the_old_weights_stay(group: Group) -> None:
    group.update(parameters())
    assert all((tensor == 0).all() for tensor in group.models[0].held.values())


def test_staged_weights_are_applied_once(group: Group) -> None:
    group.update(parameters())
    group.receivers[0].apply()
    with pytest.raises(WeightUpdateError, match="no weights were staged"):
        group.receivers[0].apply()


def test_a_second_update_may_not_begin_before_the_first_has_ended(group: Group) -> None:
    group.update(parameters())
    with pytest.raises(WeightUpdateError, match="before the last one ended"):
        group.update(parameters())


def test_a_byte_that_changed_on_the_way_is_found_by_all(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, lock = [], threading.Lock()

    def corrupted(data: torch.Tensor) -> torch.Tensor:
        with lock:
            mine.append(threading.current_thread())
            is_first = mine.count(threading.current_thread()) == 1 and len(set(mine)) == 1
        if is_first:
            data[3] ^= 1
        return checksum(data)

    monkeypatch.setattr(receiving, "checksum", corrupted)
    with pytest.raises(WeightUpdateError, match="what an engine received is not what was sent"):
        group.update(parameters(), verify=True)
    troubles = []
    for receiver in group.receivers:
        with pytest.raises(WeightUpdateError) as failed:
            receiver.apply()
        troubles.append(str(failed.value))
    assert sorted(trouble.partition(": ")[2] for trouble in troubles) == [
        "checksum mismatch in buckets [0] of 19",
        "what another engine received is not what was sent",
    ]


def test_a_member_that_never_comes_ends_the_update_at_the_deadline() -> None:
    group = Group(timeout_s=2.0)
    with pytest.raises(WeightUpdateError, match="not everybody came to .* within 2 s"):
        group.update(parameters(), receivers=1)
    with pytest.raises(WeightUpdateError, match="did not arrive whole"):
        group.receivers[0].apply()


def test_those_who_wait_for_a_member_that_died_go_as_soon_as_the_group_is_called_off(
    group: Group,
) -> None:
    began = time.monotonic()
    calling_off = threading.Timer(0.2, group.call_off)
    calling_off.start()
    with pytest.raises(WeightUpdateError, match="was called off"):
        group.update(parameters(), receivers=1)
    with pytest.raises(WeightUpdateError, match="was called off"):
        group.receivers[0].apply()
    assert time.monotonic() - began < 15.0, "the time limit of 20 s ended it"
    calling_off.join()


def test_a_receiver_that_waits_hears_when_the_sender_hangs_up(group: Group) -> None:
    group.update(parameters())
    for receiver in group.receivers:
        receiver.apply()
    group.begin_receiving(parameters())
    began = time.monotonic()
    group.hang_up()
    for receiver in group.receivers:
        with pytest.raises(WeightUpdateError, match="Connection (closed|reset) by peer"):
            receiver.apply()
    assert time.monotonic() - began < 15.0, "the time limit of 20 s ended it"


def test_discarding_does_not_wait_for_what_hangs(group: Group) -> None:
    group.begin_receiving(parameters())
    began = time.monotonic()
    assert group.receivers[0].discard() == "it was still receiving"
    assert time.monotonic() - began < 5.0


def test_in_place_an_update_that_has_not_begun_can_be_discarded() -> None:
    group = Group(timeout_s=20.0, mode="none")
    group.begin_receiving(parameters())
    group.call_off()
    assert "was called off" in group.receivers[0].discard()


def test_in_place_an_update_that_has_begun_tears_the_weights() -> None:
    group = Group(timeout_s=20.0, mode="none")
    group.update(parameters())
    with pytest.raises(TornWeights, match="a part of an update is in the model"):
        group.receivers[0].discard()


def test_the_meeting_point_listens_on_its_own_address_only() -> None:
    rendezvous = Rendezvous("127.0.0.1", timeout_s=5.0)
    port = f"{rendezvous.port:04X}"
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if f":{port} 00000000:0000 0A" in line]
    assert listening == [f"0100007F:{port}"]


def test_discarding_twice_is_harmless(group: Group) -> None:
    assert group.receivers[0].discard() == ""
    assert group.receivers[0].discard() == ""
