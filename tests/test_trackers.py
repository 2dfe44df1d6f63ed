"""Trackers: the real products read back, and none of them can hold up a run or lose a value."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loguru import logger

from areal_ray.checkpoints import Checkpoint, CheckpointStore, Draws
from areal_ray.config import Config
from areal_ray.config_file import from_mapping, load
from areal_ray.errors import ConfigError, PluginError
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import EvaluationRecord, Record, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.observability.trackers import load_trackers, threads
from areal_ray.observability.tracking import TrackedRun, hyperparameters, run_status, scalars
from areal_ray.stopping import StopRequested
from areal_ray.types import Prompt

T0 = 1_750_000_000.0
"""When the runs of these tests began."""


def step(number: int, reward: float = 0.5, *, began: float = T0) -> StepRecord:
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
        loop_lag_p99_ms={"engine-0": 1.5, "queue": 0.5},
        waited_s=0.25,
        train_s=0.1,
        staged_s=None,
        pause_s=None,
        loss=0.1,
        grad_norm=1.0,
        lr=1e-4,
        clipped=0.01,
        kl_to_behaviour=0.001,
        at=began + 2.0 * number,
        staleness_tokens=[30, 0, 12],
    )


def evaluation(number: int, reward: float, seconds: float) -> EvaluationRecord:
    return EvaluationRecord(
        step=number, version=number, seconds=seconds, prompts=10, reward=reward, at=T0 + seconds
    )


BEFORE = [step(1, 0.1), step(2, 0.2), step(3, 0.3), evaluation(2, 0.25, seconds=7.0), step(4, 0.4)]
"""The evaluation of step 2 ends after step 3, as it does: training goes on meanwhile."""
T1 = T0 + 100
AFTER = [step(3, 0.33, began=T1), step(4, 0.44, began=T1)]
"""Resumed from step 2, later."""


def config_of(tmp_path: Path, *trackers: str, steps: int = 4) -> Config:
    return from_mapping(
        {
            "name": "demo",
            "runs_dir": str(tmp_path / "runs"),
            "steps": steps,
            "model": {"path": "m"},
            "observability": {"trackers": list(trackers), "project": "sums"},
        }
    )


class Collector:
    """A user's own, as simple as it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.run: TrackedRun | None = None
        self.closed_with: list[BaseException | None] = []

    def open(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self, error: BaseException | None) -> None:
        self.closed_with.append(error)


class Stuck(Collector):
    """Never comes back from a record."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck, self.released = threading.Event(), threading.Event()

    def log(self, record: Record) -> None:
        self.is_stuck.set()
        self.released.wait()


class Failing(Collector):
    def log(self, record: Record) -> None:
        super().log(record)
        raise ValueError("no such table")


def run_files(config: Config, *given: object, resumed: Checkpoint | None = None) -> RunFiles:
    named = load_trackers(config.observability.trackers, given)
    files = RunFiles(config, resumed, named)
    files.save_config(config)
    files.open_trackers(config)
    return files


def checkpoint(files: RunFiles, at: int) -> Checkpoint:
    store = CheckpointStore(files.directory / "checkpoints", keep=9)
    (store.begin(at) / "book.json").write_text("{}")
    return store.commit(at, version=at, draws=Draws(groups_per_step=4, seed=0, shuffle=True))


def failed_then_finished(config: Config, config_after: Config) -> RunFiles:
    """A run that fails after its fourth step, and goes on from the second to its end."""
    files = run_files(config)
    for record in BEFORE:
        files.record(record)
    files.close(RuntimeError("no engine is left"))
    resumed = run_files(config_after, resumed=checkpoint(files, 2))
    for record in AFTER:
        resumed.record(record)
    resumed.close()
    assert resumed.directory == files.directory
    return resumed


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    told: list[str] = []
    sink = logger.add(lambda message: told.append(message.record["message"]), level="WARNING")
    yield told
    logger.remove(sink)


def test_tensorboard_shows_every_number_once_and_takes_back_what_was_resumed(
    tmp_path: Path, warnings: list[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = config_of(tmp_path, "tensorboard")
    files = failed_then_finished(config, config)
    shown = EventAccumulator(str(files.directory)).Reload()
    assert set(shown.Tags()["scalars"]) == set(scalars(BEFORE[0])) | set(scalars(BEFORE[3]))
    rewards = [(one.step, one.value, one.wall_time) for one in shown.Scalars("reward")]
    assert rewards == [
        (1, pytest.approx(0.1), T0 + 2),
        (2, pytest.approx(0.2), T0 + 4),
        (3, pytest.approx(0.33), T1 + 6),
        (4, pytest.approx(0.44), T1 + 8),
    ]
    (held_out,) = shown.Scalars("evaluation/reward")
    assert (held_out.step, held_out.value, held_out.wall_time) == (2, 0.25, T0 + 7)
    content = shown.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    chosen = HParamsPluginData.FromString(content).session_start_info.hparams
    assert chosen["trainer.lr"].number_value == config.trainer.lr
    assert set(chosen) == set(hyperparameters(config))
    # The first session's file tells how that one ended, the second's how this one did.
    ends = []
    for events in sorted(files.directory.glob("events.out.tfevents.*")):
        metadata = EventAccumulator(str(events)).Reload().summary_metadata
        content = metadata["_hparams_/session_end_info"].plugin_data.content
        ends.append(HParamsPluginData.FromString(content).session_end_info.status)
    assert ends == [Status.STATUS_FAILURE, Status.STATUS_SUCCESS]
    assert warnings == []


def wandb_records(path: Path) -> Iterator[object]:
    """The protocol buffers of a .wandb file: a header of 7 bytes, then blocks of 32 KiB with
    pieces that each have a checksum, a length and a kind (1: whole, 4: the last)."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # it is being written
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield WandbRecord.FromString(message)
            message = b""


