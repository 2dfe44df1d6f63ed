"""The records of a training, as one looks at them in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from areal_ray.observability.curve import curve
from areal_ray.observability.html import records_html
from areal_ray.observability.records import EvaluationRecord, Record, StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History:
    """Shows itself as a table; `plot` gives its curve."""

    def __init__(self, name: str, records: Iterable[Record]) -> None:
        self._name = name
        self._records = tuple(records)

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self._records if isinstance(record, StepRecord)]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        return [record for record in self._records if isinstance(record, EvaluationRecord)]

    def plot(self) -> Plot:
        return Plot(curve(self._records, title=self._name))

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __repr__(self) -> str:
        rewards = ", ".join(f"{record.reward:.3f}" for record in self.steps)
        return f"History({self._name}: rewards {rewards})"

    def _repr_html_(self) -> str:
        return records_html(self._records)


class Plot:
    """A figure of matplotlib's that a notebook shows once, whatever backend is set there."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png")
        return picture.getvalue()
