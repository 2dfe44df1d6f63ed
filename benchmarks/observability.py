"""What it costs to see a run: tokens/s and CPU seconds of the same rollouts, with and without.

One crew with a real vLLM engine takes turns, each of which finishes the same number of groups:
- without: no actor times its spans or its event loop, and none tells anything;
- with: as runs are by default. Every actor tells every two seconds, the live report is served;
- ten times: every actor tells ten times as often;
- looked at: with `areal-ray status` once a second and the report open in a browser. Who looks is
  simulated in this process, and counted.

A round is a turn of each, in an order that moves on from round to round; ratios are made within a
round. The same processes take all turns: between two engines that were started alike lies more
than is to be measured here. Hence two things stay in the turns without: the monitor, which is then
idle, and whose CPU seconds are not counted; and the activity meters, a microsecond or two a group.

Tokens/s are what counts, but two equal turns differ by more than the cost, and so do their CPU
seconds for each 1,000 tokens. Hence the turns in which all is told ten times as often: what they
lose against the turns with it is nine times what telling costs, and stands out. What is left, the
timers of the loops and the spans, is too small for that, and measured by its parts. And vLLM's own
process measures nothing for us, does the same work for each token in all turns, and is slowed down
as all processes are: "added CPU" is what the processes around it took more for each of its CPU
seconds, as a share of all without.

Before that, what each part costs (`observability_parts.py`): a span, a switch of a meter, a report
for who tells and for who hears it, an actor that only tells, and a monitor with 64 that do.
"""

from __future__ import annotations

import argparse
import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

import ray
import uvloop
from common import (
    Figure,
    local_cluster,
    median,
    on_their_loops,
    random_model,
    resolved,
    say,
    show,
    spread,
    started_crew,
)
from observability_parts import LOOP_TICKS_KEPT, measure_parts, report_parts
from rollout_throughput import PROMPT, RolloutPath, Window, print_cpu, settings

from areal_ray import Completion, Prompt
from areal_ray.actors import telemetry as telling
from areal_ray.actors.crew import Crew
from areal_ray.actors.telemetry import TELL_EVERY_S, Telemetry
from areal_ray.cli.status import EVERY_S as STATUS_EVERY_S
from areal_ray.config import Config
from areal_ray.observability.loop_health import LoopHealth
from areal_ray.observability.report.live import REFRESH_S
from areal_ray.observability.spans import Span, SpanRecorder, Timing
from areal_ray.sights import Sights
from areal_ray.tasks import guarded

VLLMS_OWN = "EngineCore"
MONITOR = "RunMonitor"
OFTEN = 10
TEN_TIMES = "ten times"


def no_reward(prompt: Prompt, completion: Completion) -> float:
    return 0.0


class NoSpans:
    """Stands where a `SpanRecorder` was."""

    timings: ClassVar[dict[str, Timing]] = {}

    def span(self, name: str, detail: str = "") -> nullcontext[None]:
        return nullcontext()

    def add(self, span: Span) -> None:
        pass


async def fall_silent(telemetry: Telemetry) -> None:
    await telemetry.close()
    telemetry.spans = NoSpans()


async def tell(telemetry: Telemetry) -> None:
    """From now on, as after ten minutes: what a report of the loop costs grows until then."""
    telemetry.spans = SpanRecorder()
    telemetry._health = LoopHealth(who=telemetry._who)
    for _ in range(LOOP_TICKS_KEPT):
        telemetry._health._window.add(0.001)
    telling.TELL_EVERY_S = TELL_EVERY_S
    telemetry.start()


async def tell_often(telemetry: Telemetry) -> None:
    await tell(telemetry)
    telling.TELL_EVERY_S = TELL_EVERY_S / OFTEN


class Observed:
    """A crew whose observability is taken away, and given back for a while."""

    def __init__(self, crew: Crew, config: Config, directory: Path) -> None:
        self._crew = crew
        self._config = config
        self._directory = directory

    async def take_away(self) -> None:
        await self._everywhere(fall_silent)

    @asynccontextmanager
    async def without(self) -> AsyncIterator[None]:
        await asyncio.sleep(2 * TELL_EVERY_S)
        yield

    @asynccontextmanager
    async def with_it(
        self, begin: Callable[[Telemetry], Awaitable[None]] = tell
    ) -> AsyncIterator[str]:
        """Yields where the live report is."""
        await self._everywhere(begin)
        async with Sights(self._config, self._directory) as sights:
            await sights.show(self._crew, ray.get_runtime_context().gcs_address)
            await asyncio.sleep(2 * TELL_EVERY_S)
            yield sights.report_url
        await self.take_away()

    @asynccontextmanager
    async def looked_at(self) -> AsyncIterator[None]:
        async with self.with_it() as report_url:
            looking = asyncio.gather(self._look_at_status(), self._look_at_report(report_url))
            try:
                yield
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    async def _look_at_status(self) -> None:
        while True:
            await self._crew.monitor.status.remote()
            await asyncio.sleep(STATUS_EVERY_S)

    async def _look_at_report(self, url: str) -> None:
        def fetch(page: str) -> None:
            with urllib.request.urlopen(url + page, timeout=10.0) as answer:
                answer.read()

        await asyncio.to_thread(fetch, "")
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(fetch, "data.json")

    async def _everywhere(self, change: Callable[[Telemetry], Awaitable[None]]) -> None:
        crew = self._crew
        actors = [crew.controller, crew.queue, crew.manager, crew.trainer]
        actors += [*crew.workers.values(), *crew.engines.values()]
        await asyncio.gather(change(crew.telemetry), on_their_loops(actors, change))


Side = Callable[[], AbstractAsyncContextManager[object]]


