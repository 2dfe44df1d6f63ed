"""The real engine: vLLM's AsyncLLM.

It is started and used on one event loop. Token ids go in and come out; the logprobs are those
of the distribution that was sampled from (after the temperature); the versions are vLLM's own
spans, exact because weights change only under a pause. vLLM tells them with the last token: of
an engine that is lost before, a token carries the version that served when the piece before it
came, which is never younger than the truth.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from areal_ray.changes import Changes
from areal_ray.errors import EngineError, EngineNotServing, described
from areal_ray.generation.engine import CommitReport, EngineSpec
from areal_ray.generation.sizing import (
    GIB,
    cpu_kv_cache_bytes,
    kv_token_bytes,
    longest_of,
    longest_sequence,
)
from areal_ray.generation.streaming import StreamedSample
from areal_ray.generation.weight_switch import WeightSwitch
from areal_ray.lifeline import claim_ownership
from areal_ray.types import (
    Completion,
    GenerationRequest,
    GenerationResult,
    Sampling,
    WeightVersion,
)
from areal_ray.weights.update import STAGING_KEY

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


LIVENESS_POLL_S = 0.1
RESTORE_TIMEOUT_S = 25.0
"""For each thing that an aborted update, or the end of a rest, gives back."""

PIECE_TOKENS = 32
"""How often vLLM tells of a sample's tokens: so many may be lost with the engine."""


