"""Groups/s and MB/s of the TrajectoryQueue against `ray.util.queue.Queue`, on the same payloads.

The same producer actors, groups of 1 MB and consumer actor for all; the consumer sums every
array, so all bytes are read. What differs is the way between:

- TrajectoryQueue: a producer offers as a rollout worker does (`Offers`), the consumer takes
  batches as a trainer does (`Batches`) and acknowledges them;
- Queue, one by one: `put_async` with several on their way, `get_async` with several on their way;
- Queue, batches: `put_async` as before, `get_nowait_batch` of as many as there are;
- Queue of references: producers `ray.put` their groups and pass references, one by one. Listed
  for comparison: it gives up what the other ways promise, since a group dies with its producer.

All have room for as many groups. Each is driven for the same number of groups, of which the
first ones are not counted; they take turns for some rounds, and the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray
from common import CpuMeter, CpuUse, Figure, local_cluster, median, resolved, say, show, spread
from ray.actor import ActorHandle
from ray.util.queue import Empty, Queue

from areal_ray import Prompt
from areal_ray.actors.batches import Batches
from areal_ray.actors.offers import Offers
from areal_ray.actors.trajectory_queue import TrajectoryQueue
from areal_ray.types import Trajectory, TrajectoryGroup

SAMPLES = 8
TOKENS = 64
ON_THEIR_WAY = 16
"""Groups that each producer has finished and not yet got rid of; gets at once of the consumer."""


def group_of(group_id: int, nbytes: int) -> TrajectoryGroup:
    words = nbytes // SAMPLES // 8
    return TrajectoryGroup(
        group_id=group_id,
        prompt=Prompt(text="12+34="),
        trajectories=[
            Trajectory(
                prompt_ids=np.zeros(8, dtype=np.int32),
                response_ids=np.zeros(TOKENS, dtype=np.int32),
                response_mask=np.ones(TOKENS, dtype=np.bool_),
                logprobs=np.zeros(TOKENS, dtype=np.float32),
                versions=np.zeros(TOKENS, dtype=np.int32),
                reward=0.0,
                finish_reason="stop",
                text="",
                arrays={"routed_experts": np.full(words, group_id, dtype=np.int64)},
            )
            for _ in range(SAMPLES)
        ],
    )


def total_of(group: TrajectoryGroup) -> int:
    return sum(int(t.arrays["routed_experts"].sum()) for t in group.trajectories)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Producer:
    """Makes groups of the ids it is given, some at a time."""

    def __init__(self, nbytes: int) -> None:
        # Made once: this is about moving them.
        self._group = group_of(1, nbytes)

    async def hand_over(self, chunks: list[list[int]]) -> tuple[list[TrajectoryGroup] | bool, ...]:
        return self._offers.hand_over(chunks)

    async def offer_to(self, queue: ActorHandle, group_ids: Sequence[int]) -> None:
        self._offers = Offers(queue, ray.get_runtime_context().current_actor)
        summary = self._group.summary()

        async def offer(group_id: int) -> None:
            await self._offers.offer(self._group, _with_id(summary, group_id))

        await _several_at_once(offer, group_ids)

    async def put_into(self, queue: Queue, group_ids: Sequence[int], as_reference: bool) -> None:
        async def put(_: int) -> None:
            item = [ray.put(self._group)] if as_reference else self._group
            await queue.put_async(item)

        await _several_at_once(put, group_ids)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Consumer:
    """Reads so many groups. Each method returns the seconds from group `first` to the last."""

    def __init__(self, groups: int, first: int) -> None:
        self._groups = groups
        self._first = first

    async def is_there(self) -> None:
        pass

    async def take_from(self, queue: ActorHandle, batch: int) -> float:
        batches, clock = Batches(queue, holder="consumer"), _Clock(self._groups, self._first)
        while not clock.is_over:
            lent = await batches.next(0)
            clock.read(lent.groups)
            await batches.done(lent)
        return clock.seconds

    async def get_one_by_one(self, queue: Queue, as_reference: bool) -> float:
        clock = _Clock(self._groups, self._first)

        async def get(_: int) -> None:
            item = await queue.get_async()
            clock.read([await item[0] if as_reference else item])

        await _several_at_once(get, range(self._groups))
        return clock.seconds

    async def get_batches(self, queue: Queue, batch: int) -> float:
        clock = _Clock(self._groups, self._first)
        while not clock.is_over:
            there = min(batch, await queue.actor.qsize.remote())
            try:
                # What `get_nowait_batch` does, without blocking the loop.
                clock.read(await queue.actor.get_nowait_batch.remote(max(1, there)))
            except Empty:
                await asyncio.sleep(0.001)
        return clock.seconds


class _Clock:
    """Reads groups, and counts the time from one to another."""

    def __init__(self, groups: int, first: int) -> None:
        self._groups, self._first = groups, first
        self._read = self._counted_from = 0
        self._began = self._ended = 0.0

    def read(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            assert total_of(group) > 0
        self._read += len(groups)
        self._ended = time.perf_counter()
        if not self._began and self._read >= self._first:
            self._began, self._counted_from = self._ended, self._read

    @property
    def is_over(self) -> bool:
        return self._read >= self._groups

    @property
    def seconds(self) -> float:
        """For `groups - first` of them."""
        counted = self._read - self._counted_from
        return (self._ended - self._began) * (self._groups - self._first) / counted


async def _several_at_once(call, numbers: Sequence[int]) -> None:
    left = iter(numbers)

    async def one_after_the_other() -> None:
        for number in left:
            await call(number)

    await asyncio.gather(*(one_after_the_other() for _ in range(ON_THEIR_WAY)))


def _with_id(summary, group_id: int):
    import msgspec

    return msgspec.structs.replace(summary, group_id=group_id)


@dataclass(frozen=True)
class Drive:
    groups_per_s: float
    cpu: CpuUse


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._nbytes = int(options.mb * 1e6)
        shares = np.array_split(np.arange(options.groups), options.producers)
        self._shares = [share.tolist() for share in shares]
        self.ways = {
            "TrajectoryQueue": self._ours,
            "Queue, one by one": lambda: self._rays(batches=False, as_reference=False),
            "Queue, batches": lambda: self._rays(batches=True, as_reference=False),
            "Queue of references": lambda: self._rays(batches=False, as_reference=True),
        }

    async def rounds(self) -> dict[str, list[Drive]]:
        drives: dict[str, list[Drive]] = {name: [] for name in self.ways}
        for number in range(self._options.rounds):
            for name, way in self.ways.items():
                drives[name].append(await way())
            rates = ", ".join(f"{d[-1].groups_per_s:,.0f}" for d in drives.values())
            say(f"round {number + 1}: {rates} groups/s")
        return drives

    async def _ours(self) -> Drive:
        options = self._options
        queue = TrajectoryQueue.options(num_cpus=0).remote(
            batch=options.batch,
            max_groups=options.room,
            max_bytes=2**40,
            max_staleness=0,
            window=None,
        )
        await queue.open.remote(range(options.groups))
        return await self._drive(
            queue,
            lambda producer, ids: producer.offer_to.remote(queue, ids),
            lambda consumer: consumer.take_from.remote(queue, options.batch),
        )

    async def _rays(self, *, batches: bool, as_reference: bool) -> Drive:
        queue = Queue(self._options.room, actor_options={"num_cpus": 0, "max_concurrency": 1000})

        def consume(consumer: ActorHandle):
            if batches:
                return consumer.get_batches.remote(queue, self._options.batch)
            return consumer.get_one_by_one.remote(queue, as_reference)

        return await self._drive(
            queue.actor,
            lambda producer, ids: producer.put_into.remote(queue, ids, as_reference),
            consume,
        )

    async def _drive(self, queue: ActorHandle, produce, consume) -> Drive:
        """Processes of its own for each drive, so that none has the traces of another."""
        options = self._options
        consumer = Consumer.remote(options.groups, options.warm_up)
        producers = [Producer.remote(self._nbytes) for _ in self._shares]
        await consumer.is_there.remote()
        await asyncio.gather(*(producer.__ray_ready__.remote() for producer in producers))
        meter = CpuMeter()
        producing = [produce(p, ids) for p, ids in zip(producers, self._shares, strict=True)]
        seconds = await consume(consumer)
        cpu = meter.use()
        await asyncio.gather(*producing)
        for actor in (consumer, queue, *producers):
            ray.kill(actor)
        return Drive((options.groups - options.warm_up) / seconds, cpu)


def report(drives: dict[str, list[Drive]], options: argparse.Namespace) -> None:
    rows, figures = [], dict[str, Figure]()
    ours = [drive.groups_per_s for drive in drives["TrajectoryQueue"]]
    for name, mine in drives.items():
        rates = [drive.groups_per_s for drive in mine]
        ratios = [our / rate for our, rate in zip(ours, rates, strict=True)]
        rows.append(
            [
                name,
                f"{median(rates):,.0f} ({spread(rates, ',.0f')})",
                f"{median(rates) * options.mb:,.0f}",
                f"{median(ratios):.1f} ({spread(ratios, '.1f')})",
                _cpu_of(mine, "Producer", options),
                _cpu_of(mine, "queue", options),
                _cpu_of(mine, "Consumer", options),
                _cpu_of(mine, "Ray itself", options),
            ]
        )
        key = name.replace(",", "").replace(" ", "_").lower()
        figures |= {f"{key}_groups_per_s": median(rates), f"ours_over_{key}": median(ratios)}
    headings = ["queue", "groups/s", "MB/s", "ours / it"]
    processes = ["producers", "queue", "consumer", "Ray"]
    print("The last four columns: CPU ms for each group.")
    show([*headings, *processes], rows, figures)


def _cpu_of(drives: list[Drive], process: str, options: argparse.Namespace) -> str:
    names = ("TrajectoryQueue", "_QueueActor") if process == "queue" else (process,)
    seconds = sum(drive.cpu.seconds[name] for drive in drives for name in names)
    return f"{1e3 * seconds / (options.groups * len(drives)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=2048, help="a multiple of the batch")
    parser.add_argument("--warm-up", type=int, default=512, help="of them, not counted")
    parser.add_argument("--mb", type=float, default=1.0, help="of each group")
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--room", type=int, default=128, help="groups that a queue holds")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = resolved({})
    with local_cluster(config):
        drives = asyncio.run(Bench(options).rounds())
    report(drives, options)


if __name__ == "__main__":
    main()
