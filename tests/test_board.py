from __future__ import annotations

import msgspec

from areal_ray.observability.actor_report import (
    ActorReport,
    EngineFacts,
    RunFacts,
    SpansWanted,
    Totals,
)
from areal_ray.observability.board import Board, SpanCollection
from areal_ray.observability.records import EvaluationRecord
from areal_ray.observability.spans import Span
from areal_ray.observability.timeline import ActivityRecord, EventRecord


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(at: float, *, process: str = "first", tokens: int = 0, **seconds: float) -> ActorReport:
    return ActorReport(
        who="engine-0",
        shown="GenerationActor[engine-0]",
        process=process,
        at=at,
        facts=EngineFacts(version=3, requests=7),
        loop_p99_ms=1.0,
        loop_worst_ms=2.0,
        totals=Totals({name.replace("_", " "): spent for name, spent in seconds.items()}, tokens),
    )


def board() -> tuple[Board, Clock]:
    clock = Clock()
    return Board("arithmetic", "runs/arithmetic", 50, clock=clock), clock


def test_a_cell_is_what_came_since_the_report_before() -> None:
    watched, _ = board()
    watched.hear(engine(100.0, tokens=10, busy=7.0))
    (cell,) = watched.hear(engine(101.0, tokens=25, busy=7.5, paused=0.25, waiting_for_data=0.25))
    assert cell == ActivityRecord(
        who="engine-0",
        at=101.0,
        seconds={"busy": 0.5, "paused": 0.25, "waiting for data": 0.25},
        tokens=15,
        requests=7,
        version=3,
    )
    assert cell.began == 100.0


def test_a_new_process_is_counted_from_its_beginning() -> None:
    watched, _ = board()
    watched.hear(engine(100.0, tokens=1000, busy=70.0))
    (cell,) = watched.hear(engine(120.0, process="second", tokens=0, restarting=2.0))
    assert (cell.seconds, cell.tokens) == ({"restarting": 2.0}, 0)


def test_a_new_board_goes_on_from_what_was_told_before() -> None:
    watched, _ = board()
    report = engine(100.0, tokens=900, busy=70.0, paused=2.0)
    (cell,) = watched.hear(msgspec.structs.replace(report, told=Totals({"busy": 69.5}, 880)))
    assert (cell.seconds, cell.tokens) == ({"busy": 0.5, "paused": 2.0}, 20)


def test_a_report_that_is_lost_costs_no_second_and_no_token() -> None:
    watched, _ = board()
    watched.hear(engine(100.0, tokens=10, busy=1.0))
    (cell,) = watched.hear(engine(103.0, tokens=40, busy=2.0, paused=2.0))
    assert (cell.seconds, cell.tokens) == ({"busy": 1.0, "paused": 2.0}, 30)


def test_pace_and_shares_are_of_the_last_cells() -> None:
    watched, clock = board()
    for second in range(20):
        # Idle for the first ten seconds; then half busy, with 50 tokens a second.
        half = max(0, second - 9) / 2
        watched.hear(
            engine(
                100.0 + second, tokens=int(100 * half), busy=half, waiting_for_data=second - half
            )
        )
    clock.now = 120.0
    (status,) = watched.status().actors
    assert status.tokens_per_s == 50.0
    assert status.shares == {"busy": 0.5, "waiting for data": 0.5}


def test_events_and_records_of_the_run_are_in_its_status() -> None:
    watched, _ = board()
    lost = EventRecord(100.0, "engine-1", "warning", "is lost: it died")
    said = EventRecord(100.0, "run", "info", "training")
    evaluations = [
        EvaluationRecord(step=step, version=step, seconds=1.0, prompts=4, reward=step / 10)
        for step in (0, 5, 10)
    ]
    news = watched.hear(
        ActorReport(
            who="run",
            shown="Run[arithmetic]",
            process="driver",
            at=100.0,
            facts=RunFacts(phase="training"),
            loop_p99_ms=0.0,
            loop_worst_ms=0.0,
            events=[lost, said],
            records=evaluations,
        )
    )
    assert news == [lost, said]
    status = watched.status()
    assert status.phase == "training"
    assert status.events == [lost]
    assert (status.first_evaluation.reward, status.last_evaluation.reward) == (0.0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(status), type=type(status)) == status


def test_spans_are_asked_for_once_of_each_who_tells() -> None:
    collection = SpanCollection(50.0, ["engine-0"])
    assert collection.take(engine(100.0)) == SpansWanted(50.0)
    assert not collection.is_whole
    given = msgspec.structs.replace(engine(100.1), spans=[Span("generate", 60.0, 1.0)])
    assert collection.take(given) is None
    assert collection.is_whole
    assert collection.take(engine(101.0)) is None
    assert [actor.spans for actor in collection.given] == [[Span("generate", 60.0, 1.0)]]


def test_nobody_waits_for_one_who_is_silent_or_has_said_his_last_word() -> None:
    watched, clock = board()
    watched.hear(engine(100.0, busy=1.0))
    assert watched.those_who_tell() == ["engine-0"]
    watched.hear(msgspec.structs.replace(engine(101.0, busy=2.0), is_last=True))
    assert watched.those_who_tell() == []
    watched.hear(engine(102.0, busy=3.0))
    clock.now += 60.0
    assert watched.those_who_tell() == []
    watched.forget("engine-0")
    assert watched.status().actors == []
