"""Going along with a run from outside, step by step: as a sweep does, which compares runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from areal_ray.session import Session


class Overseer(Protocol):
    def began(self, session: Session) -> None:
        """The run is about to take its first step."""

    async def after_step(self, session: Session) -> None:
        """After each step but the last. The trainer waits meanwhile, while rollout goes on, and
        `session.save()` can be asked for. Raise `StopRequested` to end the run there and then, with
        nothing saved."""
