"""One generation request from its first token to its last, over as many engines as it takes.

    continuation = Continuation(request)
    while (rest := continuation.rest()) is not None:
        try:
            continuation.add(await engine.generate(rest))
        except EngineLost:
            continuation.add_what_is_known()    # and the rest at another engine

An engine that is lost leaves behind the tokens it had made, as far as they are known: the whole
of them when it can still tell, else what it told by `learn` meanwhile. They are kept with their
logprobs and versions; samples that are not finished go on from them elsewhere, each within the
same limit on its whole length. Parts are kept as they come and joined once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from areal_ray.errors import EngineError
from areal_ray.types import Completion, GenerationRequest, GenerationResult


class Continuation:
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._parts: list[list[Completion]] = [[] for _ in range(request.n)]
        self._asked: list[int] = []
        self._learnt: list[list[Completion]] = []
        self._known: list[int] = []
        self._calls = 0

    def rest(self) -> GenerationRequest | None:
        """What is still to be generated, or None when every sample is finished."""
        self._asked = [i for i in range(self._request.n) if not self._is_finished(i)]
        self._learnt = [[] for _ in self._asked]
        self._known = [0] * len(self._asked)
        if not self._asked:
            return None
        self._calls += 1
        if self._calls == 1:
            return self._request
        return msgspec.structs.replace(
            self._request,
            # An engine may still be at the earlier one, if only the way to it was lost.
            request_id=f"{self._request.request_id}-part-{self._calls}",
            n=len(self._asked),
            begun=tuple(self._tokens(i) for i in self._asked),
        )

    def add(self, result: GenerationResult) -> None:
        """What an engine made of the last `rest`."""
        if len(result.completions) != len(self._asked):
            raise EngineError(
                f"{result.engine} gave {len(result.completions)} completions for "
                f"{result.request_id}, expected {len(self._asked)}"
            )
        if not result.interrupted and any(c.finish_reason is None for c in result.completions):
            raise EngineError(f"{result.engine} ended {result.request_id} without an answer")
        self._keep([[completion] for completion in result.completions])

    def learn(self, parts: list[Completion]) -> None:
        """What the engine tells of the last `rest` meanwhile, beyond what is `known`."""
        for sample, (learnt, part) in enumerate(zip(self._learnt, parts, strict=True)):
            learnt.append(part)
            self._known[sample] += len(part.token_ids)

    def known(self) -> list[int]:
        """How many tokens of each sample of the last `rest` were learnt of."""
        return list(self._known)

    def add_what_is_known(self) -> None:
        """The engine is lost, and can't say more than it has."""
        self._keep(self._learnt)

    def _keep(self, parts: list[list[Completion]]) -> None:
        for index, new in zip(self._asked, parts, strict=True):
            self._parts[index] += [
                part for part in new if len(part.token_ids) or part.finish_reason
            ]

    def completions(self) -> list[Completion]:
        return [Completion.joined(parts) if len(parts) > 1 else parts[0] for parts in self._parts]

    def _is_finished(self, index: int) -> bool:
        parts = self._parts[index]
        if not parts or parts[-1].finish_reason:
            return bool(parts)
        if sum(len(part.token_ids) for part in parts) < self._request.sampling.max_new_tokens:
            return False
        # All its tokens are there; only the word that it ended was lost with the engine.
        parts[-1] = msgspec.structs.replace(parts[-1], finish_reason="length")
        return True

    def _tokens(self, index: int) -> np.ndarray:
        parts = self._parts[index]
        return np.concatenate([p.token_ids for p in parts] or [np.empty(0, dtype=np.int32)])
