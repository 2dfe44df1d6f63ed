"""The control plane over a real Ray cluster, with engines that answer at once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle

from areal_ray.actors.rollout_controller import ControllerSpec, RolloutController
from areal_ray.actors.rollout_worker import RolloutWorker, WorkerSpec
from areal_ray.actors.trajectory_queue import TrajectoryQueue
from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, QueueClosed, TooManyFailures, root_cause
from areal_ray.plugins import pack
from areal_ray.types import (
    Completion,
    GenerationRequest,
    GenerationResult,
    GroupSummary,
    Prompt,
    Sampling,
    TrajectoryGroup,
)
from areal_ray.workflows import single_turn

pytestmark = pytest.mark.usefixtures("ray_cluster")

PROMPTS = [Prompt(text=f"{a}+{a}=", answer=str(2 * a)) for a in range(10, 50)]


@ray.remote(max_concurrency=1000)
class EchoEngine:
    """Answers every request with the same three tokens of the version it was told."""

    def __init__(self) -> None:
        self.version = 0
        self.wedged = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        one = Completion(
            token_ids=np.array([4, 4, 1], dtype=np.int32),
            logprobs=np.full(3, -0.5, dtype=np.float32),
            versions=np.full(3, self.version, dtype=np.int32),
            finish_reason="stop",
        )
        return GenerationResult(
            request_id=request.request_id, engine="echo", completions=[one] * request.n
        )

    async def probe(self) -> None:
        if self.wedged:
            await asyncio.Event().wait()

    async def set(self, *, version: int = 0, wedged: bool = False) -> None:
        self.version, self.wedged = version, wedged


def zero(prompt: Prompt, completion: Completion) -> float:
    return 0.0


def broken_for_one(prompt: Prompt, completion: Completion) -> float:
    if prompt.answer == "22":
        raise KeyError("no such answer")
    return 0.0


def broken(prompt: Prompt, completion: Completion) -> float:
    raise KeyError("the user's mistake")


class ControlPlane:
    def __init__(self, model: Path, reward: Callable, **changes: object) -> None:
        spec = {
            "samples": 2,
            "sampling": Sampling(max_new_tokens=4),
            "group_timeout_s": 20.0,
            "groups_per_step": 4,
            "max_staleness": 1,
            "max_concurrent_groups": 100,
            "max_failed_groups": 3,
            "probe_every_s": 0.1,
            "probe_timeout_s": 5.0,
            "shuffle": False,
            "seed": 0,
        } | changes
        self.queue = TrajectoryQueue.remote(
            batch=4, max_groups=1000, max_bytes=2**20, max_staleness=1
        )
        self.engine = EchoEngine.remote()
        self.worker = RolloutWorker.remote(
            WorkerSpec(
                model_path=str(model),
                trust_remote_code=False,
                max_prompt_tokens=8,
                packed_workflow=pack(single_turn),
                packed_reward=pack(reward),
                reward_processes=1,
                reward_timeout_s=20.0,
                request_timeout_s=20.0,
            ),
            self.queue,
        )
        self.controller = RolloutController.remote(
            ControllerSpec(**spec),
            PROMPTS,
            [("engine-0", self.engine)],
            [("worker-0", self.worker)],
            self.queue,
        )

    async def wait_for(self, condition: Callable) -> None:
        """Until the ledger's counts fulfil `condition`, and then still do a moment later."""

        async def poll() -> None:
            while not condition((await self.controller.status.remote()).ledger):
                await asyncio.sleep(0.01)

        await within(30, poll(), who="the ledger", doing=inspect.getsource(condition))
        await asyncio.sleep(0.1)
        assert condition((await self.controller.status.remote()).ledger)

    def kill(self) -> None:
        for actor in (self.controller, self.worker, self.engine, self.queue):
            ray.kill(actor)


@pytest.fixture
def plane(tiny_model: Path) -> Iterator[Callable[..., ControlPlane]]:
    made: list[ControlPlane] = []

    def make(reward: Callable = zero, **changes: object) -> ControlPlane:
        made.append(ControlPlane(tiny_model, reward, **changes))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def run(work: Coroutine) -> object:
    return asyncio.run(within(60, work, who="the test", doing="its work"))


def test_rollout_stops_where_staleness_ends_and_goes_on_with_the_next_version(plane) -> None:
    async def scenario() -> None:
        control = plane()
        await control.controller.start.remote()
        # (1 + 0 + 1) * 4 groups, and then (1 + 1 + 1) * 4.
        await control.wait_for(lambda ledger: ledger.accepted == 8 and not ledger.running)
        await control.controller.commit_version.remote(1)
        await control.wait_for(lambda ledger: ledger.accepted == 12 and not ledger.running)
        assert (await control.queue.status.remote()).waiting_groups == 12

    run(scenario())


