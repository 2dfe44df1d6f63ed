"""A worker's calls to engines: one per request, with what an engine has made so far kept here.

An engine that dies with its process can't tell any more what it had made. So the worker asks
each engine that it has requests at, once in a while and for all of them in one call; what it has
learnt by then is what a request goes on from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import ArealRayError, DeadlineExceeded, EngineNotServing, described
from areal_ray.generation.continuation import Continuation
from areal_ray.types import GenerationRequest, GenerationResult


class EngineLost(ArealRayError):
    """An engine did not finish a request, which can go on at another."""


@dataclass
class _Line:
    """One engine, and the requests that it works on."""

    handle: ActorHandle
    requests: dict[str, Continuation] = field(default_factory=dict)
    asking: asyncio.Task[None] | None = None


class EngineCalls:
    def __init__(
        self,
        find: Callable[[str], Awaitable[ActorHandle]],
        *,
        request_timeout_s: float,
        progress_every_s: float,
    ) -> None:
        """`find` gives the engine of a name: asked once for each, since a handle costs Ray more
        to send than all else that an assignment holds."""
        self._find = find
        self._request_timeout_s = request_timeout_s
        self._progress_every_s = progress_every_s
        self._handles: dict[str, ActorHandle] = {}
        self._lines: dict[str, _Line] = {}

    async def generate(self, name: str, rest: GenerationRequest, into: Continuation) -> None:
        """Let an engine generate the rest. Past `EngineLost`, all that is known is in `into`."""
        if name not in self._handles:
            self._handles[name] = await self._find(name)
        handle = self._handles[name]
        line = self._lines.setdefault(name, _Line(handle))
        line.requests[rest.request_id] = into
        if line.asking is None:
            line.asking = asyncio.create_task(self._ask_for_progress(line))
            line.asking.add_done_callback(partial(_tell_failure, name))
        try:
            result = await self._answer(name, handle, rest)
        except (RayActorError, EngineNotServing, DeadlineExceeded) as error:
            into.add_what_is_known()
            raise EngineLost(f"{name}: {described(error)}") from error
        finally:
            del line.requests[rest.request_id]
            if not line.requests and self._lines.get(name) is line:
                del self._lines[name]
                line.asking.cancel()
        into.add(result)
        if result.interrupted:
            raise EngineLost(result.interrupted)

    async def _answer(
        self, name: str, handle: ActorHandle, rest: GenerationRequest
    ) -> GenerationResult:
        call = handle.generate.remote(rest)
        try:
            return await within(
                self._request_timeout_s,
                call,
                who=name,
                doing=f"generating {rest.request_id} (generation.request_timeout_s)",
            )
        except (DeadlineExceeded, asyncio.CancelledError):
            # Giving up the wait does not end the call: the engine is to stop working on it.
            ray.cancel(call)
            raise

    async def _ask_for_progress(self, line: _Line) -> None:
        while True:
            await asyncio.sleep(self._progress_every_s)
            known = {request_id: c.known() for request_id, c in line.requests.items()}
            try:
                news = await line.handle.progress.remote(known)
            except RayActorError:
                return  # each request learns it from its own call
            for request_id, parts in news.items():
                if request_id in line.requests:
                    line.requests[request_id].learn(parts)


def _tell_failure(name: str, asking: asyncio.Task[None]) -> None:
    """No request depends on it, but more would be lost with the engine: it must not go unseen."""
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logs.warning("{} is not asked for its progress any more: {}", name, described(error))
