"""A number that follows from a config, and how it came about."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from areal_ray.weights.memory import readable_bytes

BYTES = "bytes"


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    value: float | None
    """None: not known before the run."""
    unit: str
    how: str
    """The way to the value; if there is none, why."""
    per_parameter: float = 0.0
    """Bytes besides, for each parameter of a model that is not known."""

    @property
    def text(self) -> str:
        if self.value is None:
            return "not known"
        if self.unit != BYTES:
            return f"{self.value:,.10g} {self.unit}".rstrip()
        parts = [readable_bytes(self.value)] if self.value or not self.per_parameter else []
        if self.per_parameter:
            parts.append(f"{self.per_parameter:g} B/parameter")
        return " + ".join(parts)

    def times(self, count: int, name: str, why: str = "") -> Figure:
        """So many of these; one of them in the words of `text`."""
        how = f"{count} × {self.text}{why}"
        value = None if self.value is None else self.value * count
        return Figure(name, value, self.unit, how, self.per_parameter * count)


class Chapter(msgspec.Struct, frozen=True):
    """Figures of one kind: all of one GPU's memory, say."""

    title: str
    figures: tuple[Figure, ...]


def total(figures: Iterable[Figure]) -> Figure:
    """The sum of what is known."""
    figures = list(figures)
    known = [figure for figure in figures if figure.value is not None]
    open_ones = [figure.name for figure in figures if figure.value is None]
    how = "the sum of the above"
    if open_ones:
        how += f", without {' and '.join(open_ones)}"
    return Figure(
        "in all",
        sum(figure.value for figure in known),
        BYTES,
        how,
        sum(figure.per_parameter for figure in known),
    )
