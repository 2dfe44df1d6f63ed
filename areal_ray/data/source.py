"""Prompts, and the cursor that walks over them.

A `PromptSource` deals out prompts epoch after epoch, each epoch in an order fixed by the seed.
A prompt that was drawn and could not be trained on is put back, and is drawn again first, so
that none is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from areal_ray.errors import DataError
from areal_ray.plugins import load_function
from areal_ray.types import Prompt


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


class PromptSource:
    """An endless stream over a finite set of prompts."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._put_back: deque[Prompt] = deque()
        self._order = self._order_of(0)

    def draw(self) -> Prompt:
        if self._put_back:
            return self._put_back.popleft()
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    def put_back(self, prompt: Prompt) -> None:
        self._put_back.append(prompt)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
