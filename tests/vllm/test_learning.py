"""A run that was struck, stopped and resumed reaches its goal, and what it leaves is right."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
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
from tests.vllm.conftest import engine_spec
from tests.vllm.struck import LEARNING, StruckRun
from tests.vllm.training import Training


@pytest.fixture(scope="module")
def learned(struck: StruckRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a smaller demo: a lower goal, and from where the struck run stopped one
    engine and one rank of the trainer only."""
    marked = MarkedProcesses(f"learned-{os.getpid()}")
    directory = tmp_path_factory.mktemp("learned")
    shutil.copytree(struck.directory, directory / "runs" / struck.directory.name)
    training = Training(
        directory,
        marked.environment,
        "--resume",
        *LEARNING,
        "steps=100000",
        "goal=0.6",
        "generation.engines=1",
    )
    try:
        assert training.wait(timeout_s=540.0) == 0, training.output
        assert "goal reached" in training.output
    finally:
        marked.kill()
    return training.run_dir


def steps_of(run_dir: Path) -> list[StepRecord]:
    return [r for r in read_metrics(run_dir / "metrics.jsonl") if isinstance(r, StepRecord)]


def evaluations_of(run_dir: Path) -> list[EvaluationRecord]:
    return [r for r in read_metrics(run_dir / "metrics.jsonl") if isinstance(r, EvaluationRecord)]


def test_the_model_learned(learned: Path) -> None:
    evaluations = evaluations_of(learned)
    assert evaluations[0].reward < 0.4
    assert evaluations[-1].reward >= 0.6


def test_it_learned_from_stale_data_within_the_bound(learned: Path, struck: StruckRun) -> None:
    steps = steps_of(learned)
    assert max(record.staleness_max for record in steps) in (1, 2)
    assert [record.step for record in steps] == list(range(1, len(steps) + 1))
    resumed = steps[len(struck.steps()) :]
    assert resumed
    # As many versions more than steps as before; and the engines keep up with the trainer, but for
    # the time of an evaluation.
    ahead = [record.version - record.step - struck.versions_ahead for record in resumed]
    assert all(-2 <= one <= 0 for one in ahead)
    assert ahead[-1] == 0
    assert all(record.tokens_per_s >= 0 for record in resumed)
    assert all(0 < record.pause_s < 30 for record in resumed if record.pause_s is not None)
    assert steps[-1].groups_failed == 0


def test_every_sample_that_was_trained_on_is_written_down(learned: Path, struck: StruckRun) -> None:
    resumed = {record.step: record for record in steps_of(learned)[len(struck.steps()) :]}
    lines = (learned / "rollouts.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["step"] in resumed]
    assert len(samples) == len(resumed) * 64 * 8
    for sample in samples[:: len(samples) // 50]:
        assert len(sample["tokens"]) == len(sample["versions"])
        assert sample["reward"] == float(
            sample["text"] == sample["answer"] and sample["finish_reason"] == "stop"
        )
        made = sample["step"] + struck.versions_ahead
        assert all(made - 3 <= version < made for version in sample["versions"])


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
    assert right == pytest.approx(evaluations_of(learned)[-1].reward, abs=0.01)

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
