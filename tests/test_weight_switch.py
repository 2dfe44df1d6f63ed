"""What vLLM is asked for during a change of weights, by a stand-in that notes it and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from areal_ray.errors import EngineError, RestoreError, TornWeights
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
STAGED, IN_PLACE = {"staging": "device"}, {"staging": "none", "release_kv_cache": True}


class RecordingLlm:
    def __init__(self, failing: str) -> None:
        self.asked: list[str] = []
        self.errored = False
        self.gates: dict[str, asyncio.Event] = {}
        self._failing = failing

    async def generate(self, *_: object) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    async def sleep(self, *, level: int, mode: str) -> None:
        assert mode == "keep"
        await self._ask({0: "pause", 1: "sleep"}[level])

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool, reset_connector: bool
    ) -> bool:
        assert reset_running_requests
        assert reset_connector
        await self._ask("clear")
        return self._failing != "cleared cache"

    async def reset_mm_cache(self) -> None:
        pass

    async def reset_encoder_cache(self) -> None:
        pass

    async def resume_generation(self) -> None:
        await self._ask("resume")

    async def release_kv_cache_memory(self) -> None:
        await self._ask("release")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        assert tags in (None, ["kv_cache"])
        await self._ask("wake" if tags else "wake up")

    async def start_weight_update(self) -> None:
        await self._ask("start")

    async def update_weights(self, request: object) -> None:
        await self._ask("receive")

    async def finish_weight_update(self) -> None:
        await self._ask("swap")

    async def update_weight_version(self, version: str) -> None:
        await self._ask(f"stamp {version}")

    async def collective_rpc(self, method: str) -> list[str]:
        await self._ask("discard")
        return ["", "it was still receiving"]

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.gates:
            await self.gates[what].wait()
        if what == self._failing:
            raise RuntimeError(f"no {what}")
        if self._failing == f"answer to {what}":
            self.errored = True
            await asyncio.Event().wait()


def engine_that_lacks(what: str, **mode: object) -> tuple[VllmEngine, RecordingLlm]:
    spec = msgspec.structs.replace(SPEC, **mode)
    engine, llm = VllmEngine(spec, address="127.0.0.1"), RecordingLlm(what)
    engine._llm = llm
    return engine, llm


async def test_staged_an_update_pauses_for_the_swap_alone() -> None:
    engine, llm = engine_that_lacks("nothing", **STAGED)
    await engine.stage_weights(b"")
    assert llm.asked == ["start", "receive"]
    assert (await engine.commit_weights(3)).version == 3
    assert llm.asked[2:] == ["pause", "swap", "clear", "stamp 3", "resume"]


async def test_in_place_an_update_pauses_before_it_receives() -> None:
    engine, llm = engine_that_lacks("nothing", **IN_PLACE)
    await engine.stage_weights(b"")
    assert llm.asked == ["pause", "release", "start", "receive"]
    await engine.commit_weights(3)
    assert llm.asked[4:] == ["swap", "clear", "stamp 3", "wake", "resume"]


async def test_a_kept_cache_is_not_cleared() -> None:
    engine, llm = engine_that_lacks("nothing", kv_after_update="keep")
    await engine.stage_weights(b"")
    await engine.commit_weights(3)
    assert llm.asked[2:] == ["pause", "swap", "stamp 3", "resume"]


async def test_a_cache_that_was_not_cleared_is_an_error_of_the_swap() -> None:
    engine, llm = engine_that_lacks("cleared cache", **STAGED)
    await engine.stage_weights(b"")
    with pytest.raises(TornWeights, match="engine-0 did not clear its KV cache"):
        await engine.commit_weights(3)
    assert "resume" not in llm.asked


@pytest.mark.parametrize(
    ("mode", "failing", "then"),
    [
        (STAGED, "start", ["discard"]),
        (STAGED, "receive", ["discard"]),
        (IN_PLACE, "pause", ["resume"]),
        (IN_PLACE, "release", ["wake", "resume"]),
        (IN_PLACE, "receive", ["discard", "wake", "resume"]),
    ],
)
async def test_a_stage_that_fails_gives_back_all_that_it_took(mode, failing, then) -> None:
    engine, llm = engine_that_lacks(failing, **mode)
    with pytest.raises(RuntimeError, match=f"no {failing}"):
        await engine.stage_weights(b"")
    assert llm.asked[llm.asked.index(failing) + 1 :] == then


async def test_a_pause_that_fails_is_undone_and_what_was_staged_is_let_go() -> None:
    engine, llm = engine_that_lacks("pause", **STAGED)
    await engine.stage_weights(b"")
    with pytest.raises(RuntimeError, match="no pause"):
        await engine.commit_weights(3)
    assert llm.asked[3:] == ["resume", "discard"]


@pytest.mark.parametrize("failing", ["swap", "stamp 3"])
@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
async def test_an_engine_whose_weights_may_be_torn_is_not_resumed(mode, failing: str) -> None:
    engine, llm = engine_that_lacks(failing, **mode)
    await engine.stage_weights(b"")
    with pytest.raises(TornWeights) as torn:
        await engine.commit_weights(3)
    # vLLM resumes when it wakes up: neither is done.
    assert not {"resume", "wake"} & set(llm.asked)
    assert str(torn.value) == (
        "engine-0 may hold torn weights after a failed swap to version 3, and stays paused: "
        f"RuntimeError: no {failing}"
    )
    with pytest.raises(EngineError, match="before the last one ended"):
        await engine.stage_weights(b"")
    with pytest.raises(TornWeights):
        await engine.discard_weights()


@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
async def test_a_resume_that_fails_is_an_error_of_the_commit(mode) -> None:
    engine, llm = engine_that_lacks("resume", **mode)
    await engine.stage_weights(b"")
    with pytest.raises(RestoreError, match="resuming failed: RuntimeError: no resume"):
        await engine.commit_weights(3)
    assert llm.asked.count("wake") == llm.asked.count("release")


async def test_a_discard_undoes_a_stage_and_tells_what_was_wrong() -> None:
    engine, llm = engine_that_lacks("nothing", **IN_PLACE)
    await engine.stage_weights(b"")
    assert await engine.discard_weights() == "it was still receiving"
    assert llm.asked[4:] == ["discard", "wake", "resume"]
    await engine.stage_weights(b"")


async def test_in_place_what_may_not_be_discarded_whole_leaves_the_engine_paused() -> None:
    engine, llm = engine_that_lacks("discard", **IN_PLACE)
    await engine.stage_weights(b"")
    with pytest.raises(RestoreError, match="letting go of received weights failed"):
        await engine.discard_weights()
    assert llm.asked[4:] == ["discard"]


@pytest.mark.parametrize(
    ("slow", "then"),
    [
        # Each is undone at once, and what the slow step then did, once more.
        ("pause", ["resume", "resume"]),
        ("release", ["wake", "resume", "wake"]),
        ("receive", ["discard", "wake", "resume"]),
    ],
)
async def test_a_discard_while_a_stage_still_runs_undoes_what_it_does_later(slow, then) -> None:
    engine, llm = engine_that_lacks("nothing", **IN_PLACE)
    llm.gates[slow] = asyncio.Event()
    staging = asyncio.ensure_future(engine.stage_weights(b""))
    while slow not in llm.asked:
        await asyncio.sleep(0)
    await engine.discard_weights()
    llm.gates[slow].set()
    with pytest.raises(EngineError, match="the update was discarded before it was staged"):
        await staging
    assert llm.asked[llm.asked.index(slow) + 1 :] == then
    llm.gates.clear()
    await engine.stage_weights(b"")
    await engine.commit_weights(3)


async def test_while_it_stands_still_an_engine_needs_no_token_to_prove_itself() -> None:
    engine, _ = engine_that_lacks("nothing", **IN_PLACE)
    probing = asyncio.ensure_future(engine.probe())
    await asyncio.sleep(0)
    await engine.stage_weights(b"")
    async with asyncio.timeout(5):
        await probing
        await engine.probe()


@pytest.mark.parametrize("step", ["receive", "pause", "swap", "resume"])
async def test_an_engine_that_dies_at_a_step_is_an_error_and_no_wait(step: str) -> None:
    engine, _ = engine_that_lacks(f"answer to {step}", **STAGED)
    with pytest.raises((EngineError, TornWeights, RestoreError), match="engine-0 died"):
        async with asyncio.timeout(5):
            await engine.stage_weights(b"")
            await engine.commit_weights(3)


async def test_an_engine_that_rests_needs_no_token_to_prove_itself_and_takes_no_update() -> None:
    engine, llm = engine_that_lacks("nothing", **STAGED)
    await engine.rest()
    await engine.rest()
    async with asyncio.timeout(5):
        await engine.probe()
    with pytest.raises(EngineError, match="an update began while the engine rests"):
        await engine.stage_weights(b"")
    await engine.wake()
    await engine.wake()
    assert llm.asked == ["sleep", "wake up"]
    await engine.stage_weights(b"")
    with pytest.raises(EngineError, match="engine-0 can't rest"):
        await engine.rest()


async def test_a_rest_that_fails_is_undone() -> None:
    engine, llm = engine_that_lacks("sleep", **STAGED)
    with pytest.raises(RuntimeError, match="no sleep"):
        await engine.rest()
    assert llm.asked == ["sleep", "wake up"]


async def test_a_wake_that_comes_while_a_rest_begins_ends_it() -> None:
    engine, llm = engine_that_lacks("nothing", **STAGED)
    llm.gates["sleep"] = asyncio.Event()
    resting = asyncio.ensure_future(engine.rest())
    while "sleep" not in llm.asked:
        await asyncio.sleep(0)
    waking = asyncio.ensure_future(engine.wake())
    await asyncio.sleep(0.01)
    assert llm.asked == ["sleep"]
    llm.gates["sleep"].set()
    await asyncio.gather(resting, waking)
    assert llm.asked == ["sleep", "wake up"]


async def test_an_engine_that_does_not_wake_is_no_engine_that_serves() -> None:
    engine, _ = engine_that_lacks("wake up", **STAGED)
    await engine.rest()
    with pytest.raises(RestoreError, match="waking failed: RuntimeError: no wake up"):
        await engine.wake()
    with pytest.raises(EngineError, match="an update began while the engine rests"):
        await engine.stage_weights(b"")
