"""The scoring process: reads groups from its standard input, writes rewards to its output.

Started by `RewardPool` as `python -m areal_ray.rewards.scorer`. It ends when its input ends, and
in the middle of a reward when the process that holds the pool is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import numpy as np

from areal_ray.lifeline import die_with_owner
from areal_ray.plugins import unpack, users_traceback
from areal_ray.rewards.messages import LENGTH, SampleToScore, ScoreReply, ScoreRequest
from areal_ray.types import Completion, Prompt


def main() -> None:
    die_with_owner()
    replies = _claim_stdout()
    requests = sys.stdin.buffer
    packed_reward = _read(requests)
    try:
        reward = unpack(packed_reward)
    except Exception:  # noqa: BLE001 - whatever it is, it travels to the owner
        _write(replies, ScoreReply(error=f"no reward function:\n{traceback.format_exc()}"))
        return
    _write(replies, ScoreReply())
    decoder = msgspec.msgpack.Decoder(ScoreRequest)
    while message := _read(requests):
        _write(replies, _score(reward, decoder.decode(message)))


def _claim_stdout() -> BinaryIO:
    """Keep the pipe for replies: what the user's reward prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def _read(stream: BinaryIO) -> bytes:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write(stream: BinaryIO, reply: ScoreReply) -> None:
    payload = msgspec.msgpack.encode(reply)
    stream.write(LENGTH.pack(len(payload)) + payload)
    stream.flush()


def _score(reward: Callable[..., object], request: ScoreRequest) -> ScoreReply:
    completions = [_completion(sample) for sample in request.samples]
    try:
        if inspect.iscoroutinefunction(reward):
            results = asyncio.run(_gather(reward, request.prompt, completions))
        else:
            results = [reward(request.prompt, completion) for completion in completions]
        return ScoreReply(rewards=[_as_number(result) for result in results])
    except Exception as error:  # noqa: BLE001 - the user's, whatever it is, travels to its owner
        told = users_traceback(error, called_from=__file__)
        return ScoreReply(error=f"the reward function raised\n{told}")


async def _gather(
    reward: Callable[..., object], prompt: Prompt, completions: list[Completion]
) -> list[object]:
    return await asyncio.gather(*(reward(prompt, completion) for completion in completions))


def _completion(sample: SampleToScore) -> Completion:
    token_ids = np.frombuffer(sample.token_ids, dtype=np.int32)
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.zeros(len(token_ids), dtype=np.int32),
        finish_reason=sample.finish_reason,
        text=sample.text,
    )


def _as_number(result: object) -> float:
    number = float(result)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, got {result!r}")
    return number


if __name__ == "__main__":
    main()
