"""Checkpoints on disk: a directory a step, whole or not there at all.

    checkpoints/.step-00000020.partial/     being written, by as many processes as there are parts
    checkpoints/step-00000020/              whole: its manifest names every file and its size
        manifest.json
        book.json            the rollout book: ledger, data cursor, groups in flight
        groups.msgpack       finished groups that wait to be trained on
        trainer/             models, optimizers, and how far they are

The manifest is written last, and only then does the directory get its name; what has no manifest
does not exist, and one whose files are not those of its manifest is refused by name. All methods
block: call them off the event loop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_ray import logs
from areal_ray.config import Config, LoraConfig
from areal_ray.errors import CheckpointError
from areal_ray.rollout_book import BookState
from areal_ray.types import TrajectoryGroup, WeightVersion

CHECKPOINTS = "checkpoints"
"""In a run's directory."""
MANIFEST = "manifest.json"
BOOK = "book.json"
GROUPS = "groups.msgpack"
TRAINER = "trainer"
PREFIX = "step-"

LATEST = "latest"
"""In the place of a checkpoint's directory: the last whole one of all runs of a name."""


class Draws(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the rollout book and a trainer's adapters mean: with others, their numbers would tell of
    something else."""

    groups_per_step: int
    seed: int
    shuffle: bool
    lora: LoraConfig = LoraConfig()


def draws_of(config: Config) -> Draws:
    trainer = config.trainer
    return Draws(trainer.groups_per_step, config.seed, config.data.shuffle, trainer.lora)


class Manifest(msgspec.Struct, frozen=True):
    step: int
    version: WeightVersion
    draws: Draws
    files: dict[str, int]
    """Each by its path here, with its size in bytes."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def trainer(self) -> Path:
        return self.directory / TRAINER

    @property
    def groups(self) -> Path:
        return self.directory / GROUPS

    def book(self) -> BookState:
        return msgspec.json.decode((self.directory / BOOK).read_bytes(), type=BookState)


class CheckpointStore:
    def __init__(self, directory: Path, *, keep: int) -> None:
        """`keep`: so many of the latest; older ones are removed."""
        self._directory = directory
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty directory for the parts. One is written at a time: what earlier attempts, at
        any step, have left is removed."""
        partial = self._partial(step)
        for left in self._directory.glob(f".{PREFIX}*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{partial} can't be made: {error.strerror}") from error
        return partial

    def commit(self, step: int, version: WeightVersion, draws: Draws) -> Checkpoint:
        """All parts are there: from now on it is a checkpoint."""
        partial, whole = self._partial(step), self._directory / f"{PREFIX}{step:08d}"
        files = {}
        for path in sorted(p for p in partial.rglob("*") if p.is_file()):
            _sync(path)
            files[str(path.relative_to(partial))] = path.stat().st_size
        manifest = Manifest(step=step, version=version, draws=draws, files=files)
        (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        _sync(partial / MANIFEST)
        # One of the same step is there if a run was resumed from before it.
        shutil.rmtree(whole, ignore_errors=True)
        os.replace(partial, whole)
        _sync(self._directory)
        self._remove_old()
        return Checkpoint(whole, manifest)

    def take_over(self, directory: Path) -> Checkpoint:
        """A copy of one that lies elsewhere, in the place of what there is of its step."""
        step = open_checkpoint(directory).step
        partial, whole = self.begin(step), self._directory / f"{PREFIX}{step:08d}"
        try:
            shutil.copytree(directory, partial, dirs_exist_ok=True)
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(partial, whole)
        except OSError as error:
            raise CheckpointError(f"{directory} can't be copied to {whole}: {error}") from error
        return open_checkpoint(whole)

    def give_up(self, step: int) -> None:
        """Some part could not be written."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def latest(self) -> Checkpoint:
        """The last whole one. One that is broken is told, and passed over."""
        for directory in reversed(self._all()):
            try:
                return open_checkpoint(directory)
            except CheckpointError as error:
                logs.warning("passed over: {}", error)
        raise CheckpointError(f"{self._directory} holds no whole checkpoint")

    def forget_after(self, step: int) -> None:
        """A run that goes on from `step` writes the later ones anew."""
        for directory in self._all():
            if _step_of(directory) > step:
                shutil.rmtree(directory)

    def _all(self) -> list[Path]:
        return sorted(self._directory.glob(f"{PREFIX}*"))

    def _remove_old(self) -> None:
        for directory in self._all()[: -self._keep]:
            shutil.rmtree(directory, ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self._directory / f".{PREFIX}{step:08d}.partial"


def open_checkpoint(directory: Path) -> Checkpoint:
    """Refuses one that is not whole, and says what is missing."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    problems = list(_problems(directory, manifest))
    if problems:
        raise CheckpointError(f"{directory} is not whole: " + "; ".join(problems))
    return Checkpoint(directory, manifest)


def write_groups(path: Path, groups: list[TrajectoryGroup]) -> None:
    path.write_bytes(msgspec.msgpack.encode(groups, enc_hook=_encode_array))


def read_groups(path: Path) -> list[TrajectoryGroup]:
    return msgspec.msgpack.decode(
        path.read_bytes(), type=list[TrajectoryGroup], dec_hook=_decode_array
    )


def _problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
            continue
        if found != size:
            yield f"{name} has {found} bytes, expected {size}"


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix(PREFIX))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode_array(value: object) -> object:
    import numpy as np

    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"a checkpoint can't hold a {type(value).__name__}")


def _decode_array(kind: type, value: object) -> object:
    import numpy as np

    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
