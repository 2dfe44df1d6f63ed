"""Calls of the controller to workers: one for each group, with an engine leased for as long.

A worker whose engine is lost asks for another, and the group's lease moves there.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray.actors.calls import ASK_TIMEOUT_S
from areal_ray.actors.pool import ActorPool
from areal_ray.actors.rollout_worker import Assignment
from areal_ray.changes import Changes
from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, NotReady
from areal_ray.routing import Lease
from areal_ray.types import GroupOutcome, GroupSummary, Prompt, Sampling

WORKER_GONE = (ActorUnavailableError, ActorDiedError, NotReady)
"""What a call raises when its worker died: the group can be given to another."""


class GroupCalls:
    def __init__(self, engines: ActorPool, workers: ActorPool, *, timeout_s: float) -> None:
        self._engines = engines
        self._workers = workers
        self._timeout_s = timeout_s
        self._leases: dict[int, Lease[ActorHandle]] = {}
        self._changed = Changes()

    async def call(
        self,
        method: Literal["roll_out", "evaluate", "try_out", "ask"],
        group_id: int,
        prompt: Prompt,
        *,
        samples: int,
        sampling: Sampling,
        worker: str = "",
        engine: str = "",
    ) -> GroupOutcome | GroupSummary | str:
        """Give a group to a worker and an engine, those that are named if they take work."""
        weight = samples * sampling.max_new_tokens
        async with (
            self._engines.lease(weight=weight, prefer=engine) as at,
            self._workers.lease(weight=1, prefer=worker) as by,
        ):
            assignment = Assignment(
                group_id=group_id,
                prompt=prompt,
                samples=samples,
                sampling=sampling,
                engine=at.name,
            )
            self._leases[group_id] = at
            self._changed.notify()
            try:
                return await within(
                    self._timeout_s,
                    getattr(by.member, method).remote(assignment),
                    who=by.name,
                    doing=f"group {group_id} (rollout.group_timeout_s)",
                )
            except WORKER_GONE:
                self._workers.doubt(by.name)
                raise
            except (DeadlineExceeded, asyncio.CancelledError):
                # Nothing depends on whether it hears: what it finishes will not be wanted.
                by.member.give_up.remote(group_id)
                raise
            finally:
                del self._leases[group_id]
                self._changed.notify()

    async def relocate(self, group_id: int, lost: str) -> str:
        """Another engine for a group whose engine is lost; waits until there is one."""
        self._engines.doubt(lost)
        # A controller that was restarted may still be on its way to this group.
        await self._changed.until(lambda: group_id in self._leases)
        lease = self._leases[group_id]
        if lease.name == lost:
            await lease.move()
        return lease.name

    async def places(self) -> dict[int, tuple[str, str]]:
        """The worker and the engine of each group that runs, as far as the workers answer."""
        handles = self._workers.handles
        answers = await asyncio.gather(
            *(
                within(ASK_TIMEOUT_S, handle.running.remote(), who=name, doing="its status")
                for name, handle in handles.items()
            ),
            return_exceptions=True,
        )
        return {
            group_id: (name, engine)
            for name, answer in zip(handles, answers, strict=True)
            if isinstance(answer, dict)
            for group_id, engine in answer.items()
        }