def wandb_sessions(directory: Path) -> list[list[object]]:
    """The records of each, once they are all there: W&B's own process writes them, and may be some
    milliseconds behind the end of a run."""
    deadline = time.monotonic() + 20
    while True:
        paths = sorted(directory.glob("wandb/offline-*/*.wandb"))
        sessions = [list(wandb_records(path)) for path in paths]
        if all(session and session[-1].HasField("exit") for session in sessions):
            return sessions
        assert time.monotonic() < deadline, sessions
        time.sleep(0.02)


def wandb_rows(records: list[object]) -> list[dict[str, object]]:
    return [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_gets_every_record_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(tmp_path, "wandb")
    files = failed_then_finished(config, config)
    sessions = wandb_sessions(files.directory)
    runs = [next(one.run for one in session if one.HasField("run")) for session in sessions]
    assert [(run.project, run.display_name) for run in runs] == [("sums", "demo")] * 2
    assert runs[0].run_id == runs[1].run_id == (files.directory / "wandb.id").read_text().strip()
    chosen = {one.key: json.loads(one.value_json) for one in runs[0].config.update}
    assert chosen["trainer"]["lr"] == config.trainer.lr
    # Nothing is dropped though the evaluation's step is older than the one before it.
    for session, logged in zip(sessions, (BEFORE, AFTER), strict=True):
        for row, record in zip(wandb_rows(session), logged, strict=True):
            expected = scalars(record) | {"step": record.step, "seconds": record.seconds}
            got = {key: float(row[key]) for key in expected}
            assert got == pytest.approx(expected)
            assert row["_timestamp"] == record.at
    axes = {one.metric.glob_name: one.metric.step_metric for one in sessions[0]}
    assert axes["*"] == "step"
    exits = [next(one.exit for one in session if one.HasField("exit")) for session in sessions]
    assert [exit.exit_code for exit in exits] == [1, 0]
    assert "RuntimeError: no engine is left" in str(sessions[0])
    assert warnings == []


def test_mlflow_gets_every_record_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "mlflow", steps=2)
    failed_then_finished(config, config_of(tmp_path, "mlflow", steps=4))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    rewards = client.get_metric_history(run.info.run_id, "reward")
    assert [(one.step, one.value, one.timestamp / 1000) for one in rewards] == [
        (1, 0.1, T0 + 2),
        (2, 0.2, T0 + 4),
        (3, 0.3, T0 + 6),
        (4, 0.4, T0 + 8),
        (3, 0.33, T1 + 6),
        (4, 0.44, T1 + 8),
    ]
    assert run.data.metrics == pytest.approx(scalars(AFTER[-1]) | scalars(BEFORE[3]))
    # A param can't be changed; what a resumed run does otherwise is a tag.
    assert run.data.params == {key: str(one) for key, one in hyperparameters(config).items()}
    assert run.data.tags["resumed.steps"] == "4"
    assert run.data.tags["ended by"] == "RuntimeError: no engine is left"
    assert warnings == []


def test_a_run_that_was_stopped_is_killed_and_neither_failed_nor_finished() -> None:
    assert run_status(None) == "finished"
    assert run_status(RuntimeError("x")) == "failed"
    for wanted in (StopRequested(), KeyboardInterrupt(), asyncio.CancelledError()):
        assert run_status(wanted) == "killed"
        assert run_status(BaseExceptionGroup("tasks", [wanted])) == "killed"


def test_the_numbers_of_a_record_go_by_their_names() -> None:
    names = scalars(step(3))
    assert names["loop_lag_p99_ms/engine-0"] == 1.5
    assert (names["staleness_tokens/0"], names["staleness_tokens/2"]) == (30, 12)
    assert not {"step", "at", "kind", "pause_s", "evaluation/reward"} & set(names)
    assert scalars(evaluation(2, 0.25, seconds=7.0)) == {
        "evaluation/version": 2,
        "evaluation/seconds": 7,
        "evaluation/prompts": 10,
        "evaluation/reward": 0.25,
    }


