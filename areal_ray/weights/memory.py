"""What staging costs in memory, told before a run starts."""

from __future__ import annotations

import math
from pathlib import Path

from areal_ray.config import Config
from areal_ray.weights.update import DTYPE_BYTES

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def staging_memory(config: Config, model_path: str) -> str:
    """One line for the user. `config`: resolved."""
    weights, shards = config.weights, config.generation.tensor_parallel
    total = _weight_bytes(model_path, DTYPE_BYTES[config.model.dtype])
    bucket = int(weights.bucket_mib * 2**20)
    on_gpus = config.device == "cuda"
    where = "pinned host memory" if weights.staging == "host" and on_gpus else "memory"
    whose = "GPU" if on_gpus else "engine"
    if weights.staging == "none":
        copy = "no copy"
    elif total is None:
        copy = "as much as its own weights"
    else:
        copy = _readable(total // shards)
    has_buckets = weights.staging == "none" or shards > 1 or (weights.staging == "host" and on_gpus)
    buckets = ""
    if has_buckets:
        size = 2 * bucket if total is None else 2 * min(bucket, total)
        buckets = f" and {_readable(size)} of buckets"
    return f"weight staging `{weights.staging}`: {copy}{buckets}, in {where}, for each {whose}"


def _weight_bytes(model_path: str, size: int) -> int | None:
    """None for a model that is not here yet."""
    from safetensors import safe_open

    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        return None
    elements = 0
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                elements += math.prod(opened.get_slice(name).get_shape())
    return elements * size


def _readable(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {UNITS[-1]}"
