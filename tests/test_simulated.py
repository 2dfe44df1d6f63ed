"""The simulated engine, on a clock that moves by hand: times are chosen as exact binary fractions.

First token after 0.5 s, then 8 a second: tokens at 0.5, 0.625, 0.75, 0.875, 1.0 ...
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from areal_ray.errors import EngineError, TornWeights
from areal_ray.generation.faults import (
    Die,
    FailRequest,
    FailStart,
    FailStep,
    Fault,
    FaultPlan,
    Slow,
    SpoilResult,
    Wedge,
)
from areal_ray.generation.simulated import SimulatedEngine, SimulatedSpec
from areal_ray.types import Completion, GenerationRequest, GenerationResult, Sampling

SPEC = SimulatedSpec(
    name="engine-0", tokens_per_s=8.0, first_token_s=0.5, mean_tokens=24.0, vocabulary=1000
)
ENDLESS = msgspec.structs.replace(SPEC, mean_tokens=1e9)
"""Every sample reaches its limit."""


@dataclass
class ManualTimer:
    callback: Callable[..., object]
    args: tuple[object, ...]
    is_cancelled: bool = False

    __hash__ = object.__hash__

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock:
    def __init__(self) -> None:
        self._now_s = 64.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, ManualTimer]] = []

    @property
    def pending(self) -> int:
        return sum(not timer.is_cancelled for _, _, timer in self._timers)

    def time(self) -> float:
        return self._now_s

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> ManualTimer:
        timer = ManualTimer(callback, args)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """All that happens within these seconds, in its order."""
        until = self._now_s + seconds
        await everyone_waits()
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, when)
            if not timer.is_cancelled:
                timer.callback(*timer.args)
                await everyone_waits()
        self._now_s = until

    def skip(self, seconds: float) -> None:
        """Time passes in which nobody comes to run."""
        self._now_s += seconds

    async def run(self, coroutine: Coroutine[object, object, object]) -> object:
        """Await it, with time going on as long as there is anything to wait for."""
        task = asyncio.create_task(coroutine)
        await everyone_waits()
        while not task.done():
            assert self.pending, "waits for what will never come"
            await self.advance(max(self._timers[0][0] - self._now_s, 0.0))
        return await task


async def everyone_waits() -> None:
    """Let each task go on until it waits for the clock: a wake-up or two away at most."""
    for _ in range(5):
        await asyncio.sleep(0)


def request(
    name: str = "group-0",
    *,
    n: int = 4,
    max_new_tokens: int = 64,
    begun: tuple[np.ndarray, ...] = (),
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.array([3, 1, 4], dtype=np.int32),
        n=n,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        begun=begun,
    )


async def started(
    clock: ManualClock, spec: SimulatedSpec = SPEC, *faults: Fault
) -> SimulatedEngine:
    engine = SimulatedEngine(msgspec.structs.replace(spec, faults=faults), clock=clock)
    await clock.run(engine.start())
    return engine


async def generated(spec: SimulatedSpec, asked: GenerationRequest) -> list[Completion]:
    """What an engine of its own makes of it, undisturbed."""
    clock = ManualClock()
    return (await clock.run((await started(clock, spec)).generate(asked))).completions


@asynccontextmanager
async def running(
    coroutine: Coroutine[object, object, GenerationResult],
) -> AsyncIterator[asyncio.Task[GenerationResult]]:
    """A task that ends with the block, at the latest."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(coroutine)
        await everyone_waits()
        yield task
        task.cancel()


def assert_same(some: list[Completion], others: list[Completion]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.finish_reason == other.finish_reason


def joined(begun: list[Completion], rest: list[Completion]) -> list[Completion]:
    return [Completion.joined(parts) for parts in zip(begun, rest, strict=True)]


async def test_engines_with_the_same_seed_make_the_same_samples() -> None:
    elsewhere = msgspec.structs.replace(SPEC, name="engine-1", tokens_per_s=100.0)
    assert_same(await generated(SPEC, request()), await generated(elsewhere, request("other")))


async def test_other_seeds_prompts_and_samples_give_other_tokens() -> None:
    asked = request(n=2)
    of_prompt = msgspec.structs.replace(asked, prompt_ids=np.array([3, 1, 5], dtype=np.int32))
    of_seed = msgspec.structs.replace(ENDLESS, seed=1)
    samples = (
        await generated(ENDLESS, asked)
        + await generated(ENDLESS, of_prompt)
        + await generated(of_seed, asked)
    )
    assert len({sample.token_ids.tobytes() for sample in samples}) == 6


async def test_a_result_has_the_types_of_a_real_one() -> None:
    for sample in await generated(SPEC, request()):
        assert sample.token_ids.dtype == sample.versions.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) > 0
        assert 0 <= sample.token_ids.min() <= sample.token_ids.max() < SPEC.vocabulary
        assert np.all(sample.logprobs <= 0.0)