def test_hyperparameters_go_by_the_keys_of_overrides(tmp_path: Path) -> None:
    chosen = hyperparameters(config_of(tmp_path, "wandb", "mlflow"))
    assert chosen["generation.colocated"] is False
    assert chosen["observability.trackers"] == '["wandb","mlflow"]'
    assert chosen["goal"] == "null"


async def test_a_thousand_records_of_two_threads_and_two_tasks_all_arrive_in_order(
    tmp_path: Path,
) -> None:
    collector = Collector()
    files = run_files(config_of(tmp_path), collector)

    def log(source: int) -> None:
        for number in range(250):
            files.record(step(number, reward=float(source)))

    async def log_between_others(source: int) -> None:
        for number in range(250):
            files.record(step(number, reward=float(source)))
            await asyncio.sleep(0)

    await asyncio.gather(
        asyncio.to_thread(log, 0),
        asyncio.to_thread(log, 1),
        log_between_others(2),
        log_between_others(3),
    )
    await asyncio.to_thread(files.close)
    for kept in (collector.records, read_metrics(files.metrics_path)):
        assert len(kept) == 1000
        for source in range(4):
            steps = [record.step for record in kept if record.reward == source]
            assert steps == list(range(250))
    assert collector.closed_with == [None]


def test_a_tracker_that_is_stuck_delays_nobody_and_what_it_missed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.3)
    stuck, collector = Stuck(), Collector()
    files = run_files(config_of(tmp_path), stuck, collector)
    files.record(step(1))
    assert stuck.is_stuck.wait(10)
    for number in range(2, 102):
        files.record(step(number))
    files.close()
    assert len(collector.records) == len(read_metrics(files.metrics_path)) == 101
    assert collector.closed_with == [None]
    assert warnings == [
        "the tracker Stuck could not be closed in time: 101 records were not written to it. "
        "metrics.jsonl has everything"
    ]
    stuck.released.set()


def test_a_tracker_that_is_far_behind_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(threads, "MAX_WAITING", 5)
    stuck = Stuck()
    files = run_files(config_of(tmp_path), stuck)
    files.record(step(1))
    assert stuck.is_stuck.wait(10)
    for number in range(2, 12):
        files.record(step(number))
    stuck.released.set()
    files.close()
    # Of eleven, one was in its hands and five waited.
    (told,) = warnings
    assert "Stuck was more than 5 records behind: 5 were not written to it" in told
    assert len(read_metrics(files.metrics_path)) == 11


def test_a_tracker_that_fails_is_told_of_once_and_the_others_get_everything(
    tmp_path: Path, warnings: list[str]
) -> None:
    failing, collector = Failing(), Collector()
    files = run_files(config_of(tmp_path), failing, collector)
    for number in range(1, 21):
        files.record(step(number))
    error = RuntimeError("no engine is left")
    files.close(error)
    assert warnings == [
        "the tracker Failing failed and is left out from now on: ValueError: no such table. "
        "metrics.jsonl has everything"
    ]
    assert (len(failing.records), failing.closed_with) == (1, [])
    assert (len(collector.records), collector.closed_with) == (20, [error])


def test_a_tracker_that_can_not_be_opened_or_exits_is_left_out_as_well(
    tmp_path: Path, warnings: list[str]
) -> None:
    class Unreachable(Collector):
        def open(self, run: TrackedRun) -> None:
            raise ConnectionError("nobody there")

    class Exiting(Collector):
        def close(self, error: BaseException | None) -> None:
            sys.exit(3)

    exiting = Exiting()
    files = run_files(config_of(tmp_path), Unreachable(), exiting)
    files.record(step(1))
    files.close()
    assert exiting.records == [step(1)]
    unreachable, exits = sorted(warnings, reverse=True)
    assert "Unreachable failed and is left out from now on: ConnectionError" in unreachable
    assert "Exiting failed and is left out from now on: SystemExit: 3" in exits


def test_a_run_that_ends_before_its_trackers_are_opened_closes_well(tmp_path: Path) -> None:
    collector = Collector()
    config = config_of(tmp_path)
    files = RunFiles(config, None, load_trackers((), [collector]))
    files.close(RuntimeError("no cluster"))
    assert (collector.run, collector.closed_with) == (None, [])


