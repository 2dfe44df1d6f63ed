"""What the rest of areal_ray asks of an engine, whatever runs inside it."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from areal_ray.types import Completion, GenerationRequest, GenerationResult, WeightVersion
from areal_ray.weights.update import KvAfterUpdate, StagingMode


class EngineSpec(msgspec.Struct, frozen=True):
    """How to start one engine."""

    name: str
    model_path: str
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    max_prompt_tokens: int
    max_new_tokens: int
    max_samples: int
    """Samples in flight at once, at most."""
    tensor_parallel: int
    kv_cache_gib: float | None
    gpu_memory: float
    trust_remote_code: bool
    seed: int
    staging: StagingMode = "device"
    kv_after_update: KvAfterUpdate = "recompute"
    release_kv_cache: bool = False
    colocated: bool = False


class CommitReport(msgspec.Struct, frozen=True):
    """What a commit cost: how long generation stood still."""

    engine: str
    version: WeightVersion
    paused_s: float


class Engine(Protocol):
    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """All samples of one prompt. A cancelled call is aborted in the engine too. When the
        engine is lost meanwhile, what it had made is the result, marked as interrupted."""

    def progress(self, known: dict[str, list[int]]) -> dict[str, list[Completion]]:
        """What running requests have made beyond the `known` number of tokens of each sample, by
        request id. A request that is not running is left out."""

    async def probe(self) -> None:
        """Prove that the engine generates, by any token that it makes from now on: a health flag
        stays green on a wedged one. While it stands still because it was told to, that is answer
        enough."""

    async def stage_weights(self, encoded_update: bytes) -> None:
        """Begin to receive new weights (a `WeightUpdate` as msgpack); returns at once. If it fails
        there is nothing to undo."""

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        """Pause, swap, stamp, resume. What fails is undone; but after a swap that fails the weights
        may be torn, and the engine is not resumed."""

    async def discard_weights(self) -> str:
        """Let go of what was staged; the old weights go on serving. Raises if they can't."""

    async def rest(self) -> None:
        """Let go of the device's memory, for somebody else who needs it: no token is made until
        `wake`. Requests are kept, and computed anew. What fails is undone."""

    async def wake(self) -> None:
        """Take the memory again, and go on. An engine that does not rest stays as it is."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def is_resting(self) -> bool: ...

    @property
    def stands_still(self) -> bool:
        """It rests, or is paused for an update of its weights."""

    @property
    def version(self) -> WeightVersion:
        """That it serves."""

    @property
    def generated_tokens(self) -> int:
        """Since it was made."""

    async def close(self) -> None: ...
