"""What a running run can be told from outside, by `areal-ray pause`, `resume` and `resize`."""

from __future__ import annotations

import msgspec


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Begin no new groups. Those under way are finished, and learnt from as far as they fill a
    batch."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    pass


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    """Grow or shrink the pool to so many engines."""

    engines: int


Command = Pause | Resume | Resize


class Order(msgspec.Struct, frozen=True):
    """A command on its way to the run."""

    number: int
    command: Command


class Answer(msgspec.Struct, frozen=True):
    """What came of it."""

    text: str
    is_refusal: bool = False
