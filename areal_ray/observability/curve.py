"""The reward curve as a picture.

Drawn without pyplot, whose state is the process's: in a notebook that is the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from areal_ray.observability.records import EvaluationRecord, Record, StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130


def read_metrics(path: Path) -> list[Record]:
    """All whole lines: the last one may have been cut off by whatever ended the run."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return msgspec.json.Decoder(Record).decode_lines(whole)
    except msgspec.ValidationError:
        return [_with_nan(line) for line in whole.splitlines()]


def _with_nan(line: bytes) -> Record:
    """JSON knows no NaN: a number that is none was written as null."""
    fields = msgspec.json.decode(line)
    kind = StepRecord if fields["kind"] == "step" else EvaluationRecord
    for field in msgspec.structs.fields(kind):
        if field.type is float and fields.get(field.name, 0.0) is None:
            fields[field.name] = math.nan
    return msgspec.convert(fields, kind)


def draw_curve(metrics: Path, picture: Path, *, title: str) -> None:
    """From metrics.jsonl. Blocks: call it off the loop."""
    curve(read_metrics(metrics), title=title).savefig(picture)


def curve(records: Sequence[Record], *, title: str) -> Figure:
    """Training reward as a line, held-out reward as points."""
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    figure = Figure(figsize=(8, 4.2), dpi=DPI)
    axes = figure.subplots()
    axes.plot(
        [record.step for record in steps],
        [record.reward for record in steps],
        color="#7aa6c2",
        linewidth=1.4,
        label="training (sampled)",
    )
    if evaluations:
        axes.plot(
            [record.step for record in evaluations],
            [record.reward for record in evaluations],
            color="#c2410c",
            marker="o",
            markersize=4.5,
            linewidth=1.8,
            label="held out (greedy)",
        )
        for record, below in ((evaluations[0], False), (evaluations[-1], True)):
            axes.annotate(
                f"{record.reward:.2f}",
                (record.step, record.reward),
                xytext=(6, -14 if below else 8),
                textcoords="offset points",
                color="#c2410c",
            )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    return figure
