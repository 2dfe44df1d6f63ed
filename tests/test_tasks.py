from __future__ import annotations

import asyncio
import gc
import random
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RaySystemError

from areal_ray.deadlines import within
from areal_ray.errors import ArealRayError, DeadlineExceeded, EngineError, described
from areal_ray.stopping import StopRequested, StopSignals
from areal_ray.tasks import (
    SPAWNED,
    Closing,
    Ended,
    RunnerClosed,
    TaskCancelled,
    TaskRunner,
    guarded,
)


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(message: str) -> None:
    raise ValueError(message)


async def give(value: int) -> int:
    return value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


class Gated:
    """A task that runs until the test says how it ends: `open` it, or `break_` it."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self._gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[object] | None = None

    async def __call__(self) -> int:
        self.task = asyncio.current_task()
        return await asyncio.shield(self._gate)

    @property
    def started(self) -> bool:
        return self.task is not None

    def open(self) -> None:
        self._gate.set_result(self._value)

    def break_(self, error: Exception) -> None:
        self._gate.set_exception(error)


class Stubborn:
    """Swallows its cancellation, cleans up until `clean_up_done`, then ends by calling `then`."""

    def __init__(self, then: Callable[[], int]) -> None:
        self._then = then
        self.cancellations = 0
        self.cleaned_up = False
        self.clean_up_done = asyncio.Event()

    async def __call__(self) -> int:
        try:
            await forever()
        except asyncio.CancelledError:
            self.cancellations += 1
        try:
            await self.clean_up_done.wait()
        except asyncio.CancelledError:
            self.cancellations += 1
            raise
        self.cleaned_up = True
        return self._then()


def ends_cancelled() -> int:
    raise asyncio.CancelledError


def ends_badly() -> int:
    raise ValueError("the clean-up failed")


@pytest.fixture
async def runner() -> AsyncIterator[TaskRunner[int]]:
    runner: TaskRunner[int] = TaskRunner()
    yield runner
    await within(5, runner.close(), who="the runner", doing="closing")


def submit_gated(runner: TaskRunner[int], count: int) -> list[Gated]:
    tasks = [Gated(value) for value in range(count)]
    for value, task in enumerate(tasks):
        runner.submit(task, name=f"task {value}")
    return tasks


async def taken(runner: TaskRunner[int]) -> Ended[int]:
    return await runner.next_ended(timeout_s=5)


@contextmanager
def no_noise() -> Iterator[None]:
    """Nothing is said behind the owner's back: no warning, nothing for the loop's handler."""
    heard: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
        gc.collect()
    assert not heard


async def test_what_is_submitted_tells_its_name_number_and_value(runner: TaskRunner[int]) -> None:
    assert runner.submit(lambda: give(7), name="seven") == 0
    ended = await taken(runner)
    assert ended == Ended(name="seven", number=0, value=7, error=None)
    assert ended.result() == 7
    assert runner.submit(lambda: give(8), name="eight") == 1


async def test_at_most_limit_run_and_the_others_wait_in_submission_order() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=2)
    tasks = submit_gated(runner, 5)
    assert (runner.running, runner.waiting) == (2, 3)
    await until(lambda: tasks[1].started)
    for expected_next in (2, 3, 4):
        tasks[expected_next - 2].open()
        await until(lambda: tasks[expected_next].started)  # noqa: B023 - awaited at once
        assert [task.started for task in tasks] == [n <= expected_next for n in range(5)]
        assert runner.running == 2
    await runner.close()


async def test_without_a_limit_everything_runs_at_once(runner: TaskRunner[int]) -> None:
    tasks = submit_gated(runner, 100)
    assert (runner.running, runner.waiting) == (100, 0)
    await until(lambda: all(task.started for task in tasks))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_lets_nothing_run_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit is {limit}"):
        TaskRunner(limit=limit)


async def test_an_error_takes_neither_the_runner_nor_its_siblings_down(
    runner: TaskRunner[int],
) -> None:
    broken, whole = submit_gated(runner, 2)
    broken.break_(ValueError("only mine"))
    ended = await taken(runner)
    assert (ended.number, str(ended.error)) == (0, "only mine")
    whole.open()
    assert (await taken(runner)).result() == 1
    runner.submit(lambda: give(2), name="later")
    assert (await taken(runner)).result() == 2


async def test_the_error_is_raised_with_the_traceback_of_where_it_happened(
    runner: TaskRunner[int],
) -> None:
    async def deep_inside() -> int:
        raise ValueError("here")

    runner.submit(deep_inside, name="a")
    ended = await taken(runner)
    with pytest.raises(ValueError, match="here") as raised:
        ended.result()
    assert raised.value is ended.error
    assert "deep_inside" in [
        frame.name for frame in traceback.extract_tb(raised.value.__traceback__)
    ]


async def test_a_factory_that_raises_is_an_outcome_and_gives_its_slot_back() -> None:
    def broken_factory() -> Coroutine[object, object, int]:
        raise ValueError("no coroutine")

    runner: TaskRunner[int] = TaskRunner(limit=1)
    runner.submit(broken_factory, name="broken")
    runner.submit(lambda: give(1), name="next")
    assert str((await taken(runner)).error) == "no coroutine"
    assert (await taken(runner)).result() == 1


async def test_none_is_a_value_like_any_other() -> None:
    async def nothing() -> None:
        pass

    runner: TaskRunner[None] = TaskRunner()
    runner.submit(nothing, name="a")
    assert (await runner.next_ended(timeout_s=5)).result() is None


async def test_a_task_started_by_the_end_of_another_sees_the_context_of_its_submitter() -> None:
    who: ContextVar[int] = ContextVar("who")

    async def ask() -> int:
        return who.get()

    runner: TaskRunner[int] = TaskRunner(limit=1)
    for value in range(3):
        who.set(value)
        runner.submit(ask, name=f"asks {value}")
    assert [ended.result() async for ended in runner.results()] == [0, 1, 2]


async def test_a_task_that_cancels_itself_is_told_of_and_not_waited_for_for_ever(
    runner: TaskRunner[int],
) -> None:
    async def cancels_itself() -> int:
        raise asyncio.CancelledError("of its own accord")

    runner.submit(cancels_itself, name="gone")
    ended = await taken(runner)
    assert isinstance(ended.error, TaskCancelled)
    assert isinstance(ended.error, ArealRayError)
    assert isinstance(ended.error.__cause__, asyncio.CancelledError)
    assert str(ended.error) == (
        "task 'gone' was ended by CancelledError, which its runner did not ask for"
    )


async def test_an_error_that_is_no_exception_is_told_of_too(runner: TaskRunner[int]) -> None:
    class Unusual(BaseException):
        pass

    async def unusual() -> int:
        raise Unusual

    runner.submit(unusual, name="a")
    ended = await taken(runner)
    assert isinstance(ended.error, TaskCancelled)
    assert isinstance(ended.error.__cause__, Unusual)


@pytest.mark.parametrize("before_its_first_step", [True, False])
async def test_a_task_cancelled_from_outside_gives_its_slot_to_the_next(
    before_its_first_step: bool,
) -> None:
    runner: TaskRunner[int] = TaskRunner(limit=1)
    before = asyncio.all_tasks()
    first, second = submit_gated(runner, 2)
    (task,) = asyncio.all_tasks() - before
    if not before_its_first_step:
        await until(lambda: first.started)
    task.cancel()
    assert isinstance((await taken(runner)).error, TaskCancelled)
    await until(lambda: second.started)
    assert first.started is not before_its_first_step
    assert (runner.running, runner.waiting) == (1, 0)
    await runner.close()


@pytest.mark.parametrize("seed", range(4))
async def test_thousands_of_random_cancellations_give_every_slot_back(seed: int) -> None:
    dice = random.Random(seed)
    runner: TaskRunner[int] = TaskRunner(limit=8)
    alive: list[asyncio.Task[object]] = []

    async def one(steps: int, fails: bool) -> int:
        task = asyncio.current_task()
        assert task is not None
        alive.append(task)
        for _ in range(steps):
            await asyncio.sleep(0)
        if fails:
            raise ValueError
        return steps

    for number in range(3000):
        steps, fails = dice.randrange(6), dice.random() < 0.2
        runner.submit(lambda s=steps, f=fails: one(s, f), name=f"{number}")
    outcomes: Counter[type | None] = Counter()
    while runner.running:
        assert runner.running <= 8
        for task in dice.sample(alive, k=min(len(alive), dice.randrange(4))):
            task.cancel()
        alive[:] = [task for task in alive if not task.done()]
        await asyncio.sleep(0)
    async for ended in runner.results():
        outcomes[type(ended.error)] += 1
    assert (runner.running, runner.waiting) == (0, 0)
    assert sum(outcomes.values()) == 3000
    # Each way of ending was really there.
    assert min(outcomes[TaskCancelled], outcomes[ValueError], outcomes[type(None)]) > 100


async def test_a_pause_stops_new_starts_and_what_runs_is_still_harvested() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=1)
    first, second = submit_gated(runner, 2)
    runner.pause()
    assert runner.paused
    first.open()
    assert (await taken(runner)).number == 0
    assert (runner.running, runner.waiting) == (0, 1)
    runner.resume()
    assert not runner.paused
    await until(lambda: second.started)
    await runner.close()


async def test_what_is_submitted_during_a_pause_starts_when_it_is_over(
    runner: TaskRunner[int],
) -> None:
    runner.pause()
    submit_gated(runner, 3)
    assert (runner.running, runner.waiting) == (0, 3)
    runner.resume()
    assert (runner.running, runner.waiting) == (3, 0)


async def test_a_resume_keeps_to_the_limit() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=2)
    runner.pause()
    submit_gated(runner, 5)
    runner.resume()
    assert (runner.running, runner.waiting) == (2, 3)
    await runner.close()


async def test_results_come_in_the_order_of_completion(runner: TaskRunner[int]) -> None:
    tasks = submit_gated(runner, 3)
    for number in (2, 0, 1):
        tasks[number].open()
        assert (await taken(runner)).number == number


async def test_in_submission_order_a_result_waits_for_its_predecessors(
    runner: TaskRunner[int],
) -> None:
    tasks = submit_gated(runner, 3)
    seen: list[int] = []

    async def take_all() -> None:
        async for ended in runner.results(order="submission"):
            seen.append(ended.number)  # noqa: PERF401 - one by one is what is looked at

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(take_all())
        tasks[2].open()
        tasks[1].break_(ValueError())
        await until(lambda: runner.running == 1)
        assert seen == []
        tasks[0].open()
    assert seen == [0, 1, 2]


async def test_waiting_for_a_predecessor_does_not_keep_the_loop_busy(
    runner: TaskRunner[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = submit_gated(runner, 2)
    second.open()
    await until(lambda: runner.running == 1)
    looks: list[str] = []
    take = runner._take
    monkeypatch.setattr(runner, "_take", lambda order: looks.append(order) or take(order))
    taker = asyncio.create_task(anext(aiter(runner.results(order="submission"))))
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(looks) == 1
    first.open()
    assert (await taker).number == 0


async def test_results_end_when_all_has_been_taken_also_what_came_meanwhile(
    runner: TaskRunner[int],
) -> None:
    runner.submit(lambda: give(3), name="three")
    seen = []
    async with asyncio.timeout(5):
        async for ended in runner.results():
            value = ended.result()
            seen.append(value)
            if value:
                runner.submit(lambda less=value - 1: give(less), name="one less")
    assert seen == [3, 2, 1, 0]
    assert [ended async for ended in runner.results()] == []


async def test_results_left_in_the_middle_stay_for_the_next_taker(runner: TaskRunner[int]) -> None:
    tasks = submit_gated(runner, 4)
    for left, number in ((3, 3), (2, 0), (1, 2), (0, 1)):
        tasks[number].open()
        await until(lambda: runner.running == left)  # noqa: B023 - awaited at once
    async for ended in runner.results(order="submission"):
        assert ended.number == 0
        break
    assert [ended.number async for ended in runner.results()] == [3, 2, 1]


async def test_takers_of_both_orders_share_the_results_and_all_come_to_an_end(
    runner: TaskRunner[int],
) -> None:
    tasks = submit_gated(runner, 50)
    seen: list[int] = []

    async def take_all(order: str) -> None:
        async for ended in runner.results(order=order):
            seen.append(ended.number)
            await asyncio.sleep(0)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for order in ("completion", "submission") * 3:
            group.create_task(take_all(order))
        for number in random.Random(1).sample(range(50), k=50):
            tasks[number].open()
            await asyncio.sleep(0)
    assert sorted(seen) == list(range(50))


async def test_a_timeout_is_the_builtin_one_and_loses_nothing(runner: TaskRunner[int]) -> None:
    (task,) = submit_gated(runner, 1)
    with pytest.raises(TimeoutError):
        await runner.next_ended(timeout_s=0)
    task.open()
    await until(lambda: runner.running == 0)
    assert (await runner.next_ended(timeout_s=0)).number == 0


@pytest.mark.parametrize("turns", range(8))
async def test_a_taker_cancelled_at_any_moment_of_the_delivery_loses_no_result(
    runner: TaskRunner[int], turns: int
) -> None:
    (task,) = submit_gated(runner, 1)
    await until(lambda: task.started)
    taker = asyncio.create_task(runner.next_ended())
    await asyncio.sleep(0)
    task.open()
    for _ in range(turns):
        await asyncio.sleep(0)
    taker.cancel()
    try:
        ended = await taker
    except asyncio.CancelledError:
        ended = await taken(runner)
    assert ended.number == 0


async def test_a_result_that_a_cancelled_taker_left_goes_to_another_who_waits(
    runner: TaskRunner[int],
) -> None:
    (task,) = submit_gated(runner, 1)
    await until(lambda: task.started)
    cancelled, patient = (asyncio.create_task(runner.next_ended()) for _ in range(2))
    await asyncio.sleep(0)
    task.open()
    # From here both are woken, and neither has had its turn.
    await until(lambda: runner.running == 0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await within(5, patient, who="the other taker", doing="taking")).number == 0


async def test_timeouts_at_any_moment_lose_no_result() -> None:
    dice = random.Random(3)
    runner: TaskRunner[int] = TaskRunner(limit=4)
    for number in range(500):
        runner.submit(lambda n=number: asyncio.sleep(dice.random() / 5000, n), name="a")
    seen: list[int] = []
    timeouts = 0
    async with asyncio.timeout(30):
        while len(seen) < 500:
            try:
                seen.append((await runner.next_ended(timeout_s=dice.random() / 5000)).result())
            except TimeoutError:
                timeouts += 1
    assert sorted(seen) == list(range(500))
    assert timeouts


async def test_the_first_vital_task_to_fail_is_told_to_whoever_asks(
    runner: TaskRunner[int],
) -> None:
    runner.spawn(forever, name="a")
    runner.spawn(lambda: fail("first"), name="b")
    await asyncio.sleep(0)
    runner.spawn(lambda: fail("second"), name="c")
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await within(5, runner.failed(), who="the test", doing="waiting")


async def test_a_failure_reaches_all_who_wait_also_after_one_gave_up(
    runner: TaskRunner[int],
) -> None:
    gate = asyncio.Event()

    async def fail_later() -> None:
        await gate.wait()
        raise ValueError("at last")

    with no_noise():
        runner.spawn(fail_later, name="a")
        gives_up, first, second = (asyncio.create_task(runner.failed()) for _ in range(3))
        await asyncio.sleep(0)
        gives_up.cancel()
        gate.set()
        outcomes = await asyncio.gather(gives_up, first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        asyncio.CancelledError,
        ValueError,
        ValueError,
    ]


async def test_a_failure_before_anybody_asks_is_neither_lost_nor_noisy() -> None:
    with no_noise():
        runner: TaskRunner[int] = TaskRunner()
        runner.spawn(lambda: fail("early"), name="a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="early"):
            await within(5, runner.failed(), who="the test", doing="waiting")
        unasked: TaskRunner[int] = TaskRunner()
        unasked.spawn(lambda: fail("nobody asks"), name="a")
        await unasked.close()
        del unasked


async def test_a_vital_task_that_vanishes_has_failed(runner: TaskRunner[int]) -> None:
    async def vanishes() -> None:
        raise asyncio.CancelledError

    runner.spawn(vanishes, name="loop")
    with pytest.raises(TaskCancelled, match="task 'loop' was ended by CancelledError"):
        await within(5, runner.failed(), who="the test", doing="waiting")


async def test_a_vital_task_that_returns_is_no_failure_and_leaves_no_result(
    runner: TaskRunner[int],
) -> None:
    async def done() -> None:
        pass

    runner.spawn(done, name="a")
    with pytest.raises(DeadlineExceeded):
        await within(0.01, runner.failed(), who="the runner", doing="failing")
    assert [ended async for ended in runner.results()] == []


async def test_a_vital_task_heeds_neither_the_limit_nor_the_pause() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=1)
    submit_gated(runner, 1)
    runner.pause()
    runner.spawn(lambda: fail("it ran"), name="a")
    with pytest.raises(ValueError, match="it ran"):
        await within(5, runner.failed(), who="the test", doing="waiting")
    assert runner.running == 1
    await runner.close()


async def test_vital_failures_after_the_first_are_told_at_closing() -> None:
    runner: TaskRunner[int] = TaskRunner()
    runner.spawn(lambda: fail("first"), name="a")
    runner.spawn(lambda: fail("second"), name="b")
    with pytest.raises(ValueError, match="first"):
        await runner.failed()
    (second,) = (await runner.close()).errors
    assert (second.name, second.number, str(second.error)) == ("b", SPAWNED, "second")


async def test_closing_tells_what_became_of_everything() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=2)
    with no_noise():
        tasks = submit_gated(runner, 5)
        tasks[0].open()
        await until(lambda: tasks[2].started)
        closing = await runner.close()
    assert closing == Closing(
        cancelled=("task 1", "task 2"),
        never_started=("task 3", "task 4"),
        untaken=(Ended(name="task 0", number=0, value=0, error=None),),
        errors=(),
    )
    assert not tasks[3].started
    assert (runner.running, runner.waiting) == (0, 0)
    assert await runner.close() is closing


async def test_closing_cancels_and_awaits_vital_tasks_too() -> None:
    ended = []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    runner: TaskRunner[int] = TaskRunner()
    runner.spawn(slow_to_end, name="a")
    await asyncio.sleep(0)
    assert await runner.close() == Closing((), (), (), ())
    assert ended == [True]


async def test_a_closed_runner_takes_no_work_and_gives_no_results() -> None:
    runner: TaskRunner[int] = TaskRunner()
    runner.submit(lambda: give(1), name="a")
    await until(lambda: runner.running == 0)
    await runner.close()
    with no_noise():
        with pytest.raises(RunnerClosed, match="does not take 'late'"):
            runner.submit(lambda: give(2), name="late")
        with pytest.raises(RunnerClosed, match="does not take 'later'"):
            runner.spawn(forever, name="later")
    with pytest.raises(RunnerClosed, match="was closed"):
        await runner.next_ended(timeout_s=5)
    assert [ended async for ended in runner.results()] == []
    runner.resume()
    assert runner.running == 0


@pytest.mark.parametrize("order", ["completion", "submission"])
async def test_closing_releases_whoever_waits_for_a_result(order: str) -> None:
    async def take_all() -> list[Ended[int]]:
        return [ended async for ended in runner.results(order=order)]

    runner: TaskRunner[int] = TaskRunner()
    slow = Stubborn(lambda: 1)
    runner.submit(slow, name="slow")
    takers = [asyncio.create_task(runner.next_ended()), asyncio.create_task(take_all())]
    await asyncio.sleep(0)
    closing = asyncio.create_task(runner.close())
    # They are released at once, not when the slow one has ended.
    one, several = await within(
        5, asyncio.gather(*takers, return_exceptions=True), who="takers", doing="being released"
    )
    assert isinstance(one, RunnerClosed)
    assert several == []
    assert not closing.done()
    slow.clean_up_done.set()
    assert [ended.value for ended in (await closing).untaken] == [1]


@pytest.mark.parametrize(
    ("then", "cancelled", "untaken", "errors"),
    [
        (ends_cancelled, ("slow",), [], []),
        (lambda: 5, (), [5], []),
        (ends_badly, (), [], ["the clean-up failed"]),
    ],
)
async def test_a_task_that_swallows_its_cancellation_is_awaited_and_told_of_once(
    then: Callable[[], int], cancelled: tuple[str, ...], untaken: list[int], errors: list[str]
) -> None:
    runner: TaskRunner[int] = TaskRunner()
    slow = Stubborn(then)
    runner.submit(slow, name="slow")
    await asyncio.sleep(0)
    closing = asyncio.create_task(runner.close())
    await until(lambda: slow.cancellations == 1)
    assert not closing.done()
    slow.clean_up_done.set()
    told = await within(5, closing, who="the runner", doing="closing")
    assert slow.cleaned_up
    assert told.cancelled == cancelled
    assert [ended.value for ended in told.untaken] == untaken
    assert [str(ended.error) for ended in told.errors] == errors


async def test_a_vital_task_that_raises_while_cancelled_is_told_of() -> None:
    async def breaks() -> None:
        try:
            await forever()
        finally:
            raise ValueError("on the way out")

    runner: TaskRunner[int] = TaskRunner()
    runner.spawn(breaks, name="loop")
    await asyncio.sleep(0)
    (error,) = (await runner.close()).errors
    assert (error.name, str(error.error)) == ("loop", "on the way out")


async def test_what_had_ended_before_the_closing_is_a_result_and_not_a_consequence_of_it() -> None:
    runner: TaskRunner[int] = TaskRunner()
    runner.submit(lambda: fail("before"), name="failed")
    runner.spawn(lambda: fail("vital, before"), name="vital")
    before = asyncio.all_tasks()
    # One step: both are done, and the runner has not been told yet.
    await asyncio.sleep(0)
    assert runner.running == 1
    assert before - asyncio.all_tasks()
    closing = await runner.close()
    assert [str(ended.error) for ended in closing.untaken] == ["before"]
    assert closing.errors == ()
    with pytest.raises(ValueError, match="vital, before"):
        await within(5, runner.failed(), who="the test", doing="waiting")


async def test_a_closing_cancelled_half_way_can_be_called_again() -> None:
    runner: TaskRunner[int] = TaskRunner(limit=2)
    slow = Stubborn(lambda: 0)
    runner.submit(slow, name="slow")
    submit_gated(runner, 2)
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await within(0.01, runner.close(), who="the runner", doing="closing")
    assert runner.running == 1
    # It swallowed the first request and goes on: asked again, it ends.
    closing = await within(5, runner.close(), who="the runner", doing="closing")
    assert (runner.running, slow.cancellations) == (0, 2)
    assert closing == Closing(
        cancelled=("task 0", "slow"), never_started=("task 1",), untaken=(), errors=()
    )


async def test_who_joins_a_closing_does_not_cut_short_the_clean_up_under_way() -> None:
    runner: TaskRunner[int] = TaskRunner()
    slow = Stubborn(lambda: 0)
    runner.submit(slow, name="slow")
    await asyncio.sleep(0)
    first = asyncio.create_task(runner.close())
    await until(lambda: slow.cancellations == 1)
    second = asyncio.create_task(runner.close())
    await asyncio.sleep(0)
    slow.clean_up_done.set()
    assert await first is await second
    assert (slow.cancellations, slow.cleaned_up) == (1, True)


async def test_a_task_that_would_close_its_own_runner_is_told_that_it_cannot(
    runner: TaskRunner[int],
) -> None:
    async def closes() -> int:
        await runner.close()
        return 0

    runner.submit(closes, name="a")
    assert "await itself for ever" in str((await taken(runner)).error)


HOW_TO_END = ["succeed", "fail", "be cancelled from outside", "cancel itself"]
WHEN_CLOSED = ["end", "raise", "give a value"]
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(WHEN_CLOSED)),
    st.tuples(st.just("end"), st.sampled_from(HOW_TO_END), st.integers(0, 50)),
    st.tuples(st.just("take")),
    st.tuples(st.just("start a taker")),
    st.tuples(st.just("cancel a taker"), st.integers(0, 5)),
    st.tuples(st.just("pause")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("let the loop run"), st.integers(1, 4)),
)


class Story:
    """Random steps upon a runner; afterwards every name must be in exactly one place."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.runner: TaskRunner[str] = TaskRunner(limit=limit)
        self.submitted: list[str] = []
        self.started: list[str] = []
        self.delivered: list[Ended[str]] = []
        self._takers: list[asyncio.Task[None]] = []
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._told: dict[str, asyncio.Future[str]] = {}

    async def _task(self, name: str, when_closed: str) -> str:
        self.started.append(name)
        task = asyncio.current_task()
        assert task is not None
        self._tasks[name] = task
        self._told[name] = asyncio.get_running_loop().create_future()
        try:
            how = await self._told[name]
        except asyncio.CancelledError:
            if not self.runner._closed or when_closed == "end":
                raise
            await asyncio.sleep(0)
            if when_closed == "raise":
                raise ValueError(name) from None
            return name
        if how == "fail":
            raise ValueError(name)
        if how == "cancel itself":
            raise asyncio.CancelledError
        return name

    async def _take_one(self) -> None:
        self.delivered.append(await self.runner.next_ended())

    async def step(self, what: str, *how: object) -> None:
        match what, *how:
            case "submit", when_closed:
                name = f"task {len(self.submitted)}"
                self.submitted.append(name)
                self.runner.submit(lambda: self._task(name, when_closed), name=name)
            case "end", way, which if self._told:
                names = list(self._told)
                name = names[which % len(names)]
                told = self._told.pop(name)
                if way == "be cancelled from outside":
                    self._tasks[name].cancel()
                elif not told.done():
                    told.set_result(way)
            case ("take",):
                with suppress(TimeoutError):
                    self.delivered.append(await self.runner.next_ended(timeout_s=0))
            case ("start a taker",):
                self._takers.append(asyncio.create_task(self._take_one()))
            case "cancel a taker", which if self._takers:
                self._takers.pop(which % len(self._takers)).cancel()
            case ("pause",):
                self.runner.pause()
            case ("resume",):
                self.runner.resume()
            case "let the loop run", turns:
                for _ in range(turns):
                    await asyncio.sleep(0)
        assert self.limit is None or self.runner.running <= self.limit

    async def end(self) -> Closing[str]:
        closing = await within(5, self.runner.close(), who="the runner", doing="closing")
        await asyncio.gather(*self._takers, return_exceptions=True)
        return closing


