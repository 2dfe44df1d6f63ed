"""One crew (a trainer, two engines, the control plane) serves all tests that only look at it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from areal_ray.generation.engine import EngineSpec

EXAMPLES = Path(__file__).parents[2] / "examples"


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
            self.config, task, model_path=str(tiny_model), run_dir=run_dir, seats=self._seats
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


@pytest.fixture(scope="session")
def live(
    ray_cluster: None,
    arithmetic: ModuleType,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveCrew]:
    from areal_ray.actors.crew_specs import Task
    from areal_ray.plugins import pack
    from areal_ray.workflows import load_filter, single_turn

    def closeness(prompt, completion) -> float:
        return -abs(len(completion.text) - 3)

    task = Task(
        prompts=arithmetic.problems(),
        demonstrations=(),
        packed_workflow=pack(single_turn),
        packed_reward=pack(closeness),
        packed_filter=pack(load_filter("everything")),
    )
    crew = LiveCrew(tiny_model, tmp_path_factory.mktemp("crew"), task)
    yield crew
    crew.close()


class Training:
    """`areal-ray train` in a process of its own, with all it says in a file."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str) -> None:
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "areal_ray.cli", "train", *arguments],
                env={**environment, "PYTHONFAULTHANDLER": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text()

    def read_until(self, text: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.is_running, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in time:\n{self.output}"
            time.sleep(0.05)

    def wait(self, timeout_s: float = 300.0) -> int:
        """Returns the exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # Python's fault handler then says where each thread is.
            self._process.send_signal(signal.SIGABRT)
            self._process.wait()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None


@pytest.fixture
def train(marked_processes, tmp_path: Path) -> Callable[..., Training]:
    """Starts the arithmetic example with overrides, in `tmp_path`, findable by its marker."""

    def start(*overrides: str) -> Training:
        return Training(
            tmp_path / "said.txt",
            marked_processes.environment,
            str(EXAMPLES / "arithmetic.yaml"),
            f"runs_dir={tmp_path / 'runs'}",
            *overrides,
        )

    return start


def wait_until_empty(alive: Callable[[], dict[int, str]], timeout_s: float = 20.0) -> dict:
    """What is still alive after at most `timeout_s`: nothing, if all is well."""
    deadline = time.monotonic() + timeout_s
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
