"""The actors of one run: made together, started side by side, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.checkpoint_engine import (
    CheckpointEngineManager,
    EngineMember,
    UpdateReport,
)
from areal_ray.actors.generation import GenerationActor
from areal_ray.actors.rollout_controller import ControllerSpec, RolloutController
from areal_ray.actors.rollout_worker import RolloutWorker, WorkerSpec
from areal_ray.actors.trainer import TrainerActor
from areal_ray.actors.trajectory_queue import TrajectoryQueue
from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.generation.engine import EngineSpec
from areal_ray.placement import Reservation
from areal_ray.plugins import pack
from areal_ray.training import TrainerSpec
from areal_ray.types import Prompt, WeightVersion

CLOSE_TIMEOUT_S = 20.0
QUEUE_MAX_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Task:
    """What the user brings: prompts, how an episode goes and how it is scored."""

    prompts: Sequence[Prompt]
    demonstrations: Sequence[Prompt]
    """For the supervised phase, if there is one."""
    packed_workflow: bytes
    packed_reward: bytes


class Crew:
    trainer: ActorHandle
    queue: ActorHandle
    controller: ActorHandle
    manager: ActorHandle

    def __init__(
        self, config: Config, task: Task, *, model_path: str, run_dir: Path, seats: Reservation
    ) -> None:
        """Make the actors whose places are known. None of them does anything yet."""
        self._config = config
        self._task = task
        # Each group in flight may need a second call to its worker, the queue's for the finished
        # group; and a probe or a commit must not wait behind all of them.
        calls_at_once = 1024 + 2 * config.rollout.max_concurrent_groups
        self._engine_names = [_engine_name(index) for index in range(config.generation.engines)]
        self.engines = [
            GenerationActor.options(name=name, max_concurrency=calls_at_once, **vars(slot)).remote(
                engine_spec(config, index, model_path)
            )
            for index, (name, slot) in enumerate(
                zip(self._engine_names, seats.slots("engine"), strict=True)
            )
        ]
        self.queue = TrajectoryQueue.options(
            name="trajectory-queue",
            num_cpus=0,
            max_concurrency=calls_at_once,
        ).remote(
            batch=config.trainer.groups_per_step,
            # One batch in training and as many as may wait: the ledger's bound, kept here too.
            max_groups=(config.rollout.max_staleness + 2) * config.trainer.groups_per_step,
            max_bytes=QUEUE_MAX_BYTES,
            max_staleness=config.rollout.max_staleness,
        )
        (trainer_slot,) = seats.slots("trainer")
        self.trainer = TrainerActor.options(name="trainer", **vars(trainer_slot)).remote(
            _trainer_spec(config, model_path), self.queue, str(run_dir)
        )
        self._worker_names = [f"worker-{index}" for index in range(config.rollout.workers)]
        self._workers = [
            RolloutWorker.options(name=name, num_cpus=0, max_concurrency=calls_at_once).remote(
                _worker_spec(config, task, model_path), self.queue
            )
            for name in self._worker_names
        ]
        self._others: list[ActorHandle] = []

    async def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Engines, workers and trainer side by side (the trainer with its supervised phase);
        then the first weights go to the engines, and rollout begins. `say` hears what is done."""
        timeout_s = self._config.generation.startup_timeout_s
        async with asyncio.TaskGroup() as tasks:
            addresses = [
                tasks.create_task(self._start_engine(name, engine, say))
                for name, engine in zip(self._engine_names, self.engines, strict=True)
            ]
            for name, worker in zip(self._worker_names, self._workers, strict=True):
                tasks.create_task(within(timeout_s, worker.ready.remote(), who=name, doing="start"))
            tasks.create_task(self._start_trainer(say))
        self._make_control_plane([address.result() for address in addresses])
        await self.update_weights(0)
        await self._ask(self.controller.start.remote(), "the controller", "start")

    async def update_weights(self, version: WeightVersion) -> UpdateReport:
        """Carry the trainer's weights to every engine, then let the controller know."""
        report = await within(
            3 * self._config.weights.timeout_s,
            self.manager.update_weights.remote(version),
            who="the checkpoint engine manager",
            doing=f"weight update {version}",
        )
        await self._ask(
            self.controller.commit_version.remote(version), "the controller", "taking a version"
        )
        return report

    async def stop_rollout(self) -> None:
        """No new groups, and nobody waits for a batch any more."""
        await self.controller.close.remote()
        await self.queue.close.remote()

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; or, when it was cancelled and so is to end at once, kill."""
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self.kill()
        else:
            await self.close()

    async def close(self) -> None:
        """Ask all to let go of what they hold; then end them, whether they did or not."""
        closing = [
            *(engine.close.remote() for engine in self.engines),
            *(worker.close.remote() for worker in self._workers),
            self.trainer.close.remote(),
        ]
        try:
            outcomes = await asyncio.gather(
                *(
                    within(CLOSE_TIMEOUT_S, call, who="an actor", doing="its shutdown")
                    for call in closing
                ),
                return_exceptions=True,
            )
        finally:
            self.kill()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                logs.debug("while closing: {}", outcome)

    def kill(self) -> None:
        for actor in (*self.engines, *self._workers, self.trainer, self.queue, *self._others):
            ray.kill(actor)

    async def _start_engine(
        self, name: str, engine: ActorHandle, say: Callable[[str], None]
    ) -> str:
        address = await within(
            self._config.generation.startup_timeout_s,
            engine.start.remote(),
            who=name,
            doing="its start (generation.startup_timeout_s)",
        )
        say(f"{name} is up")
        return address

    async def _start_trainer(self, say: Callable[[str], None]) -> None:
        warmup = self._config.warmup
        await within(
            self._config.generation.startup_timeout_s,
            self.trainer.start.remote(),
            who="the trainer",
            doing="start",
        )
        say("the trainer is up")
        if warmup.steps:
            loss = await within(
                self._config.trainer.step_timeout_s,
                self.trainer.warm_up.remote(self._task.demonstrations, warmup),
                who="the trainer",
                doing="the supervised warm-up (trainer.step_timeout_s)",
            )
            say(f"{warmup.steps} supervised steps done, loss {loss:.3f}")

    def _make_control_plane(self, addresses: Sequence[str]) -> None:
        config = self._config
        named = list(zip(self._engine_names, self.engines, strict=True))
        self.controller = RolloutController.options(name="rollout-controller", num_cpus=0).remote(
            _controller_spec(config),
            self._task.prompts,
            named,
            list(zip(self._worker_names, self._workers, strict=True)),
            self.queue,
        )
        self.manager = CheckpointEngineManager.options(
            name="checkpoint-engine-manager", num_cpus=0
        ).remote(
            self.trainer,
            [
                EngineMember(
                    name=name,
                    handle=handle,
                    address=address,
                    workers=config.generation.tensor_parallel,
                )
                for (name, handle), address in zip(named, addresses, strict=True)
            ],
            backend="nccl" if config.device == "cuda" else "gloo",
            bucket_bytes=int(config.weights.bucket_mib * 2**20),
            timeout_s=config.weights.timeout_s,
        )
        self._others = [self.controller, self.manager]

    async def _ask(self, call: Awaitable[object], who: str, doing: str) -> object:
        return await within(self._config.weights.timeout_s, call, who=who, doing=doing)


def _engine_name(index: int) -> str:
    return f"engine-{index}"


def engine_spec(config: Config, index: int, model_path: str) -> EngineSpec:
    generation = config.generation
    samples_in_flight = config.rollout.max_concurrent_groups * config.rollout.samples
    return EngineSpec(
        name=_engine_name(index),
        model_path=model_path,
        dtype=config.model.dtype,
        device=config.device,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=generation.max_new_tokens,
        max_samples=min(1024, -(-samples_in_flight // generation.engines)),
        tensor_parallel=generation.tensor_parallel,
        kv_cache_gib=generation.kv_cache_gib,
        gpu_memory=generation.gpu_memory,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed + index,
    )


def _trainer_spec(config: Config, model_path: str) -> TrainerSpec:
    return TrainerSpec(
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        device=config.device,
        dtype=config.model.dtype,
        max_prompt_tokens=config.data.max_prompt_tokens,
        temperature=config.generation.temperature,
        seed=config.seed,
        trainer=config.trainer,
        algorithm=config.algorithm,
        packed_advantage=pack(ADVANTAGES[config.algorithm.advantage]),
        packed_loss=pack(POLICY_LOSSES[config.algorithm.loss]),
    )


def _worker_spec(config: Config, task: Task, model_path: str) -> WorkerSpec:
    return WorkerSpec(
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        max_prompt_tokens=config.data.max_prompt_tokens,
        packed_workflow=task.packed_workflow,
        packed_reward=task.packed_reward,
        reward_processes=config.reward.processes,
        reward_timeout_s=config.reward.timeout_s,
        request_timeout_s=config.generation.request_timeout_s,
    )


def _controller_spec(config: Config) -> ControllerSpec:
    return ControllerSpec(
        samples=config.rollout.samples,
        sampling=config.sampling,
        group_timeout_s=config.rollout.group_timeout_s,
        groups_per_step=config.trainer.groups_per_step,
        max_staleness=config.rollout.max_staleness,
        max_concurrent_groups=config.rollout.max_concurrent_groups,
        max_failed_groups=config.rollout.max_failed_groups,
        probe_every_s=config.generation.probe_every_s,
        probe_timeout_s=config.generation.probe_timeout_s,
        shuffle=config.data.shuffle,
        seed=config.seed,
    )
