"""How late event loops run while each step of 256 rollouts carries 100 MB of arrays.

A step is 32 groups of 8 samples. Each trajectory has arrays attached by the workflow, as the
routed experts of an MoE model would be, 100 MB for the whole step; they go through the real
worker and the real queue to a paced trainer that reads every byte, in a thread as the real one
does. Engines are simulated: whole steps end at about the same time, which is the worst case.
Lags are those of the event loops within the window, as the actors themselves measure them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
from common import (
    CpuMeter,
    Figure,
    Lags,
    Learning,
    local_cluster,
    resolved,
    say,
    show,
    started_crew,
    tiny_model,
)
from ray.actor import ActorHandle

from areal_ray import Completion, Prompt
from areal_ray.actors.rehearsal import Rehearsal
from areal_ray.config import Config
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.observability.loop_health import LoopReport
from areal_ray.tasks import guarded
from areal_ray.types import Trajectory, WeightVersion
from areal_ray.workflows import RolloutContext, single_turn

AIM_MS = 50.0
WARM_UP_STEPS = 3


def no_reward(prompt: Prompt, completion: Completion) -> float:
    return 0.0


async def with_arrays(prompt: Prompt, context: RolloutContext) -> list[Trajectory]:
    """A single turn, with arrays of `array_bytes` attached to each trajectory."""
    trajectories = await single_turn(prompt, context)
    nbytes = int(prompt.metadata["array_bytes"])

    def attach() -> list[Trajectory]:
        return [
            msgspec.structs.replace(
                one, arrays={"routed_experts": np.ones(nbytes // 8, dtype=np.int64)}
            )
            for one in trajectories
        ]

    return await asyncio.to_thread(attach)


async def let_it_read(trainer: ActorHandle) -> None:
    """Have the paced trainer read what it gets."""

    def change(actor: object) -> None:
        batches, take = actor._batches, actor._batches.next

        def total(groups: list) -> int:
            trajectories = [t for group in groups for t in group.trajectories]
            return sum(int(t.arrays["routed_experts"].sum()) for t in trajectories)

        async def take_and_read(version: WeightVersion) -> object:
            batch = await take(version)
            assert await asyncio.to_thread(total, batch.groups) > 0
            return batch

        batches.next = take_and_read

    await trainer.__ray_call__.remote(change)


async def measure(
    config: Config, model: Path, options: argparse.Namespace
) -> tuple[dict[str, LoopReport], int, float]:
    samples = config.rollout.samples
    per_sample = int(options.mb * 1e6) // (options.groups_per_step * samples)
    prompts = [
        Prompt(text=f"{a}+{b}=", metadata={"array_bytes": per_sample})
        for a in range(10, 40)
        for b in range(10, 40)
    ]
    engine = SimulatedSpec(
        name="",
        tokens_per_s=options.mean_tokens / options.mean_s,
        first_token_s=0.05,
        mean_tokens=options.mean_tokens,
        vocabulary=14,
        commit_pause_s=0.03,
    )
    async with started_crew(
        config,
        model,
        prompts=prompts,
        reward=no_reward,
        workflow=with_arrays,
        rehearsal=Rehearsal(engine=engine, step_s=options.step_s),
    ) as crew:
        await let_it_read(crew.trainer)
        learning = Learning(crew)
        lags = Lags(
            {"controller": crew.controller, "queue": crew.queue}
            | {"worker": crew._workers["worker-0"], "trainer": crew.trainer}
        )

        async def window() -> tuple[dict[str, LoopReport], int, float]:
            for _ in range(WARM_UP_STEPS):
                await learning.step()
            await lags.reset()
            began, meter = time.perf_counter(), CpuMeter()
            for _ in range(options.steps):
                await learning.step()
            seconds = time.perf_counter() - began
            use = meter.use()
            for name, spent_s in use.seconds.most_common(6):
                say(f"{name}: {spent_s / use.wall_s:.2f} cores")
            say(f"others: {use.elsewhere_s / use.wall_s:.2f} cores")
            return await lags.reports(), options.steps, seconds

        return await guarded(window(), crew.watch())


def report(lags: dict[str, LoopReport], steps: int, seconds: float, mb: float) -> None:
    rows = [
        [who, *(f"{ms:.1f}" for ms in (lag.p50_ms, lag.p90_ms, lag.p99_ms, lag.max_ms))]
        for who, lag in lags.items()
    ]
    figures = dict[str, Figure](step_s=seconds / steps, mb_per_s=mb * steps / seconds)
    for who, lag in lags.items():
        figures |= {f"{who}_lag_p99_ms": lag.p99_ms, f"{who}_lag_max_ms": lag.max_ms}
    figures["aim_met"] = max(lags[who].p99_ms for who in ("controller", "queue")) < AIM_MS
    print(f"{steps} steps of {seconds / steps:.2f} s, {mb:.0f} MB each; lag of event loops in ms")
    show(["event loop", "p50", "p90", "p99", "max"], rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=100.0, help="arrays in a whole step")
    parser.add_argument("--groups-per-step", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--mean-tokens", type=float, default=100.0)
    parser.add_argument("--mean-s", type=float, default=0.3, help="mean time of a sample")
    parser.add_argument("--step-s", type=float, default=0.5, help="how long training takes")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tiny_model() as model:
        config = resolved(
            {
                "model": {"path": str(model)},
                "data": {"max_prompt_tokens": 8},
                "generation": {"engines": options.engines, "max_new_tokens": 1024},
                "rollout": {"samples": options.samples, "max_staleness": 1},
                "trainer": {"groups_per_step": options.groups_per_step},
            }
        )
        with local_cluster(config):
            lags, steps, seconds = asyncio.run(measure(config, model, options))
    report(lags, steps, seconds, options.mb)


if __name__ == "__main__":
    main()
