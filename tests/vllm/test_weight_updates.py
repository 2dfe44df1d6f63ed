"""Weight updates on real vLLM: every token's stamp, every bit, and real deaths in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import ray
import torch

from areal_ray.actors.checkpoint_engine import CheckpointEngineManager, EngineMember, ManagerSpec
from areal_ray.actors.generation import GenerationActor
from areal_ray.errors import WeightUpdateError
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack
from areal_ray.types import GenerationRequest, GenerationResult, Sampling
from areal_ray.weights.transaction import Limits
from tests.vllm import versioned
from tests.vllm.conftest import engine_spec
from tests.vllm.versioned import (
    LENGTH,
    Kind,
    VersionedTrainer,
    engine_digests,
    make_model,
    token_of,
    weights_of,
)

cloudpickle.register_pickle_by_value(versioned)

MODES = {
    "engine-0": {"staging": "device", "kv_after_update": "recompute"},
    "engine-1": {"staging": "none", "kv_after_update": "keep"},
}
"""One way each; what is asked of them is the same."""


class Site:
    """A manager, two engines, and a trainer whose weights prove their version. All tests use it,
    one after the other: versions go on."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.version = 0
        self.engines = {
            name: GenerationActor.options(max_concurrency=200, num_cpus=0, max_restarts=-1).remote(
                engine_spec(
                    name,
                    model,
                    max_prompt_tokens=300,
                    max_new_tokens=LENGTH,
                    max_samples=64,
                    **mode,
                )
            )
            for name, mode in MODES.items()
        }
        self._started = dict(
            zip(
                self.engines,
                ray.get([engine.start.remote() for engine in self.engines.values()]),
                strict=True,
            )
        )

        self.trainer = VersionedTrainer.options(num_cpus=0, max_restarts=1).remote(str(model))
        self.manager = CheckpointEngineManager.options(num_cpus=0).remote(
            self.trainer,
            ManagerSpec(
                backend="gloo",
                bucket_bytes=64 * 1024,
                verify=True,
                limits=Limits(
                    timeout_s=60.0, busy_timeout_s=60.0, restore_timeout_s=30.0, max_failures=2
                ),
                start_timeout_s=60.0,
            ),
        )

    async def begin(self, kind: Kind) -> None:
        """All engines serve weights of this kind, in a version of their own."""
        for name in self.engines:
            await self.sync(name)
        await self.trainer.choose.remote(kind)
        assert (await self.update()).engines == 2

    async def sync(self, name: str) -> None:
        started = self._started[name]
        member = EngineMember(
            name=name,
            handle=self.engines[name],
            address=started.address,
            process=started.process,
            workers=1,
        )
        await self.manager.sync.remote(member)

    async def restart(self, name: str) -> None:
        """As the pool does."""
        await self.manager.forget.remote(name)
        engine = self.engines[name]
        death = engine.until_death.remote()
        ray.kill(engine, no_restart=False)
        await asyncio.gather(death, return_exceptions=True)
        while True:
            try:
                self._started[name] = await engine.start.remote()
                break
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(0.2)
        await self.sync(name)

    async def update(self):
        self.version += 1
        await self.trainer.train.remote(self.version)
        return (await self.manager.update_weights.remote(self.version)).outcome

    async def begin_update_to_the_middle(self) -> asyncio.Future:
        await self.trainer.wait_in_the_middle.remote()
        updating = asyncio.ensure_future(self.update())
        while not await self.trainer.is_in_the_middle.remote():
            await asyncio.sleep(0.01)
        return updating

    async def generate(
        self, name: str, prompt: list[int], tokens: int, n: int = 1
    ) -> GenerationResult:
        request = GenerationRequest(
            request_id=os.urandom(8).hex(),
            prompt_ids=np.array(prompt, dtype=np.int32),
            n=n,
            sampling=Sampling(max_new_tokens=tokens),
        )
        return await self.engines[name].generate.remote(request)

    async def check_serves(self, name: str, version: int) -> None:
        """By its stamp, by its token, and bit for bit."""
        result = await self.generate(name, [3, 4, 5], tokens=3)
        (completion,) = result.completions
        assert completion.versions.tolist() == [version] * 3
        assert completion.token_ids.tolist() == [token_of(version)] * 3
        assert await self.digests(name) == self.expected_digests(version)

    async def digests(self, name: str) -> dict[str, str]:
        """vLLM's own SHA-256 of every tensor that the engine's worker holds."""

        def checksums(actor) -> list[dict[str, str]]:
            llm = actor._engine._llm
            loop = llm.output_handler.get_loop()  # the actor's own: this runs beside it
            return asyncio.run_coroutine_threadsafe(llm.compute_weight_checksums(), loop).result()

        (of_worker,) = await self.engines[name].__ray_call__.remote(checksums)
        return {name.rpartition(":")[2]: digest for name, digest in of_worker.items()}

    def expected_digests(self, version: int) -> dict[str, str]:
        return engine_digests(weights_of(self._parameters, version, kind="proving"))

    @cached_property
    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        return [(name, parameter.detach()) for name, parameter in model.named_parameters()]

    async def tokens_made(self, name: str) -> int:
        """By the requests that run."""
        return await self.engines[name].__ray_call__.remote(
            lambda actor: sum(
                len(sample.completion().token_ids)
                for samples in actor._engine._running.values()
                for sample in samples
            )
        )

    async def core_pid(self, name: str) -> int:
        return await self.engines[name].__ray_call__.remote(
            lambda actor: actor._engine._llm.engine_core.resources.engine_manager.processes[0].pid
        )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def site(
    ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("versioned")
    make_model(directory, tiny_model)
    made = Site(directory)
    yield made
    for actor in (*made.engines.values(), made.manager, made.trainer):
        ray.kill(actor)


def test_every_token_is_stamped_with_the_version_that_made_it(
    site: Site, runner: asyncio.Runner
) -> None:
    """Ten updates with dozens of samples in flight, on an engine that recomputes its KV cache and
    is paused for a copy, and on one that keeps it and is paused for the transfer."""

    async def scenario() -> list[GenerationResult]:
        await site.begin("proving")
        rng = np.random.default_rng(0)
        calls = [
            asyncio.ensure_future(
                site.generate(name, rng.integers(2, 14, 1 + index % 7).tolist(), LENGTH, n=3)
            )
            for name in site.engines
            for index in range(10)
        ]
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert (await site.update()).engines == 2
            for name in site.engines:
                assert await site.digests(name) == site.expected_digests(site.version)
        return await asyncio.gather(*calls)

    results = runner.run(scenario())
    completions = [c for result in results for c in result.completions]
    assert len(completions) == 60
    for completion in completions:
        proved = [token_of(version) for version in completion.versions.tolist()]
        assert completion.token_ids.tolist() == proved
    spans = [len(set(completion.versions.tolist())) for completion in completions]
    assert max(spans) > 5, "hardly a sample was in flight over several updates"
    for name in site.engines:
        runner.run(site.check_serves(name, site.version))


def test_what_old_weights_cached_is_no_part_of_a_new_prompt(
    site: Site, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A prompt of several blocks before and after an update: as if nothing had been cached."""
    prompt = np.random.default_rng(1).integers(2, 14, 280).tolist()

    async def scenario() -> dict[str, GenerationResult]:
        await site.begin("random")
        await asyncio.gather(*(site.generate(name, prompt, tokens=4) for name in site.engines))
        await site.update()
        return {name: await site.generate(name, prompt, tokens=4) for name in site.engines}

    results = runner.run(scenario())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(site.model, dtype=torch.float32)
    made = weights_of(list(model.named_parameters()), site.version, kind="random")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made[name])
    model.save_pretrained(tmp_path)
    causal = CausalModel(str(tmp_path), device=torch.device("cpu"), trust_remote_code=False)
    for name, result in results.items():
        (completion,) = result.completions
        ids = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
        sequence = LearnedSequence(
            token_ids=ids,
            learned=np.repeat([False, True], [len(prompt), 4]),
        )
        (batch,) = pack([sequence], budget_tokens=1000)
        with torch.no_grad():
            expected = causal.logprobs(batch, temperature=1.0).numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3, err_msg=name)


def test_an_engine_goes_on_after_a_rest_where_it_was(site: Site, runner: asyncio.Runner) -> None:
    """Requests in flight stand still while the trainer has the devices, and then end as if nothing
    had been; also when an update fails before them."""

    async def scenario() -> None:
        await site.begin("proving")
        calls = [
            asyncio.ensure_future(site.generate(name, [3, 4, 5], LENGTH, n=4))
            for name in site.engines
        ]
        known = {}
        while not all(known.values()):
            known = {name: await site.tokens_made(name) for name in site.engines}
        assert await site.manager.begin_trainers_turn.remote() == []
        known = {name: await site.tokens_made(name) for name in site.engines}
        await asyncio.gather(*(engine.probe.remote() for engine in site.engines.values()))
        await asyncio.sleep(0.5)
        assert known == {name: await site.tokens_made(name) for name in site.engines}
        assert max(known.values()) < 4 * LENGTH
        assert await site.manager.end_trainers_turn.remote() == []
        await site.update()
        for result in await asyncio.gather(*calls):
            for completion in result.completions:
                made = completion.versions.tolist()
                assert len(made) == LENGTH
                assert completion.token_ids.tolist() == [token_of(version) for version in made]

    runner.run(scenario())


def test_an_engine_killed_while_staging_does_not_keep_the_other_from_the_update(
    site: Site, runner: asyncio.Runner
) -> None:
    async def scenario() -> None:
        await site.begin("proving")
        updating = await site.begin_update_to_the_middle()
        os.kill(await site.core_pid("engine-1"), signal.SIGKILL)
        await site.trainer.go_on.remote()
        outcome = await updating
        assert (outcome.attempts, outcome.engines) == (2, 1)
        assert [one.name for one in outcome.lost] == ["engine-1"]
        await site.check_serves("engine-0", site.version)
        await site.restart("engine-1")
        await site.check_serves("engine-1", site.version)
        assert (await site.update()).engines == 2
        for name in site.engines:
            await site.check_serves(name, site.version)

    runner.run(scenario())


def test_a_trainer_killed_while_sending_leaves_the_old_version_serving(
    site: Site, runner: asyncio.Runner
) -> None:
    """In place a transfer that breaks off tears the weights: that engine must be replaced."""

    async def scenario() -> None:
        await site.begin("proving")
        before = site.version
        updating = await site.begin_update_to_the_middle()
        os.kill(await site.trainer.pid.remote(), signal.SIGKILL)
        with pytest.raises(WeightUpdateError):
            await updating
        await site.check_serves("engine-0", before)
        # The trainer is back, with weights of the next version that were lost and made again.
        while True:
            try:
                await site.trainer.train.remote(site.version)
                break
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(0.2)
        await site.restart("engine-1")
        outcome = (await site.manager.update_weights.remote(site.version)).outcome
        assert outcome.engines == 2
        for name in site.engines:
            await site.check_serves(name, before + 1)

    runner.run(scenario())


def test_an_engine_killed_while_committing_is_lost_alone(
    site: Site, runner: asyncio.Runner
) -> None:
    """The last test here: nobody needs that engine any more."""

    def die_at_the_swap(actor) -> None:
        steps = actor._engine._switch._steps
        core = actor._engine._llm.engine_core.resources.engine_manager.processes[0].pid
        swap = steps.swap

        async def killed() -> None:
            os.kill(core, signal.SIGKILL)
            await swap()

        steps.swap = killed

    async def scenario() -> None:
        await site.begin("proving")
        await site.engines["engine-0"].__ray_call__.remote(die_at_the_swap)
        outcome = await site.update()
        assert (outcome.attempts, outcome.engines) == (1, 1)
        assert [one.name for one in outcome.lost] == ["engine-0"]
        await site.check_serves("engine-1", site.version)

    runner.run(scenario())
