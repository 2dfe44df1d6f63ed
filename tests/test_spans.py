from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from areal_ray.observability.chrome_trace import chrome_trace, write_trace
from areal_ray.observability.run_status import ActorSpans
from areal_ray.observability.spans import Span, SpanRecorder, Timing


def test_two_who_time_the_same_thing_at_once_both_count() -> None:
    recorder = SpanRecorder()

    def work() -> None:
        for _ in range(500):
            recorder.add(Span("reward", 0.0, 0.25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.timings == {"reward": Timing(times=2000, seconds=500.0, longest_s=0.25)}


def test_the_last_spans_are_kept_and_all_are_counted() -> None:
    recorder = SpanRecorder(kept=3)
    for second in range(5):
        recorder.add(Span("train", float(second), 0.5))
    assert [span.began for span in recorder.since(0.0)] == [2.0, 3.0, 4.0]
    assert [span.began for span in recorder.since(3.5)] == [3.0, 4.0]
    assert recorder.timings["train"].times == 5


def test_what_fails_is_timed_too() -> None:
    recorder = SpanRecorder()
    before = time.time()
    with pytest.raises(RuntimeError), recorder.span("reward", "group 3"):
        raise RuntimeError
    (span,) = recorder.since(before)
    assert (span.name, span.detail) == ("reward", "group 3")
    assert before <= span.began <= time.time()


def test_spans_that_overlap_are_on_rows_of_their_own(tmp_path: Path) -> None:
    spans = [
        Span("generate", 1.0, 2.0, "group 1"),
        Span("generate", 2.0, 2.0, "group 2"),
        Span("generate", 3.5, 1.0, "group 3"),
        Span("commit", 3.0, 0.1),
    ]
    write_trace(
        tmp_path / "trace.json", [ActorSpans("engine-0", "GenerationActor[engine-0]", spans)]
    )
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [
        (rows[e["tid"]], e["ts"], e["dur"], e.get("args", {}).get("detail"))
        for e in events
        if e["ph"] == "X"
    ]
    # The third begins after the first has ended: in its row.
    assert drawn == [
        ("generate", 1e6, 2e6, "group 1"),
        ("generate", 3.5e6, 1e6, "group 3"),
        ("generate 2", 2e6, 2e6, "group 2"),
        ("commit", 3e6, 1e5, None),
    ]


def test_every_actor_is_a_process_in_the_trace() -> None:
    trace = chrome_trace(
        [ActorSpans("trainer", "TrainerActor[trainer]", []), ActorSpans("run", "", [])]
    )
    names = {e.pid: e.args["name"] for e in trace.trace_events if e.name == "process_name"}
    assert names == {1: "run", 2: "trainer"}
