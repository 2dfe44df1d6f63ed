from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.errors import EngineError
from areal_ray.generation.continuation import Continuation
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.generation.simulated_tokens import SimulatedGeneration
from areal_ray.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Sampling,
)


def request(*, n: int = 2, max_new_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id="group-0",
        prompt_ids=np.array([3, 1, 4], dtype=np.int32),
        n=n,
        sampling=Sampling(max_new_tokens=max_new_tokens, temperature=0.5),
    )


def part(*token_ids: int, ends: FinishReason | None = None, version: int = 0) -> Completion:
    """Its logprobs: minus the hundredth of each token."""
    ids = np.array(token_ids, dtype=np.int32)
    return Completion(
        token_ids=ids,
        logprobs=(-ids / 100).astype(np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        finish_reason=ends,
    )


def result(*completions: Completion, interrupted: str = "") -> GenerationResult:
    return GenerationResult(
        request_id="group-0",
        engine="engine-0",
        completions=list(completions),
        interrupted=interrupted,
    )


def begun(rest: GenerationRequest | None) -> list[list[int]]:
    assert rest is not None
    return [tokens.tolist() for tokens in rest.begun]


def test_an_undisturbed_request_goes_to_one_engine_as_it_is() -> None:
    asked, whole = request(), [part(1, 2, ends="stop"), part(3, ends="stop")]
    continuation = Continuation(asked)
    assert continuation.rest() is asked
    continuation.add(result(*whole))
    assert continuation.rest() is None
    made = continuation.completions()
    assert [one is other for one, other in zip(made, whole, strict=True)] == [True, True]


def test_an_interrupted_sample_goes_on_from_its_tokens_and_is_joined() -> None:
    continuation = Continuation(request(n=1))
    continuation.rest()
    continuation.add(result(part(11, 12, version=3), interrupted="engine-0 died"))
    assert begun(continuation.rest()) == [[11, 12]]
    continuation.add(result(part(13, version=4), interrupted="engine-1 died"))
    assert begun(continuation.rest()) == [[11, 12, 13]]
    continuation.add(result(part(14, 15, ends="stop", version=5)))
    assert continuation.rest() is None
    [made] = continuation.completions()
    assert made.token_ids.tolist() == [11, 12, 13, 14, 15]
    np.testing.assert_allclose(made.logprobs, [-0.11, -0.12, -0.13, -0.14, -0.15], rtol=1e-6)
    assert made.versions.tolist() == [3, 3, 4, 5, 5]
    assert made.finish_reason == "stop"
    assert made.token_ids.dtype == made.versions.dtype == np.int32
    assert made.logprobs.dtype == np.float32


def test_finished_samples_are_not_asked_for_again_and_keep_their_places() -> None:
    continuation = Continuation(request(n=4))
    continuation.rest()
    continuation.add(
        result(
            part(1, ends="stop"),
            part(2),
            part(3, 3, ends="stop"),
            part(),
            interrupted="engine-0 died",
        )
    )
    rest = continuation.rest()
    assert (rest.n, begun(rest)) == (2, [[2], []])
    continuation.add(result(part(22), part(4, ends="stop"), interrupted="engine-1 died"))
    rest = continuation.rest()
    assert (rest.n, begun(rest)) == (1, [[2, 22]])
    continuation.add(result(part(222, ends="stop")))
    assert continuation.rest() is None
    made = [one.token_ids.tolist() for one in continuation.completions()]
    assert made == [[1], [2, 22, 222], [3, 3], [4]]


def test_every_part_has_a_name_of_its_own_and_is_of_the_same_request() -> None:
    """An engine may still be at an earlier part, if only the way to it was lost."""
    asked = request(n=1)
    continuation, names = Continuation(asked), set()
    for call in range(4):
        rest = continuation.rest()
        names.add(rest.request_id)
        assert rest.sampling == asked.sampling
        assert rest.prompt_ids is asked.prompt_ids
        continuation.add(result(part(call), interrupted="it died"))
    assert len(names) == 4
    assert "group-0" in names


def test_an_engine_that_died_at_once_changes_nothing_but_the_name() -> None:
    continuation = Continuation(request())
    first = continuation.rest()
    continuation.add_what_is_known()
    second = continuation.rest()
    assert second.request_id != first.request_id
    assert (second.n, begun(second)) == (2, [[], []])
    continuation.add(result(part(), part(), interrupted="it died too"))
    third = continuation.rest()
    assert (third.n, begun(third)) == (2, [[], []])
    assert {tokens.dtype for tokens in third.begun} == {np.dtype(np.int32)}
    continuation.add(result(part(1, ends="stop"), part(2, ends="stop")))
    assert continuation.rest() is None
    assert [one.token_ids.tolist() for one in continuation.completions()] == [[1], [2]]


def test_what_was_learnt_is_what_is_left_of_an_engine_that_can_tell_no_more() -> None:
    continuation = Continuation(request(n=3))
    continuation.rest()
    assert continuation.known() == [0, 0, 0]
    continuation.learn([part(1, 1), part(2, ends="stop"), part()])
    assert continuation.known() == [2, 1, 0]
    continuation.learn([part(11, version=1), part(ends="stop"), part()])
    assert continuation.known() == [3, 1, 0]
    continuation.add_what_is_known()
    rest = continuation.rest()
    assert (rest.n, begun(rest)) == (2, [[1, 1, 11], []])
    # Of this part nothing is known yet.
    assert continuation.known() == [0, 0]
    continuation.learn([part(111, version=2), part(3)])
    continuation.add_what_is_known()
    assert begun(continuation.rest()) == [[1, 1, 11, 111], [3]]
    continuation.add(result(part(ends="stop"), part(33, ends="stop")))
    assert continuation.rest() is None
    made = continuation.completions()
    assert [one.token_ids.tolist() for one in made] == [[1, 1, 11, 111], [2], [3, 33]]
    assert [one.finish_reason for one in made] == ["stop", "stop", "stop"]
    assert made[0].versions.tolist() == [0, 0, 1, 2]


def test_what_was_learnt_is_not_counted_twice_when_the_engine_tells_all_itself() -> None:
    continuation = Continuation(request())
    continuation.rest()
    continuation.learn([part(1), part(2)])
    # The learnt versions may be older than the true ones; those of the result are exact.
    continuation.add(
        result(part(1, 11, version=7), part(2, 22, ends="stop", version=7), interrupted="it died")
    )
    assert begun(continuation.rest()) == [[1, 11]]
    continuation.add(result(part(ends="stop")))
    assert continuation.rest() is None
    first, second = continuation.completions()
    assert first.versions.tolist() == second.versions.tolist() == [7, 7]


def test_a_sample_that_has_all_its_tokens_is_finished_though_nobody_said_so() -> None:
    continuation = Continuation(request(n=2, max_new_tokens=3))
    continuation.rest()
    continuation.learn([part(1, 2), part(4, 5)])
    continuation.learn([part(3), part()])
    continuation.add_what_is_known()
    rest = continuation.rest()
    # The first has 3 of 3 tokens; asked for a fourth, it would be longer than it may be.
    assert (rest.n, begun(rest)) == (1, [[4, 5]])
    continuation.add(result(part(6), interrupted="it died with the last word on its lips"))
    assert continuation.rest() is None
    made = continuation.completions()
    assert [one.token_ids.tolist() for one in made] == [[1, 2, 3], [4, 5, 6]]
    assert [one.finish_reason for one in made] == ["length", "length"]


def test_asking_for_the_rest_twice_does_no_harm() -> None:
    continuation = Continuation(request(n=1, max_new_tokens=2))
    continuation.rest()
    continuation.add(result(part(1), interrupted="it died"))
    assert begun(continuation.rest()) == begun(continuation.rest()) == [[1]]
    continuation.add(result(part(2), interrupted="it died"))
    assert continuation.rest() is None
    assert continuation.rest() is None


@pytest.mark.parametrize("given_back", [0, 1, 3])
def test_another_number_of_completions_is_refused(given_back: int) -> None:
    continuation = Continuation(request(n=2))
    continuation.rest()
    with pytest.raises(
        EngineError, match=f"engine-0 gave {given_back} completions for group-0, expected 2"
    ):
        continuation.add(result(*[part(1, ends="stop")] * given_back))


def test_completions_are_counted_against_what_was_asked_for_last() -> None:
    continuation = Continuation(request(n=2))
    continuation.rest()
    continuation.add(result(part(1, ends="stop"), part(2), interrupted="it died"))
    continuation.rest()
    with pytest.raises(EngineError, match="gave 2 completions for group-0, expected 1"):
        continuation.add(result(part(1, ends="stop"), part(2, ends="stop")))


def test_an_engine_that_ends_a_sample_without_an_end_is_at_fault() -> None:
    """Else the same request would go to it again and again, for ever."""
    continuation = Continuation(request(n=2))
    continuation.rest()
    with pytest.raises(EngineError, match="engine-0 ended group-0 without an answer"):
        continuation.add(result(part(1, ends="stop"), part(2)))


SPEC = SimulatedSpec(
    name="engine-0", tokens_per_s=1.0, first_token_s=1.0, mean_tokens=6.0, vocabulary=1000
)
LOSSES = st.lists(
    st.tuples(
        # How many tokens an engine makes of each sample before it is lost,
        st.integers(0, 7),
        # how many of those it tells meanwhile, at which moments,
        st.lists(st.integers(0, 7), max_size=3),
        # and whether it can still tell all when it is lost.
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(n=st.integers(1, 6), limit=st.integers(1, 12), seed=st.integers(0, 99), losses=LOSSES)
def test_however_often_engines_are_lost_the_samples_are_those_of_one_that_was_not(
    n: int, limit: int, seed: int, losses: list[tuple[int, list[int], bool]]
) -> None:
    """Engines that make the same tokens of the same sample, and number v stamps version v."""
    asked = GenerationRequest(
        request_id="group-0",
        prompt_ids=np.array([seed], dtype=np.int32),
        n=n,
        sampling=Sampling(max_new_tokens=limit),
    )
    undisturbed = SimulatedGeneration(SPEC, asked, 0.0, 0).completions(1e9, known=[0] * n)
    continuation, made_by = Continuation(asked), [[] for _ in range(n)]
    for version, (seconds, told_at, can_tell) in enumerate([*losses, (10**6, [], True)]):
        rest = continuation.rest()
        if rest is None:
            break
        unfinished = [i for i in range(n) if len(made_by[i]) < len(undisturbed[i].token_ids)]
        assert rest.n == len(unfinished), "finished samples are not asked for again"
        engine = SimulatedGeneration(SPEC, rest, 0.0, version)
        for moment in sorted(min(moment, seconds) for moment in told_at):
            continuation.learn(engine.completions(moment, known=continuation.known()))
        if can_tell:
            made = engine.completions(seconds, known=[0] * rest.n)
            counts = [len(one.token_ids) for one in made]
            is_whole = all(one.finish_reason for one in made)
            continuation.add(result(*made, interrupted="" if is_whole else "it died"))
        else:
            counts = continuation.known()
            continuation.add_what_is_known()
        for sample, count in zip(unfinished, counts, strict=True):
            made_by[sample] += [version] * count
    assert continuation.rest() is None
    for one, other, versions in zip(continuation.completions(), undisturbed, made_by, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.finish_reason == other.finish_reason
        assert one.versions.tolist() == versions
        assert len(one.token_ids) <= limit
