from __future__ import annotations

import asyncio

import pytest

from areal_ray.errors import RestoreError
from areal_ray.restoring import Undo, uncancelled


class Steps:
    def __init__(self) -> None:
        self.done: list[str] = []

    async def do(self, what: str) -> None:
        await asyncio.sleep(0)
        self.done.append(what)

    async def fail(self, what: str) -> None:
        await self.do(what)
        raise RuntimeError(f"no {what}")

    async def hang(self) -> None:
        await asyncio.Event().wait()


async def test_what_was_acquired_is_given_back_in_reverse_order() -> None:
    steps = Steps()
    with pytest.raises(ValueError, match="half-way"):
        async with Undo(timeout_s=5) as undo:
            undo.later("a", lambda: steps.do("a"))
            undo.later("b", lambda: steps.do("b"))
            raise ValueError("half-way")
    assert steps.done == ["b", "a"]


async def test_what_is_to_stay_is_not_undone() -> None:
    steps = Steps()
    async with Undo(timeout_s=5) as undo:
        undo.later("a", lambda: steps.do("a"))
        undo.nothing_more()
    assert steps.done == []


async def test_a_failing_and_a_hanging_restore_keep_no_other_from_running() -> None:
    steps = Steps()
    with pytest.raises(ValueError, match="half-way") as raised:
        async with Undo(timeout_s=0.05) as undo:
            undo.later("resuming", lambda: steps.do("resume"))
            undo.later("waking", lambda: steps.fail("wake"))
            undo.later("hanging up", steps.hang)
            raise ValueError("half-way")
    assert steps.done == ["wake", "resume"]
    assert raised.value.__notes__ == [
        "and then, hanging up failed: DeadlineExceeded: a restore did not finish hanging up "
        "within 0.05 s",
        "and then, waking failed: RuntimeError: no wake",
    ]


async def test_with_no_other_error_a_failing_restore_is_the_error() -> None:
    steps = Steps()
    with pytest.raises(RestoreError, match="resuming failed: RuntimeError: no resume"):
        async with Undo(timeout_s=5) as undo:
            undo.later("waking", lambda: steps.do("wake"))
            undo.later("resuming", lambda: steps.fail("resume"))
    assert steps.done == ["resume", "wake"]


async def test_a_cancellation_waits_for_the_restores() -> None:
    steps, gate, is_in = Steps(), asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        is_in.set()
        await gate.wait()
        await steps.do("resume")

    async def work() -> None:
        async with Undo(timeout_s=5) as undo:
            undo.later("waking", lambda: steps.do("wake"))
            undo.later("resuming", slowly)
            await steps.hang()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await is_in.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.done == ["resume", "wake"]


async def test_what_may_not_be_cancelled_ends_and_then_the_cancellation_is_raised() -> None:
    steps, gate = Steps(), asyncio.Event()

    async def commit() -> None:
        await gate.wait()
        await steps.do("commit")

    task = asyncio.ensure_future(uncancelled(commit()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.done == ["commit"]


async def test_what_may_not_be_cancelled_gives_its_result_and_its_error() -> None:
    async def three() -> int:
        return 3

    assert await uncancelled(three()) == 3
    with pytest.raises(RuntimeError, match="no more"):
        await uncancelled(Steps().fail("more"))
