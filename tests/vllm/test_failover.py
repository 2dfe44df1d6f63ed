"""A request that outlives its engine: what was generated is kept, and the rest is right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from rehearsing import pid_of, run

from areal_ray.actors.engine_calls import EngineCalls, EngineLost
from areal_ray.actors.generation import GenerationActor
from areal_ray.generation.continuation import Continuation
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack
from areal_ray.types import Completion, GenerationRequest, Sampling
from tests.vllm.conftest import engine_spec

LENGTH = 400


@pytest.fixture(scope="module")
def endless_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, which can't say that it is done: its end token is none of its outputs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("endless")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 2 * LENGTH
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engines(ray_cluster: None, endless_model: Path) -> Iterator[dict[str, ray.actor.ActorHandle]]:
    made = {
        name: GenerationActor.options(max_concurrency=100, num_cpus=0, max_restarts=-1).remote(
            engine_spec(name, endless_model, max_new_tokens=LENGTH, seed=index)
        )
        for index, name in enumerate(("first", "second", "third"))
    }
    ray.get([engine.start.remote() for engine in made.values()])
    yield made
    for engine in made.values():
        ray.kill(engine)


def test_over_the_death_of_an_engine_and_of_an_actor_every_token_is_kept(
    engines, endless_model: Path
) -> None:
    asked = GenerationRequest(
        request_id="long",
        prompt_ids=np.array([4, 12, 5, 13], dtype=np.int32),
        n=4,
        sampling=Sampling(max_new_tokens=LENGTH, temperature=0.8),
    )

    async def find(name: str) -> ray.actor.ActorHandle:
        return engines[name]

    calls = EngineCalls(find, request_timeout_s=120.0, progress_every_s=0.05)
    continuation = Continuation(asked)

    async def until_known(tokens: int) -> None:
        while min(continuation.known()) < tokens:
            await asyncio.sleep(0.01)

    async def lose(name: str, victim: int, at: int) -> list[np.ndarray]:
        """Let an engine work at the rest until it is killed; what the others are then asked."""
        rest = continuation.rest()
        working = asyncio.ensure_future(calls.generate(name, rest, continuation))
        await until_known(at)
        known = continuation.known()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineLost, match=name):
            await working
        begun = [len(tokens) for tokens in rest.begun] or [0] * 4
        kept = continuation.rest().begun
        for before, learnt, tokens in zip(begun, known, kept, strict=True):
            assert len(tokens) >= before + learnt
        return list(kept)

    async def scenario() -> tuple[list[np.ndarray], list[np.ndarray], list[Completion]]:
        core = await engines["first"].__ray_call__.remote(
            lambda actor: actor._engine._llm.engine_core.resources.engine_manager.processes[0].pid
        )
        # vLLM's process dies: its actor still has all that it was told.
        first = await lose("first", core, at=64)
        # The actor dies: what it made is known from its progress.
        second = await lose("second", await pid_of(engines["second"]), at=64)
        rest = continuation.rest()
        await calls.generate("third", rest, continuation)
        assert continuation.rest() is None
        return first, second, continuation.completions()

    first, second, completions = run(scenario())
    for early, later, completion in zip(first, second, completions, strict=True):
        assert 64 <= len(early) < len(later) < LENGTH
        assert np.array_equal(later[: len(early)], early)
        assert np.array_equal(completion.token_ids[: len(later)], later)
        assert len(completion.token_ids) == len(completion.logprobs) == LENGTH
        assert completion.finish_reason == "length"
        assert completion.versions.tolist() == [0] * LENGTH
        # Each token was sampled in the context of all before it, whoever made those.
        mine = logprobs(endless_model, asked, completion)
        assert np.abs(mine - completion.logprobs).max() < 1e-3


def logprobs(model: Path, asked: GenerationRequest, completion: Completion) -> np.ndarray:
    prompt_ids = asked.prompt_ids
    sequence = LearnedSequence(
        token_ids=np.concatenate([prompt_ids, completion.token_ids]),
        learned=np.repeat([False, True], [len(prompt_ids), len(completion.token_ids)]),
    )
    (batch,) = pack([sequence], budget_tokens=2 * LENGTH)
    causal = CausalModel(str(model), device=torch.device("cpu"), trust_remote_code=False)
    with torch.no_grad():
        return causal.logprobs(batch, temperature=asked.sampling.temperature).numpy()
