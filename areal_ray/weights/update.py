"""One weight update as it is told to those who take part."""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_ray.weights.layout import WeightManifest

Backend = Literal["gloo", "nccl"]
StagingMode = Literal["device", "host", "none"]
KvAfterUpdate = Literal["keep", "recompute"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

STAGING_KEY = "areal_ray_staging"
"""In vLLM's `additional_config`, which is for such things: the staging mode."""


class GroupMember(msgspec.Struct, frozen=True):
    """All that one process needs to join a group."""

    host: str
    port: int
    """Where the group meets."""
    address: str
    """The member's own address, the one it listens on."""
    group_id: str
    rank: int
    world_size: int
    backend: Backend
    timeout_s: float


class WeightUpdate(msgspec.Struct, frozen=True):
    """The group to join, and what will come over it."""

    member: GroupMember
    manifest: WeightManifest
    verify: bool = False
    """Checksums follow the buckets, and each is compared."""


class SendingPlan(msgspec.Struct, frozen=True):
    """Where the engines meet the trainer, and what it will send them."""

    host: str
    port: int
    manifest: WeightManifest
