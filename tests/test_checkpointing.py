"""A checkpoint that takes too long to write, over actors that are played."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_ray.actors.checkpointing import Checkpointing
from areal_ray.checkpoints import write_groups
from areal_ray.config_file import from_mapping
from areal_ray.data import PromptSource
from areal_ray.errors import CheckpointError, DeadlineExceeded
from areal_ray.rollout_book import BookState, RolloutBook
from areal_ray.types import Prompt


class Played:
    """Controller, queue and trainer in one, of a run in which nothing has happened yet."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()
        for name in ("book_state", "snapshot", "write_snapshot", "write_groups"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _book_state(self) -> BookState:
        source = PromptSource([Prompt(text="a")], seed=0, shuffle=False)
        return RolloutBook(source, batch=1, max_staleness=0, max_concurrent=1).state

    async def _snapshot(self) -> dict:
        return {}

    async def take_snapshot(self) -> None:
        pass

    async def _write_snapshot(self, directory: str) -> None:
        await self.may_write.wait()
        await asyncio.to_thread(os.makedirs, directory)

    async def _write_groups(self, places: list, path: str) -> None:
        await asyncio.to_thread(write_groups, Path(path), [])


async def test_while_one_is_written_past_its_limit_no_other_is_begun(tmp_path: Path) -> None:
    config = from_mapping(
        {"name": "a", "model": {"path": "m"}, "checkpoint": {"every": 1, "timeout_s": 3}}
    )
    played = Played()
    checkpointing = Checkpointing(
        config, tmp_path, controller=played, queue=played, trainer=played, trainer_calls=played
    )
    await checkpointing.write(await checkpointing.take_snapshot(1))
    played.may_write.clear()
    with pytest.raises(DeadlineExceeded, match="writing a checkpoint"):
        await checkpointing.write(await checkpointing.take_snapshot(2))
    with pytest.raises(CheckpointError, match="still being written"):
        await checkpointing.take_snapshot(3)
    # It comes to its end at last, in a directory that nobody wants any more.
    played.may_write.set()
    await checkpointing._writing
    await checkpointing.write(await checkpointing.take_snapshot(4))
    directories = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert directories == ["step-00000001", "step-00000004"]
