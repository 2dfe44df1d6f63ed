"""What a simulated engine makes of a request: which tokens, when, and under which weights.

All of it is settled when the request comes: a token's moment by the rate, its id and logprob by
a hash of the seed, the prompt, the sample's index and the position. So what is made by any
moment is arithmetic over arrays, and the same on every engine with the same seed.

A sample that goes on from tokens of another engine is known by the first of them (the prompt's
own number plus the sample's index): its place in the request tells nothing, as finished samples
are left out of it. One that has no token yet is known by its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from areal_ray.errors import EngineError
from areal_ray.types import Completion, FinishReason, GenerationRequest, WeightVersion

if TYPE_CHECKING:
    from areal_ray.generation.simulated import SimulatedSpec

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SimulatedGeneration:
    """One running request: what it makes and when, on the engine's own clock."""

    def __init__(
        self,
        spec: SimulatedSpec,
        request: GenerationRequest,
        began_s: float,
        version: WeightVersion,
    ) -> None:
        if len(request.begun) not in (0, request.n):
            raise EngineError(
                f"{request.request_id} has begun {len(request.begun)} samples, expected 0 or all "
                f"{request.n}"
            )
        self._vocabulary = spec.vocabulary
        self._begin(spec, request)
        self._measure(spec.mean_tokens, request.sampling.max_new_tokens)
        steps = np.arange(self._lengths.max()) / spec.tokens_per_s
        self._made_at_s = began_s + spec.first_token_s + steps
        self.ends_s = float(self._made_at_s[-1]) if len(steps) else began_s
        self._committed_at_s: list[float] = []
        self._versions = [version]

    def commit(self, at_s: float, version: WeightVersion) -> None:
        """Tokens made after this moment are of this version."""
        self._committed_at_s.append(at_s)
        self._versions.append(version)

    def next_token_s(self, now_s: float) -> float:
        place = np.searchsorted(self._made_at_s, now_s, side="right")
        return float(self._made_at_s[place]) if place < len(self._made_at_s) else math.inf

    def completions(self, now_s: float, *, known: Sequence[int]) -> list[Completion]:
        """What is made by now, without the first `known` tokens of each sample."""
        steps = int(np.searchsorted(self._made_at_s, now_s, side="right"))
        made = np.minimum(self._lengths, steps).tolist()
        spans = list(zip(known, made, strict=True))
        first = min((start for start, stop in spans if start < stop), default=steps)
        token_ids, logprobs = self._tokens(first, steps)
        commits = np.searchsorted(self._committed_at_s, self._made_at_s[first:steps], side="left")
        versions = np.asarray(self._versions, dtype=np.int32)[commits]
        return [
            Completion(
                token_ids=token_ids[sample, start - first : stop - first].copy(),
                logprobs=logprobs[sample, start - first : stop - first].copy(),
                versions=versions[start - first : stop - first].copy(),
                finish_reason=self._reasons[sample] if stop == self._lengths[sample] else None,
            )
            for sample, (start, stop) in enumerate(spans)
        ]

    def _begin(self, spec: SimulatedSpec, request: GenerationRequest) -> None:
        prompt = np.ascontiguousarray(request.prompt_ids, dtype=np.int32).tobytes()
        seeded = hashlib.blake2b(prompt, digest_size=8, key=str(spec.seed).encode())
        first_of_prompt = int.from_bytes(seeded.digest(), "little")
        begun = request.begun or ((),) * request.n
        indexes = [
            (int(tokens[0]) - first_of_prompt) % spec.vocabulary if len(tokens) else place
            for place, tokens in enumerate(begun)
        ]
        self._first_ids = [(first_of_prompt + index) % spec.vocabulary for index in indexes]
        self._begun = np.array([len(tokens) for tokens in begun])
        self._keys = _mixed(
            np.uint64(first_of_prompt) + GOLDEN * np.array(indexes, dtype=np.uint64)
        )

    def _measure(self, mean_tokens: float, max_new_tokens: int) -> None:
        """How many tokens each sample is still to make, and how it then ends."""
        chances = (_mixed(self._keys) >> np.uint64(11)) * 2.0**-53
        whole = np.ceil(np.log1p(-chances) / math.log1p(-1.0 / mean_tokens))
        # Like a real engine, it makes at least one token where there is room for one.
        left = np.maximum(whole - self._begun, 1)
        room = np.maximum(max_new_tokens - self._begun, 0)
        self._lengths = np.minimum(left, room).astype(np.int64)
        self._reasons: list[FinishReason] = [
            "stop" if stops else "length" for stops in (left <= room).tolist()
        ]

    def _tokens(self, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The tokens of every sample at these steps, and their logprobs."""
        positions = (self._begun[:, None] + np.arange(start, stop)).astype(np.uint64)
        bits = _mixed(self._keys[:, None] + GOLDEN * positions)
        token_ids = ((bits >> np.uint64(32)) * np.uint64(self._vocabulary)) >> np.uint64(32)
        logprobs = (bits & np.uint64(0xFFFFFF)) * (-math.log(self._vocabulary) / 2**24)
        if start == 0 < stop:
            token_ids[:, 0] = np.where(self._begun == 0, self._first_ids, token_ids[:, 0])
        return token_ids.astype(np.int32), logprobs.astype(np.float32)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finisher: neighbouring values become unrelated ones."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
