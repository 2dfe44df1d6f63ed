from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from made_run import (
    BACK_S,
    BEGAN,
    LOST_S,
    RolloutRecord,
    append,
    make_run,
    metrics,
    step_record,
)

from areal_ray.cli import main
from areal_ray.errors import NoRun
from areal_ray.observability.report import write_report
from areal_ray.observability.report.data import ReportData, RunReader
from areal_ray.observability.timeline import ActivityRecord, EventRecord


def read(directory: Path) -> ReportData:
    reader = RunReader(directory)
    while reader.read():
        pass
    reader.read_samples()
    return reader.data()


def cell(who: str, at: float, **seconds: float) -> ActivityRecord:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return ActivityRecord(who=who, at=at, seconds=named, tokens=10)


def embedded(html: str) -> dict[str, object]:
    (found,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "made", steps=120)


def test_the_report_tells_of_the_whole_run(run: Path) -> None:
    data = read(run)
    summary, timeline = data.summary, data.timeline
    assert (summary.name, summary.step, summary.steps, summary.seconds) == ("made", 120, 160, 600.0)
    assert summary.generated_tokens == pytest.approx(600 * 3500, rel=0.05)
    assert summary.retried_updates == 1
    assert data.evaluations.steps == [0, 15, 30, 45, 60, 75, 90, 105]
    assert data.evaluations.first.reward < 0.3 < 0.85 < data.evaluations.last.reward
    assert len(data.curves.columns["pause_s"].mean) == 120
    assert len(data.curves.staleness_tokens) == 4
    assert data.lags[0].who == "engine-1"
    assert timeline.counts == {"info": 7, "warning": 2, "error": 1}
    assert [lane.who for lane in timeline.lanes] == ["trainer", "engine-0", "engine-1"]
    lost = timeline.lanes[2]
    # Nobody hears of it from when it is lost until 14 s before it serves again.
    assert lost.absent_s == pytest.approx(BACK_S - 14 - LOST_S, abs=1.1)
    assert data.step_t[0] == 5.0
    assert len(data.samples) == 3
    assert "Qwen/Qwen2.5-0.5B" in data.config


@pytest.mark.parametrize("missing", ["timeline.jsonl", "rollouts.jsonl", "metrics.jsonl"])
def test_a_run_is_told_of_without_one_of_its_files(run: Path, missing: str) -> None:
    (run / missing).unlink()
    data = read(run)
    assert (data.timeline.lanes == []) is (missing == "timeline.jsonl")
    assert (data.samples == []) is (missing == "rollouts.jsonl")
    assert (data.curves.steps == []) is (missing == "metrics.jsonl")
    assert "made" in write_report(run).read_text()


def test_one_step_and_no_evaluation_make_a_report(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", [step_record(1, random.Random(1))])
    data = read(tmp_path)
    assert (data.summary.step, data.summary.steps, data.evaluations.first) == (1, None, None)
    assert len(data.curves.columns["reward"].mean) == 1


def test_lines_cut_short_are_counted_and_the_rest_is_read(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_bytes()
    # Cut off by a kill, gone on behind it, and being written just now.
    (run / "metrics.jsonl").write_bytes(
        whole + b'{"kind":"step","st\n' + b"\xff\xfe\n" + whole[:90]
    )
    with (run / "timeline.jsonl").open("ab") as file:
        file.write(b'{"kind":"activity","wh')
    data = read(run)
    assert (data.summary.step, data.unreadable_lines, data.read) == (120, 2, 1.0)


def test_a_loss_that_is_no_number_does_not_keep_the_report_away(tmp_path: Path) -> None:
    diverged = msgspec.structs.replace(step_record(2, random.Random(1)), loss=float("nan"))
    append(tmp_path / "metrics.jsonl", [step_record(1, random.Random(1)), diverged])
    loss = read(tmp_path).curves.columns["loss"].mean
    assert loss[0] is not None
    assert loss[1] is None


def test_a_resumed_run_is_followed_from_the_beginning(tmp_path: Path) -> None:
    path, chance = tmp_path / "metrics.jsonl", random.Random(1)
    append(path, [step_record(number, chance) for number in (1, 2, 3)])
    reader = RunReader(tmp_path)
    while reader.read():
        pass
    kept = tmp_path / "kept"
    append(kept, [step_record(number, chance) for number in (1, 2)])
    kept.replace(path)
    while reader.read():
        pass
    assert reader.data().curves.steps == [1, 2]


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    one = step_record(1, random.Random(5))
    append(
        tmp_path / "metrics.jsonl",
        (
            msgspec.structs.replace(one, step=step, reward=float(step == 2777), at=BEGAN + step)
            for step in range(1, 4001)
        ),
    )
    engines = [f"engine-{number}" for number in range(64)]
    append(
        tmp_path / "timeline.jsonl",
        (
            cell(who, BEGAN + 1200.0 * nth, busy=900.0, paused=40.0, idle=260.0)
            for nth in range(1, 217)
            for who in engines
        ),
    )
    data = read(tmp_path)
    # 4,000 steps in at most 1,500 points: 4 steps each, and the one spike is still there.
    assert (data.curves.width, len(data.curves.steps)) == (4, 1000)
    assert max(data.curves.columns["reward"].high) == 1.0
    # Three days in at most 160,000 / 64 = 2,500 bins a lane: 259,200 s / 128 s = 2,025.
    assert (data.timeline.width_s, data.timeline.bins) == (128.0, 2025)
    assert write_report(tmp_path).stat().st_size < 5_000_000


def test_what_a_model_wrote_can_end_no_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028 {{data}} &amp;"
    sample = RolloutRecord(1, 1, evil, evil, evil, 1.0, "stop", [1], [1], [0])
    append(tmp_path / "rollouts.jsonl", [sample])
    append(tmp_path / "metrics.jsonl", metrics(1, random.Random(1)))
    event = EventRecord(at=1.0, who=evil, level="error", text=evil)
    append(tmp_path / "timeline.jsonl", [event])
    (tmp_path / "config.yaml").write_text(f"name: x # {evil}")
    html = write_report(tmp_path).read_text()
    assert html.count("</script>") == 2
    assert "<img" not in html
    data = embedded(html)
    assert data["samples"][0]["worst"][0]["text"] == evil
    assert data["timeline"]["events"][0]["text"] == evil
    assert evil in data["config"]


def test_the_page_refers_to_nothing_outside(run: Path) -> None:
    html = write_report(run).read_text().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in html
    assert "connect-src 'none'" in html


def test_the_command_writes_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    elsewhere = run.parent / "other.html"
    assert main(["report", str(run), "--out", str(elsewhere)]) == 0
    assert elsewhere.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in run.parent.iterdir()) == ["made", "other.html"]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--port", "80"]) == 2
    with pytest.raises(NoRun):
        write_report(tmp_path)