async def test_lengths_are_spread_around_their_mean_within_the_limit() -> None:
    samples = await generated(SPEC, request(n=900, max_new_tokens=10_000))
    assert {sample.finish_reason for sample in samples} == {"stop"}
    lengths = [len(sample.token_ids) for sample in samples]
    # A geometric distribution's deviation is about its mean: 24 +- 4 * 24 / sqrt(900).
    assert 20.8 < np.mean(lengths) < 27.2
    limited = await generated(SPEC, request(n=900, max_new_tokens=24))
    assert [len(sample.token_ids) for sample in limited] == np.minimum(lengths, 24).tolist()
    assert [sample.finish_reason == "length" for sample in limited] == [n > 24 for n in lengths]


async def test_a_request_ends_with_its_longest_sample() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS)
    async with running(engine.generate(request(max_new_tokens=5))) as call:
        # The fifth token comes at 0.5 + 4 / 8 = 1 s.
        await clock.advance(0.9375)
        assert not call.done()
        await clock.advance(0.0625)
        assert len(call.result().completions[0].token_ids) == 5


async def test_begun_samples_go_on_exactly_and_keep_the_limit() -> None:
    whole = await generated(SPEC, request(n=8, max_new_tokens=20))
    assert {sample.finish_reason for sample in whole} == {"stop", "length"}
    cuts = [max(len(sample.token_ids) // 2, 1) for sample in whole]
    # Finished samples are left out of a continued request, so the places change.
    unfinished = [i for i in (1, 2, 4, 6, 7) if cuts[i] < len(whole[i].token_ids)]
    begun = tuple(whole[i].token_ids[: cuts[i]] for i in unfinished)
    rest = await generated(SPEC, request(n=len(begun), max_new_tokens=20, begun=begun))
    assert len(rest) > 2
    for i, tail in zip(unfinished, rest, strict=True):
        np.testing.assert_array_equal(tail.token_ids, whole[i].token_ids[cuts[i] :])
        np.testing.assert_array_equal(tail.logprobs, whole[i].logprobs[cuts[i] :])
        assert tail.finish_reason == whole[i].finish_reason


async def test_a_sample_begun_up_to_the_limit_makes_no_more() -> None:
    whole = await generated(ENDLESS, request(n=2, max_new_tokens=4))
    begun = (whole[0].token_ids, whole[1].token_ids[:3])
    rest = await generated(ENDLESS, request(n=2, max_new_tokens=4, begun=begun))
    assert [len(sample.token_ids) for sample in rest] == [0, 1]
    assert [sample.finish_reason for sample in rest] == ["length", "length"]


async def test_a_request_begun_in_part_only_is_refused() -> None:
    begun = (np.array([1], dtype=np.int32),)
    with pytest.raises(EngineError, match="has begun 1 samples, expected 0 or all 4"):
        await generated(SPEC, request(n=4, begun=begun))


async def test_a_sample_that_straddles_a_commit_carries_both_versions() -> None:
    clock = ManualClock()
    engine = await started(clock, msgspec.structs.replace(ENDLESS, commit_pause_s=2.0))
    async with running(engine.generate(request(max_new_tokens=8))) as call:
        await clock.advance(0.8125)
        await engine.stage_weights(b"")
        # At 0.5, 0.625 and 0.75 s three tokens were made; the fourth waits out the pause.
        report = await clock.run(engine.commit_weights(7))
        assert (report.engine, report.version, report.paused_s) == ("engine-0", 7, 2.0)
        await clock.advance(0.0625)
        # 0.8125 s before the pause and 0.0625 s after it: the fourth, due at 0.875 s.
        [first, *_] = engine.progress({"group-0": [0, 0, 0, 0]})["group-0"]
        assert first.versions.tolist() == [0, 0, 0, 7]
        await clock.advance(0.5)
        for sample in call.result().completions:
            assert sample.versions.tolist() == [0, 0, 0, 7, 7, 7, 7, 7]
    assert_same(call.result().completions, await generated(ENDLESS, request(max_new_tokens=8)))


async def test_a_token_due_at_the_moment_of_the_pause_is_of_the_old_version() -> None:
    clock = ManualClock()
    engine = await started(clock, msgspec.structs.replace(ENDLESS, commit_pause_s=1.0))
    async with running(engine.generate(request(n=1, max_new_tokens=4))) as call:
        await clock.advance(0.625)
        await engine.stage_weights(b"")
        commit = asyncio.create_task(engine.commit_weights(1))
        await clock.advance(0.5)
        # In the pause nothing is made, and a request that comes now is of the new version.
        assert len(engine.progress({"group-0": [0]})["group-0"][0].token_ids) == 2
        async with running(engine.generate(request("late", n=1, max_new_tokens=1))) as late:
            await clock.advance(1.5)
            assert late.result().completions[0].versions.tolist() == [1]
        await commit
        assert call.result().completions[0].versions.tolist() == [0, 0, 1, 1]


async def test_death_ends_running_requests_with_what_they_had_made() -> None:
    clock = ManualClock()
    engine = await started(clock, SPEC)
    whole = await generated(SPEC, request(n=8))
    async with running(engine.generate(request(n=8))) as call:
        await clock.advance(1.0)
        engine.inject(Die())
        # 5 tokens at 0.5 ... 1.0 s, however late the event loop comes to tell of the death.
        clock.skip(1.0)
        result = await call
    assert result.interrupted == "engine-0 died"
    for partial, sample in zip(result.completions, whole, strict=True):
        np.testing.assert_array_equal(partial.token_ids, sample.token_ids[:5])
        is_finished = len(sample.token_ids) <= 5
        assert partial.finish_reason == (sample.finish_reason if is_finished else None)
    assert {partial.finish_reason for partial in result.completions} == {None, "stop"}
    assert engine.is_dead
    assert clock.pending == 0


@pytest.mark.parametrize("call", ["generate", "probe", "stage", "commit", "discard"])
async def test_a_dead_engine_refuses_every_call(call: str) -> None:
    clock = ManualClock()
    engine = await started(clock, SPEC, Die(after_s=1.0))
    calls = {
        "generate": lambda: engine.generate(request()),
        "probe": engine.probe,
        "stage": lambda: engine.stage_weights(b""),
        "commit": lambda: engine.commit_weights(1),
        "discard": engine.discard_weights,
    }
    assert not engine.is_dead
    await clock.advance(1.0)
    with pytest.raises(EngineError, match="engine-0 died"):
        await calls[call]()
    assert engine.progress({"group-0": [0, 0, 0, 0]}) == {}


async def test_a_request_whose_tokens_are_all_made_is_not_interrupted_by_a_death() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS, Die(after_s=1.0))
    # The fifth token and the death both come at 1 s; the death's timer is the older one.
    result = await clock.run(engine.generate(request(max_new_tokens=5)))
    assert result.interrupted == ""
    assert engine.is_dead


async def test_a_wedged_engine_looks_alive_and_answers_nothing_until_cancelled() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS, Wedge(after_s=1.0))
    calls = [asyncio.create_task(engine.generate(request()))]
    await clock.advance(1.0)
    calls += [
        asyncio.create_task(engine.generate(request("late"))),
        asyncio.create_task(engine.probe()),
        asyncio.create_task(engine.stage_weights(b"")),
        asyncio.create_task(engine.commit_weights(1)),
        asyncio.create_task(engine.discard_weights()),
    ]
    await clock.advance(1000.0)
    assert not any(call.done() for call in calls)
    assert not engine.is_dead
    # What was made before is still told: 5 tokens at 0.5 ... 1.0 s.
    known = {"group-0": [0] * 4, "late": [0] * 4}
    told = engine.progress(known)
    assert [len(part.token_ids) for part in told["group-0"]] == [5] * 4
    assert [len(part.token_ids) for part in told["late"]] == [0] * 4
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert_idle(engine, clock)


