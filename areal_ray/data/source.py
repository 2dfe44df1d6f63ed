"""Prompts, and the cursor that walks over them.

A `PromptSource` deals out prompts epoch after epoch, each epoch in an order fixed by the seed.
A prompt that was drawn and grew too old to be trained on is put back, and is drawn again first,
so that none is lost. One whose rollout failed is tried again at the end of the epoch; after
`MAX_FAILURES` it is given up, so that a single bad prompt can't use up a run's error budget.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_ray.errors import DataError, JournalError
from areal_ray.plugins import load_function
from areal_ray.types import Prompt

MAX_FAILURES = 3


def load_prompts(spec: str) -> list[Prompt]:
    """Read the prompts that a config names: a `.jsonl` file, or `file.py:function`."""
    if spec.endswith(".jsonl"):
        return _read_jsonl(Path(spec))
    return as_prompts(load_function(spec)(), where=spec)


def as_prompts(items: Iterable[object], *, where: str) -> list[Prompt]:
    prompts = list(items)
    if not prompts:
        raise DataError(f"{where}: holds no prompts")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise DataError(
                f"{where}: item {index} is a {type(prompt).__name__}, expected a Prompt"
            )
    return prompts


def refuse_without_answers(demonstrations: Sequence[Prompt]) -> None:
    for index, prompt in enumerate(demonstrations):
        if prompt.answer is None:
            shown = prompt.text or prompt.messages
            raise DataError(f"warmup.data: item {index} has no answer to teach: {shown}")


def _read_jsonl(path: Path) -> list[Prompt]:
    decoder = msgspec.json.Decoder(Prompt)
    prompts = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return as_prompts(prompts, where=str(path))


class SourceState(msgspec.Struct, frozen=True):
    """Where a `PromptSource` stands: with it, another one goes on just there."""

    prompts: int
    epoch: int
    position: int
    first: list[int]
    last: list[int]
    failures: dict[int, int]


class PromptSource:
    """An endless stream over a finite set of prompts."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._first: deque[int] = deque()
        self._last: deque[int] = deque()
        self._failures: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def state(self) -> SourceState:
        return SourceState(
            prompts=len(self._prompts),
            epoch=self._epoch,
            position=self._position,
            first=list(self._first),
            last=list(self._last),
            failures=dict(self._failures),
        )

    def restore(self, state: SourceState) -> None:
        if state.prompts != len(self._prompts):
            raise JournalError(
                f"it is of {state.prompts} prompts, not of these {len(self._prompts)}"
            )
        self._epoch = state.epoch
        self._position = state.position
        self._order = self._order_of(state.epoch)
        self._first = deque(state.first)
        self._last = deque(state.last)
        self._failures = Counter(state.failures)

    def draw(self) -> int:
        """The index of the next prompt."""
        while True:
            index = self._next_index()
            if self._failures[index] < MAX_FAILURES:
                return index

    def put_back(self, index: int) -> None:
        """Draw it again first."""
        self._first.appendleft(index)

    def failed(self, index: int) -> bool:
        """Try again at the end of the epoch; False if it has failed too often for that."""
        self._failures[index] += 1
        if self._failures[index] < MAX_FAILURES:
            self._last.append(index)
            return True
        if all(self._failures[index] >= MAX_FAILURES for index in range(len(self._prompts))):
            # None is left: then it is not the prompts, and the error budget is to decide.
            self._failures.clear()
        return False

    def _next_index(self) -> int:
        if self._first:
            return self._first.popleft()
        if self._position == len(self._order):
            if self._last:
                return self._last.popleft()
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return int(self._order[self._position - 1])

    def _order_of(self, epoch: int) -> range | NDArray[np.int64]:
        if not self._shuffle:
            return range(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
