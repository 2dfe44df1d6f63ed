"""The example of an episode with several turns, as the guide tells it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import msgspec
import pytest

from areal_ray.observability.records import RolloutRecord
from areal_ray.types import NOT_GENERATED
from tests.vllm.training import EXAMPLES, step_records


def test_episodes_of_two_turns_train(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES / "two_tries.py"
    short = ["steps=2", "warmup.steps=20", "evaluation.prompts=8", "evaluation.every=0"]
    small = ["goal=null", "generation.engines=1", "trainer.groups_per_step=8", "checkpoint.every=0"]
    monkeypatch.setattr(sys, "argv", [str(script), *short, *small, f"runs_dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0

    run_dir = tmp_path / "two-tries"
    samples = msgspec.json.Decoder(RolloutRecord).decode_lines(
        (run_dir / "rollouts.jsonl").read_bytes()
    )
    assert len(samples) == 2 * 8 * 8
    twice = [sample for sample in samples if NOT_GENERATED in sample.versions]
    assert twice, "a model that has hardly learnt is wrong at first"
    for sample in twice:
        read = [
            token
            for token, version in zip(sample.tokens, sample.versions, strict=True)
            if version == NOT_GENERATED
        ]
        assert read == sample.prompt_tokens
        assert sample.reward in (0.0, 0.5)
    # The trainer rates both turns as the engine did, so it has seen what the engine had.
    assert all(step["kl_to_behaviour"] < 1e-3 for step in step_records(run_dir))