async def test_the_end_of_a_wedged_engine_frees_those_who_wait() -> None:
    clock = ManualClock()
    engine = await started(clock)
    engine.inject(Wedge())
    calls = [asyncio.create_task(engine.generate(request())), asyncio.create_task(engine.probe())]
    await everyone_waits()
    await engine.close()
    result, refusal = await asyncio.gather(*calls, return_exceptions=True)
    assert result.interrupted == "engine-0 was closed"
    assert isinstance(refusal, EngineError)
    assert_idle(engine, clock)


async def test_an_engine_wedged_at_once_never_starts() -> None:
    clock = ManualClock()
    engine = SimulatedEngine(msgspec.structs.replace(SPEC, faults=(Wedge(),)), clock=clock)
    async with running(engine.start()) as start:
        await clock.advance(1000.0)
        assert not start.done()
    assert_idle(engine, clock)


async def test_what_progress_told_goes_on_elsewhere_to_the_same_whole() -> None:
    clock = ManualClock()
    asked = request(n=8, max_new_tokens=20)
    whole = await generated(SPEC, asked)
    lost = await started(clock)
    async with running(lost.generate(asked)):
        # After 0.75 s 3 tokens are made, after 1.5 s 9; what comes then is lost.
        await clock.advance(0.75)
        early = lost.progress({"group-0": [0] * 8})["group-0"]
        await clock.advance(0.75)
        known = [len(part.token_ids) for part in early]
        told = joined(early, lost.progress({"group-0": known})["group-0"])
        await clock.advance(0.25)
    unfinished = [i for i, part in enumerate(told) if part.finish_reason is None]
    assert 0 < len(unfinished) < 8
    begun = tuple(told[i].token_ids for i in unfinished)
    assert {len(tokens) for tokens in begun} == {9}
    rest = request(n=len(begun), max_new_tokens=20, begun=begun)
    elsewhere = msgspec.structs.replace(SPEC, name="engine-1")
    tails = dict(zip(unfinished, await generated(elsewhere, rest), strict=True))
    moved = [
        Completion.joined([part, tails[i]]) if i in tails else part for i, part in enumerate(told)
    ]
    assert_same(moved, whole)


