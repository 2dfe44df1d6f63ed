"""A run killed at once, with all its processes, and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.vllm.training import LENGTH_REWARD, step_records, wait_until_empty

SYNCHRONOUS = (
    f"reward.function={LENGTH_REWARD}",
    "warmup.steps=20",
    "goal=null",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "generation.engines=1",
    "generation.seeded=true",
    "rollout.max_staleness=0",
    "trainer.groups_per_step=8",
    "checkpoint.every=2",
    "steps=8",
)


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    train, marked_processes, tmp_path: Path
) -> None:
    """Synchronously, so that what is drawn for each step follows from the steps before it. Before,
    the trainer is sharded over two ranks; then it has one."""
    training = train(*SYNCHRONOUS, "trainer.ranks=2", "trainer.sharding=full")
    training.read_until("step 5/")
    marked_processes.kill()
    assert wait_until_empty(marked_processes.alive) == {}

    run_dir = tmp_path / "runs" / "arithmetic"
    before = {record["step"]: record for record in step_records(run_dir)}
    resumed = train("--resume", *SYNCHRONOUS)
    assert resumed.wait() == 0, resumed.output
    assert "as it was after step 4" in resumed.output
    assert "supervised steps" not in resumed.output
    records = step_records(run_dir)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["version"] for record in records] == list(range(1, 9))
    assert all(record["groups_failed"] == 0 for record in records)
    # Step 5 was taken twice: before the kill, and again from the checkpoint of step 4.
    assert before[5]["grad_norm"] > 1e-3
    assert before[5]["loss"] != before[4]["loss"]
    for name in ("reward", "response_tokens", "loss", "grad_norm", "lr", "kl_to_behaviour"):
        assert records[4][name] == pytest.approx(before[5][name], rel=1e-3, abs=1e-6), name
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines()
    samples = Counter((r["step"], r["group"]) for r in map(json.loads, lines))
    # Each group once, with its eight samples, in the order of drawing: 8 groups a step.
    assert set(samples.values()) == {8}
    for step in range(1, 9):
        groups = sorted(group for at, group in samples if at == step)
        assert groups == list(range(8 * (step - 1), 8 * step))
    assert (run_dir / "model" / "model.safetensors").is_file()
