"""What crosses the pipe between a reward pool and its scoring processes.

Each message is its length as eight bytes, then msgpack. The first one is the reward function;
the process answers it, and every group after it, with a `ScoreReply`.
"""

from __future__ import annotations

import struct

import msgspec

from areal_ray.types import FinishReason, Prompt

LENGTH = struct.Struct("<Q")


class SampleToScore(msgspec.Struct):
    token_ids: bytes
    """Of an int32 array: a list of so many numbers would hold up who encodes it."""
    text: str
    finish_reason: FinishReason


class ScoreRequest(msgspec.Struct):
    prompt: Prompt
    samples: list[SampleToScore]


class ScoreReply(msgspec.Struct):
    rewards: list[float] = []
    error: str = ""
