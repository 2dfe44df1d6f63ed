from __future__ import annotations

from pathlib import Path

import pytest

from areal_ray.config import resolve
from areal_ray.config_file import from_mapping
from areal_ray.weights.memory import staging_memory


def told(model: str, device: str, **changes: object) -> str:
    generation = {"tensor_parallel": changes.pop("tensor_parallel", 1)}
    config = from_mapping(
        {"name": "m", "model": {"path": model}, "generation": generation, "weights": changes}
    )
    return staging_memory(resolve(config, device=device), model)


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        # 2 x 14 x 64 embeddings, 2 layers of 3 x (64 x 64 + 64) + 64 x 64 + 3 x 64 x 128 + 2 x 64,
        # a norm of 64: 84,416 parameters, of 4 bytes on CPUs (329.75 KiB), of 2 on GPUs.
        ("cpu", {}, "`device`: 330 KiB, in memory, for each engine"),
        ("cuda", {}, "`device`: 165 KiB, in memory, for each GPU"),
        ("cuda", {"tensor_parallel": 2, "bucket_mib": 0.0625},
         "`device`: 82.4 KiB and 128 KiB of buckets, in memory, for each GPU"),
        ("cuda", {"staging": "host", "bucket_mib": 0.0625},
         "`host`: 165 KiB and 128 KiB of buckets, in pinned host memory, for each GPU"),
        ("cpu", {"staging": "none", "bucket_mib": 0.0625},
         "`none`: no copy and 128 KiB of buckets, in memory, for each engine"),
    ],
)  # fmt: skip
def test_what_staging_costs_is_told(
    tiny_model: Path, device: str, changes: dict, expected: str
) -> None:
    assert told(str(tiny_model), device, **changes) == f"weight staging {expected}"


def test_of_a_model_that_is_not_here_yet_it_is_told_in_words() -> None:
    said = told("some/model", "cuda")
    assert said.endswith("`device`: as much as its own weights, in memory, for each GPU")
