"""What a commit leaves behind when it fails, on a stand-in that records what vLLM is asked."""

from __future__ import annotations

import pytest

from areal_ray.errors import EngineError
from areal_ray.generation.engine import EngineSpec
from areal_ray.generation.vllm import VllmEngine

SPEC = EngineSpec(
    name="engine-0",
    model_path="m",
    dtype="float32",
    device="cpu",
    max_prompt_tokens=8,
    max_new_tokens=8,
    max_samples=8,
    tensor_parallel=1,
    kv_cache_gib=None,
    gpu_memory=0.85,
    trust_remote_code=False,
    seed=0,
)


class RecordingLlm:
    def __init__(self, failing: str) -> None:
        self.asked: list[str] = []
        self._failing = failing

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._ask("pause")

    async def finish_weight_update(self, weight_version: str) -> None:
        self._ask("swap")

    async def resume_generation(self) -> None:
        self._ask("resume")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self._failing:
            raise RuntimeError(f"no {what}")


def engine_that_fails_to(failing: str) -> tuple[VllmEngine, RecordingLlm]:
    engine, llm = VllmEngine(SPEC, address="127.0.0.1"), RecordingLlm(failing)
    engine._llm = llm
    return engine, llm


async def test_a_commit_pauses_swaps_and_resumes() -> None:
    engine, llm = engine_that_fails_to("nothing")
    assert (await engine.commit_weights(3)).version == 3
    assert llm.asked == ["pause", "swap", "resume"]


async def test_a_pause_that_fails_is_undone() -> None:
    engine, llm = engine_that_fails_to("pause")
    with pytest.raises(RuntimeError, match="no pause"):
        await engine.commit_weights(3)
    assert llm.asked == ["pause", "resume"]


async def test_an_engine_whose_weights_may_be_torn_is_not_resumed() -> None:
    engine, llm = engine_that_fails_to("swap")
    with pytest.raises(EngineError) as torn:
        await engine.commit_weights(3)
    assert llm.asked == ["pause", "swap"]
    assert str(torn.value) == (
        "engine-0 may hold torn weights after a failed swap to version 3, and stays paused: "
        "RuntimeError: no swap"
    )
