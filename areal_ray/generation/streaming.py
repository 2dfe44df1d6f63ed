"""One sample as vLLM streams it: piece by piece, joined when somebody asks.

Each piece carries tokens and the logprobs they were sampled with. The exact versions come with
the last one; until then each token counts as made by the weights that served when the piece
before its own came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from areal_ray.errors import EngineError
from areal_ray.types import NOT_GENERATED, Completion, FinishReason, WeightVersion

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class StreamedSample:
    def __init__(self) -> None:
        self.version: WeightVersion = 0
        self._token_ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        self._logprobs: list[np.ndarray] = [np.empty(0, dtype=np.float32)]
        self._versions: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        self._finish_reason: FinishReason | None = None

    def add(self, piece: CompletionOutput, *, served_now: WeightVersion) -> None:
        token_ids = np.asarray(piece.token_ids, dtype=np.int32)
        self._token_ids.append(token_ids)
        self._logprobs.append(_sampled_logprobs(piece, token_ids))
        self._versions.append(np.full(len(token_ids), self.version, dtype=np.int32))
        self.version = served_now
        if piece.finish_reason is not None:
            self._finish_reason = "length" if piece.finish_reason == "length" else "stop"
            self._versions = [_exact_versions(piece, sum(map(len, self._token_ids)))]

    def completion(self, *, since: int = 0) -> Completion:
        """Its tokens from the number `since` on; more may come while it has no finish_reason."""
        return Completion(
            token_ids=np.concatenate(self._token_ids)[since:],
            logprobs=np.concatenate(self._logprobs)[since:],
            versions=np.concatenate(self._versions)[since:],
            finish_reason=self._finish_reason,
        )


def _sampled_logprobs(piece: CompletionOutput, token_ids: np.ndarray) -> np.ndarray:
    """The sampled token comes first at each position."""
    flat = piece.logprobs
    firsts = np.asarray(flat.start_indices, dtype=np.int64)
    if not np.array_equal(np.asarray(flat.token_ids)[firsts], token_ids):
        raise EngineError("vLLM's logprobs do not belong to its tokens")
    return np.asarray(flat.logprobs, dtype=np.float32)[firsts]


def _exact_versions(last: CompletionOutput, length: int) -> np.ndarray:
    versions = np.full(length, NOT_GENERATED, dtype=np.int32)
    for span in last.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    ends_at = max((span.end for span in last.weight_versions or ()), default=0)
    if ends_at != length or (versions == NOT_GENERATED).any():
        raise EngineError("vLLM did not stamp every token with a weight version")
    return versions
