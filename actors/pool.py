"""ActorPool: keeps the members of a pool alive, and knows who takes work.

Each member has one task that looks after it for ever: start it, sync it, let it serve, ask for
proof of work again and again; and when it fails or falls silent, take it out of the routing,
kill what is left of it, and begin anew. The rules are `Fleet`'s, the choice among those that
serve is `Balancer`'s. Ray restarts a member's process where it was; the pool restarts its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray import logs
from areal_ray.actors.calls import end_process
from areal_ray.changes import Changes
from areal_ray.errors import DeadlineExceeded, PoolError, described
from areal_ray.fleet import Fleet, MemberStatus
from areal_ray.observability.loop_health import LoopReport
from areal_ray.routing import Balancer
from areal_ray.tasks import TaskRunner


class Keeper(Protocol):
    """What the members of one pool need. Each call has a time limit and names who broke it."""

    what: str

    async def bring_up(self, name: str, handle: ActorHandle) -> None:
        """Start it, or find it started. The process may be on its way back."""

    async def sync(self, name: str, handle: ActorHandle) -> None:
        """Give it what the others have, so that it can serve."""

    async def prove(self, name: str, handle: ActorHandle) -> LoopReport:
        """Returns once it has shown that it works, and tells how its event loop does."""

    async def lost(self, name: str) -> None:
        """It does not serve any more."""


@dataclass(frozen=True)
class Care:
    prove_every_s: float
    suspect_after_s: float
    dead_after_s: float
    may_restart: bool
    max_failed_starts: int
    min_members: int
    """Fewer that serve or may yet serve end the run."""


class ActorPool:
    def __init__(
        self,
        keeper: Keeper,
        care: Care,
        tasks: TaskRunner,
        tell: Callable[[str, bool, str], None] = lambda name, is_lost, text: None,
    ) -> None:
        """`tell` hears of each loss of a member, and of each that serves: its name, whether it is
        lost, and how it came about."""
        self._tell = tell
        self._keeper = keeper
        self._care = care
        self._tasks = tasks
        self._fleet = Fleet(
            suspect_after_s=care.suspect_after_s,
            dead_after_s=care.dead_after_s,
            max_failed_starts=care.max_failed_starts,
            may_restart=care.may_restart,
            clock=time.monotonic,
        )
        self._balancer: Balancer[ActorHandle] = Balancer()
        self._handles: dict[str, ActorHandle] = {}
        self._loops: dict[str, LoopReport] = {}
        self._doubts: dict[str, asyncio.Event] = {}
        self._condemned: dict[str, str] = {}
        self._changed = Changes()
        self.lease = self._balancer.lease

    @property
    def statuses(self) -> list[MemberStatus]:
        return self._fleet.statuses()

    @property
    def loads(self) -> dict[str, int]:
        return self._balancer.loads

    @property
    def handles(self) -> dict[str, ActorHandle]:
        return dict(self._handles)

    @property
    def loops(self) -> dict[str, LoopReport]:
        """How late the event loop of each ran, when it last proved itself."""
        return dict(self._loops)

    def add(self, name: str, handle: ActorHandle, *, has_served: bool) -> None:
        """Look after it from now on. Telling it twice does no harm.

        `has_served`: under another's care. Before any has served, a failure ends the run: what
        can't work need not be tried again.
        """
        if name in self._fleet:
            return
        self._fleet.add(name, has_served=has_served)
        self._handles[name] = handle
        self._doubts[name] = asyncio.Event()
        self._tasks.spawn(lambda: self._look_after(name), name=f"looking after {name}")

    async def remove(self, name: str) -> None:
        """Drain it: no new work, and it leaves once its last lease has ended."""
        await self._changed.until(lambda: self._has_settled(name))
        if name not in self._fleet:
            return
        if not self._fleet.is_given_up(name):
            self._fleet.drain(name)
            self._balancer.exclude(name)
            await self._balancer.until_idle(name)
        self._leave(name)
        await self._keeper.lost(name)

    async def until_settled(self) -> None:
        """Wait until each member serves, or is given up."""
        await self._changed.until(lambda: all(map(self._has_settled, self._handles)))

    def doubt(self, name: str) -> None:
        """Somebody had trouble with it: no new work until it has proved itself, from now."""
        if name in self._doubts:
            self._balancer.exclude(name)
            self._doubts[name].set()

    def condemn(self, name: str, cause: str) -> None:
        """It must not serve as it is, though it may answer: restart it."""
        if name in self._doubts:
            self._condemned[name] = cause
            self._balancer.exclude(name)
            self._doubts[name].set()

    async def _look_after(self, name: str) -> None:
        handle = self._handles[name]
        while True:
            try:
                await self._serve(name, handle)
                return
            except Exception as error:  # noqa: BLE001 - every failure of a member ends here
                if name not in self._fleet:
                    return
                await self._bury(name, handle, error)
            if self._fleet.is_given_up(name):
                return
            self._fleet.restart(name)
            self._changed.notify()

    async def _serve(self, name: str, handle: ActorHandle) -> None:
        """Returns when it has left the pool; raises when it is lost."""
        await self._keeper.bring_up(name, handle)
        if name not in self._fleet:
            return
        self._fleet.started(name)
        await self._keeper.sync(name, handle)
        self._fleet.synced(name)
        self._balancer.admit(name, handle)
        self._changed.notify()
        again = " again" if self._fleet.incarnation(name) > 1 else ""
        self._tell(name, False, f"serves{again}")
        while name in self._fleet:
            await self._prove(name, handle)
            await self._until_next_proof(self._doubts.get(name))
            if name in self._condemned:
                raise PoolError(self._condemned.pop(name))

    async def _until_next_proof(self, doubt: asyncio.Event | None) -> None:
        if doubt is None:
            return
        with contextlib.suppress(TimeoutError):
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes with the doubt.
            async with asyncio.timeout(self._care.prove_every_s):
                await doubt.wait()
        doubt.clear()

    async def _prove(self, name: str, handle: ActorHandle) -> None:
        proof = asyncio.ensure_future(self._keeper.prove(name, handle))
        try:
            while not (await asyncio.wait({proof}, timeout=self._care.suspect_after_s / 4))[0]:
                if name not in self._fleet:
                    return
                state = self._fleet.tick(name)
                if state == "suspect":
                    self._balancer.exclude(name)
                elif state == "dead":
                    raise DeadlineExceeded(name, "a proof of work", self._care.dead_after_s)
            self._loops[name] = proof.result()
        finally:
            proof.cancel()
            await asyncio.gather(proof, return_exceptions=True)
        if name in self._fleet:
            self._fleet.answered(name)
            if self._fleet.state(name) == "serving" and name not in self._condemned:
                self._balancer.admit(name, handle)

    async def _bury(self, name: str, handle: ActorHandle, error: Exception) -> None:
        """Out of the routing; and if its process still stands, end it so that Ray restarts it."""
        never_served = not self._fleet.has_ever_served()
        is_leaving = self._fleet.state(name) == "draining"
        cause = described(error)
        self._fleet.failed(name, cause, for_good=isinstance(error, ActorDiedError))
        self._balancer.exclude(name)
        self._condemned.pop(name, None)
        logs.warning("{} is lost: {}", name, cause)
        self._tell(name, True, f"is lost: {cause}")
        if never_served and not isinstance(error, ActorUnavailableError):
            raise error
        if not is_leaving:
            self._end_if_too_few()
        await self._keeper.lost(name)
        if not isinstance(error, (ActorUnavailableError, ActorDiedError)):
            await self._kill(name, handle)
        self._changed.notify()

    async def _kill(self, name: str, handle: ActorHandle) -> None:
        try:
            await end_process(handle, may_restart=not self._fleet.is_given_up(name))
        except DeadlineExceeded as error:
            logs.warning("{}: {}", name, error)

    def _end_if_too_few(self) -> None:
        left = len(self._fleet.hopeful())
        if left < self._care.min_members:
            given_up = [status for status in self._fleet.statuses() if status.given_up]
            causes = "\n".join(f"  {status.name}: {status.cause}" for status in given_up)
            raise PoolError(
                f"{left} {self._keeper.what}s are left, fewer than the {self._care.min_members} "
                f"that are needed; given up:\n{causes}"
            )

    def _has_settled(self, name: str) -> bool:
        return (
            name not in self._fleet
            or self._fleet.is_given_up(name)
            or self._fleet.state(name) in ("serving", "suspect")
        )

    def _leave(self, name: str) -> None:
        self._fleet.remove(name)
        self._handles.pop(name)
        self._loops.pop(name, None)
        self._doubts.pop(name).set()
        self._changed.notify()
