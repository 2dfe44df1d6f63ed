"""The best and the worst samples of a run, to read, from early in it to late.

rollouts.jsonl may be many gigabytes: a few places of it are read, spread evenly from the first byte
to the last, and of each the best and the worst samples are taken, no two of the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from areal_ray.observability.report.tail import LineDecoder
from areal_ray.types import NOT_GENERATED

ROLLOUTS = "rollouts.jsonl"
PLACES = 3
EACH = 3
"""So many of the best, and of the worst, at each place."""
PLACE_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20
MAX_TEXT = 3000


class SampleLine(msgspec.Struct, frozen=True):
    """What is read of a line of rollouts.jsonl."""

    step: int
    group: int
    prompt: str
    answer: str | None
    text: str
    reward: float | None
    finish_reason: str
    versions: list[int]


class Sample(msgspec.Struct, frozen=True):
    step: int
    group: int
    prompt: str
    answer: str | None
    text: str
    reward: float
    finish_reason: str
    tokens: int
    oldest_version: int | None
    newest_version: int | None


class SamplePlace(msgspec.Struct, frozen=True):
    first_step: int
    last_step: int
    samples: int
    """Among which these are the best and the worst."""
    best: list[Sample]
    worst: list[Sample]


def pick_samples(
    path: Path, *, places: int = PLACES, place_bytes: int = PLACE_BYTES
) -> list[SamplePlace]:
    """None if there is no file, or no whole line in it."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        size = file.seek(0, 2)
        if size <= places * place_bytes:
            return _thirds(_lines(file.seek(0) or file.read()), places)
        starts = [nth * (size - place_bytes) // (places - 1) for nth in range(places)]
        found = [_lines(_piece(file, start, place_bytes)) for start in starts]
    return [_place(lines) for lines in found if lines]


def _piece(file: BinaryIO, start: int, length: int) -> bytes:
    """Whole lines from about `start` on: at least one, if it is not longer than all reason."""
    file.seek(start)
    if start:
        file.readline(MAX_LINE_BYTES)  # the rest of a line
    piece = file.read(length)
    if b"\n" not in piece:
        piece += file.readline(MAX_LINE_BYTES)
    return piece


def _lines(piece: bytes) -> list[SampleLine]:
    whole = piece[: piece.rfind(b"\n") + 1]
    lines = LineDecoder(SampleLine).decode(whole)
    return [line for line in lines if line.reward is not None]


def _thirds(lines: Sequence[SampleLine], places: int) -> list[SamplePlace]:
    """A file that is read whole, divided by steps: a short run has fewer places than asked for."""
    if not lines:
        return []
    first, last = lines[0].step, lines[-1].step
    parts: dict[int, list[SampleLine]] = {}
    for line in lines:
        nth = (line.step - first) * places // (last - first + 1)
        parts.setdefault(min(max(nth, 0), places - 1), []).append(line)
    return [_place(parts[nth]) for nth in sorted(parts)]


def _place(lines: Sequence[SampleLine]) -> SamplePlace:
    # Among equals by a number that says nothing, or all would be of the first or the last step.
    by_reward = sorted(lines, key=lambda line: (line.reward, crc32(b"%d" % line.group)))
    worst = _of_different_prompts(by_reward, avoiding=set())
    best = _of_different_prompts(reversed(by_reward), avoiding={id(line) for line in worst})
    return SamplePlace(
        first_step=min(line.step for line in lines),
        last_step=max(line.step for line in lines),
        samples=len(lines),
        best=[_sample(line) for line in best],
        worst=[_sample(line) for line in worst],
    )


def _of_different_prompts(lines: Iterable[SampleLine], avoiding: set[int]) -> list[SampleLine]:
    chosen: dict[str, SampleLine] = {}
    for line in lines:
        if len(chosen) == EACH:
            break
        if id(line) not in avoiding:
            chosen.setdefault(line.prompt, line)
    return list(chosen.values())


def _sample(line: SampleLine) -> Sample:
    versions = [version for version in line.versions if version != NOT_GENERATED]
    return Sample(
        step=line.step,
        group=line.group,
        prompt=_shortened(line.prompt),
        answer=None if line.answer is None else _shortened(line.answer),
        text=_shortened(line.text),
        reward=line.reward,
        finish_reason=line.finish_reason,
        tokens=len(line.versions),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
    )


def _shortened(text: str) -> str:
    """Its beginning and its end, which is where an answer is."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