def test_a_batch_is_read_from_the_object_store_after_its_worker_is_gone(plane) -> None:
    async def scenario() -> list[TrajectoryGroup]:
        control = plane()
        await control.controller.start.remote()
        await control.wait_for(lambda ledger: ledger.accepted == 8)
        await control.controller.close.remote()
        ray.kill(control.worker)
        lease = await control.queue.get_batch.remote(0)
        groups = await asyncio.gather(*lease.references)
        await control.queue.acknowledge.remote(lease.lease_id)
        assert (await control.queue.status.remote()).held_groups == 4
        return groups

    groups = run(scenario())
    assert [len(group.trajectories) for group in groups] == [2, 2, 2, 2]
    first = groups[0].trajectories[0]
    assert first.text == "22"
    assert first.response_ids.tolist() == [4, 4, 1]
    assert first.versions.tolist() == [0, 0, 0]


def test_groups_that_grew_too_old_are_rolled_out_again(plane) -> None:
    async def scenario() -> None:
        control = plane()
        await control.controller.start.remote()
        await control.wait_for(lambda ledger: ledger.accepted == 8)
        await control.engine.set.remote(version=5)
        waiting = asyncio.ensure_future(control.queue.get_batch.remote(5))
        # All eight were made by version 0: more than one version behind version 5.
        lease = await within(20, waiting, who="the queue", doing="a fresh batch")
        assert {summary.oldest_version for summary in lease.summaries} == {5}
        await control.wait_for(lambda ledger: ledger.expired == 8 and ledger.accepted == 8)

    run(scenario())


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(plane) -> None:
    async def scenario() -> None:
        control = plane(broken)
        await control.controller.start.remote()
        await within(30, control.controller.watch.remote(), who="watch", doing="raising")

    with pytest.raises(TooManyFailures) as failed:
        run(scenario())
    message = str(root_cause(failed.value))
    assert "4 groups failed, more than rollout.max_failed_groups (3) allows" in message
    assert 'KeyError: "the user\'s mistake"' in message


def test_one_bad_prompt_does_not_end_the_run(plane) -> None:
    async def scenario() -> None:
        # 200 groups, five times round the 40 prompts; few at a time, or one prompt would be in
        # flight more often than it may fail.
        control = plane(broken_for_one, groups_per_step=100, max_concurrent_groups=8)
        await control.controller.start.remote()
        await control.wait_for(lambda ledger: ledger.accepted == 200 and not ledger.running)
        # It failed three times and was given up, within the budget of three.
        assert (await control.controller.status.remote()).ledger.failed == 3

    run(scenario())


def test_an_engine_that_stops_answering_is_named(plane) -> None:
    async def scenario() -> None:
        control = plane(probe_timeout_s=0.5)
        await control.engine.set.remote(wedged=True)
        await control.controller.start.remote()
        await within(30, control.controller.watch.remote(), who="watch", doing="raising")

    with pytest.raises(DeadlineExceeded) as failed:
        run(scenario())
    assert str(root_cause(failed.value)) == (
        "engine-0 did not finish a one-token probe (generation.probe_timeout_s) within 0.5 s"
    )


def test_an_evaluation_is_greedy_complete_and_beside_the_ledger(plane) -> None:
    async def scenario() -> None:
        control = plane(lambda prompt, completion: completion.text == prompt.answer)
        result = await control.controller.evaluate.remote(PROMPTS)
        # The engine says 22 to everything: right for 11+11 alone.
        assert (result.prompts, result.mean_reward) == (40, 1 / 40)
        assert (await control.controller.status.remote()).ledger.submitted == 0

    run(scenario())


@ray.remote
class Producer:
    async def hand_over(self, group_id: int) -> tuple[str, bool]:
        return f"group {group_id}", True


def summary(group_id: int) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        samples=1,
        generated_tokens=1,
        nbytes=10,
        oldest_version=0,
        mean_reward=0.0,
    )


@pytest.fixture
def small_queue() -> Iterator[tuple[ActorHandle, ActorHandle]]:
    queue = TrajectoryQueue.remote(batch=2, max_groups=2, max_bytes=1000, max_staleness=0)
    producer = Producer.remote()
    yield queue, producer
    ray.kill(queue)
    ray.kill(producer)


def test_a_full_queue_makes_a_producer_wait_and_drops_nothing(small_queue) -> None:
    async def scenario() -> list[str]:
        queue, producer = small_queue
        puts = {asyncio.ensure_future(queue.put.remote(producer, summary(i))) for i in range(4)}
        while sum(put.done() for put in puts) < 2:
            await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
        assert (await queue.status.remote()).held_groups == 2
        assert sum(put.done() for put in puts) == 2
        received = []
        for _ in range(2):
            lease = await queue.get_batch.remote(0)
            received += await asyncio.gather(*lease.references)
            await queue.acknowledge.remote(lease.lease_id)
        await asyncio.gather(*puts)
        return received

    # An async actor begins calls in any order.
    assert sorted(run(scenario())) == ["group 0", "group 1", "group 2", "group 3"]


def test_closing_the_queue_lets_everybody_go_who_waits(small_queue) -> None:
    async def scenario() -> None:
        queue, producer = small_queue
        for index in range(2):
            await queue.put.remote(producer, summary(index))
        waiting = [
            asyncio.ensure_future(queue.put.remote(producer, summary(2))),
            asyncio.ensure_future(queue.expired.remote()),
        ]
        await queue.status.remote()
        await queue.close.remote()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, QueueClosed)

    run(scenario())
