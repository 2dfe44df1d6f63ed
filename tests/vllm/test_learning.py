"""Whole runs, in processes of their own, as a user starts them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from areal_ray.config_file import load
from areal_ray.generation.vllm import VllmEngine
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.types import GenerationRequest, Sampling
from tests.conftest import MarkedProcesses
from tests.vllm.conftest import EXAMPLES, Training, engine_spec


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is a smaller demo: one engine, a lower goal."""
    marked = MarkedProcesses(f"learned-{os.getpid()}")
    runs = tmp_path_factory.mktemp("learned")
    training = Training(
        runs / "said.txt",
        marked.environment,
        str(EXAMPLES / "arithmetic.yaml"),
        f"runs_dir={runs}",
        "generation.engines=1",
        "trainer.lr=2e-4",
        "goal=0.6",
    )
    try:
        assert training.wait(timeout_s=540.0) == 0, training.output
        assert "goal reached" in training.output
    finally:
        marked.kill()
    return runs / "arithmetic"


def test_the_model_learned(learned: Path) -> None:
    records = read_metrics(learned / "metrics.jsonl")
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    assert evaluations[0].reward < 0.4
    assert evaluations[-1].reward >= 0.6


def test_it_learned_from_stale_data_within_the_bound(learned: Path) -> None:
    steps = [r for r in read_metrics(learned / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert max(record.staleness_max for record in steps) in (1, 2)
    assert [record.step for record in steps] == list(range(1, len(steps) + 1))
    # The engines keep up with the trainer, but for the time of an evaluation.
    assert all(0 <= record.step - record.version <= 2 for record in steps)
    assert steps[-1].version == steps[-1].step
    assert all(record.tokens_per_s >= 0 and 0 <= record.pause_s < 30 for record in steps)
    assert all(record.pause_s > 0 for record in steps if record.version == record.step)
    assert steps[-1].groups_failed == 0


def test_every_sample_that_was_trained_on_is_written_down(learned: Path) -> None:
    lines = (learned / "rollouts.jsonl").read_text().splitlines()
    records = read_metrics(learned / "metrics.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(lines) == len(steps) * 64 * 8
    for line in lines[:: len(lines) // 50]:
        sample = json.loads(line)
        assert len(sample["tokens"]) == len(sample["versions"])
        assert sample["reward"] == float(
            sample["text"] == sample["answer"] and sample["finish_reason"] == "stop"
        )
        # Version v is served from step v on: at step s the trainer is at version s - 1.
        assert all(sample["step"] - 3 <= v < sample["step"] for v in sample["versions"])


def test_the_other_files_are_there(learned: Path) -> None:
    config = load(learned / "config.yaml")
    assert (config.device, config.trainer.lr) == ("cpu", 2e-4)
    assert config.rollout.max_concurrent_groups == 192
    assert (learned / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_exported_model_answers_as_evaluated_in_transformers_and_vllm(
    learned: Path, arithmetic: ModuleType
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    problems = arithmetic.held_out_problems()
    tokenizer = AutoTokenizer.from_pretrained(learned / "model")
    model = AutoModelForCausalLM.from_pretrained(learned / "model", dtype=torch.float32)
    ids = torch.tensor([tokenizer(problem.text)["input_ids"] for problem in problems])
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=5, do_sample=False)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    right = np.mean([text == p.answer for text, p in zip(texts, problems, strict=True)])
    records = read_metrics(learned / "metrics.jsonl")
    evaluated = [record for record in records if isinstance(record, EvaluationRecord)][-1]
    assert right == pytest.approx(evaluated.reward, abs=0.01)

    answers = asyncio.run(_vllm_answers(learned / "model", ids.numpy().astype(np.int32)))
    same = [
        tokenizer.decode(mine, skip_special_tokens=True) == text
        for mine, text in zip(answers, texts, strict=True)
    ]
    assert np.mean(same) > 0.99


async def _vllm_answers(model: Path, prompts: np.ndarray) -> list[list[int]]:
    engine = VllmEngine(
        engine_spec("engine-0", model, max_new_tokens=5, max_samples=256, kv_cache_gib=0.0625),
        address="127.0.0.1",
    )
    await engine.start()
    try:
        greedy = Sampling(max_new_tokens=5, temperature=0.0)
        results = await asyncio.gather(
            *(
                engine.generate(GenerationRequest(f"r{i}", prompt, 1, greedy))
                for i, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    return [result.completions[0].token_ids.tolist() for result in results]
