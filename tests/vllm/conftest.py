"""One crew (a trainer, two engines, the control plane) serves all tests that only look at it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from areal_ray.generation.engine import EngineSpec
from tests.conftest import MarkedProcesses
from tests.vllm.struck import StruckRun, strike_a_run
from tests.vllm.training import LENGTH_REWARD, Training


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


def engine_spec(name: str, model: Path, **changes: object) -> EngineSpec:
    """Of an engine on the CPU for a tiny model."""
    defaults = {
        "model_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "max_prompt_tokens": 8,
        "max_new_tokens": 8,
        "max_samples": 8,
        "tensor_parallel": 1,
        "kv_cache_gib": None,
        "gpu_memory": 0.85,
        "trust_remote_code": False,
        "seed": 0,
    }
    return EngineSpec(name=name, **(defaults | changes))


class LiveCrew:
    """A started crew and the event loop that it is awaited on."""

    def __init__(self, tiny_model: Path, run_dir: Path, task) -> None:
        from areal_ray.actors.crew import Crew
        from areal_ray.actors.crew_specs import pack_tokenizer
        from areal_ray.config import resolve
        from areal_ray.config_file import from_mapping
        from areal_ray.placement import plan, reserve

        self.config = resolve(
            from_mapping(
                {
                    "name": "crew",
                    "model": {"path": str(tiny_model)},
                    "data": {"max_prompt_tokens": 8},
                    "generation": {"engines": 2, "max_new_tokens": 24},
                    "rollout": {"samples": 4, "max_staleness": 1},
                    "trainer": {"groups_per_step": 8, "lr": 1e-3},
                    "weights": {"bucket_mib": 0.1},
                }
            ),
            device="cpu",
        )
        self._runner = asyncio.Runner()
        self._seats = self.run(reserve(plan(self.config, device="cpu")))
        self.crew = Crew(
            self.config,
            task,
            model_path=str(tiny_model),
            packed_tokenizer=pack_tokenizer(self.config, str(tiny_model)),
            run_dir=run_dir,
            seats=self._seats,
        )
        self.run(self.crew.start())
        self.version = 0

    def run(self, work):
        async def awaited():
            return await work

        return self._runner.run(awaited())

    def train_and_update(self) -> None:
        """One step on whatever the engines generated, and its weights to the engines."""
        self.run(self.crew.train_step(self.version + 1, self.version))
        self.version += 1
        self.run(self.crew.update_weights(self.version))

    def close(self) -> None:
        self.run(self.crew.close())
        self._seats.release()
        self._runner.close()


@pytest.fixture(scope="module")
def live(
    ray_cluster: None,
    arithmetic: ModuleType,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveCrew]:
    from areal_ray.actors.crew_specs import Task
    from areal_ray.plugins import load_function, pack
    from areal_ray.workflows import load_filter, single_turn

    task = Task(
        prompts=arithmetic.problems(),
        demonstrations=(),
        packed_workflow=pack(single_turn),
        packed_reward=pack(load_function(LENGTH_REWARD)),
        packed_filter=pack(load_filter("everything")),
    )
    crew = LiveCrew(tiny_model, tmp_path_factory.mktemp("crew"), task)
    yield crew
    crew.close()


@pytest.fixture
def train(marked_processes, tmp_path: Path) -> Callable[..., Training]:
    """Starts the arithmetic example with overrides, in `tmp_path`, findable by its marker."""
    return partial(Training, tmp_path, marked_processes.environment)


@pytest.fixture(scope="session")
def struck(tmp_path_factory: pytest.TempPathFactory) -> StruckRun:
    """To be looked at only: it is over."""
    marked = MarkedProcesses(f"struck-{os.getpid()}")
    try:
        return strike_a_run(tmp_path_factory.mktemp("struck"), marked)
    finally:
        marked.kill()
