"""What staging costs in memory, told before a run starts."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from areal_ray.config import Config
from areal_ray.weights.update import DTYPE_BYTES

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
RECEIVING_BUCKETS = 2
"""One arrives while the other is put where it belongs."""


class StagingMemory(msgspec.Struct, frozen=True):
    """For each GPU of an engine; on CPUs, for each engine."""

    copy_bytes: int | None
    """0 without a copy; None if the model is not here yet."""
    bucket_bytes: int
    """0 where buckets are received in their places."""
    is_on_host: bool
    """The copy is in pinned host memory, not beside the weights."""


def staging(config: Config, weight_bytes: int | None) -> StagingMemory:
    """`config`: resolved. `weight_bytes`: of the whole model, if that is known."""
    mode, shards = config.weights.staging, config.generation.tensor_parallel
    is_on_host = mode == "host" and config.device == "cuda"
    bucket = int(config.weights.bucket_mib * 2**20)
    if weight_bytes is not None:
        bucket = min(bucket, weight_bytes)
    copy = None if weight_bytes is None else weight_bytes // shards
    if mode == "none":
        copy = 0
    has_buckets = mode == "none" or shards > 1 or is_on_host
    return StagingMemory(copy, RECEIVING_BUCKETS * bucket if has_buckets else 0, is_on_host)


def staging_memory(config: Config, model_path: str) -> str:
    """One line for the user. `config`: resolved."""
    shapes = tensor_shapes(model_path)
    total = None
    if shapes:
        total = sum(map(math.prod, shapes.values())) * DTYPE_BYTES[config.model.dtype]
    needed = staging(config, total)
    where = "pinned host memory" if needed.is_on_host else "memory"
    whose = "GPU" if config.device == "cuda" else "engine"
    match needed.copy_bytes:
        case None:
            copy = "as much as its own weights"
        case 0:
            copy = "no copy"
        case size:
            copy = readable_bytes(size)
    buckets = ""
    if needed.bucket_bytes:
        buckets = f" and {readable_bytes(needed.bucket_bytes)} of buckets"
    mode = config.weights.staging
    return f"weight staging `{mode}`: {copy}{buckets}, in {where}, for each {whose}"


def tensor_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Of a model's safetensors files, by name; none of a model that is not here yet."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def readable_bytes(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {UNITS[-1]}"
