"""Calls to an actor that Ray may be restarting at the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import ActorUnavailableError

from areal_ray.deadlines import within
from areal_ray.errors import NotReady

T = TypeVar("T")

RETRY_EVERY_S = 0.2
ASK_TIMEOUT_S = 60.0
"""For an answer that should come at once."""

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
