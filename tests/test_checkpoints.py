"""Checkpoints on disk: whole, or not there; and what is wrong with one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal_ray.checkpoints import (
    CheckpointStore,
    Draws,
    open_checkpoint,
    read_groups,
    write_groups,
)
from areal_ray.config import Config
from areal_ray.config_file import from_mapping
from areal_ray.errors import CheckpointError
from areal_ray.observability.jsonl import JsonlWriter, keep_until
from areal_ray.observability.run_files import RunFiles, latest_checkpoint
from areal_ray.types import Prompt, Trajectory, TrajectoryGroup

DRAWS = Draws(groups_per_step=4, seed=0, shuffle=True)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def write(store: CheckpointStore, step: int) -> Path:
    partial = store.begin(step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "shard-0").write_bytes(b"x" * step)
    (partial / "book.json").write_text("{}")
    return store.commit(step, version=step, draws=DRAWS).directory


def test_the_latest_whole_one_is_found_and_older_ones_are_removed(store: CheckpointStore) -> None:
    for step in (5, 10, 15):
        write(store, step)
    latest = store.latest()
    assert (latest.step, latest.manifest.version) == (15, 15)
    assert latest.manifest.files == {"book.json": 2, "trainer/shard-0": 15}
    assert [p.name for p in sorted(latest.directory.parent.iterdir())] == [
        "step-00000010",
        "step-00000015",
    ]


def test_what_was_not_finished_does_not_exist(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        store.latest()
    (store.begin(5) / "book.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        store.latest()
    # A later attempt at the same step begins with nothing.
    assert list(store.begin(5).iterdir()) == []
    store.give_up(5)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_earlier_steps_left_unfinished_is_swept_away(
    store: CheckpointStore, tmp_path: Path
) -> None:
    write(store, 5)
    (store.begin(10) / "book.json").write_text("{}")
    store.begin(15)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        ".step-00000015.partial",
        "step-00000005",
    ]


def test_a_missing_or_short_file_is_named_and_the_one_before_is_taken(
    store: CheckpointStore,
) -> None:
    write(store, 5)
    broken = write(store, 10)
    (broken / "trainer" / "shard-0").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="trainer/shard-0 has 1 bytes, expected 10"):
        open_checkpoint(broken)
    (broken / "trainer" / "shard-0").unlink()
    with pytest.raises(CheckpointError, match="not whole: trainer/shard-0 is missing"):
        open_checkpoint(broken)
    assert store.latest().step == 5
    (broken / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="it has no manifest.json"):
        open_checkpoint(broken)


def test_a_step_that_is_reached_again_replaces_what_was_there(store: CheckpointStore) -> None:
    for step in (5, 10):
        write(store, step)
    store.forget_after(5)
    assert store.latest().step == 5
    write(store, 10)
    write(store, 10)
    assert store.latest().step == 10


def test_a_place_that_can_not_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="can't be made: Not a directory"):
        CheckpointStore(tmp_path / "checkpoints", keep=1).begin(5)


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Config]:
    def config(name: str = "demo") -> Config:
        return from_mapping({"name": name, "runs_dir": str(tmp_path), "model": {"path": "m"}})

    return config


def run_of(config: Config, *steps: int) -> RunFiles:
    """A run that has written checkpoints at these steps."""
    files = RunFiles(config)
    files.save_config(config)
    for step in steps:
        write(CheckpointStore(files.directory / "checkpoints", keep=9), step)
    return files


def test_the_last_one_of_all_runs_of_a_name_is_taken_and_that_run_goes_on(runs) -> None:
    run_of(runs(), 5, 10)
    second = run_of(runs(), 2)
    run_of(runs())
    assert [p.name for p in sorted(second.directory.parent.iterdir())] == [
        "demo",
        "demo-2",
        "demo-3",
    ]
    # The first was further, the third has none yet.
    latest = latest_checkpoint(runs())
    assert latest.directory == second.directory / "checkpoints" / "step-00000002"
    assert RunFiles(runs(), latest).directory == second.directory
    # Until the first one goes on, and writes another.
    first_one = open_checkpoint(second.directory.with_name("demo") / "checkpoints/step-00000010")
    first = RunFiles(runs(), first_one)
    assert first.directory.name == "demo"
    write(CheckpointStore(first.directory / "checkpoints", keep=9), 15)
    assert latest_checkpoint(runs()).step == 15


def test_a_run_that_has_the_name_of_anothers_second_directory_is_not_taken_for_it(runs) -> None:
    run_of(runs(), 5)
    other = run_of(runs("demo-2"), 7)
    assert other.directory.name == "demo-2"
    assert latest_checkpoint(runs()).step == 5
    assert latest_checkpoint(runs("demo-2")).step == 7
    # Resumed under another name, a checkpoint begins a run of its own.
    assert RunFiles(runs(), latest_checkpoint(runs("demo-2"))).directory.name == "demo-3"


def test_without_a_whole_one_in_any_run_of_the_name_there_is_nothing_to_resume(runs) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no run in .*/demo, or in .* a whole checkpoint"):
            latest_checkpoint(runs())
        run_of(runs())


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    trajectory = Trajectory(
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(2, dtype=np.int32),
        response_mask=np.array([True, False]),
        logprobs=np.array([-0.1, -np.inf], dtype=np.float32),
        versions=np.array([4, -1], dtype=np.int32),
        reward=0.1,
        finish_reason="length",
        text="é",
        arrays={"experts": np.arange(6, dtype=np.uint8).reshape(2, 3)},
    )
    prompt = Prompt(text="a", answer="b", metadata={"level": 3})
    write_groups(tmp_path / "groups", [TrajectoryGroup(7, prompt, [trajectory])])
    (group,) = read_groups(tmp_path / "groups")
    assert (group.group_id, group.prompt) == (7, prompt)
    (back,) = group.trajectories
    for name in ("prompt_ids", "response_ids", "response_mask", "logprobs", "versions"):
        mine, theirs = getattr(trajectory, name), getattr(back, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(back.arrays["experts"], trajectory.arrays["experts"])
    assert (back.reward, back.finish_reason, back.text) == (0.1, "length", "é")


def test_records_of_later_steps_and_half_a_line_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"step","step":1}\n{"kind":"evaluation","step":2}\n{"step":3}\n{"st')
    keep_until(path, 2)
    assert path.read_text() == '{"kind":"step","step":1}\n{"kind":"evaluation","step":2}\n'
    keep_until(tmp_path / "none.jsonl", 2)


def test_what_follows_half_a_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"step":1}\n{"st')
    writer = JsonlWriter(path)
    writer.write(Draws(1, 2, True))
    writer.close()
    assert path.read_text().splitlines()[1:] == [
        '{"st',
        '{"groups_per_step":1,"seed":2,"shuffle":true}',
    ]
    keep_until(path, 5)
    assert path.read_text() == '{"step":1}\n'
