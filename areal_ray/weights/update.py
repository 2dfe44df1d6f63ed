"""One weight update as it is told to an engine."""

from __future__ import annotations

import msgspec

from areal_ray.weights.layout import WeightManifest
from areal_ray.weights.transport import GroupMember


class WeightUpdate(msgspec.Struct, frozen=True):
    """The group to join, and what will come over it."""

    member: GroupMember
    manifest: WeightManifest