async def test_progress_tells_only_what_is_new_and_only_of_what_runs() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS)
    asked = request(n=2, max_new_tokens=9)
    async with running(engine.generate(asked)) as call:
        await clock.advance(1.0)
        told = engine.progress({"group-0": [2, 5], "unknown": [0]})
        assert list(told) == ["group-0"]
        assert [len(part.token_ids) for part in told["group-0"]] == [3, 0]
        await clock.advance(0.5)
        [whole, _] = call.result().completions
    np.testing.assert_array_equal(told["group-0"][0].token_ids, whole.token_ids[2:5])
    np.testing.assert_array_equal(told["group-0"][0].logprobs, whole.logprobs[2:5])
    assert engine.progress({"group-0": [0, 0]}) == {}


async def test_an_error_hits_just_one_call() -> None:
    clock = ManualClock()
    engine = await started(clock, SPEC, FailRequest(after_requests=1))
    calls = [asyncio.create_task(engine.generate(request(f"group-{i}"))) for i in range(3)]
    await clock.advance(60.0)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [
        GenerationResult,
        EngineError,
        GenerationResult,
    ]
    assert not engine.is_dead


@pytest.mark.parametrize("how", ["missing_completion", "nan_logprob"])
async def test_a_spoilt_result_comes_once(how: str) -> None:
    clock = ManualClock()
    engine = await started(clock)
    await clock.run(engine.generate(request()))
    # Counted from its injection: one more request comes through.
    engine.inject(SpoilResult(how=how, after_requests=1))
    await clock.run(engine.generate(request()))
    spoilt = await clock.run(engine.generate(request()))
    if how == "missing_completion":
        assert len(spoilt.completions) == 3
    else:
        assert math.isnan(spoilt.completions[0].logprobs[0])
    sound = await clock.run(engine.generate(request()))
    assert_same(sound.completions, await generated(SPEC, request()))


async def test_a_slow_engine_makes_fewer_tokens_for_a_while() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS, Slow(factor=0.25, duration_s=4.0, after_s=1.0))
    async with running(engine.generate(request(n=1, max_new_tokens=17))) as call:

        def made() -> int:
            return len(engine.progress({"group-0": [0]})["group-0"][0].token_ids)

        await clock.advance(1.0)
        assert made() == 5
        await clock.advance(2.0)
        # 2 s at a quarter of 8 tokens a second: 4 more.
        assert made() == 9
        await clock.advance(2.0)
        assert made() == 13
        await clock.advance(0.4375)
        assert made() == 16
        await clock.advance(0.0625)
        assert call.done()


async def test_a_probe_of_an_idle_engine_makes_a_token_of_its_own() -> None:
    clock = ManualClock()
    engine = await started(clock)
    await clock.run(engine.probe())
    assert clock.time() == 64.0 + 0.5


async def test_a_probe_of_a_busy_engine_takes_the_next_token_as_proof() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS)
    async with running(engine.generate(request())):
        await clock.advance(0.5625)
        await clock.run(engine.probe())
        assert clock.time() == 64.0 + 0.625


async def test_weights_are_staged_once_and_may_be_discarded() -> None:
    clock = ManualClock()
    engine = await started(clock, SPEC, FailStep(step="receive", how="raise", when="before"))
    with pytest.raises(EngineError, match="failed to receive"):
        await engine.stage_weights(b"")
    await engine.stage_weights(b"")
    with pytest.raises(EngineError, match="before the last one ended"):
        await engine.stage_weights(b"")
    assert await engine.discard_weights() == ""
    await engine.stage_weights(b"")
    assert (await clock.run(engine.commit_weights(1))).version == 1


