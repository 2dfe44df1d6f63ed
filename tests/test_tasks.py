from __future__ import annotations

import asyncio

import pytest

from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, EngineError, described
from areal_ray.routing import LeastLoaded
from areal_ray.stopping import StopRequested, StopSignals
from areal_ray.tasks import Supervisor, guarded


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(message: str) -> None:
    raise ValueError(message)


async def give(value: int) -> int:
    return value


async def test_the_first_task_to_fail_is_told_to_whoever_asks() -> None:
    supervisor = Supervisor()
    supervisor.spawn(forever(), name="a")
    supervisor.spawn(fail("first"), name="b")
    await asyncio.sleep(0)
    supervisor.spawn(fail("second"), name="c")
    with pytest.raises(ValueError, match="first"):
        await within(5, supervisor.failed(), who="the test", doing="waiting")
    await supervisor.close()


async def test_closing_cancels_and_awaits_every_task() -> None:
    ended = []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    supervisor = Supervisor()
    supervisor.spawn(slow_to_end(), name="a")
    await asyncio.sleep(0)
    await supervisor.close()
    assert ended == [True]


async def test_guarded_work_gives_its_result() -> None:
    assert await guarded(give(3), forever()) == 3


async def test_a_guard_that_raises_ends_the_work() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    with pytest.raises(ValueError, match="stop it"):
        await guarded(work(), forever(), fail("stop it"))
    assert cancelled.is_set()


async def test_a_guard_that_returns_lets_the_work_go_on() -> None:
    async def work() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def content() -> None:
        pass

    assert await guarded(work(), content(), forever()) == 7


async def test_the_deadline_names_who_did_not_answer() -> None:
    with pytest.raises(DeadlineExceeded) as late:
        await within(0.01, forever(), who="engine-3", doing="staging version 7")
    assert str(late.value) == "engine-3 did not finish staging version 7 within 0.01 s"


async def test_a_timeout_of_the_work_itself_stays_what_it_is() -> None:
    async def work() -> None:
        raise TimeoutError("inner")

    with pytest.raises(TimeoutError, match="inner") as error:
        await within(5, work(), who="engine-3", doing="anything")
    assert not isinstance(error.value, DeadlineExceeded)


async def test_a_stop_request_gives_up_what_is_awaited() -> None:
    with StopSignals() as stop:
        asyncio.get_running_loop().call_soon(stop.request)
        with pytest.raises(StopRequested):
            await stop.race(forever())


def test_work_goes_to_the_least_loaded_and_is_given_back_on_error() -> None:
    balancer = LeastLoaded(["a", "b"])
    with balancer.lease(weight=5) as first:
        with balancer.lease(weight=1) as second, balancer.lease(weight=1) as third:
            assert (first, second, third) == ("a", "b", "b")
            assert balancer.loads == (5, 2)
        with pytest.raises(RuntimeError), balancer.lease(weight=9):
            raise RuntimeError
    assert balancer.loads == (0, 0)


def test_the_root_cause_is_found_under_its_wrappings() -> None:
    inner = EngineError("engine-1 failed: out of memory")
    remote = RuntimeError("a long remote traceback")
    remote.cause = inner
    assert described(ExceptionGroup("several", [remote])) == (
        "EngineError: engine-1 failed: out of memory"
    )
