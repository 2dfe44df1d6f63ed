"""What somebody asked to see: answers, and groups that were rolled out for their own sake.

They are what a run makes all the time, with what a person wants to know besides: the text of each
token, which engine made it, how long it took.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from areal_ray.types import Completion, Prompt, TrajectoryGroup


class Answers(msgspec.Struct, frozen=True):
    """The samples of one prompt, as an engine gave them: nobody has scored them."""

    prompt: Prompt
    completions: list[Completion]
    pieces: list[list[str]]
    """The text of each token."""
    engine: str
    seconds: float

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    def __getitem__(self, index: int) -> Completion:
        return self.completions[index]

    def __repr__(self) -> str:
        return f"Answers({self.texts!r} by {self.engine})"

    def _repr_html_(self) -> str:
        from areal_ray.observability.html import answers_html

        return answers_html(self)


class TriedOut(TrajectoryGroup, frozen=True):
    """A group that went through workflow and reward, and then to whoever asked for it, not to
    the trainer."""

    pieces: list[list[str]]
    """The text of each token of each response."""
    engine: str
    seconds: float

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    def __repr__(self) -> str:
        samples = [(trajectory.text, trajectory.reward) for trajectory in self.trajectories]
        return f"TriedOut({samples!r} by {self.engine})"
