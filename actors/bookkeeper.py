"""The rollout book together with its journal: what happens in the one is written to the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from areal_ray.data import PromptSource
from areal_ray.journal import Journal
from areal_ray.rollout_book import RolloutBook
from areal_ray.types import Prompt

A = TypeVar("A")
T = TypeVar("T")


class Bookkeeper:
    book: RolloutBook
    found_a_journal: bool
    """Somebody kept this book before us."""

    def __init__(self, path: Path, *, batch: int, max_staleness: int, max_concurrent: int) -> None:
        self._journal = Journal(path)
        self._limits = {
            "batch": batch,
            "max_staleness": max_staleness,
            "max_concurrent": max_concurrent,
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._turn = asyncio.Lock()

    async def read(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        """`book` is then as the journal has it, or empty if there is no journal yet."""
        source = PromptSource(prompts, seed=seed, shuffle=shuffle)
        self.book = await self._off_loop(self._reread, source)

    async def write(self) -> None:
        """Returns when all that has happened so far is written."""
        async with self._turn:
            if self._journal.wants_snapshot:
                self.book.take_events()
                await self._off_loop(self._journal.begin, self.book.state)
            elif events := self.book.take_events():
                await self._off_loop(self._journal.append, events)

    def _reread(self, source: PromptSource) -> RolloutBook:
        written = self._journal.read()
        self.found_a_journal = written is not None
        state, events = written or (None, [])
        book = RolloutBook(source, state=state, **self._limits)
        book.replay(events)
        self._journal.begin(book.state)
        return book

    async def _off_loop(self, work: Callable[[A], T], argument: A) -> T:
        """In one thread, so that writes keep their order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)
