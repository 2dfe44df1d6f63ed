"""A run's checkpoints: one moment of all actors, written while they go on, and taken up again.

The moment lies between two steps: the trainer learns from no batch. First the controller tells
where every group is, then the queue what waits in it. A group that was finished in between is
running for the one and here for the other: it is taken as finished. One that began in between is
unknown to the controller's word, and is left out: its prompt is still to be drawn.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
from ray.actor import ActorHandle

from areal_ray.actors.calls import ASK_TIMEOUT_S, until_back
from areal_ray.actors.crew_specs import journal_path
from areal_ray.actors.trainer_calls import TrainerCalls
from areal_ray.actors.trajectory_queue import Place
from areal_ray.checkpoints import (
    BOOK,
    CHECKPOINTS,
    GROUPS,
    TRAINER,
    Checkpoint,
    CheckpointStore,
    draws_of,
)
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.errors import CheckpointError
from areal_ray.journal import Journal
from areal_ray.restoring import uncancelled
from areal_ray.rollout_book import BookState


@dataclass(frozen=True)
class Cut:
    """A moment between two steps: where every group was."""

    step: int
    book: BookState
    places: list[Place]
    """Of the groups that waited to be trained on."""


class Checkpointing:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        controller: ActorHandle,
        queue: ActorHandle,
        trainer: ActorHandle,
        trainer_calls: TrainerCalls,
    ) -> None:
        self._config = config.checkpoint
        self._draws = draws_of(config)
        self._journal = Journal(journal_path(run_dir))
        self._controller = controller
        self._queue = queue
        self._trainer = trainer
        self._trainer_calls = trainer_calls
        self._writing: asyncio.Future[list[object]] | None = None
        self.store = CheckpointStore(run_dir / CHECKPOINTS, keep=config.checkpoint.keep)

    async def take_snapshot(self, step: int) -> Cut:
        """Returns when training may go on: only the trainer's tensors are copied for it. Refused
        while the last one is being written, if only by somebody whom nobody waits for any more."""
        if self._writing is not None and not self._writing.done():
            raise CheckpointError("the one before is still being written, past its time limit")
        book: BookState = await until_back(
            ASK_TIMEOUT_S,
            self._controller.book_state.remote,
            who="the controller",
            doing="telling where every group is",
        )
        waiting: dict[int, Place] = await until_back(
            ASK_TIMEOUT_S,
            self._queue.snapshot.remote,
            who="the trajectory queue",
            doing="telling what waits in it",
        )
        known = book.running.keys() | book.accepted.keys()
        places = [place for group_id, place in waiting.items() if group_id in known]
        await self._trainer_calls.take_snapshot()
        return Cut(step=step, book=book, places=places)

    async def write(self, cut: Cut) -> None:
        """While everything goes on. What is not whole in the end is not there."""
        partial = await asyncio.to_thread(self.store.begin, cut.step)
        # It goes on past its time limit: what writes is a thread, which nobody can end.
        self._writing = asyncio.gather(
            self._trainer.write_snapshot.remote(str(partial / TRAINER)),
            self._trainer.write_groups.remote(cut.places, str(partial / GROUPS)),
            asyncio.to_thread((partial / BOOK).write_bytes, msgspec.json.encode(cut.book)),
            return_exceptions=True,
        )
        try:
            outcomes = await within(
                self._config.timeout_s,
                asyncio.shield(self._writing),
                who="the trainer",
                doing="writing a checkpoint (checkpoint.timeout_s)",
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            # To its end: a cancellation would leave the thread at it.
            version = cut.book.counts.version
            await uncancelled(asyncio.to_thread(self.store.commit, cut.step, version, self._draws))
        except BaseException:
            await asyncio.to_thread(self.store.give_up, cut.step)
            raise

    async def take_up_rollouts(self, checkpoint: Checkpoint) -> None:
        """Before the controller is attached: it finds a journal, as if it had been killed at that
        moment; and the queue has what it had."""
        book = await asyncio.to_thread(checkpoint.book)
        unpaused = msgspec.structs.replace(book, is_paused=False)
        await asyncio.to_thread(self._journal.begin, unpaused)
        await until_back(
            self._config.timeout_s,
            lambda: self._queue.restore.remote(str(checkpoint.groups)),
            who="the trajectory queue",
            doing="taking groups up again",
        )