def test_a_tracker_knows_the_run_and_where_it_goes_on(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first, second, other = Collector(), Collector(), Collector()
    files = run_files(config, first)
    files.close()
    run_files(config, second, resumed=checkpoint(files, 2)).close()
    run_files(config, other).close()
    assert first.run == TrackedRun("demo", tmp_path / "runs" / "demo", config)
    assert (second.run.name, second.run.resumed_step, second.run.is_resumed) == ("demo", 2, True)
    assert (other.run.name, other.run.is_resumed) == ("demo-2", False)


OWN = """
class Mine:
    def open(self, run): ...
    def log(self, record): ...
    def close(self, error): ...

def made(): return Mine()
def wrong(): return 3
def broken(): raise OSError("no license")
def greedy(url): return Mine()
"""


def test_a_tracker_of_ones_own_is_a_class_or_a_function_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "own_trackers.py").write_text(OWN)
    (tmp_path / "demo.yaml").write_text(
        "name: demo\nobservability: {trackers: ['own_trackers.py:Mine', 'own_trackers.py:made']}\n"
    )
    specs = load(tmp_path / "demo.yaml").observability.trackers
    named = load_trackers(specs)
    assert [type(one.tracker).__name__ for one in named] == ["Mine", "Mine"]
    assert [one.name for one in named] == [
        f"{tmp_path}/own_trackers.py:Mine",
        f"{tmp_path}/own_trackers.py:made",
    ]
    for name, why in {
        "wrong": "expected a tracker, got a int, which has no `open`, no `log`, no `close`",
        "broken": "is called without arguments, and raised OSError: no license",
        "greedy": "is called without arguments, and raised TypeError: greedy",
        "missing": "has no `missing`",
    }.items():
        with pytest.raises((ConfigError, PluginError), match=why):
            load_trackers([f"{tmp_path}/own_trackers.py:{name}"])


@pytest.mark.parametrize(
    ("specs", "given", "why"),
    [
        (["tensorbord"], [], "got `tensorbord`; did you mean `tensorboard`"),
        (["excel"], [], "expected tensorboard, wandb, mlflow or file.py:name, got `excel`$"),
        (["tensorboard", "tensorboard"], [], "trackers: `tensorboard` is given twice"),
        ([], [Collector], "trackers: expected a tracker, got the class Collector"),
        ([], [print], "which has no `open`, no `log`, no `close`"),
    ],
)
def test_what_is_no_tracker_is_refused(specs: list[str], given: list[object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_trackers(specs, given)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make an import fail as it does where the package is not there."""

    def hide(package: str) -> None:
        for name in list(sys.modules):
            if name.split(".")[0] == package or name.startswith(
                "areal_ray.observability.trackers."
            ):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(
    ("tracker", "package", "why"),
    [
        ("tensorboard", "tensorboard", "TensorBoard is not installed"),
        ("wandb", "wandb", "Weights & Biases is not installed"),
        ("mlflow", "mlflow", "MLflow is not installed"),
    ],
)
def test_what_is_not_installed_is_refused_with_what_to_install(
    tracker: str, package: str, why: str, not_installed: Callable[[str], None]
) -> None:
    not_installed(package)
    with pytest.raises(ConfigError, match=f"^observability.trackers: {why}") as refused:
        load_trackers([tracker])
    assert f'pip install "areal_ray[{tracker}]"' in str(refused.value)


def test_wandb_without_a_login_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # its settings are read once
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="wandb can't log in: .*, or WANDB_MODE=offline"):
        load_trackers(["wandb"])
    wandb.teardown()


@pytest.mark.parametrize("error", [RuntimeError("no engine is left"), StopRequested()])
async def test_a_run_hands_its_trackers_what_ended_it(tmp_path: Path, error: Exception) -> None:
    from areal_ray.run import Run

    class EndsAtOnce(Run):
        async def begin(
            self, files: RunFiles, view: object, ending: object, *, paused: bool = False
        ) -> tuple[object, Config]:
            files.open_trackers(config)
            raise error

    collector, config = Collector(), config_of(tmp_path)
    run = EndsAtOnce(
        config,
        prompts=[Prompt(text="1+1=")],
        reward=lambda prompt, completion: 0.0,
        trackers=[collector],
    )
    if isinstance(error, StopRequested):
        assert (await run.train()).ended == "stopped"
    else:
        with pytest.raises(RuntimeError, match="no engine is left"):
            await run.train()
    assert collector.run.name == "demo"
    (told,) = collector.closed_with
    assert isinstance(told, type(error))


def test_a_run_refuses_its_trackers_before_anything_starts(
    tmp_path: Path, not_installed: Callable[[str], None]
) -> None:
    from areal_ray.run import Run

    not_installed("wandb")
    config = config_of(tmp_path, "wandb")
    with pytest.raises(ConfigError, match="Weights & Biases is not installed"):
        Run(config, prompts=[Prompt(text="1+1=")], reward=lambda prompt, completion: 0.0)
    assert not (tmp_path / "runs").exists()
