from __future__ import annotations

import io
import json
import math
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from areal_ray.config_file import from_mapping
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.jsonl import JsonlWriter
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.observability.terminal import LiveView, PlainView, clock, open_view, sparkline


def step(number: int, reward: float = 0.5) -> StepRecord:
    return StepRecord(
        step=number,
        version=number,
        seconds=2.0 * number,
        reward=reward,
        response_tokens=3.5,
        tokens_per_s=1234.0,
        staleness_mean=1.5,
        staleness_max=2,
        queue_groups=64,
        groups_failed=1,
        groups_expired=0,
        groups_filtered=2,
        engines=2,
        loop_lag_p99_ms={"controller": 1.5, "queue": 0.5},
        waited_s=0.25,
        train_s=0.1,
        staged_s=0.05,
        pause_s=0.03,
        loss=0.1,
        grad_norm=1.0,
        lr=1e-4,
        clipped=0.01,
        kl_to_behaviour=0.001,
    )


def evaluation(number: int, reward: float) -> EvaluationRecord:
    return EvaluationRecord(step=number, version=number, seconds=1.0, prompts=10, reward=reward)


def test_a_run_that_diverged_can_be_read_again(tmp_path: Path) -> None:
    metrics = JsonlWriter(tmp_path / "metrics.jsonl")
    diverged = msgspec.structs.replace(step(2), loss=float("nan"), kl_to_behaviour=float("nan"))
    for record in (step(1), diverged):
        metrics.write(record)
    metrics.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first == step(1)
    assert math.isnan(second.loss)
    assert math.isnan(second.kl_to_behaviour)
    assert second.reward == diverged.reward


def test_the_live_panel_shows_what_matters() -> None:
    console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    view = LiveView("demo", 50, console)
    view.evaluation(evaluation(0, 0.25))
    for number in range(1, 11):
        view.step(step(number, reward=number / 20))
    view.evaluation(evaluation(10, 0.75))
    console.print(view._draw())
    view.close()
    drawn = console.export_text()
    for shown in (
        "demo",
        "10/50",
        "1:20 left",
        "0.500",
        "0.250 → 0.750",
        "1,234 tokens/s",
        "1.5 versions on average, 2 at most",
        "64 groups waiting",
        "pause 30 ms",
        "1 failed, 0 expired",
    ):
        assert shown in drawn


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = open_view("demo", 50, Console(file=sys.stdout))
    assert isinstance(view, PlainView)
    view.phase("starting")
    view.step(step(10))
    view.evaluation(evaluation(10, 0.75))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("] starting")
    assert lines[1].endswith(
        "step 10/50  reward 0.500  1,234 tokens/s  staleness 1.5 (max 2)  queue 64  "
        "pause 30 ms  left 1:20"
    )
    assert lines[2].endswith("held-out reward 0.750 at version 10 (10 prompts)")


def test_small_helpers_of_the_view() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert (clock(59.6), clock(3599), clock(3725)) == ("1:00", "59:59", "1:02:05")


def test_a_runs_files_are_written_and_the_curve_is_drawn(tmp_path: Path) -> None:
    config = from_mapping({"name": "demo", "runs_dir": str(tmp_path), "model": {"path": "m"}})
    files = RunFiles(config)
    records = [evaluation(0, 0.2), step(1), step(2), evaluation(2, 0.9)]
    for record in records:
        files.record(record)
    files.save_config(config)
    files.close()
    assert read_metrics(tmp_path / "demo" / "metrics.jsonl") == records
    assert (tmp_path / "demo" / "reward.png").read_bytes().startswith(b"\x89PNG")
    # A second run of the same name does not touch the first one's files.
    assert RunFiles(config).directory == tmp_path / "demo-2"


class Line(msgspec.Struct):
    number: int


def test_json_lines_are_encoded_and_written_in_another_thread(tmp_path: Path) -> None:
    threads = set()

    def lines(count: int) -> list[Line]:
        threads.add(threading.current_thread())
        return [Line(number) for number in range(count)]

    writer = JsonlWriter(tmp_path / "lines.jsonl", lines)
    writer.write(2)
    writer.write(1)
    writer.close()
    text = (tmp_path / "lines.jsonl").read_text()
    assert [json.loads(line)["number"] for line in text.splitlines()] == [0, 1, 0]
    assert threading.main_thread() not in threads


def test_an_error_while_writing_is_raised_by_close(tmp_path: Path) -> None:
    def fail(item: int) -> list[Line]:
        raise OSError("disk full")

    writer = JsonlWriter(tmp_path / "lines.jsonl", fail)
    writer.write(1)
    with pytest.raises(OSError, match="disk full"):
        writer.close()


def test_an_early_error_is_not_forgotten_for_later_successes(tmp_path: Path) -> None:
    ready = threading.Event()

    def fail_first(item: int) -> list[Line]:
        ready.wait(10)
        if item == 0:
            raise OSError("disk full")
        return [Line(item)]

    writer = JsonlWriter(tmp_path / "lines.jsonl", fail_first)
    writer.write(0)
    writer.write(1)
    ready.set()
    with pytest.raises(OSError, match="disk full"):
        writer.close()


def test_a_line_that_was_cut_off_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = msgspec.json.encode(step(1))
    path.write_bytes(line + b"\n" + line[:20])
    assert read_metrics(path) == [step(1)]