@pytest.fixture
def only_new_garbage() -> Iterator[None]:
    """All that lives by now is left out of every collection, which then takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_new_garbage")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 5, None]), st.lists(STEPS, max_size=60))
def test_whatever_happens_every_submission_is_accounted_for_exactly_once(
    limit: int | None, steps: list[tuple[object, ...]]
) -> None:
    async def play() -> None:
        story = Story(limit)
        with no_noise():
            for step in steps:
                await story.step(*step)
            closing = await story.end()
        told = [*story.delivered, *closing.untaken, *closing.errors]
        accounted = [ended.name for ended in told] + [*closing.cancelled, *closing.never_started]
        assert sorted(accounted) == sorted(story.submitted)
        assert all(story.submitted[ended.number] == ended.name for ended in told)
        assert all((ended.error is None) == (ended.value == ended.name) for ended in told)
        assert all(ended.error for ended in closing.errors)
        assert not set(closing.never_started) & set(story.started)
        # In submission order, but for those cancelled before their first step.
        assert story.started == [name for name in story.submitted if name in set(story.started)]
        assert (story.runner.running, story.runner.waiting) == (0, 0)

    asyncio.run(play())


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


def test_the_root_cause_is_found_under_its_wrappings() -> None:
    inner = EngineError("engine-1 failed: out of memory")
    remote = RuntimeError("a long remote traceback")
    remote.cause = inner
    assert described(ExceptionGroup("several", [remote])) == (
        "EngineError: engine-1 failed: out of memory"
    )


def test_what_ray_tells_line_by_line_is_told_in_one() -> None:
    died = RaySystemError("the actor died\n\tclass_name: TrainerActor\n\tpid: 17")
    assert described(died) == (
        "RaySystemError: System error: the actor died class_name: TrainerActor pid: 17"
    )
    told = "it raised\nTraceback (most recent call last):\n  File ..."
    assert described(RaySystemError(told)).endswith(told)
