"""The configuration: one tree of Structs, with a default for everything that can have one.

`areal_ray.config_file.load` reads a file into it, strictly. `check` refuses combinations that
can't work; `resolve` fills in what follows from the rest. Both run before any actor starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from areal_ray.algorithm_config import AlgorithmConfig, algorithm_problems, algorithm_resolved
from areal_ray.config_section import (
    Count,
    CountOrZero,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Section,
)
from areal_ray.errors import ConfigError
from areal_ray.types import Sampling
from areal_ray.weights.update import KvAfterUpdate, StagingMode

LrSchedule = Literal["constant", "linear", "cosine"]


class ModelConfig(Section):
    path: str | None = None
    """A Hugging Face model directory or hub name."""
    factory: str | None = None
    """Instead of `path`: `file.py:function`, called with an empty directory to save a model in."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on GPUs, float32 on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off, unless you trust its author."""


class DataConfig(Section):
    train: str | None = None
    """Prompts: a `.jsonl` file, or `file.py:function` that returns them."""
    held_out: str | None = None
    """Prompts for evaluation, never trained on."""
    max_prompt_tokens: Count = 1024
    """A longer prompt is refused."""
    shuffle: bool = True
    """Draw each epoch in another order, fixed by `seed`."""


class RewardConfig(Section):
    function: str | None = None
    """`file.py:function` of a `Prompt` and a `Completion` that gives a number."""
    processes: Count = 1
    """How many processes score beside each rollout worker."""
    timeout_s: Positive = 30.0
    """A reward that takes longer has failed: its process is killed and replaced."""


class WarmupConfig(Section):
    steps: CountOrZero = 0
    """Supervised steps on prompts with answers, before reinforcement learning."""
    data: str | None = None
    """The demonstrations: `.jsonl` or `file.py:function`. Derived: those of `data.train`."""
    batch: Count = 64
    """Answers per supervised step."""
    lr: Positive = 1e-5
    """Of these steps."""


class GenerationConfig(Section):
    engines: Count = 1
    """vLLM engines in the pool."""
    min_engines: Count = 1
    """With fewer that serve or may yet serve, the run ends."""
    restart_engines: bool = True
    """Bring a lost engine back. Off, each loss is for good."""
    tensor_parallel: Count = 1
    """GPUs per engine."""
    colocated: bool = False
    """Trainer and engines share devices and take turns: engines sleep, their requests kept, while
    the trainer computes, and it waits in host memory while they generate."""
    max_new_tokens: Count = 512
    """The longest answer, or turn of one."""
    temperature: NotNegative = 1.0
    """Of what is trained on. Evaluations are greedy."""
    seeded: bool = False
    """Let every sample follow from `seed`, its group and the weights alone, so that synchronous
    training can be repeated. vLLM samples such requests one by one."""
    kv_cache_gib: Positive | None = None
    """KV cache per engine. Derived: on CPUs what all samples in flight need, within 1/16 to 1; on
    GPUs what `gpu_memory` leaves."""
    gpu_memory: Fraction = 0.85
    """The part of a GPU's memory that an engine may take."""
    startup_timeout_s: Positive = 900.0
    """An engine must be up within this, its model loaded."""
    request_timeout_s: Positive = 900.0
    """One generation call, a whole group, must end within this."""
    progress_every_s: Positive = 10.0
    """How often an engine's tokens are noted elsewhere, to go on from if its actor dies. (When
    vLLM's own process dies, the actor still has them.)"""
    probe_every_s: Positive = 5.0
    """How often an engine proves that it still generates."""
    suspect_after_s: Positive = 30.0
    """An engine that has not proved it for so long gets no new work."""
    dead_after_s: Positive = 120.0
    """After so long it is killed and restarted, and its requests go on elsewhere."""


class RolloutConfig(Section):
    samples: Count = 8
    """Samples per prompt: the size of a group."""
    max_staleness: CountOrZero = 2
    """How many versions old a token may be when it is trained on. 0: synchronous."""
    max_concurrent_groups: Count | None = None
    """Derived: all that `max_staleness` lets start."""
    workers: Count = 1
    """Processes that run episodes."""
    workflow: str = "single_turn"
    """What an episode is: a name, or `file.py:function`."""
    group_timeout_s: Positive = 3600.0
    """A whole episode, reward and place in the queue included, must end within this."""
    max_failed_groups: CountOrZero = 16
    """So many of the last 256 groups may fail,"""
    max_failure_rate: NotNegative = 0.1
    """or this part of them; more failures than both allow end the run."""
    filter: str = "everything"
    """Which groups to train on: `everything`, `unequal_rewards`, or `file.py:function`."""
    max_filtered_in_a_row: Count = 1000
    """A filter that lets none of so many groups through ends the run."""
    order: Literal["completion", "strict", "window"] = "completion"
    """In which order groups are trained on: as they are finished; as they were drawn; or as
    finished, within a window over the oldest that is not, so that long answers are not left
    behind."""
    window: Count | None = None
    """How many groups ahead of the oldest unfinished one. Derived: `trainer.groups_per_step`."""
    max_queue_gib: Positive = 8.0
    """Finished groups that wait for training, in all; rollout waits when there are more."""


