"""The engine and the trainer are two implementations of one policy: they must agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from areal_ray.actors.generation import GenerationActor
from areal_ray.errors import EngineError, WeightUpdateError, root_cause
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack
from areal_ray.types import Completion, GenerationRequest, GenerationResult, Sampling
from tests.vllm.conftest import engine_spec


def requests(prefix: str, count: int, sampling: Sampling, n: int = 4) -> list[GenerationRequest]:
    rng = np.random.default_rng(7)
    return [
        GenerationRequest(
            request_id=f"{prefix}-{index}",
            prompt_ids=rng.integers(2, 14, size=int(rng.integers(1, 8))).astype(np.int32),
            n=n,
            sampling=sampling,
        )
        for index in range(count)
    ]


def generate(live, asked: list[GenerationRequest], engine: int = 0) -> list[GenerationResult]:
    async def all_of_them():
        handle = live.crew.engines[f"engine-{engine}"]
        return await asyncio.gather(*(handle.generate.remote(request) for request in asked))

    return live.run(all_of_them())


def trainer_model(live, directory: Path) -> CausalModel:
    """The trainer's weights as they are now, by way of its export."""
    live.run(live.crew.trainer.export.remote(str(directory)))
    return CausalModel(str(directory), device=torch.device("cpu"), trust_remote_code=False)


def trainer_logprobs(
    model: CausalModel, prompt_ids: np.ndarray, completion: Completion, temperature: float
) -> np.ndarray:
    sequence = LearnedSequence(
        token_ids=np.concatenate([prompt_ids, completion.token_ids]),
        learned=np.repeat([False, True], [len(prompt_ids), len(completion.token_ids)]),
    )
    (batch,) = pack([sequence], budget_tokens=1000)
    with torch.no_grad():
        return model.logprobs(batch, temperature=temperature).numpy()


def test_the_engines_logprobs_are_the_trainers(live, tmp_path: Path) -> None:
    live.train_and_update()
    model = trainer_model(live, tmp_path)
    for temperature in (1.0, 0.6):
        sampling = Sampling(max_new_tokens=24, temperature=temperature)
        asked = requests(f"logprobs-{temperature}", 8, sampling)
        for request, result in zip(asked, generate(live, asked), strict=True):
            assert len(result.completions) == 4
            for completion in result.completions:
                expected = trainer_logprobs(model, request.prompt_ids, completion, temperature)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_after_a_weight_update_every_engine_answers_greedily_as_the_trainer(
    live, tmp_path: Path
) -> None:
    greedy = Sampling(max_new_tokens=24, temperature=0.0)
    before = generate(live, requests("before", 8, greedy, n=1))
    for _ in range(3):
        live.train_and_update()
    model = trainer_model(live, tmp_path)
    for engine in range(2):
        asked = requests(f"after-{engine}", 8, greedy, n=1)
        after = generate(live, asked, engine)
        for request, result in zip(asked, after, strict=True):
            (completion,) = result.completions
            assert set(completion.versions.tolist()) == {live.version}
            ids = np.concatenate([request.prompt_ids, completion.token_ids])
            with torch.no_grad():
                logits = model.module(torch.tensor(ids[None], dtype=torch.long)).logits[0]
            predicted = logits.argmax(-1)[len(request.prompt_ids) - 1 : -1]
            assert completion.token_ids.tolist() == predicted.tolist()
    assert any(
        not np.array_equal(old.completions[0].logprobs, new.completions[0].logprobs)
        for old, new in zip(before, after, strict=True)
    )


def test_with_a_seed_every_engine_makes_the_same_samples_of_a_request(live) -> None:
    seeded = Sampling(max_new_tokens=24, temperature=1.0, seed=7)

    def tokens(engine: int, sampling: Sampling) -> list[list[int]]:
        results = generate(live, requests("seeded", 8, sampling), engine)
        return [c.token_ids.tolist() for result in results for c in result.completions]

    first = tokens(0, seeded)
    assert first == tokens(0, seeded) == tokens(1, seeded)
    assert len({tuple(one) for one in first}) > 24, "samples of a prompt differ"
    assert first != tokens(0, Sampling(max_new_tokens=24, temperature=1.0, seed=8))


def test_requests_in_flight_over_updates_carry_the_versions_in_order(live) -> None:
    async def generate_while_updating() -> list[GenerationResult]:
        long = Sampling(max_new_tokens=24, temperature=1.0)
        handle = live.crew.engines["engine-0"]
        calls = [handle.generate.remote(r) for r in requests("flight", 64, long, n=8)]
        for _ in range(4):
            await live.crew.train_step(live.version + 1, live.version)
            live.version += 1
            await live.crew.update_weights(live.version)
        return await asyncio.gather(*calls)

    before = live.version
    results = live.run(generate_while_updating())
    versions = [c.versions for result in results for c in result.completions]
    assert all((np.diff(one) >= 0).all() for one in versions)
    assert all(before <= one[0] and one[-1] <= live.version for one in versions)
    assert any(one[0] < one[-1] for one in versions)


def test_a_request_that_the_engine_refuses_is_told_with_its_name(live) -> None:
    prompt_ids = np.full(100, 3, dtype=np.int32)
    asked = GenerationRequest("long", prompt_ids, 1, Sampling(max_new_tokens=4))
    with pytest.raises(EngineError) as refused:
        generate(live, [asked])
    assert str(root_cause(refused.value)).startswith("engine-0 failed: ")
    assert "100" in str(root_cause(refused.value))


def test_an_engine_that_can_t_hold_an_answer_tells_what_it_can(live, tiny_model: Path) -> None:
    spec = engine_spec("small", tiny_model, max_new_tokens=64)
    engine = GenerationActor.options(num_cpus=0).remote(spec)
    with pytest.raises(EngineError) as refused:
        live.run(engine.start.remote())
    ray.kill(engine)
    assert str(root_cause(refused.value)).startswith(
        "generation.max_new_tokens: expected less than 64, "
    )


def test_an_update_that_fails_leaves_the_old_version_serving_and_the_next_one_works(live) -> None:
    """The trainer has no weights of the version that it is asked for: what was staged is let go."""
    with pytest.raises(WeightUpdateError) as failed:
        live.run(live.crew.update_weights(live.version + 1))
    assert str(root_cause(failed.value)) == (
        f"the trainer sent version {live.version}, expected {live.version + 1}"
    )
    for number in range(2):
        asked = requests(f"old-{number}", 2, Sampling(max_new_tokens=4), n=2)
        for result in generate(live, asked, number):
            assert {v for c in result.completions for v in c.versions.tolist()} == {live.version}
    live.train_and_update()
    for number in range(2):
        asked = requests(f"new-{number}", 2, Sampling(max_new_tokens=4), n=2)
        for result in generate(live, asked, number):
            assert {v for c in result.completions for v in c.versions.tolist()} == {live.version}
