"""Groups/s through one controller, at the scale of a cluster: 64 engines, 4,096 samples in flight.

Every actor is real and a process of its own (controller, workers, queue, 64 generation actors,
weight updates to all of them); the engines are simulated and the trainer is paced, with no time
for a step, so that it takes batches as fast as they come. Two windows, one after the other:

- offered: engines at a real engine's pace. Compared with what these engines alone can give:
  groups in flight / mean time of a group, by arithmetic over the very samples that are asked for;
- saturated: engines that answer at once. What comes through then is what the control plane can
  do on this machine, where all processes share its cores; `bound` is what one controller could do
  if all others had cores of their own: groups per second of its CPU time.

For both, how late the event loops of controller and queue ran within the window, and who used
how much CPU. `--profile DIR` has py-spy look at the controller while it is saturated.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from common import (
    CpuMeter,
    CpuUse,
    Figure,
    Lags,
    Learning,
    local_cluster,
    pid_of,
    resolved,
    say,
    show,
    started_crew,
    tiny_model,
)

from areal_ray import Completion, Prompt
from areal_ray.actors.crew import Crew
from areal_ray.actors.rehearsal import Rehearsal
from areal_ray.config import Config
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.generation.simulated_tokens import SimulatedGeneration
from areal_ray.observability.loop_health import LoopReport
from areal_ray.tasks import guarded
from areal_ray.types import GenerationRequest

PROMPTS = [Prompt(text=f"{a}+{b}=") for a in range(10, 100) for b in range(10, 100)]
BATCH = 128


def no_reward(prompt: Prompt, completion: Completion) -> float:
    return 0.0


@dataclass(frozen=True)
class Window:
    groups_per_s: float
    expired: int
    lags: dict[str, LoopReport]
    cpu: CpuUse


def offered_groups_per_s(config: Config, engine: SimulatedSpec, model: Path) -> float:
    """What the engines give if each group in flight is replaced the moment it ends."""
    tokenizer = PromptTokenizer(str(model), trust_remote_code=False, max_tokens=8)
    ends_s = [
        SimulatedGeneration(
            engine,
            GenerationRequest(
                "", tokenizer.encode(prompt), config.rollout.samples, config.sampling
            ),
            began_s=0.0,
            version=0,
        ).ends_s
        for prompt in PROMPTS
    ]
    return config.rollout.max_concurrent_groups / float(np.mean(ends_s))


async def measure(config: Config, options: argparse.Namespace, model: Path) -> tuple[Window, ...]:
    engine = _engine(options)
    async with started_crew(
        config,
        model,
        prompts=PROMPTS,
        reward=no_reward,
        rehearsal=Rehearsal(engine=engine, step_s=0.0),
    ) as crew:

        async def windows() -> tuple[Window, Window]:
            await _warm_up(crew, config, at_least_s=2 * options.group_s)
            offered = await _window(crew, options.seconds)
            await _make_instant(crew, engine)
            await asyncio.sleep(5.0)
            if options.profile is not None:
                await _profile(crew, options.profile)
            return offered, await _window(crew, options.seconds)

        return await guarded(windows(), Learning(crew).for_ever(), crew.watch())


async def _warm_up(crew: Crew, config: Config, *, at_least_s: float) -> None:
    """Past the wave of the first groups, which all begin together."""
    say(f"warming up for {at_least_s:.0f} s")
    await asyncio.sleep(at_least_s)
    status = await crew.controller.status.remote()
    if status.ledger.running < 0.9 * config.rollout.max_concurrent_groups:
        say(f"only {status.ledger.running} groups are in flight")


async def _window(crew: Crew, seconds: float) -> Window:
    lags = Lags({"controller": crew.controller, "queue": crew.queue})
    await lags.reset()
    before = await crew.controller.status.remote()
    meter, began = CpuMeter(), time.perf_counter()
    await asyncio.sleep(seconds)
    after = await crew.controller.status.remote()
    elapsed_s, cpu = time.perf_counter() - began, meter.use()
    return Window(
        groups_per_s=(after.ledger.accepted - before.ledger.accepted) / elapsed_s,
        expired=after.ledger.expired - before.ledger.expired,
        lags=await lags.reports(),
        cpu=cpu,
    )


async def _make_instant(crew: Crew, engine: SimulatedSpec) -> None:
    at_once = msgspec.structs.replace(engine, tokens_per_s=1e9, first_token_s=1e-9)

    def hurry(actor: object) -> None:
        actor._engine._spec = at_once

    await asyncio.gather(*(actor.__ray_call__.remote(hurry) for actor in crew.engines.values()))


async def _profile(crew: Crew, directory: Path) -> None:
    spy = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("py-spy")),
        *("record", "-d", "10", "-r", "200", "-f", "raw", "--gil"),
        *("-o", str(directory / "controller.raw"), "-p", str(await pid_of(crew.controller))),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await spy.wait()


def _engine(options: argparse.Namespace) -> SimulatedSpec:
    """Its longest of 8 samples takes `group_s` on average: 2.7 times the mean of a geometric
    distribution (1 + 1/2 + ... + 1/8)."""
    longest_of_group = sum(1 / n for n in range(1, options.samples + 1))
    return SimulatedSpec(
        name="",
        tokens_per_s=options.mean_tokens * longest_of_group / options.group_s,
        first_token_s=0.05,
        mean_tokens=options.mean_tokens,
        vocabulary=14,
        commit_pause_s=0.03,
    )


def report(offered: float, options: argparse.Namespace, windows: tuple[Window, ...]) -> None:
    print(f"{'cores used':20}{'offered':>12}{'saturated':>12}")
    names = sorted({name for window in windows for name in window.cpu.seconds})
    for name in names:
        print(f"{name:20}" + "".join(f"{window.cpu.cores(name):12.2f}" for window in windows))
    elsewhere = [window.cpu.elsewhere_s / window.cpu.wall_s for window in windows]
    print(f"{'(others)':20}" + "".join(f"{value:12.2f}" for value in elsewhere) + "\n")
    rows, figures = [], dict[str, Figure](offered_groups_per_s=offered)
    for name, window in zip(("offered", "saturated"), windows, strict=True):
        bound = window.groups_per_s / window.cpu.cores("RolloutController")
        lags = [window.lags[who] for who in ("controller", "queue")]
        rows.append(
            [
                name,
                f"{window.groups_per_s:.1f}",
                f"{options.samples * window.groups_per_s:,.0f}",
                f"{window.groups_per_s / offered:.2f}" if name == "offered" else "",
                f"{bound:.0f}",
                *(f"{lag.p50_ms:.1f} / {lag.p99_ms:.1f} / {lag.max_ms:.1f}" for lag in lags),
                f"{window.expired}",
            ]
        )
        figures |= {
            f"{name}_groups_per_s_measured": window.groups_per_s,
            f"{name}_samples_per_s": options.samples * window.groups_per_s,
            f"{name}_controller_bound_groups_per_s": bound,
        }
        for lag, who in zip(lags, ("controller", "queue"), strict=True):
            figures |= {
                f"{name}_{who}_lag_p50_ms": lag.p50_ms,
                f"{name}_{who}_lag_p99_ms": lag.p99_ms,
                f"{name}_{who}_lag_max_ms": lag.max_ms,
            }
    figures["of_offered"] = windows[0].groups_per_s / offered
    lag = "lag p50 / p99 / max ms"
    show(
        [
            "engines",
            "groups/s",
            "samples/s",
            "of offered",
            "bound",
            f"controller {lag}",
            f"queue {lag}",
            "expired",
        ],
        rows,
        figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--groups-in-flight", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mean-tokens", type=float, default=300.0)
    parser.add_argument("--group-s", type=float, default=20.0, help="mean time of a group")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each window")
    parser.add_argument("--profile", type=Path, help="a directory for py-spy's output")
    options = parser.parse_args()
    with tiny_model() as model:
        config = resolved(
            {
                "model": {"path": str(model)},
                "data": {"max_prompt_tokens": 8},
                "generation": {"engines": options.engines, "max_new_tokens": 4096},
                "rollout": {
                    "samples": options.samples,
                    "workers": options.workers,
                    "max_concurrent_groups": options.groups_in_flight,
                    # Versions come every `BATCH` groups: what is in flight must not expire.
                    "max_staleness": 40 * options.groups_in_flight // BATCH,
                },
                "trainer": {"groups_per_step": BATCH},
            }
        )
        offered = offered_groups_per_s(config, _engine(options), model)
        with local_cluster(config):
            windows = asyncio.run(measure(config, options, model))
    report(offered, options, windows)


if __name__ == "__main__":
    main()