async def test_without_an_update_there_is_nothing_to_commit() -> None:
    engine = await started(ManualClock())
    with pytest.raises(EngineError, match="no update to commit"):
        await engine.commit_weights(1)


async def test_an_engine_with_torn_weights_makes_no_more_tokens() -> None:
    clock = ManualClock()
    engine = await started(clock, ENDLESS)
    await engine.stage_weights(b"")
    engine.inject(FailStep(step="swap", how="raise", when="before"))
    async with running(engine.generate(request())) as call:
        with pytest.raises(TornWeights, match="torn weights"):
            await clock.run(engine.commit_weights(1))
        await clock.advance(1000.0)
        assert not call.done()
    assert not engine.is_dead


async def test_a_commit_cancelled_in_its_swap_tears_the_weights() -> None:
    clock = ManualClock()
    engine = await started(clock, msgspec.structs.replace(ENDLESS, commit_pause_s=1.0))
    await engine.stage_weights(b"")
    async with running(engine.commit_weights(1)):
        await clock.advance(0.5)
    async with running(engine.generate(request())) as call:
        await clock.advance(1000.0)
        assert not call.done()
    with pytest.raises(TornWeights):
        await engine.discard_weights()


async def test_an_engine_that_fails_to_start_is_dead() -> None:
    clock = ManualClock()
    spec = msgspec.structs.replace(SPEC, start_s=3.0, faults=(FailStart(),))
    engine = SimulatedEngine(spec, clock=clock)
    with pytest.raises(EngineError, match="is not started"):
        await engine.probe()
    with pytest.raises(EngineError, match="failed to start"):
        await clock.run(engine.start())
    assert clock.time() == 64.0 + 3.0
    assert engine.is_dead


async def test_an_engine_may_die_while_it_starts() -> None:
    spec = msgspec.structs.replace(SPEC, start_s=3.0)
    with pytest.raises(EngineError, match="engine-0 died"):
        await started(ManualClock(), spec, Die(after_s=1.0))


def test_chance_is_seeded() -> None:
    def struck(seed: str) -> list[bool]:
        plan = FaultPlan(seed)
        plan.add(FailRequest(probability=0.5))
        return [bool(plan.at_request()) for _ in range(64)]

    assert struck("0 engine-0") == struck("0 engine-0") != struck("0 engine-1")
    assert 16 < sum(struck("0 engine-0")) < 48


def test_a_fault_has_one_trigger() -> None:
    with pytest.raises(ValueError, match="one trigger"):
        Die(after_s=1.0, probability=0.5)


def test_a_spec_travels_as_bytes() -> None:
    faults = (Slow(factor=0.5, after_s=1.0), SpoilResult(how="nan_logprob"), Die(probability=0.1))
    spec = msgspec.structs.replace(SPEC, faults=faults)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SimulatedSpec) == spec


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_nothing_is_left_after(how: str) -> None:
    clock = ManualClock()
    engine = await started(clock, SPEC, Slow(factor=0.5, duration_s=1000.0))
    engine.inject(Wedge(after_s=1000.0))
    calls = [asyncio.create_task(engine.generate(request(f"group-{i}"))) for i in range(8)]
    await clock.advance(0.5)
    if how == "cancel":
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert clock.pending == 2
        assert engine.progress({f"group-{i}": [0] * 4 for i in range(8)}) == {}
    await engine.close()
    await engine.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(getattr(end, "interrupted", "") or how == "cancel" for end in ends)
    assert_idle(engine, clock)


def assert_idle(engine: SimulatedEngine, clock: ManualClock) -> None:
    assert clock.pending == 0
    assert engine._waiting == set()
    assert engine._running == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_4096_samples_run_on_64_engines_of_one_event_loop() -> None:
    specs = [
        msgspec.structs.replace(
            SPEC, name=f"engine-{i}", tokens_per_s=10_000.0, first_token_s=0.002, mean_tokens=200.0
        )
        for i in range(64)
    ]
    engines = [SimulatedEngine(spec) for spec in specs]
    async with asyncio.timeout(60.0):
        await asyncio.gather(*(engine.start() for engine in engines))
        results = await asyncio.gather(
            *(
                engine.generate(request(f"group-{i}", n=8, max_new_tokens=400))
                for engine in engines
                for i in range(8)
            )
        )
    assert sum(len(result.completions) for result in results) == 4096
    for result in results:
        assert_same(result.completions, results[0].completions)