async def measure(config: Config, model: Path, groups: int, rounds: int) -> list[dict[str, Window]]:
    """Rounds of one window for each side."""
    async with started_crew(config, model, prompts=[PROMPT], reward=no_reward) as crew:
        path = RolloutPath(crew)
        directory = Path((await crew.monitor.status.remote()).directory)
        observed = Observed(crew, config, directory)
        sides: dict[str, Side] = {
            "without": observed.without,
            "with": observed.with_it,
            TEN_TIMES: lambda: observed.with_it(tell_often),
            "looked at": observed.looked_at,
        }

        async def take_turns() -> list[dict[str, Window]]:
            await path.drain()
            await observed.take_away()
            return [await a_round(path, sides, number, groups) for number in range(rounds)]

        return await guarded(take_turns(), crew.watch())


async def a_round(
    path: RolloutPath, sides: dict[str, Side], number: int, groups: int
) -> dict[str, Window]:
    names = list(sides)
    first = number % len(names)
    windows: dict[str, Window] = {}
    for name in (*names[first:], *names[:first]):
        async with sides[name]():
            windows[name] = await path.window(groups)
    told = ", ".join(
        f"{name} {windows[name].tokens_per_s:,.0f} tokens/s "
        f"{cpu_ms(windows[name], name):.1f} CPU ms"
        for name in names
    )
    say(f"round {number + 1}: {told} for each 1,000 tokens")
    return {name: windows[name] for name in names}


def counted_s(window: Window, side: str) -> float:
    """CPU seconds. Without observability there would be no monitor."""
    seconds = window.cpu.seconds
    return seconds.total() - (seconds[MONITOR] if side == "without" else 0.0)


def cpu_ms(window: Window, side: str) -> float:
    """For each 1,000 tokens."""
    return 1e6 * counted_s(window, side) / window.tokens


def report(rounds: Sequence[dict[str, Window]]) -> None:
    names = list(rounds[0])
    windows = [list(turns.values()) for turns in rounds]
    processes = sorted({name for turns in windows for turn in turns for name in turn.cpu.seconds})
    print_cpu(names, processes, windows)
    rows, figures = [], dict[str, Figure](rounds=len(rounds))
    for name in names:
        rates = [turns[name].tokens_per_s for turns in rounds]
        costs = [cpu_ms(turns[name], name) for turns in rounds]
        of_rate = [turns[name].tokens_per_s / turns["without"].tokens_per_s for turns in rounds]
        of_cost = [
            cpu_ms(turns[name], name) / cpu_ms(turns["without"], "without") for turns in rounds
        ]
        added = [100.0 * added_share(turns, name) for turns in rounds]
        rows.append(
            [
                name,
                f"{median(rates):,.0f}",
                f"{median(of_rate):.3f} ({spread(of_rate)})",
                f"{median(costs):.1f}",
                f"{median(of_cost):.3f} ({spread(of_cost)})",
                f"{median(added):.2f} % ({spread(added)})",
            ]
        )
        key = name.replace(" ", "_")
        figures |= {
            f"{key}_tokens_per_s": median(rates),
            f"{key}_of_tokens_per_s": median(of_rate),
            f"{key}_of_tokens_per_s_rounds": [round(ratio, 3) for ratio in of_rate],
            f"{key}_cpu_ms_per_1000_tokens": median(costs),
            f"{key}_of_cpu": median(of_cost),
            f"{key}_of_cpu_rounds": [round(ratio, 3) for ratio in of_cost],
            f"{key}_added_cpu_percent": median(added),
            f"{key}_added_cpu_percent_rounds": [round(percent, 2) for percent in added],
        }
    lost = [1.0 - turns[TEN_TIMES].tokens_per_s / turns["with"].tokens_per_s for turns in rounds]
    added = [added_share(turns, TEN_TIMES) - added_share(turns, "with") for turns in rounds]
    told = {"tokens_per_s": lost, "cpu": added}
    figures |= {
        f"telling_percent_of_{what}": 100.0 * median(shares) / (OFTEN - 1)
        for what, shares in told.items()
    }
    show(
        ["turn", "tokens/s", "of without", "CPU ms/1k tokens", "of without", "added CPU"],
        rows,
        figures,
    )
    print(
        f"telling every {TELL_EVERY_S:g} s costs a {OFTEN - 1}th of what {OFTEN} times as much "
        f"loses against it: {figures['telling_percent_of_tokens_per_s']:.2f} % of the tokens/s, "
        f"{figures['telling_percent_of_cpu']:.2f} % of the CPU"
    )


def added_share(turns: dict[str, Window], name: str) -> float:
    without = around_vllm(turns["without"], "without")
    return (around_vllm(turns[name], name) - without) / (1.0 + without)


def around_vllm(window: Window, side: str) -> float:
    """CPU seconds of all other processes, for each of vLLM's own."""
    vllms_own = window.cpu.seconds[VLLMS_OWN]
    return counted_s(window, side) / vllms_own - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=128, help="to finish in each turn")
    parser.add_argument("--groups-in-flight", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--actors", type=int, default=64, help="that tell the monitor of the parts")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which they do")
    parser.add_argument("--only", choices=["parts", "run"])
    options = parser.parse_args()
    with random_model(hidden=options.hidden, layers=options.layers, vocabulary=96) as model:
        config = resolved(settings(options, str(model)))
        new_loop = uvloop.new_event_loop
        with local_cluster(config), asyncio.Runner(loop_factory=new_loop) as runner:
            if options.only != "run":
                report_parts(runner.run(measure_parts(options.actors, options.seconds)))
            if options.only != "parts":
                report(runner.run(measure(config, model, options.groups, options.rounds)))


if __name__ == "__main__":
    main()
