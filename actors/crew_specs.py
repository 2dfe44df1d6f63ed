"""From the configuration to what each actor of a run is told."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_ray.actors.checkpoint_engine import ManagerSpec
from areal_ray.actors.pool import Care
from areal_ray.actors.rollout_controller import ControllerSpec
from areal_ray.actors.rollout_worker import WorkerSpec
from areal_ray.actors.run_monitor import MonitorSpec
from areal_ray.algorithms import Algorithm
from areal_ray.config import Config, RolloutConfig
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.generation.engine import EngineSpec
from areal_ray.generation.sizing import samples_at_once
from areal_ray.observability.timeline import TIMELINE
from areal_ray.plugins import pack
from areal_ray.training.spec import TrainerSpec
from areal_ray.types import Prompt
from areal_ray.weights.transaction import Limits

MAX_FAILED_STARTS = 3
RESTORE_TIMEOUT_S = 30.0
"""For each engine's part in undoing an update."""


@dataclass(frozen=True)
class Task:
    """What the user brings: prompts, how an episode goes, how it is scored, what is kept."""

    prompts: Sequence[Prompt]
    demonstrations: Sequence[Prompt]
    """For the supervised phase, if there is one."""
    packed_workflow: bytes
    packed_reward: bytes
    packed_filter: bytes


def journal_path(run_dir: Path) -> Path:
    return run_dir / "rollout.journal"


def engine_name(index: int) -> str:
    return f"engine-{index}"


def engine_spec(config: Config, index: int, model_path: str) -> EngineSpec:
    generation = config.generation
    return EngineSpec(
        name=engine_name(index),
        model_path=model_path,
        dtype=config.model.dtype,
        device=config.device,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=generation.max_new_tokens,
        max_samples=samples_at_once(config),
        tensor_parallel=generation.tensor_parallel,
        kv_cache_gib=generation.kv_cache_gib,
        gpu_memory=generation.gpu_memory,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed + index,
        staging=config.weights.staging,
        kv_after_update=config.weights.kv_after_update,
        release_kv_cache=config.weights.release_kv_cache,
        colocated=generation.colocated,
    )


def _engine_care(config: Config) -> Care:
    generation = config.generation
    return Care(
        prove_every_s=generation.probe_every_s,
        suspect_after_s=generation.suspect_after_s,
        dead_after_s=generation.dead_after_s,
        may_restart=generation.restart_engines,
        max_failed_starts=MAX_FAILED_STARTS,
        min_members=generation.min_engines,
    )


def _worker_care(config: Config) -> Care:
    generation = config.generation
    return Care(
        prove_every_s=generation.probe_every_s,
        suspect_after_s=generation.suspect_after_s,
        dead_after_s=generation.dead_after_s,
        may_restart=True,
        max_failed_starts=MAX_FAILED_STARTS,
        min_members=1,
    )


def window_of(rollout: RolloutConfig) -> int | None:
    """As the trajectory buffer counts it."""
    return {"completion": None, "strict": 0, "window": rollout.window}[rollout.order]


def trainer_spec(config: Config, model_path: str) -> TrainerSpec:
    return TrainerSpec(
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        device=config.device,
        dtype=config.model.dtype,
        max_prompt_tokens=config.data.max_prompt_tokens,
        temperature=config.generation.temperature,
        seed=config.seed,
        trainer=config.trainer,
        steps=config.steps,
        # One may send weights while the others gather along.
        ranks_timeout_s=config.trainer.step_timeout_s + config.weights.timeout_s,
        packed_algorithm=pack(Algorithm.of(config.algorithm)),
    )


def manager_spec(config: Config) -> ManagerSpec:
    weights = config.weights
    return ManagerSpec(
        # NCCL takes no two members on one GPU; and a colocated trainer sends from host memory.
        backend="nccl" if config.device == "cuda" and not config.generation.colocated else "gloo",
        bucket_bytes=int(weights.bucket_mib * 2**20),
        verify=weights.verify,
        limits=Limits(
            timeout_s=weights.timeout_s,
            busy_timeout_s=config.trainer.step_timeout_s,
            restore_timeout_s=RESTORE_TIMEOUT_S,
            max_failures=weights.max_failures,
        ),
        start_timeout_s=config.generation.startup_timeout_s + weights.timeout_s,
    )


def monitor_spec(config: Config, run_dir: Path) -> MonitorSpec:
    return MonitorSpec(
        run=run_dir.name,
        directory=str(run_dir),
        timeline=str(run_dir / TIMELINE),
        steps=config.steps,
        trace_s=config.observability.trace_s,
    )


def update_timeout_s(config: Config) -> float:
    """All that an update may take: every attempt to its limit with all it undoes, the search for
    engines that can't receive, the commit; and a sync of every engine before it."""
    weights = config.weights
    attempt_s = config.trainer.step_timeout_s + weights.timeout_s + 6 * RESTORE_TIMEOUT_S
    attempts = weights.max_failures + 3 * config.generation.engines
    return attempts * (attempt_s + weights.timeout_s)


def pack_tokenizer(config: Config, model_path: str) -> bytes:
    """For the workers. Blocks, for seconds at first."""
    tokenizer = PromptTokenizer(
        model_path,
        trust_remote_code=config.model.trust_remote_code,
        max_tokens=config.data.max_prompt_tokens,
    )
    return pickle.dumps(tokenizer)


def worker_spec(config: Config, task: Task, packed_tokenizer: bytes) -> WorkerSpec:
    return WorkerSpec(
        packed_tokenizer=packed_tokenizer,
        packed_workflow=task.packed_workflow,
        packed_reward=task.packed_reward,
        packed_filter=task.packed_filter,
        reward_processes=config.reward.processes,
        reward_timeout_s=config.reward.timeout_s,
        request_timeout_s=config.generation.request_timeout_s,
        progress_every_s=config.generation.progress_every_s,
        relocate_timeout_s=config.generation.startup_timeout_s,
    )


def controller_spec(config: Config, run_dir: Path) -> ControllerSpec:
    rollout = config.rollout
    return ControllerSpec(
        samples=rollout.samples,
        sampling=config.sampling,
        group_timeout_s=rollout.group_timeout_s,
        groups_per_step=config.trainer.groups_per_step,
        max_staleness=rollout.max_staleness,
        max_concurrent_groups=rollout.max_concurrent_groups,
        max_failed_groups=rollout.max_failed_groups,
        max_failure_rate=rollout.max_failure_rate,
        max_filtered_in_a_row=rollout.max_filtered_in_a_row,
        shuffle=config.data.shuffle,
        seed=config.seed,
        journal=str(journal_path(run_dir)),
        tensor_parallel=config.generation.tensor_parallel,
        is_colocated=config.generation.colocated,
        startup_timeout_s=config.generation.startup_timeout_s,
        sync_timeout_s=update_timeout_s(config),
        engine_care=_engine_care(config),
        worker_care=_worker_care(config),
    )
