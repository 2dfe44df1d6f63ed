"""What a run needs of memory, as far as it follows from the config and the model's size.

Activations, the CUDA context and the processes' own libraries (about a gigabyte for each that has
torch or vLLM loaded) come on top: they don't follow from either.
"""

from __future__ import annotations

from areal_ray.algorithms import Algorithm
from areal_ray.config import Config
from areal_ray.generation.sizing import GIB, cpu_kv_cache_bytes, samples_at_once
from areal_ray.planning.figures import BYTES, Chapter, Figure, total
from areal_ray.planning.model_size import ModelSize, UnknownSize
from areal_ray.training.ranks import SUM_ELEMENTS
from areal_ray.weights.memory import readable_bytes, staging
from areal_ray.weights.sender import BUCKETS_IN_FLIGHT
from areal_ray.weights.update import DTYPE_BYTES

FLOAT32 = 4
ADAM = 2 * FLOAT32
"""Two moments for each parameter."""


class MemoryPlan:
    """`config`: resolved."""

    def __init__(self, config: Config, size: ModelSize | UnknownSize) -> None:
        self._config = config
        self._size = size
        self._on_gpus = config.device == "cuda"
        needs = Algorithm.of(config.algorithm).needs
        self._has_reference, self._has_critic = needs.reference, needs.values
        self._staging = staging(config, self._served_bytes)

    @property
    def chapters(self) -> list[Chapter]:
        engine, rank = self._engine(), self._rank()
        engine_in_all, rank_in_all = total(engine), total(rank)
        host = self._host(engine_in_all, rank_in_all)
        on_gpus = self._on_gpus
        return [
            Chapter("The model", (self._model(),)),
            Chapter(
                "Memory of each GPU of an engine" if on_gpus else "Memory of each engine",
                (*engine, engine_in_all),
            ),
            Chapter(
                "Memory of each trainer rank's GPU" if on_gpus else "Memory of each trainer rank",
                (*rank, rank_in_all),
            ),
            Chapter("Host memory, over all nodes", (*host, total(host))),
            Chapter("Disk", tuple(self._disk())),
        ]

    @property
    def _parameters(self) -> int | None:
        return self._size.parameters if isinstance(self._size, ModelSize) else None

    @property
    def _served_bytes(self) -> int | None:
        """Of the weights as engines have them, all of a model's."""
        if self._parameters is None:
            return None
        return self._parameters * DTYPE_BYTES[self._config.model.dtype]

    @property
    def _shards(self) -> int:
        trainer = self._config.trainer
        return trainer.ranks if trainer.sharding == "full" else 1

    @property
    def _adapters(self) -> int | None:
        """Parameters of one set; 0 without."""
        lora = self._config.trainer.lora
        if not lora.rank:
            return 0
        return self._size.adapter_parameters(lora) if isinstance(self._size, ModelSize) else None

    def _model(self) -> Figure:
        if isinstance(self._size, UnknownSize):
            return Figure("parameters", None, "", self._size.why)
        return Figure("parameters", self._size.parameters, "", f"from {self._size.source}")

    def _figure(
        self, name: str, count: int | None, each: int, of: str, *, shards: int = 1
    ) -> Figure:
        """So many parameters of `each` bytes, in `shards` parts. None: as many as the model's."""
        parts = "" if shards == 1 else f" / {shards} (trainer.ranks, sharded)"
        if count is None:
            return Figure(name, 0, BYTES, f"{each} bytes {of}{parts}", each / shards)
        how = f"{_short(count)} parameters × {each} bytes {of}{parts}"
        return Figure(name, count * each // shards, BYTES, how)

    def _engine(self) -> list[Figure]:
        config, needed = self._config, self._staging
        mode, weights = config.weights.staging, self._engine_weights("weights")
        figures = [weights]
        if mode == "none":
            figures.append(Figure("staging copy", 0, BYTES, "weights.staging none: no copy"))
        elif not needed.is_on_host:
            how = f"weights.staging {mode}: as much as the weights"
            figures.append(Figure("staging copy", weights.value, BYTES, how, weights.per_parameter))
        if needed.bucket_bytes:
            figures.append(
                Figure("buckets", needed.bucket_bytes, BYTES, "2, of at most weights.bucket_mib")
            )
        return [*figures, self._kv_cache()]

    def _engine_weights(self, name: str) -> Figure:
        """Of each GPU of an engine, or of an engine on CPUs."""
        dtype, shards = self._config.model.dtype, self._config.generation.tensor_parallel
        all_of_them = self._figure(name, self._parameters, DTYPE_BYTES[dtype], f"({dtype})")
        if shards == 1:
            return all_of_them
        return Figure(
            name,
            all_of_them.value // shards,
            BYTES,
            f"{all_of_them.how} / {shards} (generation.tensor_parallel)",
            all_of_them.per_parameter / shards,
        )

    def _kv_cache(self) -> Figure:
        generation = self._config.generation
        if generation.kv_cache_gib is not None:
            how = "generation.kv_cache_gib"
            return Figure("KV cache", generation.kv_cache_gib * GIB, BYTES, how)
        need = None
        if isinstance(self._size, ModelSize):
            samples, longest = samples_at_once(self._config), self._longest(self._size)
            token = self._size.kv_token_bytes // (
                generation.tensor_parallel if self._on_gpus else 1
            )
            need = f"{samples:,} samples × {longest:,} tokens × {readable_bytes(token)}"
        if self._on_gpus:
            left = f"what generation.gpu_memory, {generation.gpu_memory:.0%} of the GPU, leaves"
            if need is not None:
                full = readable_bytes(samples * longest * token)
                left += f"; all in flight at full length would fill {full}: {need}"
            return Figure("KV cache", None, BYTES, left)
        if need is None:
            how = "what all samples in flight need, within 1/16 to 1 GiB"
            return Figure("KV cache", None, BYTES, how)
        size = cpu_kv_cache_bytes(token, longest, samples)
        return Figure("KV cache", size, BYTES, f"{need}, within 1/16 to 1 GiB")

    def _longest(self, size: ModelSize) -> int:
        wanted = self._config.data.max_prompt_tokens + self._config.generation.max_new_tokens
        return min(wanted, size.max_tokens or wanted)

    def _rank(self) -> list[Figure]:
        policy, shards = self._parameters, self._shards
        has_adapters = self._config.trainer.lora.rank > 0
        figures = [self._figure("weights", policy, FLOAT32, "(float32)", shards=shards)]
        if has_adapters:
            figures.append(self._adapter_figure())
        else:
            figures += [
                self._figure("gradients", policy, FLOAT32, "(float32)", shards=shards),
                self._figure("Adam", policy, ADAM, "(2 moments, float32)", shards=shards),
            ]
        if self._has_reference and not has_adapters:
            figures.append(
                self._figure("reference", policy, FLOAT32, "(algorithm.kl)", shards=shards)
            )
        if self._has_critic:
            critic = self._size.critic_parameters if isinstance(self._size, ModelSize) else None
            each, of = 2 * FLOAT32 + ADAM, "(weights, gradients, Adam)"
            figures.append(self._figure("critic", critic, each, of, shards=shards))
        trained = self._adapters if has_adapters else policy
        return [*figures, *self._sums(trained), *self._sent_buckets()]

    def _adapter_figure(self) -> Figure:
        of = "(policy and reference, gradients, Adam)"
        if self._adapters is None:
            return Figure("adapters", None, BYTES, f"their layers are the model's {of}")
        each = 3 * FLOAT32 + ADAM
        return self._figure("adapters", self._adapters, each, of, shards=self._shards)

    def _sums(self, trained: int | None) -> list[Figure]:
        """Where ranks have copies, gradients are summed buffer by buffer."""
        if self._config.trainer.ranks == 1 or self._shards > 1:
            return []
        how = f"gradients are summed over ranks {SUM_ELEMENTS:,} at a time, × {FLOAT32} bytes"
        size = SUM_ELEMENTS
        if trained is not None:
            size = min(trained, SUM_ELEMENTS + self._size.largest_tensor)
        return [Figure("gradient sums", size * FLOAT32, BYTES, how)]

    def _sent_buckets(self) -> list[Figure]:
        config = self._config
        go_as_they_are = (
            not self._on_gpus
            and config.model.dtype == "float32"
            and self._shards == 1
            and not config.trainer.lora.rank
        )
        if go_as_they_are:
            return []
        size = int(config.weights.bucket_mib * 2**20)
        if self._served_bytes is not None:
            size = min(size, self._served_bytes)
        how = f"{BUCKETS_IN_FLIGHT}, of at most weights.bucket_mib; the first rank alone"
        return [Figure("buckets", BUCKETS_IN_FLIGHT * size, BYTES, how)]

    def _host(self, engine: Figure, rank: Figure) -> list[Figure]:
        config = self._config
        ranks, engines = config.trainer.ranks, config.generation.engines
        if self._on_gpus:
            figures = [
                self._figure("", self._parameters, FLOAT32, "").times(
                    ranks, "reading the model", ": at the start, whole, in each rank"
                )
            ]
        else:
            figures = [engine.times(engines, "engines"), rank.times(ranks, "trainer")]
        gpus = engines * config.generation.tensor_parallel
        if self._staging.is_on_host:
            figures.append(self._engine_weights("").times(gpus, "staging copies", ", pinned"))
        if config.generation.colocated and self._on_gpus:
            figures += [
                self._engine_weights("").times(gpus, "engines asleep", ": their weights"),
                rank.times(1, "trainer at rest"),
            ]
        if config.checkpoint.every:
            copies = 1 if self._shards > 1 else ranks
            figures.append(self._saved().times(copies, "copy for a checkpoint"))
        how = "rollout.max_queue_gib, at most, in Ray's object store"
        figures.append(Figure("finished groups", config.rollout.max_queue_gib * GIB, BYTES, how))
        return figures

    def _saved(self) -> Figure:
        """A checkpoint: weights and moments of what is trained, and the reference's weights."""
        own = self._adapters if self._config.trainer.lora.rank else self._parameters
        each = FLOAT32 + ADAM + (FLOAT32 if self._has_reference else 0)
        if own is None and self._config.trainer.lora.rank:
            return Figure("", None, BYTES, "")
        figures = [self._figure("", own, each, "")]
        if self._has_critic:
            critic = self._size.critic_parameters if isinstance(self._size, ModelSize) else None
            figures.append(self._figure("", critic, FLOAT32 + ADAM, ""))
        return total(figures)

    def _disk(self) -> list[Figure]:
        config, dtype = self._config, self._config.model.dtype
        figures = []
        if config.checkpoint.every:
            why = ": checkpoint.keep, and the one being written; without rollouts"
            figures.append(self._saved().times(config.checkpoint.keep + 1, "checkpoints", why))
        figures.append(
            self._figure("exported model", self._parameters, DTYPE_BYTES[dtype], f"({dtype})")
        )
        return figures


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)