class LoraConfig(Section):
    """Low-rank adapters on the policy's linear layers. A critic is trained in full."""

    rank: CountOrZero = 0
    """Of the adapters, which alone are trained then. 0: none; all weights are trained."""
    alpha: Positive = 32.0
    """What an adapter computes counts `alpha / rank` times."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which layers have one: all but the head, or those of these names, such as `q_proj`."""


class TrainerConfig(Section):
    ranks: Count = 1
    """Processes that train together, each on a GPU of its own (or, on CPUs, a core)."""
    sharding: Literal["auto", "full", "none"] = "auto"
    """How ranks hold models and optimizers: each a part of everything (`full`), or each a copy.
    `auto`: parts on GPUs, copies on CPUs."""
    groups_per_step: Count = 32
    """Groups in one optimizer step."""
    mini_batches: Count = 1
    """Optimizer steps on each batch: it is split into so many parts, of whole samples."""
    epochs: Count = 1
    """How often each batch is gone through."""
    lr: Positive = 1e-6
    """AdamW's learning rate."""
    lr_warmup_steps: CountOrZero = 10
    """Steps over which the learning rate rises to `lr`."""
    lr_schedule: LrSchedule = "constant"
    """What it does then, until the last of `steps`."""
    lr_floor: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The part of `lr` that `linear` and `cosine` end with."""
    beta1: Decay = 0.9
    """AdamW's memory of gradients"""
    beta2: Decay = 0.95
    """and of their squares."""
    weight_decay: NotNegative = 0.0
    """AdamW's, of all that is trained."""
    max_grad_norm: Positive = 1.0
    """A longer gradient is scaled down to this."""
    micro_batch_tokens: Count = 16384
    """Tokens in one forward and backward pass; the result does not depend on it."""
    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass, instead of keeping them."""
    compile: bool = False
    """Let torch compile the layers: a minute or so at the start, for faster steps on GPUs."""
    lora: LoraConfig = LoraConfig()
    step_timeout_s: Positive = 1800.0
    """What the trainer is asked for (to have a batch, a step, an export) must end within this."""
    max_restarts: CountOrZero = 3
    """So often a trainer that dies is brought back, from the last checkpoint."""


class WeightsConfig(Section):
    bucket_mib: Annotated[float, Meta(ge=0.001)] = 256.0
    """Weights travel in buffers of this size."""
    timeout_s: Positive = 300.0
    """Each step of a weight update (staging on all engines, the commit) must end within this."""
    staging: StagingMode = "device"
    """Where weights wait until all engines have them: beside those that serve (`device`), in
    pinned host memory (`host`), or nowhere (`none`): written in place, while generation stands
    still. On CPUs `device` and `host` are the same."""
    kv_after_update: KvAfterUpdate = "recompute"
    """What becomes of the KV cache of requests in flight: `recompute` it under the new weights, or
    `keep` what the old ones made. Later prompts never use what old weights cached."""
    release_kv_cache: bool = False
    """Give the KV cache's memory back while weights are written in place, where a GPU has no room
    for the transfer beside it. Needs `staging: none`."""
    verify: bool = False
    """Compare a checksum of every bucket after the transfer."""
    max_failures: Count = 3
    """So many updates that fail in a row end the run."""


class CheckpointConfig(Section):
    every: CountOrZero = 50
    """Write one after each this many steps, at the start and at the end, while training goes on.
    0: none, and a run that is lost is lost."""
    keep: Count = 2
    """How many of the latest to keep."""
    timeout_s: Positive = 3600.0
    """One that takes longer to write is given up."""


class EvaluationConfig(Section):
    every: CountOrZero = 0
    """Evaluate after each this many steps, besides at the start and the end. 0: only there."""
    prompts: Count | None = None
    """How many of the held-out prompts to use. Derived: all of them."""
    timeout_s: Positive = 1800.0
    """One must end within this."""


class ObservabilityConfig(Section):
    telemetry: bool = True
    """Let every actor tell what it does, every two seconds: for `areal-ray status`, the timeline in
    the report, traces, and the metrics in Ray's dashboard."""
    live_report: bool = True
    """Serve the run's report, as it is by then, at a local address while the run goes on."""
    trackers: tuple[str, ...] = ()
    """Where metrics go besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, or `file.py:name`
    of your own `Tracker`."""
    project: str = "areal_ray"
    """The project (Weights & Biases) or experiment (MLflow) that the run belongs to."""
    trace_s: NotNegative = 60.0
    """How much of the run's end is kept as a trace, in `trace.json`."""


