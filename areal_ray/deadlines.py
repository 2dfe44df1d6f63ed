"""An await with a time limit that names who did not answer.

A hang is the worst failure of a long run: nothing is printed and nobody is to blame. So whoever
asks something of another process sets a limit with `within`, and the error past it says who was
asked to do what, and for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from areal_ray.errors import DeadlineExceeded

T = TypeVar("T")


async def within(timeout_s: float, awaitable: Awaitable[T], *, who: str, doing: str) -> T:
    """Await; past `timeout_s`, cancel it and raise `DeadlineExceeded` naming `who`.

    A `TimeoutError` raised by the awaited work itself stays what it is.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await awaitable
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(who, doing, timeout_s) from error
        raise
