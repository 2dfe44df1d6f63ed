"""How objects show themselves in a notebook. What a model or a user wrote stays text there."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from areal_ray.actors.rollout_controller import RolloutStatus
from areal_ray.actors.trajectory_queue import QueueStatus
from areal_ray.error_budget import FailureKind
from areal_ray.fleet import MemberStatus
from areal_ray.observability.history import History
from areal_ray.observability.html import MAX_SAMPLES, MAX_TOKENS, line_html
from areal_ray.observability.loop_health import LoopReport
from areal_ray.observability.records import EvaluationRecord
from areal_ray.staleness import LedgerCounts
from areal_ray.try_outs import Answers, TriedOut
from areal_ray.types import Completion, Message, Prompt, Trajectory, TrajectoryGroup
from areal_ray.weights.transaction import LostEngine, Outcome
from areal_ray.workbench import BenchStatus

EVIL = "<script>alert('x')</script>&\"<b>"


class Page(HTMLParser):
    """The elements that a browser would make, and all text in them. Refuses what is not closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.text = ""
        self.titles: list[str] = []
        self._inside: list[str] = []
        self.feed(source)
        self.close()
        assert self._inside == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._inside.append(tag)
        assert {name for name, _ in attributes} <= {"style", "title"}
        self.titles += [value for name, value in attributes if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def completion(tokens: int = 2, version: int = 3) -> Completion:
    return Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        versions=np.full(tokens, version, dtype=np.int32),
        finish_reason="stop",
        text=EVIL,
    )


def trajectory(reward: float, tokens: int = 2, version: int = 3) -> Trajectory:
    prompt_ids = np.array([1], dtype=np.int32)
    return Trajectory.single_turn(prompt_ids, completion(tokens, version), reward)


def bench() -> BenchStatus:
    loop = LoopReport("queue", 0, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    return BenchStatus(
        name=EVIL,
        directory=EVIL,
        steps=2,
        version=2,
        served=1,
        rollout=RolloutStatus(
            ledger=LedgerCounts(version=1, submitted=5, running=3, accepted=2),
            generated_tokens=12345,
            paused=True,
            engines=[MemberStatus("engine-0", "serving", 2, False, EVIL)],
            engine_loads={"engine-0": 7},
            workers=[],
            failures=[FailureKind(EVIL, 1, "group 0", EVIL)],
            loops={},
        ),
        queue=QueueStatus(waiting_groups=4, held_groups=4, held_bytes=3 * 2**20, loop=loop),
    )


def shown() -> dict[str, str]:
    prompt = Prompt(text=EVIL, answer=EVIL)
    chat = Prompt(messages=(Message(role=EVIL, content=EVIL),))
    lost = LostEngine(name=EVIL, process="", cause=EVIL)
    return {
        "answers": Answers(prompt, [completion()], [[EVIL, "b"]], EVIL, 0.5)._repr_html_(),
        "tried out": TriedOut(0, prompt, [trajectory(1.0)], [[EVIL, "b"]], EVIL, 0.5)._repr_html_(),
        "group of a chat": TrajectoryGroup(0, chat, [trajectory(1.0)])._repr_html_(),
        "weight update": Outcome(1, 2, 2, 0.1, 0.1, 0.01, [lost])._repr_html_(),
        "bench": bench()._repr_html_(),
        "line": line_html(EVIL),
    }


@pytest.mark.parametrize("what", shown())
def test_what_a_model_or_a_user_wrote_stays_text(what: str) -> None:
    page = Page(shown()[what])
    assert set(page.elements) <= {"div", "span", "table", "tr", "th", "td"}
    assert EVIL in page.text


def test_a_bench_tells_of_engines_trainer_queue_and_ledger() -> None:
    text = Page(bench()._repr_html_()).text
    for part in ("engine-0", "serving", "paused", "2 steps, version 2: 1 ahead of the engines"):
        assert part in text
    assert "4 groups wait, 3 MiB" in text
    assert "3 on their way · 2 accepted" in text
    assert "12,345 tokens" in text


def test_each_token_tells_its_probability_and_its_version() -> None:
    page = Page(Answers(Prompt(text="?"), [completion()], [["a", "b"]], "e", 0.5)._repr_html_())
    # exp(-0.5) = 0.607
    assert page.titles == ["p 0.607, logprob -0.500, version 3"] * 2


def test_a_group_of_a_run_is_shown_by_token_numbers_and_a_tried_out_one_by_their_text() -> None:
    prompt, samples = Prompt(text="?"), [trajectory(0.0), trajectory(1.0)]
    assert "01" in Page(TrajectoryGroup(0, prompt, samples)._repr_html_()).text
    tried = TriedOut(0, prompt, samples, [["x", "y"], ["z", "\n"]], "engine-1", 0.04)
    text = Page(tried._repr_html_()).text
    assert "xy" in text
    assert "z↵\n" in text
    assert "2 samples, mean reward 0.500, by engine-1 in 40 ms" in text


def test_versions_are_told_apart_where_there_are_several() -> None:
    prompt = Prompt(text="?")
    one = TrajectoryGroup(0, prompt, [trajectory(0.0), trajectory(0.0)])._repr_html_()
    two = TrajectoryGroup(0, prompt, [trajectory(0.0), trajectory(0.0, version=4)])._repr_html_()
    assert "border-bottom:2px" not in one
    assert "border-bottom:2px" in two
    assert "version 4" in Page(two).text


def test_tokens_that_no_model_made_are_shown_as_context() -> None:
    sample = trajectory(1.0)
    sample.response_mask[1] = False
    page = Page(TrajectoryGroup(0, Prompt(text="?"), [sample])._repr_html_())
    assert page.titles[1] == "context"


def test_long_answers_and_large_groups_are_cut() -> None:
    samples = [trajectory(1.0, tokens=MAX_TOKENS + 5)] + [trajectory(0.0)] * (MAX_SAMPLES + 1)
    page = Page(TrajectoryGroup(0, Prompt(text="?"), samples)._repr_html_())
    assert "… 5 more tokens" in page.text
    assert "… 2 more samples" in page.text
    assert len(page.titles) == MAX_TOKENS + 2 * (MAX_SAMPLES - 1)


def test_a_history_is_a_table_and_a_picture() -> None:
    evaluations = [
        EvaluationRecord(step=step, version=step, seconds=1.0, prompts=9, reward=step / 4)
        for step in (0, 3)
    ]
    history = History("a run", evaluations)
    assert "0.750" in Page(history._repr_html_()).text
    assert history.plot()._repr_png_().startswith(b"\x89PNG")
    assert [record.reward for record in history] == [0.0, 0.75]
