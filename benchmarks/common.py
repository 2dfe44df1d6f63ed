"""What the benchmarks share: a model, a cluster, a crew, its lags, CPU seconds, and the report."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from ray.actor import ActorHandle

from areal_ray import Completion, Prompt
from areal_ray.actors.crew import Crew
from areal_ray.actors.crew_specs import Task, pack_tokenizer
from areal_ray.actors.rehearsal import Rehearsal
from areal_ray.actors.telemetry import Telemetry
from areal_ray.config import Config, resolve
from areal_ray.config_file import from_mapping
from areal_ray.deadlines import within
from areal_ray.observability.loop_health import LoopReport
from areal_ray.placement import connect, plan, reserve
from areal_ray.plugins import pack
from areal_ray.types import WeightVersion
from areal_ray.workflows import Workflow, load_filter, single_turn

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.py"
RAYS_OWN = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
Figure = float | int | str | bool | list[float]


def show(
    headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Mapping[str, Figure]
) -> None:
    """One table for people, one line of JSON for programs."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }
    print(json.dumps(rounded))


def say(what: str) -> None:
    """On the way to the figures: to standard error."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def resolved(mapping: Mapping[str, object]) -> Config:
    return resolve(from_mapping({"name": "benchmark", **mapping}), device="cpu")


@contextmanager
def local_cluster(config: Config) -> Iterator[None]:
    cluster = connect(config)
    try:
        yield
    finally:
        cluster.leave()


@contextmanager
def tiny_model() -> Iterator[Path]:
    """The demo's model, with random weights."""
    from transformers.utils.logging import disable_progress_bar

    spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        example.tiny_qwen(Path(directory))
        yield Path(directory)


@contextmanager
def random_model(*, hidden: int, layers: int, vocabulary: int) -> Iterator[Path]:
    """Larger than the demo's, so that generation is real work. Of random weights, it ends a
    sample at each token with a chance of about one in `vocabulary`."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    with tiny_model() as directory:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens([chr(0x4E00 + n) for n in range(vocabulary - len(tokenizer))])
        tokenizer.save_pretrained(directory)
        config = Qwen2Config.from_pretrained(directory)
        config.vocab_size = vocabulary
        config.hidden_size, config.intermediate_size = hidden, 3 * hidden
        config.num_hidden_layers = layers
        config.layer_types = ["full_attention"] * layers
        config.num_attention_heads = config.num_key_value_heads = hidden // 64
        config.max_position_embeddings = 4096
        Qwen2ForCausalLM(config).save_pretrained(directory)
        yield directory


@asynccontextmanager
async def started_crew(
    config: Config,
    model: Path,
    *,
    prompts: Sequence[Prompt],
    reward: Callable[[Prompt, Completion], float],
    workflow: Workflow = single_turn,
    rehearsal: Rehearsal | None = None,
) -> AsyncIterator[Crew]:
    """All actors of a run, at work; nobody trains yet."""
    task = Task(
        prompts=prompts,
        demonstrations=(),
        packed_workflow=pack(workflow),
        packed_reward=pack(reward),
        packed_filter=pack(load_filter(config.rollout.filter)),
    )
    seats = await reserve(plan(config, device="cpu"))
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            async with Crew(
                config,
                task,
                model_path=str(model),
                packed_tokenizer=pack_tokenizer(config, str(model)),
                run_dir=Path(run_dir),
                seats=seats,
                rehearsal=rehearsal,
            ) as crew:
                await crew.start(say)
                yield crew
    finally:
        await asyncio.to_thread(seats.release)


class Learning:
    """Trains on batch after batch and lets the engines serve each next version."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.version: WeightVersion = 0
        self.groups_trained = 0

    async def for_ever(self) -> None:
        while True:
            await self.step()

    async def step(self) -> None:
        crew, step = self._crew, self.version + 1
        report = await crew.train_step(step, self.version)
        await crew.update_weights(step)
        self.version = step
        await crew.trained(report.group_ids)
        self.groups_trained += len(report.group_ids)


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, *, every_s: float, timeout_s: float = 300.0
) -> None:
    async def poll() -> None:
        while True:
            if await condition():
                return
            await asyncio.sleep(every_s)

    await within(timeout_s, poll(), who="the benchmark", doing=what)


class Lags:
    """The event loops of some actors, over a window of time."""

    def __init__(self, actors: Mapping[str, ActorHandle]) -> None:
        self._actors = actors

    async def reset(self) -> None:
        """Begin anew."""

        async def begin_anew(telemetry: Telemetry) -> None:
            telemetry._health.reset()

        await on_their_loops(self._actors.values(), begin_anew)

    async def reports(self) -> dict[str, LoopReport]:
        async def report(telemetry: Telemetry) -> LoopReport:
            return telemetry.loop()

        reports = await on_their_loops(self._actors.values(), report)
        return dict(zip(self._actors, reports, strict=True))


async def on_their_loops(
    actors: Iterable[ActorHandle], question: Callable[[Telemetry], Awaitable[T]]
) -> list[T]:
    """Ask each actor's telemetry, on its own event loop: what Ray calls runs in another thread."""

    def ask(actor: object) -> T:
        is_trainer = hasattr(actor, "_rank")
        telemetry: Telemetry = actor._rank.telemetry if is_trainer else actor._telemetry
        asked = asyncio.run_coroutine_threadsafe(question(telemetry), telemetry._health._loop)
        return asked.result(60)

    return await asyncio.gather(*(actor.__ray_call__.remote(ask) for actor in actors))


async def pid_of(actor: ActorHandle) -> int:
    return await actor.__ray_call__.remote(lambda _: __import__("os").getpid())


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds in a window, of this program's processes by name and of all the rest."""

    wall_s: float
    seconds: Counter[str]
    elsewhere_s: float
    """Other people's processes, and what the hypervisor took."""

    def cores(self, name: str) -> float:
        return self.seconds[name] / self.wall_s


class CpuMeter:
    """Reads the CPU seconds of every process from /proc. Blocks for some milliseconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before = _process_times()
        self._all_before = _machine_time()

    def use(self) -> CpuUse:
        after, wall_s = _process_times(), time.perf_counter() - self._began
        seconds: Counter[str] = Counter()
        for pid, (name, spent_s) in after.items():
            seconds[name] += spent_s - self._before.get(pid, ("", 0.0))[1]
        elsewhere_s = _machine_time() - self._all_before - seconds.total()
        return CpuUse(wall_s, seconds, max(0.0, elsewhere_s))


def _process_times() -> dict[int, tuple[str, float]]:
    """Of this process and all that descend from it."""
    found: dict[int, tuple[str, float]] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it ended just now
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        found[pid] = (
            _name_of(pid, command),
            (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S,
        )
    return {pid: found[pid] for pid in found if _descends(pid, parents)}


def _descends(pid: int, parents: Mapping[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False


def _name_of(pid: int, command: str) -> str:
    if pid == os.getpid():
        return "the driver"
    if "areal_ray.rewards.scorer" in command:
        return "scorer"
    if named := re.match(r"(?:ray|VLLM)::(\w+)", command):
        return "Ray itself" if named[1] in RAYS_OWN else named[1]
    return "Ray itself"


def _machine_time() -> float:
    """All but idle and waiting for disks."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / CLOCK_TICKS_PER_S


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"
