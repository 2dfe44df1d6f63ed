from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from areal_ray.errors import EngineError
from areal_ray.generation.streaming import StreamedSample


@dataclass
class Span:
    """vLLM's WeightVersionSpan."""

    start: int
    end: int
    version: str


@dataclass
class FlatLogprobs:
    """vLLM's own: those of all positions in one list, and where each position begins."""

    start_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Piece:
    """What StreamedSample reads of vLLM's CompletionOutput."""

    token_ids: list[int]
    logprobs: FlatLogprobs
    finish_reason: str | None = None
    weight_versions: list[Span] | None = field(default_factory=list)
    index: int = 0


def piece(*token_ids: int, ends: str | None = None, spans: list[Span] | None = None) -> Piece:
    """Its logprobs: minus the hundredth of each token."""
    flat = FlatLogprobs(
        start_indices=list(range(len(token_ids))),
        token_ids=list(token_ids),
        logprobs=[-token / 100 for token in token_ids],
    )
    return Piece(list(token_ids), flat, ends, spans)


def test_pieces_are_joined_with_their_logprobs() -> None:
    sample = StreamedSample()
    sample.add(piece(11, 12), served_now=0)
    sample.add(piece(13), served_now=0)
    sample.add(piece(14, ends="stop", spans=[Span(0, 4, "0")]), served_now=0)
    joined = sample.completion()
    assert joined.token_ids.tolist() == [11, 12, 13, 14]
    np.testing.assert_allclose(joined.logprobs, [-0.11, -0.12, -0.13, -0.14], rtol=1e-6)
    assert joined.versions.tolist() == [0, 0, 0, 0]
    assert joined.finish_reason == "stop"
    assert joined.token_ids.dtype == joined.versions.dtype == np.int32
    assert joined.logprobs.dtype == np.float32


def test_before_its_first_piece_a_sample_is_empty() -> None:
    made = StreamedSample().completion()
    assert (len(made.token_ids), len(made.logprobs), len(made.versions)) == (0, 0, 0)
    assert made.token_ids.dtype == made.versions.dtype == np.int32
    assert made.logprobs.dtype == np.float32
    assert made.finish_reason is None


def test_until_the_end_a_token_counts_as_of_the_version_at_the_piece_before_it() -> None:
    sample = StreamedSample()
    sample.version = 3
    sample.add(piece(11, 12), served_now=3)
    # Version 4 was committed somewhere while these three were made: 3 for all is the safe side.
    sample.add(piece(13, 14, 15), served_now=4)
    sample.add(piece(16), served_now=4)
    sample.add(piece(), served_now=6)
    sample.add(piece(17), served_now=6)
    made = sample.completion()
    assert made.versions.tolist() == [3, 3, 3, 3, 3, 4, 6]
    assert made.finish_reason is None


def test_with_the_last_piece_the_exact_versions_come() -> None:
    sample = StreamedSample()
    sample.version = 3
    sample.add(piece(11, 12), served_now=3)
    sample.add(piece(13, 14, 15), served_now=4)
    assert sample.completion().versions.tolist() == [3, 3, 3, 3, 3]
    sample.add(piece(16, ends="length", spans=[Span(0, 3, "3"), Span(3, 6, "4")]), served_now=5)
    made = sample.completion()
    assert made.versions.tolist() == [3, 3, 3, 4, 4, 4]
    assert made.versions.dtype == np.int32
    assert made.finish_reason == "length"


def test_a_sample_can_end_with_a_piece_that_has_no_token() -> None:
    sample = StreamedSample()
    sample.add(piece(11), served_now=0)
    sample.add(piece(ends="stop", spans=[Span(0, 1, "2")]), served_now=2)
    assert sample.completion().versions.tolist() == [2]
    assert sample.completion().finish_reason == "stop"


@pytest.mark.parametrize("since", range(7))
def test_what_is_known_already_is_left_out(since: int) -> None:
    sample = StreamedSample()
    sample.version = 1
    sample.add(piece(11, 12, 13), served_now=2)
    sample.add(piece(14, 15), served_now=3)
    sample.add(piece(16), served_now=3)
    whole, rest = sample.completion(), sample.completion(since=since)
    assert rest.token_ids.tolist() == [11, 12, 13, 14, 15, 16][since:]
    assert rest.versions.tolist() == [1, 1, 1, 2, 2, 3][since:]
    np.testing.assert_array_equal(rest.logprobs, whole.logprobs[since:])


def test_the_end_is_told_even_if_all_tokens_are_known() -> None:
    sample = StreamedSample()
    sample.add(piece(11, ends="stop", spans=[Span(0, 1, "0")]), served_now=0)
    rest = sample.completion(since=1)
    assert (len(rest.token_ids), rest.finish_reason) == (0, "stop")


def test_the_sampled_token_is_the_first_of_each_position() -> None:
    sample = StreamedSample()
    # At each position the sampled token, then the two most likely: 7 and 9 were sampled.
    flat = FlatLogprobs(
        start_indices=[0, 3],
        token_ids=[7, 1, 2, 9, 3, 4],
        logprobs=[-0.5, -0.1, -0.2, -0.25, -0.3, -0.4],
    )
    sample.add(Piece([7, 9], flat), served_now=0)
    assert sample.completion().logprobs.tolist() == [-0.5, -0.25]


def test_logprobs_of_other_tokens_are_refused() -> None:
    flat = FlatLogprobs(start_indices=[0, 1], token_ids=[7, 8], logprobs=[-0.5, -0.25])
    with pytest.raises(EngineError, match="logprobs do not belong to its tokens"):
        StreamedSample().add(Piece([7, 9], flat), served_now=0)
    with pytest.raises(EngineError, match="logprobs do not belong to its tokens"):
        StreamedSample().add(Piece([7], flat), served_now=0)


@pytest.mark.parametrize(
    "spans",
    [None, [], [Span(0, 2, "1")], [Span(0, 2, "1"), Span(2, 4, "2")]],
    ids=["none", "empty", "too few", "too many"],
)
def test_tokens_without_a_version_are_refused(spans: list[Span] | None) -> None:
    sample = StreamedSample()
    sample.add(piece(11, 12), served_now=0)
    with pytest.raises(EngineError, match="did not stamp every token with a weight version"):
        sample.add(piece(13, ends="stop", spans=spans), served_now=0)


@pytest.mark.parametrize(
    "spans",
    [[Span(2, 3, "1"), Span(1, 3, "1")], [Span(2, 5, "1")]],
    ids=["overlapping", "beyond the end"],
)
def test_spans_that_leave_a_token_out_are_refused(spans: list[Span]) -> None:
    sample = StreamedSample()
    sample.add(piece(11, 12), served_now=0)
    with pytest.raises(EngineError, match="did not stamp every token with a weight version"):
        sample.add(piece(13, ends="stop", spans=spans), served_now=0)
