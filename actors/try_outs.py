"""What somebody who composes the actors by hand asks of a crew: a group to look at, another
reward, a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from ray.actor import ActorHandle

from areal_ray.actors.calls import ASK_TIMEOUT_S, end_process, until_back
from areal_ray.actors.rollout_worker import WorkerSpec
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.try_outs import Answers, TriedOut
from areal_ray.types import Prompt, Sampling


class TryOuts:
    def __init__(
        self,
        config: Config,
        *,
        controller: ActorHandle,
        workers: dict[str, ActorHandle],
        queue: ActorHandle,
    ) -> None:
        self._config = config
        self._controller = controller
        self._workers = workers
        self._queue = queue

    async def ask(self, prompt: Prompt, samples: int, sampling: Sampling) -> Answers:
        return await self._try_out("ask", prompt, samples, sampling)

    async def roll_out(self, prompt: Prompt, samples: int, sampling: Sampling) -> TriedOut:
        return await self._try_out("try_out", prompt, samples, sampling)

    async def pause(self) -> None:
        """Start no new groups. Those that run go on, and are taken."""
        await self._ask_controller(self._controller.pause.remote)

    async def resume(self) -> None:
        await self._ask_controller(self._controller.resume.remote)

    async def equip(self, spec: WorkerSpec) -> None:
        """While rollout is paused: what is rolled out next goes by this workflow, reward and
        filter, and what waits to be trained on went by others, so it is rolled out again."""
        await asyncio.gather(
            *(
                until_back(
                    self._config.rollout.group_timeout_s,
                    lambda worker=worker: worker.equip.remote(spec),
                    who=name,
                    doing="ending its groups, to take another workflow or reward",
                )
                for name, worker in self._workers.items()
            )
        )
        await self._ask_controller(lambda: self._controller.equip.remote(spec))
        await until_back(
            ASK_TIMEOUT_S,
            self._queue.discard.remote,
            who="the trajectory queue",
            doing="letting go of what waits",
        )

    async def end_controller(self) -> None:
        """For one that has given up: Ray brings another, which goes on from the journal once it
        is attached."""
        await end_process(self._controller, may_restart=True)

    async def _try_out(
        self, method: Literal["try_out", "ask"], prompt: Prompt, samples: int, sampling: Sampling
    ) -> TriedOut | Answers:
        name, group_id = await until_back(
            self._config.rollout.group_timeout_s,
            lambda: self._controller.try_out.remote(method, prompt, samples, sampling),
            who="the controller",
            doing="a group to look at (rollout.group_timeout_s)",
        )
        return await within(
            ASK_TIMEOUT_S,
            self._workers[name].collect.remote(group_id),
            who=name,
            doing="handing a group over",
        )

    async def _ask_controller(self, call: Callable[[], object]) -> None:
        await until_back(ASK_TIMEOUT_S, call, who="the controller", doing="answering")
