from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvloop
from loguru import logger

from areal_ray import logs
from areal_ray.observability.loop_health import LagWindow, LoopHealth, StallLog

BLAMED = "in hold_the_loop\n"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class SetClock:
    """Shows the time it was set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is logged, one entry a message."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message)), format="{level} {message}")
    yield messages
    logger.remove(sink)


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loop of ")]


def wait_until_no_watchdog_is_left() -> None:
    for watchdog in watchdogs():
        watchdog.join(timeout=30)
        assert not watchdog.is_alive()


@pytest.fixture(autouse=True)
def _no_watchdog_outlives_its_test() -> Iterator[None]:
    yield
    wait_until_no_watchdog_is_left()


def hold_the_loop() -> None:
    time.sleep(0.3)


def watched(who: str = "actor", **settings: float) -> LoopHealth:
    health = LoopHealth(who=who, limit_s=0.05, every_s=0.01, **settings)
    health.start()
    return health


def test_percentiles_are_of_the_lags_in_the_window() -> None:
    window = LagWindow(every_s=1.0, size=101)
    for lag_ms in reversed(range(101)):
        window.add(lag_ms / 1e3)
    report = window.report("actor")
    # 0, 1 ... 100 ms: the value at rank p * (101 - 1) is p itself.
    assert (report.p50_ms, report.p90_ms, report.p99_ms) == pytest.approx((50, 90, 99))
    assert (report.max_ms, report.worst_ms, report.samples) == pytest.approx((100, 100, 101))


def test_old_lags_leave_the_window_but_the_worst_is_kept() -> None:
    window = LagWindow(every_s=1.0, size=4)
    window.add(0.9, "held here")
    for lag_s in (0.1, 0.2, 0.3, 0.4):
        window.add(lag_s)
    report = window.report("actor")
    # 100, 200, 300 and 400 ms are left: the median is half way between 200 and 300.
    assert (report.p50_ms, report.max_ms) == pytest.approx((250, 400))
    assert (report.worst_ms, report.worst_stack, report.samples) == (900, "held here", 5)


def test_without_a_sample_there_are_zeros() -> None:
    report = LoopHealth(who="actor").report()
    assert (report.who, report.samples, report.p99_ms, report.worst_stack) == ("actor", 0, 0.0, "")


def test_a_stall_counts_once_for_each_tick_that_was_due_in_it() -> None:
    window = LagWindow(every_s=0.25)
    window.add(1.0)
    # Due at 0, 0.25, 0.5, 0.75 and 1 s, all at 1 s: 1000, 750, 500, 250 and 0 ms late.
    report = window.report("actor")
    assert (report.samples, report.p50_ms, report.max_ms) == (5, 500, 1000)
    # Rank 0.9 * 4 = 3.6: 750 + 0.6 * 250.
    assert report.p90_ms == pytest.approx(900)


def test_one_stall_of_five_seconds_shows_in_the_p99_of_a_minute() -> None:
    window = LagWindow(every_s=0.125)
    window.add(5.0)  # 5.0 / 0.125 + 1 = 41 of the 480 ticks of a minute.
    for _ in range(480 - 41):
        window.add(0.0)
    report = window.report("actor")
    # Rank 0.99 * 479 = 474.21, where 479 is 5000 ms, 475 is 4500 ms and 474 is 4375 ms.
    assert report.samples == 480
    assert report.p99_ms == pytest.approx(4375 + 0.21 * 125)
    assert report.p90_ms == 0


def test_a_stall_longer_than_the_window_fills_it_with_its_longest_lags() -> None:
    window = LagWindow(every_s=1.0, size=4)
    window.add(1e9)
    report = window.report("actor")
    assert (report.samples, report.max_ms) == (4, 1e12)
    assert report.p50_ms == pytest.approx(1e12 - 1500)


async def test_a_late_tick_counts_before_it_has_come_and_only_once() -> None:
    clock = SetClock()
    health = LoopHealth(who="actor", limit_s=3600.0, every_s=0.25, clock=clock)
    health.start()
    assert health.report().samples == 0
    clock.now += 1.25  # It was due after 0.25.
    assert (health.report().samples, health.report().max_ms) == (5, 1000)
    async with asyncio.timeout(30):
        while health.report().samples == 5:
            await asyncio.sleep(0.01)
    # The clock stands still, so ticks after it are on time.
    assert health.report().worst_ms == 1000
    assert health.report().max_ms == 1000
    health.close()


async def test_reset_forgets_the_lags_and_one_that_is_not_over() -> None:
    clock = SetClock()
    health = LoopHealth(who="actor", limit_s=3600.0, every_s=0.25, clock=clock)
    health.start()
    clock.now += 5.0
    assert health.report().worst_ms == 4750
    health.reset()
    assert (health.report().samples, health.report().worst_ms) == (0, 0)
    clock.now += 0.5
    assert (health.report().samples, health.report().worst_ms) == (2, 250)
    health.close()
    assert (health.report().samples, health.report().worst_ms) == (2, 250)
    health.reset()
    assert health.report().samples == 0


async def test_the_log_names_the_function_that_holds_the_loop_while_it_does(
    told: list[str],
) -> None:
    health = watched("trainer 3", quiet_s=0.0)
    async with asyncio.timeout(60):
        while not any(BLAMED in message for message in told):
            hold_the_loop()
            held = health.report()
            await asyncio.sleep(0.02)
    assert held.max_ms >= 250
    assert health.report().worst_ms >= 250
    health.close()
    wait_until_no_watchdog_is_left()
    at = next(i for i, message in enumerate(told) if BLAMED in message)
    assert told[at].startswith("WARNING trainer 3: the event loop is held for ")
    assert told[at + 1].startswith("WARNING trainer 3: the event loop went on after ")


async def test_the_report_has_the_stack_of_the_worst_stall() -> None:
    health = watched()
    async with asyncio.timeout(60):
        while BLAMED not in health.report().worst_stack:
            health.reset()
            hold_the_loop()
            await asyncio.sleep(0.02)
    health.close()
    assert BLAMED in health.report().worst_stack


async def test_a_call_that_keeps_the_gil_is_told_as_well(told: list[str]) -> None:
    health = watched(quiet_s=0.0)
    ctypes.PyDLL(None).usleep(300_000)
    await asyncio.sleep(0.02)
    assert health.report().worst_ms >= 250
    health.close()
    wait_until_no_watchdog_is_left()
    # The watchdog was held too: the stack is of just after, or there is none.
    assert any("is held for" in message for message in told)
    assert any("went on after" in message for message in told)


def test_a_stall_soon_after_another_is_counted_and_not_told(told: list[str]) -> None:
    log = StallLog("actor", quiet_s=30.0)
    log.held(100.0, 99.5, 0.5, "first\n")
    log.went_on(99.5, 2.0)
    for now in (110.0, 120.0, 129.9):
        log.held(now, now - 0.5, 0.5, "silent\n")
        log.went_on(now - 0.5, 1.0)
    log.held(130.0, 129.5, 0.5, "fifth\n")
    log.held(160.0, 159.5, 0.5, "sixth\n")
    first, first_end, fifth, sixth = [message.split("\n")[:2] for message in told]
    is_held = "WARNING actor: the event loop is held for 0.50 s so far"
    assert first == [f"{is_held}, here:", "first"]
    assert first_end[0] == "WARNING actor: the event loop went on after 2.00 s"
    assert fifth == [f"{is_held} (3 more since the last one told), here:", "fifth"]
    assert sixth == [f"{is_held}, here:", "sixth"]


@pytest.mark.parametrize("end", [LoopHealth.reset, LoopHealth.close])
async def test_a_long_stall_is_told_once_and_its_end_once(
    end: Callable[[LoopHealth], None], told: list[str]
) -> None:
    clock = SetClock()
    health = LoopHealth(who="actor", limit_s=0.02, every_s=3600.0, quiet_s=0.0, clock=clock)
    health.start()
    clock.now += 3600.5
    async with asyncio.timeout(30):
        while not told:
            await asyncio.sleep(0.01)
    clock.now += 1.0
    await asyncio.sleep(0.1)  # Time for the watchdog to tell it again, if it would.
    end(health)
    health.close()
    wait_until_no_watchdog_is_left()
    held, went_on = told
    assert "is held for 0.50 s so far" in held
    assert "went on after 1.50 s" in went_on


async def test_a_stall_that_ended_before_the_watchdog_woke_is_told_without_a_stack(
    told: list[str],
) -> None:
    clock = SetClock()
    health = LoopHealth(who="actor", limit_s=60.0, every_s=1.0, clock=clock)
    health.start()
    clock.now += 91.0
    health.close()
    wait_until_no_watchdog_is_left()
    held, went_on = told
    assert "is held for 90.00 s so far" in held
    assert "not seen" in held
    assert "went on after 90.00 s" in went_on
    assert (health.report().worst_ms, health.report().worst_stack) == (90_000, "")


async def test_the_watchdog_outlives_a_log_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(message: str, *arguments: object) -> None:
        failed.set()
        raise OSError("no space left on device")

    monkeypatch.setattr(logs, "warning", fail)
    health = watched()
    async with asyncio.timeout(60):
        while not failed.is_set():
            hold_the_loop()
            await asyncio.sleep(0.02)
    assert len(watchdogs()) == 1
    async with asyncio.timeout(60):
        while BLAMED not in health.report().worst_stack:
            health.reset()
            hold_the_loop()
            await asyncio.sleep(0.02)
    health.close()
    wait_until_no_watchdog_is_left()


@pytest.mark.parametrize("new_loop", LOOPS)
def test_close_ends_the_thread_and_the_timer(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def close_while_the_loop_runs() -> None:
        health = watched()
        assert len(watchdogs()) == 1
        async with asyncio.timeout(30):
            while health.report().samples < 3:
                await asyncio.sleep(0.01)
        health.close()
        health.close()
        wait_until_no_watchdog_is_left()
        samples = health.report().samples
        await asyncio.sleep(0.05)  # Time for five ticks, if there were any.
        assert health.report().samples == samples

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(close_while_the_loop_runs())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_nothing_is_left_when_the_loop_closes_first(
    new_loop: Callable[[], asyncio.AbstractEventLoop], told: list[str]
) -> None:
    clock = SetClock()

    async def leave_it_running() -> LoopHealth:
        health = LoopHealth(who="actor", limit_s=0.4, every_s=0.01, clock=clock)
        health.start()
        async with asyncio.timeout(30):
            while health.report().samples < 3:
                await asyncio.sleep(0.01)
        return health

    with asyncio.Runner(loop_factory=new_loop) as runner:
        health = runner.run(leave_it_running())
    clock.now += 3600.0  # A loop that is closed is not late.
    wait_until_no_watchdog_is_left()
    ended = health.report()
    assert (ended.worst_ms, told) == (0, [])
    health.close()
    assert health.report() == ended


def test_a_process_that_closes_nothing_ends_without_a_word() -> None:
    script = """
import asyncio
from areal_ray.observability.loop_health import LoopHealth

async def main():
    LoopHealth(who="actor", limit_s=3600.0).start()
    await asyncio.sleep(0.2)

asyncio.run(main())
loop = asyncio.new_event_loop()
loop.run_until_complete(main())  # Nor is this loop ever closed.
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


async def test_it_starts_only_once() -> None:
    health = watched()
    with pytest.raises(RuntimeError, match="once"):
        health.start()
    health.close()