class Config(Section):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """What the run is called; its files go to `<runs_dir>/<name>`."""
    runs_dir: str = "runs"
    """Relative to the working directory. On several nodes: one that they share."""
    seed: CountOrZero = 0
    """All chance in a run follows from it, as far as it can be repeated: see `seeded`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs if the cluster has any."""
    steps: Count = 100
    """Optimizer steps of reinforcement learning, at most."""
    goal: float | None = None
    """Stop as soon as an evaluation's mean reward is this high."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    warmup: WarmupConfig = WarmupConfig()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.generation.max_new_tokens,
            temperature=self.generation.temperature,
            seed=self.seed if self.generation.seeded else None,
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def check(config: Config, *, held_out_given: bool = False) -> None:
    """Refuse what is well formed but can't work, naming all of it at once.

    `held_out_given`: the held-out prompts come from the caller, not from a file.
    """
    problems = list(_problems(config, held_out_given or config.data.held_out is not None))
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: Config, has_held_out: bool) -> Iterator[str]:
    model, evaluation = config.model, config.evaluation
    if (model.path is None) == (model.factory is None):
        yield "model: expected exactly one of `path` and `factory`"
    if not has_held_out and evaluation.every:
        yield "evaluation.every: needs `data.held_out`, the prompts to evaluate on"
    if not has_held_out and config.goal is not None:
        yield "goal: needs `data.held_out`, the prompts it is measured on"
    if config.goal is not None and not evaluation.every:
        yield "goal: needs `evaluation.every`, how often to look whether it is reached"
    yield from algorithm_problems(
        config.algorithm,
        samples=config.rollout.samples,
        max_staleness=config.rollout.max_staleness,
        max_new_tokens=config.generation.max_new_tokens,
    )
    if config.generation.temperature == 0:
        yield (
            "generation.temperature: expected a number > 0, got 0: greedy samples of a prompt "
            "are all alike, and there is nothing to learn from them"
        )
    generation, rollout = config.generation, config.rollout
    if generation.min_engines > generation.engines:
        yield (
            f"generation.min_engines: expected at most generation.engines "
            f"({generation.engines}), got {generation.min_engines}"
        )
    if generation.suspect_after_s >= generation.dead_after_s:
        yield (
            f"generation.suspect_after_s: expected less than generation.dead_after_s "
            f"({generation.dead_after_s:g}), got {generation.suspect_after_s:g}"
        )
    if rollout.window is not None and rollout.order != "window":
        yield f"rollout.window: only read with `rollout.order: window`, not `{rollout.order}`"
    lora = config.trainer.lora
    if not lora.rank and lora != LoraConfig():
        yield "trainer.lora: only read with `trainer.lora.rank`; at 0 all weights are trained"
    if not lora.targets:
        yield "trainer.lora.targets: expected `all-linear` or at least one name, got an empty list"
    weights = config.weights
    if weights.release_kv_cache and weights.staging != "none":
        yield (
            "weights.release_kv_cache: needs `weights.staging: none`: with a staging copy the "
            "engines go on generating, and need their KV cache"
        )
    if weights.release_kv_cache and weights.kv_after_update == "keep":
        yield "weights.kv_after_update: `keep` can't be had with `weights.release_kv_cache`"
    if weights.release_kv_cache and config.device == "cpu":
        yield "weights.release_kv_cache: needs GPUs; on CPUs vLLM can't release its KV cache"
    if generation.colocated and weights.staging == "device":
        yield (
            "generation.colocated: needs `weights.staging: host` or `none`: a copy of the weights "
            "on the device would take the memory that the trainer needs"
        )
    if generation.colocated and config.trainer.ranks > 1:
        yield (
            "generation.colocated: expected `trainer.ranks` 1, got "
            f"{config.trainer.ranks}: a trainer that takes turns with engines has one rank"
        )
    samples = config.trainer.groups_per_step * config.rollout.samples
    if config.trainer.mini_batches > samples:
        yield (
            f"trainer.mini_batches: expected at most {samples}, the samples of a step, got "
            f"{config.trainer.mini_batches}"
        )
    if config.trainer.sharding == "full" and config.trainer.ranks == 1:
        yield "trainer.sharding: `full` needs more than one of `trainer.ranks`"
    if config.device == "cpu" and config.generation.tensor_parallel > 1:
        yield (
            "generation.tensor_parallel: expected 1 with `device: cpu`, got "
            f"{config.generation.tensor_parallel}"
        )


def resolve(config: Config, *, device: Literal["cpu", "cuda"]) -> Config:
    """The same configuration with everything derived that was left open."""
    replace = msgspec.structs.replace
    rollout, model, trainer = config.rollout, config.model, config.trainer
    if trainer.sharding == "auto":
        is_sharded = device == "cuda" and trainer.ranks > 1
        trainer = replace(trainer, sharding="full" if is_sharded else "none")
    if model.dtype == "auto":
        model = replace(model, dtype="bfloat16" if device == "cuda" else "float32")
    if rollout.max_concurrent_groups is None:
        all_of_them = (rollout.max_staleness + 1) * config.trainer.groups_per_step
        rollout = replace(rollout, max_concurrent_groups=all_of_them)
    if rollout.order == "window" and rollout.window is None:
        rollout = replace(rollout, window=config.trainer.groups_per_step)
    algorithm = algorithm_resolved(
        config.algorithm, max_new_tokens=config.generation.max_new_tokens
    )
    return replace(
        config, device=device, model=model, rollout=rollout, algorithm=algorithm, trainer=trainer
    )
