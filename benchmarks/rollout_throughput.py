"""Tokens/s of the whole rollout path, against the same requests on a bare vLLM engine.

Three sides, the same model, sampling and groups in flight:
- `AsyncLLM`: vLLM itself in this process, each output told once, when it is final;
- `VllmEngine`: the same engine through our wrapper, which keeps what a sample has so far;
- the rollout path: another engine in its actor, leased by the controller, run by a worker,
  scored by a reward process, and taken over by the queue.

Both engines are loaded all the time, and one generates while the other idles: the sides take
turns. Each turn begins with an empty engine, keeps the same number of groups in flight, and ends
with the same number of finished groups: not after a time, since groups that began together end
together, and a window would see a wave more or less. A round is one turn of each side; a ratio is
made within a round, and the median over the rounds is what counts. Before it stands who spent
how much CPU on it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import uvloop
from common import (
    CpuMeter,
    CpuUse,
    Figure,
    local_cluster,
    median,
    random_model,
    resolved,
    say,
    show,
    spread,
    started_crew,
    until,
)

from areal_ray import Completion, Prompt
from areal_ray.actors.crew import Crew
from areal_ray.actors.crew_specs import engine_spec
from areal_ray.config import Config
from areal_ray.generation.vllm import VllmEngine
from areal_ray.types import GenerationRequest

PROMPT = Prompt(text="12+34=")


def no_reward(prompt: Prompt, completion: Completion) -> float:
    return 0.0


@dataclass(frozen=True)
class Window:
    tokens: int
    groups: int
    seconds: float
    cpu: CpuUse

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.seconds


class Side(ABC):
    """One way to generate. It runs only between `fill` and `drain`."""

    name: str

    async def window(self, groups_to_finish: int) -> Window:
        tokens, groups = await self.counted()

        async def is_done() -> bool:
            return (await self.counted())[1] >= groups + groups_to_finish

        meter, began = CpuMeter(), time.perf_counter()
        await self.fill()
        await until(is_done, "its groups", every_s=0.05)
        tokens_after, groups_after = await self.counted()
        elapsed_s, cpu = time.perf_counter() - began, meter.use()
        await self.drain()
        return Window(tokens_after - tokens, groups_after - groups, elapsed_s, cpu)

    @abstractmethod
    async def fill(self) -> None: ...

    @abstractmethod
    async def counted(self) -> tuple[int, int]:
        """Tokens and groups that are done, since the start."""

    @abstractmethod
    async def drain(self) -> None: ...


class Bare(Side):
    """So many loops, each of which asks for one group after the other."""

    def __init__(self, config: Config, engine: VllmEngine) -> None:
        self._config = config
        self._engine = engine
        self._prompt_ids = np.arange(2, 2 + len(PROMPT.text or ""), dtype=np.int32)
        self._tokens = self._groups = self._asked = 0
        self._is_open = False
        self._loops: list[asyncio.Task[None]] = []

    async def fill(self) -> None:
        self._is_open = True
        for _ in range(self._config.rollout.max_concurrent_groups):
            self._loops.append(asyncio.create_task(self._loop()))

    async def counted(self) -> tuple[int, int]:
        return self._tokens, self._groups

    async def drain(self) -> None:
        self._is_open = False
        await asyncio.gather(*self._loops)
        self._loops.clear()

    async def _loop(self) -> None:
        while self._is_open:
            self._asked += 1
            tokens = await self._generate(f"{self.name}-{self._asked}")
            self._tokens += tokens
            self._groups += 1

    @abstractmethod
    async def _generate(self, request_id: str) -> int:
        """The tokens of one group."""


class BareLlm(Bare):
    name = "AsyncLLM"

    async def _generate(self, request_id: str) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self._config.sampling
        params = SamplingParams(
            n=self._config.rollout.samples,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": self._prompt_ids.tolist()}
        tokens = 0
        async for output in self._engine._llm.generate(prompt, params, request_id):
            tokens += sum(len(one.token_ids) for one in output.outputs)
        return tokens


class BareEngine(Bare):
    name = "VllmEngine"

    async def _generate(self, request_id: str) -> int:
        result = await self._engine.generate(
            GenerationRequest(
                request_id, self._prompt_ids, self._config.rollout.samples, self._config.sampling
            )
        )
        return sum(len(completion.token_ids) for completion in result.completions)


class RolloutPath(Side):
    name = "rollout path"

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def fill(self) -> None:
        await self._crew.controller.resume.remote()

    async def counted(self) -> tuple[int, int]:
        status = await self._crew.controller.status.remote()
        return status.generated_tokens, status.ledger.accepted

    async def drain(self) -> None:
        """Paused, the controller still hands out what it drew: only the queue tells the end."""
        await self._crew.controller.pause.remote()
        last = -1

        async def stands_still() -> bool:
            nonlocal last
            before, last = last, (await self.counted())[1]
            return before == last

        await until(stands_still, "the pause", every_s=1.0)


async def measure(config: Config, model: str, groups: int, rounds: int) -> list[list[Window]]:
    """Rounds of one window for each side."""
    engine = VllmEngine(engine_spec(config, 0, model), address="127.0.0.1")
    await engine.start()
    try:
        async with started_crew(config, model, prompts=[PROMPT], reward=no_reward) as crew:
            path = RolloutPath(crew)
            await path.drain()
            sides = [BareLlm(config, engine), BareEngine(config, engine), path]
            windows = []
            for number in range(rounds):
                turn = [await side.window(groups) for side in sides]
                rates = ", ".join(f"{window.tokens_per_s:,.0f}" for window in turn)
                say(f"round {number + 1}: {rates} tokens/s")
                windows.append(turn)
            return windows
    finally:
        await engine.close()


def report(windows: list[list[Window]]) -> None:
    names = [BareLlm.name, BareEngine.name, RolloutPath.name]
    processes = sorted({name for turn in windows for window in turn for name in window.cpu.seconds})
    rows, figures = [], dict[str, Figure]()
    for index, name in enumerate(names):
        mine = [turn[index] for turn in windows]
        of_llm = [turn[index].tokens_per_s / turn[0].tokens_per_s for turn in windows]
        of_engine = [turn[index].tokens_per_s / turn[1].tokens_per_s for turn in windows]
        rate = median([window.tokens_per_s for window in mine])
        rows.append(
            [
                name,
                f"{rate:,.0f}",
                f"{median([window.groups_per_s for window in mine]):.1f}",
                f"{median(of_llm):.3f} ({spread(of_llm)})",
                f"{median(of_engine):.3f} ({spread(of_engine)})",
            ]
        )
        key = name.replace(" ", "_").lower()
        figures |= {
            f"{key}_tokens_per_s": rate,
            f"{key}_of_asyncllm": median(of_llm),
            f"{key}_of_vllmengine": median(of_engine),
            f"{key}_of_vllmengine_rounds": [round(ratio, 3) for ratio in of_engine],
        }
    print_cpu(names, processes, windows)
    show(["side", "tokens/s", "groups/s", "of AsyncLLM", "of VllmEngine"], rows, figures)


def print_cpu(names: list[str], processes: list[str], windows: list[list[Window]]) -> None:
    """CPU milliseconds for each 1,000 tokens, by process."""

    def cost(index: int, process: str) -> float:
        mine = [turn[index] for turn in windows]
        seconds = sum(window.cpu.seconds[process] for window in mine)
        return 1e6 * seconds / sum(window.tokens for window in mine)

    print(f"{'CPU ms per 1,000 tokens':24}" + "".join(f"{name:>14}" for name in names))
    for process in processes:
        costs = [cost(index, process) for index in range(len(names))]
        if max(costs) >= 0.5:
            print(f"{process:24}" + "".join(f"{value:14.1f}" for value in costs))
    busy = [
        sum(turn[index].cpu.elsewhere_s for turn in windows)
        / sum(turn[index].cpu.wall_s for turn in windows)
        for index in range(len(names))
    ]
    print(f"{'(cores used by others)':24}" + "".join(f"{value:14.2f}" for value in busy) + "\n")


def settings(options: argparse.Namespace, model: str) -> Mapping[str, object]:
    return {
        "model": {"path": model},
        "data": {"max_prompt_tokens": 8},
        "generation": {"max_new_tokens": options.new_tokens},
        "rollout": {
            "samples": options.samples,
            "max_concurrent_groups": options.groups_in_flight,
            # Nobody trains: room for all that the windows can make.
            "max_staleness": 100_000,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--groups", type=int, default=128, help="to finish in each turn")
    parser.add_argument("--groups-in-flight", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with random_model(hidden=options.hidden, layers=options.layers, vocabulary=96) as model:
        config = resolved(settings(options, str(model)))
        with local_cluster(config), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            windows = runner.run(measure(config, str(model), options.groups, options.rounds))
    report(windows)


if __name__ == "__main__":
    main()
