"""A weight update as a transaction: every engine gets the new version, or none does.

    stage     the trainer broadcasts, every engine receives beside what serves
    commit    once all hold everything: each pauses, swaps, stamps and resumes
    abort     whatever fails before the commit is undone everywhere; the old version serves on

What is decided here, and nowhere else:

- Before the commit, one failure aborts all. An engine that could not stage, or can't undo its part,
  is lost; the update is tried again with the others, over a new group. So many failures in a row
  as `max_failures` end it; before the last attempt those that can't receive even by themselves are
  found, if nobody has told, and lost.
- The commit can't be called back. An engine that fails it is lost; the others serve the new
  version.
- A lost engine must not serve: it is told of in the outcome until it is `forgotten`, and takes
  part again only through a `sync`.

A transfer that failed leaves its group unusable, so a group is used again only after a success,
and only for the same members. Nothing here knows of Ray: engines and trainer are Protocols.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Protocol, TypeVar

import msgspec

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import TrainerLost, WeightUpdateError, WrongVersion, described
from areal_ray.restoring import Undo, uncancelled
from areal_ray.types import WeightVersion
from areal_ray.weights.update import Backend, GroupMember, SendingPlan, WeightUpdate

T = TypeVar("T")

GRACE_S = 0.5


class Engine(Protocol):
    name: str
    process: str
    """No restart has the same again."""
    address: str
    workers: int
    """Tensor-parallel workers: each is a member of the group."""

    async def stage(self, encoded_update: bytes) -> None:
        """Begin to receive. What fails here needs no undoing, but bears it."""

    async def commit(self, version: WeightVersion) -> float:
        """What was staged serves from now on; returns how long generation stood still."""

    async def discard(self) -> str:
        """What was staged is let go; returns what had gone wrong in it. May come at any time."""


class Trainer(Protocol):
    async def plan(self) -> SendingPlan:
        """Comes when the trainer has no other work in hand."""

    async def send(self, member: GroupMember) -> WeightVersion:
        """Returns the version that was sent, once every member has said that it holds it.
        Raises `TrainerLost` if there is nobody who could send."""

    async def call_off(self, group_id: str) -> None:
        """A `send` to this group that still waits for somebody ends."""


class LostEngine(msgspec.Struct, frozen=True):
    """An engine that did not get an update: its process must not serve any more."""

    name: str
    process: str
    cause: str


class Outcome(msgspec.Struct, frozen=True):
    version: WeightVersion
    engines: int
    """How many serve the version now."""
    attempts: int
    staged_s: float
    """The last attempt."""
    committed_s: float
    longest_pause_s: float
    lost: list[LostEngine]

    def _repr_html_(self) -> str:
        from areal_ray.observability.html import outcome_html

        return outcome_html(self)


class Limits(msgspec.Struct, frozen=True):
    timeout_s: float
    """For each step of the way."""
    busy_timeout_s: float
    """For the trainer to end what it is at."""
    restore_timeout_s: float
    """For each thing that an abort undoes."""
    max_failures: int


class WeightUpdates:
    def __init__(self, trainer: Trainer, *, backend: Backend, verify: bool, limits: Limits) -> None:
        self._trainer = trainer
        self._backend: Backend = backend
        self._verify = verify
        self._limits = limits
        self._members: dict[str, Engine] = {}
        """Those that hold the current weights: an update is for all of them."""
        self._lost: dict[str, LostEngine] = {}
        # Unlike any other's: what an earlier manager's groups left at the meeting point is theirs.
        self._group_prefix = f"weights-{uuid.uuid4().hex[:8]}"
        self._groups_made = 0
        self._group_of: tuple[str, ...] = ()
        self.one_at_a_time = asyncio.Lock()
        """Held by an update or a sync; and by who must have neither meanwhile."""

    @property
    def members(self) -> list[str]:
        return list(self._members)

    @property
    def engines(self) -> list[Engine]:
        """Those that take part."""
        return list(self._members.values())

    @property
    def lost(self) -> list[LostEngine]:
        return list(self._lost.values())

    async def sync(self, engine: Engine) -> None:
        """Give one engine the trainer's weights, without a word to the others; from then on it
        takes part in every update."""
        async with self.one_at_a_time:
            known = self._members.get(engine.name)
            if known is not None and known.process == engine.process:
                return
            self.forget(engine.name)  # what an earlier process of that name was
            version, _ = await self._stage([engine])
            await self._commit([engine], version)
            if engine.name in self._lost:
                raise WeightUpdateError(self._lost.pop(engine.name).cause)
            self._members[engine.name] = engine

    def forget(self, name: str) -> None:
        """It takes part no more: it is lost, or has left."""
        self._members.pop(name, None)
        self._lost.pop(name, None)

    async def update(self, version: WeightVersion) -> Outcome:
        """Carry the trainer's weights to every engine that is there. With none left, the next to
        start will get them."""
        async with self.one_at_a_time:
            attempts, staged_s = await self._stage_on_all(version)
            began = time.perf_counter()
            pauses = await self._commit(self.engines, version)
            return Outcome(
                version=version,
                engines=len(pauses),
                attempts=attempts,
                staged_s=staged_s,
                committed_s=time.perf_counter() - began,
                longest_pause_s=max(pauses, default=0.0),
                lost=self.lost,
            )

    async def _stage_on_all(self, version: WeightVersion) -> tuple[int, float]:
        """Returns the number of attempts, and how long the last one took."""
        for attempt in range(1, self._limits.max_failures + 1):
            engines = self.engines
            if not engines:
                return attempt, 0.0
            try:
                _, staged_s = await self._stage(engines, version)
            except (TrainerLost, WrongVersion):
                raise  # another attempt would end the same way
            except WeightUpdateError as error:
                failure = error
                logs.warning("update {} was aborted: {}", version, error)
                is_last_but_one = 1 < attempt == self._limits.max_failures - 1
                if is_last_but_one and self.engines == engines:
                    await self._lose_who_fails_alone(engines)
            else:
                return attempt, staged_s
        raise failure

    async def _lose_who_fails_alone(self, engines: Sequence[Engine]) -> None:
        """A broken connection tells both ends of it, but not whose fault it is. If all fail, it is
        none of theirs."""
        failing = await self._failing_alone(engines)
        if len(failing) < len(engines):
            for engine, error in failing:
                self.lose(engine, f"{engine.name} can't receive: {described(error)}")

    async def _failing_alone(
        self, engines: Sequence[Engine]
    ) -> list[tuple[Engine, WeightUpdateError]]:
        """By halves, so that one among many is found in few transfers."""
        try:
            await self._stage(engines)
            self._group_of = ()  # which the abort closes
            await self._abort(engines)
        except TrainerLost:
            raise
        except WeightUpdateError as error:
            if len(engines) == 1:
                return [(engines[0], error)]
            middle = len(engines) // 2
            first = await self._failing_alone(engines[:middle])
            return first + await self._failing_alone(engines[middle:])
        return []

    async def _stage(
        self, engines: Sequence[Engine], expected: WeightVersion | None = None
    ) -> tuple[WeightVersion, float]:
        """Returns the version that was sent, and how long it took. If it fails, all is undone."""
        began = time.perf_counter()
        async with Undo(timeout_s=2 * self._limits.restore_timeout_s) as undo:
            try:
                version = await self._transfer(engines, undo)
            except WeightUpdateError:
                raise
            except Exception as error:
                raise WeightUpdateError(f"weights were not staged: {described(error)}") from error
            if expected not in (None, version):
                raise WrongVersion(f"the trainer sent version {version}, expected {expected}")
            undo.nothing_more()
        return version, time.perf_counter() - began

    async def _transfer(self, engines: Sequence[Engine], undo: Undo) -> WeightVersion:
        plan = await within(
            self._limits.busy_timeout_s,
            self._trainer.plan(),
            who="the trainer",
            doing="its sending plan (trainer.step_timeout_s)",
        )
        begun: list[Engine] = []
        sender = self._sender(plan, engines)
        sending = asyncio.ensure_future(self._trainer.send(sender))
        # In the order in which they unblock each other, which is from the last to the first: those
        # who wait for others to come, the engines, and the trainer once an engine has hung up.
        undo.later(f"the end of {sender.group_id}", lambda: self._until_ended(sending))
        undo.later("the abort", lambda: self._abort(begun))
        undo.later(f"calling {sender.group_id} off", lambda: self._call_off(sender))
        # Shielded: its end is awaited once more, when the group is ended.
        sent = self._within(asyncio.shield(sending), "the trainer", "sending weights")
        staged: dict[str, Coroutine[object, object, None]] = {}
        rank = 1
        for engine in engines:
            begun.append(engine)
            update = WeightUpdate(
                member=msgspec.structs.replace(sender, rank=rank, address=engine.address),
                manifest=plan.manifest,
                verify=self._verify,
            )
            staging = engine.stage(msgspec.msgpack.encode(update))
            staged[engine.name] = self._within(staging, engine.name, "staging weights")
            rank += engine.workers
        failures = await _failures_of(staged, sent)
        for engine in engines:
            if engine.name in failures:
                cause = f"{engine.name} did not stage: {described(failures[engine.name])}"
                self.lose(engine, cause)
        if failures:
            raise next(iter(failures.values()))
        return sending.result()

    async def _commit(self, engines: Sequence[Engine], version: WeightVersion) -> list[float]:
        """The pauses of those that serve the version now; who does not is lost. Not cut short by
        a cancellation: half a fleet of each version would be left, and nobody who knows."""
        return await uncancelled(self._commit_all(engines, version))

    async def _commit_all(self, engines: Sequence[Engine], version: WeightVersion) -> list[float]:
        commits = (
            self._within(engine.commit(version), engine.name, f"committing version {version}")
            for engine in engines
        )
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
        pauses = []
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                cause = f"{engine.name} did not commit version {version}: {described(outcome)}"
                self.lose(engine, cause)
            else:
                pauses.append(outcome)
        return pauses

    async def _abort(self, begun: Sequence[Engine]) -> None:
        outcomes = await asyncio.gather(*map(self._discard, begun), return_exceptions=True)
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise WeightUpdateError("; ".join(failures))

    async def _discard(self, engine: Engine) -> None:
        """Who can't is lost; also when there was no time to hear of it."""
        try:
            trouble = await within(
                self._limits.restore_timeout_s,
                engine.discard(),
                who=engine.name,
                doing="discarding staged weights",
            )
        except BaseException as error:
            cause = f"{engine.name} could not abort an update: {described(error)}"
            self.lose(engine, cause)
            raise WeightUpdateError(cause) from error
        if trouble:
            logs.warning("{} after an aborted update: {}", engine.name, trouble)

    def lose(self, engine: Engine, cause: str) -> None:
        """It must not serve as it is."""
        self._members.pop(engine.name, None)
        self._lost[engine.name] = LostEngine(engine.name, engine.process, cause)

    def _sender(self, plan: SendingPlan, engines: Sequence[Engine]) -> GroupMember:
        """The trainer's place in the group: the last one, if it was of the same engines."""
        processes = tuple(engine.process for engine in engines)
        if processes != self._group_of:
            self._group_of = processes
            self._groups_made += 1
        return GroupMember(
            host=plan.host,
            port=plan.port,
            address=plan.host,
            group_id=f"{self._group_prefix}-{self._groups_made}",
            rank=0,
            world_size=1 + sum(engine.workers for engine in engines),
            backend=self._backend,
            timeout_s=self._limits.timeout_s,
        )

    async def _call_off(self, sender: GroupMember) -> None:
        """A group that a transfer failed in is never used again: all meet under a new name."""
        self._group_of = ()
        await self._trainer.call_off(sender.group_id)

    async def _until_ended(self, sending: Awaitable[WeightVersion]) -> None:
        """The trainer is done with this group, and can send to the next."""
        await asyncio.gather(sending, return_exceptions=True)

    async def _within(self, call: Awaitable[T], who: str, doing: str) -> T:
        limit = f"{doing} (weights.timeout_s)"
        return await within(self._limits.timeout_s, call, who=who, doing=limit)


async def _failures_of(
    staged: dict[str, Coroutine[object, object, None]],
    sent: Coroutine[object, object, WeightVersion],
) -> dict[str, BaseException]:
    """Until all are done, or one has failed: who, and how. An engine that hangs up breaks the
    trainer's sending: it is given a moment to say why, and is then the first."""
    calls = {who: asyncio.ensure_future(call) for who, call in staged.items()}
    sending = asyncio.ensure_future(sent)
    everybody = {**calls, "": sending}
    try:
        await asyncio.wait(everybody.values(), return_when=asyncio.FIRST_EXCEPTION)
        if any(call.done() and call.exception() for call in everybody.values()):
            await asyncio.wait(calls.values(), timeout=GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for call in everybody.values():
            call.cancel()
        await asyncio.gather(*everybody.values(), return_exceptions=True)
    failures = {
        who: call.exception()
        for who, call in everybody.items()
        if not call.cancelled() and call.exception() is not None
    }
    if isinstance(failures.get(""), TrainerLost):
        return {"": failures[""]}  # whatever the engines say, that is why
    return failures
