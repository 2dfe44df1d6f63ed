"""What flows through a run: prompts in, completions out, trajectories to the trainer.

Token ids are the truth. Text is decoded once, for rewards and for people, and is never
tokenised again. Every token that a model made carries the logprob it was sampled with and the
version of the weights that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

WeightVersion = int
"""The number of weight updates committed before these weights served."""

NOT_GENERATED: WeightVersion = -1
"""The version of a token that no model made (a tool's answer, a user's turn)."""

TokenIds = NDArray[np.int32]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task for the model: plain text, or messages for the tokenizer's chat template.

    `answer` is what a reward compares with, and what the supervised warm-up teaches;
    `metadata` is the user's own and is handed to the reward and the workflow as it is.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    answer: str | None = None
    metadata: dict[str, str | int | float | bool | None] = {}

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError("a Prompt has either text or messages")


class Sampling(msgspec.Struct, frozen=True):
    """How to draw tokens. `temperature: 0` is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    """With one, tokens follow from it, the request's id and the weights, whichever engine makes
    them."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """`n` samples for one prompt: one remote call, its prefix computed once.

    `begun` is empty, or holds for each sample the tokens that another engine made of it before
    it was lost: each sample goes on from there, within the same limit on its whole length.
    """

    request_id: str
    prompt_ids: TokenIds
    n: int
    sampling: Sampling
    begun: tuple[TokenIds, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """One sample. `logprobs` and `versions` are as long as `token_ids`; a stop token is kept.

    `finish_reason` is None while more is to come: workflows never see such a one.
    """

    token_ids: TokenIds
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason | None
    text: str = ""

    @classmethod
    def joined(cls, parts: Sequence[Completion]) -> Completion:
        """Parts that follow each other, as one. The last one tells how it ended."""
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish_reason=parts[-1].finish_reason,
        )


class GenerationResult(msgspec.Struct, frozen=True):
    """The tokens that one engine made: new ones only, without those a request had begun with.

    `interrupted` tells why the engine could not go on, if so; some completions then have no
    finish_reason, and go on at another engine.
    """

    request_id: str
    engine: str
    completions: list[Completion]
    interrupted: str = ""


class Trajectory(msgspec.Struct, frozen=True):
    """One finished episode: what the trainer learns from.

    `response_mask` is True for the tokens that the policy made; the others (a tool's answer)
    are context only, with version `NOT_GENERATED`.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float
    finish_reason: FinishReason
    text: str
    arrays: dict[str, NDArray[np.generic]] = {}
    """The workflow's own, of any size (the experts that each token was routed to, say): carried
    along by reference, and handed to the trainer as they are."""

    @classmethod
    def single_turn(cls, prompt_ids: TokenIds, completion: Completion, reward: float) -> Trajectory:
        return cls(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
            logprobs=completion.logprobs,
            versions=completion.versions,
            reward=reward,
            finish_reason=completion.finish_reason,
            text=completion.text,
        )

    @property
    def nbytes(self) -> int:
        arrays = (
            self.prompt_ids,
            self.response_ids,
            self.response_mask,
            self.logprobs,
            self.versions,
            *self.arrays.values(),
        )
        return sum(array.nbytes for array in arrays)

    @property
    def oldest_version(self) -> WeightVersion:
        return int(self.versions[self.response_mask].min())


class TrajectoryGroup(msgspec.Struct, frozen=True):
    """All samples of one prompt: the unit of scheduling, of staleness and of advantages."""

    group_id: int
    prompt: Prompt
    trajectories: list[Trajectory]

    def summary(self) -> GroupSummary:
        return GroupSummary(
            group_id=self.group_id,
            samples=len(self.trajectories),
            generated_tokens=sum(int(t.response_mask.sum()) for t in self.trajectories),
            nbytes=sum(t.nbytes for t in self.trajectories),
            oldest_version=min(t.oldest_version for t in self.trajectories),
            mean_reward=float(np.mean([t.reward for t in self.trajectories])),
        )

    def _repr_html_(self) -> str:
        from areal_ray.observability.html import group_html

        return group_html(self)


class GroupSummary(msgspec.Struct, frozen=True):
    """What the control plane knows of a group: everything but its arrays."""

    group_id: int
    samples: int
    generated_tokens: int
    nbytes: int
    oldest_version: WeightVersion
    mean_reward: float


class GroupOutcome(msgspec.Struct, frozen=True):
    """How a group that did not fail ended: taken by a queue, filtered by the user's rule, or not
    wanted, since the queue has it already."""

    kind: Literal["taken", "filtered", "not wanted"]
    summary: GroupSummary | None = None
    """None if it is known from the queue alone, because its worker died."""
    queue: str = ""
    """The incarnation of the queue that took it."""
