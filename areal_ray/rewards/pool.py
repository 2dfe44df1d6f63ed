"""Reward functions, run in processes of their own under a time limit.

A user's reward may loop for ever, leak, or crash the interpreter; none of that may reach the
event loop that runs the episodes. Each process scores one group at a time. One that is too slow
is killed and replaced, and the group's error says so. A reward written as `async def` waits
more than it computes (it asks a judge, a sandbox): it runs in the process's own event loop, all
samples of a group side by side.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, RewardError
from areal_ray.lifeline import OWNER_PID
from areal_ray.rewards.messages import LENGTH, SampleToScore, ScoreReply, ScoreRequest
from areal_ray.types import Completion, Prompt

Reward = Callable[[Prompt, Completion], float | Awaitable[float]]

STARTUP_TIMEOUT_S = 120.0


class RewardPool:
    def __init__(self, packed_reward: bytes, *, processes: int, timeout_s: float) -> None:
        self._packed_reward = packed_reward
        self._timeout_s = timeout_s
        self._idle: asyncio.LifoQueue[_Scorer | None] = asyncio.LifoQueue()
        for _ in range(processes):
            self._idle.put_nowait(None)
        self._started: set[_Scorer] = set()
        self._closed = False

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """One reward per completion, in order. Waits for a free process first."""
        scorer = await self._idle.get()
        healthy = False
        try:
            if self._closed:
                raise RewardError("the reward pool is closed")
            if scorer is None:
                scorer = await _Scorer.start(self._packed_reward)
                self._started.add(scorer)
            rewards = await within(
                self._timeout_s,
                scorer.score(_request(prompt, completions)),
                who="the reward function",
                doing="scoring a group (reward.timeout_s)",
            )
            healthy = True
        except DeadlineExceeded as error:
            raise RewardError(str(error)) from error
        except RewardError:
            healthy = scorer is not None and scorer.alive
            raise
        finally:
            if scorer is not None and not healthy:
                self._started.discard(scorer)
                scorer.kill()
            self._idle.put_nowait(scorer if healthy else None)
        return rewards

    async def close(self) -> None:
        self._closed = True
        for scorer in self._started:
            scorer.kill()
        await asyncio.gather(*(scorer.wait() for scorer in self._started))
        self._started.clear()


def _request(prompt: Prompt, completions: Sequence[Completion]) -> ScoreRequest:
    return ScoreRequest(
        prompt=prompt,
        samples=[
            SampleToScore(
                token_ids=completion.token_ids.tobytes(),
                text=completion.text,
                finish_reason=completion.finish_reason,
            )
            for completion in completions
        ],
    )


class _Scorer:
    """The near end of one scoring process: length-prefixed messages over its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(ScoreReply)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def start(cls, packed_reward: bytes) -> _Scorer:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "areal_ray.rewards.scorer",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                OWNER_PID: str(os.getpid()),
            },
        )
        scorer = cls(process)
        try:
            await within(
                STARTUP_TIMEOUT_S,
                scorer._ask(packed_reward),
                who="the process that runs the reward function",
                doing="its start",
            )
        except BaseException:
            scorer.kill()
            raise
        return scorer

    async def score(self, request: ScoreRequest) -> list[float]:
        return (await self._ask(self._encoder.encode(request))).rewards

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        if self.alive:
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()

    async def _ask(self, message: bytes) -> ScoreReply:
        try:
            await self._send(message)
            reply = self._decoder.decode(await self._receive())
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await self._process.wait()
            raise RewardError(
                f"the process that runs the reward function died (exit code {code})"
            ) from error
        if reply.error:
            raise RewardError(reply.error)
        return reply

    async def _send(self, payload: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(payload)))
        self._process.stdin.write(payload)
        await self._process.stdin.drain()

    async def _receive(self) -> bytes:
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return await self._process.stdout.readexactly(length)