class VllmEngine:
    def __init__(self, spec: EngineSpec, *, address: str) -> None:
        """`address`: of this node, the only one that the engine may listen on."""
        self._spec = spec
        self._address = address
        self._llm: AsyncLLM | None = None
        self._version: WeightVersion = 0
        self._running: dict[str, list[StreamedSample]] = {}
        self._pieces = 0
        self._generated_tokens = 0
        self._piece_came = Changes()
        self._probes = 0
        self._pauses = 0
        self._switch = WeightSwitch(
            _VllmSteps(self),
            name=spec.name,
            in_place=spec.staging == "none",
            release_kv=spec.release_kv_cache,
            restore_timeout_s=RESTORE_TIMEOUT_S,
        )

    async def start(self) -> None:
        _set_environment(self._spec, self._address)
        claim_ownership()
        self._llm = await asyncio.to_thread(_start_llm, self._spec)
        await self._llm.update_weight_version("0")
        # A model that loads may still not run (a head size without a kernel): find out now.
        await self.probe()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        from vllm.v1.engine.exceptions import EngineDeadError

        samples = self._running[request.request_id] = [StreamedSample() for _ in range(request.n)]
        interrupted = ""
        try:
            await self._stream(request, samples)
        except* EngineDeadError as dead:
            interrupted = f"{self._spec.name} died: {described(dead)}"
        finally:
            del self._running[request.request_id]
        return GenerationResult(
            request_id=request.request_id,
            engine=self._spec.name,
            completions=[sample.completion() for sample in samples],
            interrupted=interrupted,
        )

    def progress(self, known: dict[str, list[int]]) -> dict[str, list[Completion]]:
        return {
            request_id: [
                sample.completion(since=count)
                for sample, count in zip(self._running[request_id], counts, strict=True)
            ]
            for request_id, counts in known.items()
            if request_id in self._running
        }

    async def probe(self) -> None:
        before = self._pieces
        self._probes += 1
        asked = GenerationRequest(
            request_id=f"probe-{self._probes}",
            prompt_ids=np.zeros(1, dtype=np.int32),
            n=1,
            sampling=Sampling(max_new_tokens=1, temperature=0.0),
        )
        # Behind a long queue the one token may take its time: any other proves as much.
        answer = asyncio.ensure_future(self._stream(asked, [StreamedSample()]))
        other = asyncio.ensure_future(
            self._piece_came.until(lambda: self._pieces > before or self._switch.stands_still)
        )
        try:
            await asyncio.wait({answer, other}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            answer.cancel()
            other.cancel()
            await asyncio.gather(answer, other, return_exceptions=True)

    async def _stream(self, request: GenerationRequest, samples: list[StreamedSample]) -> None:
        """All samples together, or, where tokens exist already, each from its own."""
        prompt, limit = request.prompt_ids.tolist(), request.sampling.max_new_tokens
        sampling = request.sampling
        if not request.begun:
            seed = _seed(sampling, request.request_id)
            params = _sampling_params(sampling, n=request.n, max_tokens=limit, seed=seed)
            await self._take_pieces(request.request_id, prompt, params, samples)
            return
        async with asyncio.TaskGroup() as tasks:
            for number, (begun, sample) in enumerate(zip(request.begun, samples, strict=True)):
                one_id = f"{request.request_id}-sample-{number}"
                seed = _seed(sampling, f"{one_id} from {len(begun)}")
                left = limit - len(begun)
                params = _sampling_params(sampling, n=1, max_tokens=left, seed=seed)
                longer = prompt + begun.tolist()
                tasks.create_task(self._take_pieces(one_id, longer, params, [sample]))

    async def _take_pieces(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        samples: list[StreamedSample],
    ) -> None:
        for sample in samples:
            sample.version = self._version
        asked: TokensPrompt = {"prompt_token_ids": prompt}
        if self._spec.kv_after_update == "keep":
            # What is cached was computed by some version's weights: a prompt finds only what came
            # after the last pause, as it does. (Otherwise a commit empties the cache.)
            asked["cache_salt"] = str(self._pauses)
        async for output in self._engine.generate(asked, params, request_id):
            for piece in output.outputs:
                samples[piece.index].add(piece, served_now=self._version)
                self._generated_tokens += len(piece.token_ids)
            self._pieces += 1
            self._piece_came.notify()

    async def stage_weights(self, encoded_update: bytes) -> None:
        await self._switch.stage(encoded_update)

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        paused_s = await self._switch.commit(version)
        return CommitReport(engine=self._spec.name, version=version, paused_s=paused_s)

    async def discard_weights(self) -> str:
        return await self._switch.discard()

    async def rest(self) -> None:
        await self._switch.rest()

    async def wake(self) -> None:
        await self._switch.wake()

    @property
    def is_dead(self) -> bool:
        """It did not come up, or its process is gone: the reason is in the log."""
        return self._llm is None or self._llm.errored

    @property
    def is_resting(self) -> bool:
        return self._switch.is_resting

    @property
    def stands_still(self) -> bool:
        return self._switch.stands_still

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def generated_tokens(self) -> int:
        return self._generated_tokens

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            # By itself it takes seconds to end: for nothing, if it has no workers with which it
            # shares memory.
            grace_s = 0 if self._spec.tensor_parallel == 1 else None
            await asyncio.to_thread(llm.shutdown, timeout=grace_s)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineNotServing(f"{self._spec.name} is not started")
        return self._llm


class _VllmSteps:
    """A change of weights, step by step, in vLLM's own calls.

    A call to an engine that dies is never answered: each is raced against its death.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._owner = engine

    async def pause(self) -> None:
        # Level 0 is a pause alone, without the fixed sleep that ends `pause_generation`. Requests
        # are kept, and go on under the new weights.
        self._owner._pauses += 1
        self._owner._piece_came.notify()
        await self._ask(self._llm.sleep(level=0, mode="keep"))

    async def resume(self) -> None:
        await self._ask(self._llm.resume_generation())

    async def release_kv(self) -> None:
        await self._ask(self._llm.release_kv_cache_memory())

    async def restore_kv(self) -> None:
        await self._ask(self._llm.wake_up(tags=["kv_cache"]))

    async def sleep(self) -> None:
        # Weights go to host memory, the KV cache is dropped; requests are kept, to be computed
        # anew. On a CPU nothing moves, and generation stands still all the same.
        self._owner._piece_came.notify()
        await self._ask(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        await self._ask(self._llm.wake_up())

    async def receive(self, encoded_update: bytes) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._ask(self._llm.start_weight_update())
        request = WeightTransferUpdateRequest(update_info={"encoded": encoded_update})
        await self._ask(self._llm.update_weights(request))

    async def drop(self) -> str:
        troubles = await self._ask(self._llm.collective_rpc("discard_staged_weights"))
        return "; ".join(filter(None, troubles))

    async def swap(self) -> None:
        await self._ask(self._llm.finish_weight_update())
        if self._owner._spec.kv_after_update == "recompute":
            # Requests in flight, and later prompts with the same prefix, compute anew what the
            # old weights left.
            cleared, _, _ = await asyncio.gather(
                self._ask(
                    self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                ),
                self._ask(self._llm.reset_mm_cache()),
                self._ask(self._llm.reset_encoder_cache()),
            )
            if not cleared:
                raise EngineError(f"{self._owner._spec.name} did not clear its KV cache")

    async def stamp(self, version: WeightVersion) -> None:
        await self._ask(self._llm.update_weight_version(str(version)))
        self._owner._version = version

    @property
    def _llm(self) -> AsyncLLM:
        return self._owner._engine

    async def _ask(self, call: Coroutine[object, object, T]) -> T:
        llm, answer = self._llm, asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=LIVENESS_POLL_S))[0]:
                if llm.errored:
                    raise EngineError(f"{self._owner._spec.name} died")
            return answer.result()
        finally:
            answer.cancel()


def _set_environment(spec: EngineSpec, address: str) -> None:
    """What vLLM reads from the environment, for the process it starts. An outer value wins."""
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": address,
    }
    if address == "127.0.0.1":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    if os.path.isdir(spec.model_path):
        settings["HF_HUB_OFFLINE"] = "1"
    if _on_cpu(spec):
        settings |= {
            # Keeps the worker inside the engine's process: half the start-up time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # By default each engine pins itself to the first core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # The sampler is compiled on the first request otherwise, for seconds.
            "TORCH_COMPILE_DISABLE": "1",
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _start_llm(spec: EngineSpec) -> AsyncLLM:
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = AutoConfig.from_pretrained(
        spec.model_path, trust_remote_code=spec.trust_remote_code
    ).get_text_config()
    max_model_len = _max_model_len(spec, model)
    args = AsyncEngineArgs(
        model=spec.model_path,
        dtype=spec.dtype,
        max_model_len=max_model_len,
        max_num_seqs=spec.max_samples,
        tensor_parallel_size=spec.tensor_parallel,
        trust_remote_code=spec.trust_remote_code,
        seed=spec.seed,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend="areal_ray"),
        additional_config={STAGING_KEY: spec.staging},
        enable_sleep_mode=not _on_cpu(spec) and (spec.release_kv_cache or spec.colocated),
        worker_extension_cls="areal_ray.weights.vllm_backend.WorkerExtension",
        gpu_memory_utilization=spec.gpu_memory,
        kv_cache_memory_bytes=_kv_cache_bytes(spec, model, max_model_len),
        enforce_eager=_on_cpu(spec),
        # Said outright: inside an actor vLLM would choose Ray, and place workers of its own.
        distributed_executor_backend="uni" if spec.tensor_parallel == 1 else "mp",
    )
    return AsyncLLM.from_engine_args(args)


def _on_cpu(spec: EngineSpec) -> bool:
    return spec.device == "cpu"


def _max_model_len(spec: EngineSpec, model: PretrainedConfig) -> int:
    """An answer must fit at least."""
    limit = longest_of(model)
    if limit is not None and spec.max_new_tokens >= limit:
        raise EngineError(
            f"generation.max_new_tokens: expected less than {limit}, which is all that "
            f"{spec.model_path} can hold, got {spec.max_new_tokens}"
        )
    return longest_sequence(
        model, max_prompt_tokens=spec.max_prompt_tokens, max_new_tokens=spec.max_new_tokens
    )


def _kv_cache_bytes(spec: EngineSpec, model: PretrainedConfig, max_model_len: int) -> int | None:
    """None leaves it to `gpu_memory_utilization`, which on a CPU would claim the whole machine."""
    if spec.kv_cache_gib is not None:
        return int(spec.kv_cache_gib * GIB)
    if not _on_cpu(spec):
        return None
    token_bytes = kv_token_bytes(model, spec.dtype)
    return cpu_kv_cache_bytes(token_bytes, max_model_len, spec.max_samples)


def _seed(sampling: Sampling, what: str) -> int | None:
    return None if sampling.seed is None else zlib.crc32(f"{sampling.seed} {what}".encode())


def _sampling_params(
    sampling: Sampling, *, n: int, max_tokens: int, seed: int | None
) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        max_tokens=max_tokens,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=PIECE_TOKENS,
    )
