"""Calls to an actor that Ray may be restarting at the moment, and the end of one's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray.deadlines import within
from areal_ray.errors import NotReady

T = TypeVar("T")

RETRY_EVERY_S = 0.2
ASK_TIMEOUT_S = 60.0
"""For an answer that should come at once."""

KILL_TIMEOUT_S = 60.0

ON_ITS_WAY_BACK = (ActorUnavailableError, NotReady)
"""What a call raises while its actor is being restarted, or has yet to be told what to do."""


async def until_back(
    timeout_s: float, call: Callable[[], Awaitable[T]], *, who: str, doing: str
) -> T:
    """Call, and call again while the actor is on its way back, within one time limit.

    What is called so may run twice, and must allow for it. An actor that is gone for good
    raises at once.
    """

    async def again_and_again() -> T:
        while True:
            try:
                return await call()
            except ON_ITS_WAY_BACK:
                await asyncio.sleep(RETRY_EVERY_S)

    return await within(timeout_s, again_and_again(), who=who, doing=doing)


async def end_process(actor: ActorHandle, *, may_restart: bool) -> None:
    """Kill it; returns when the process is gone: one that lingers would take the next call to it.

    The actor needs a method `until_death`, which never returns.
    """
    death = actor.until_death.remote()
    await asyncio.to_thread(ray.kill, actor, no_restart=not may_restart)
    with contextlib.suppress(ActorUnavailableError, ActorDiedError):
        await within(KILL_TIMEOUT_S, death, who="an actor's process", doing="dying")
