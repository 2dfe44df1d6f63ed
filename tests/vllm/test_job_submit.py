"""`ray job submit` to a cluster with its dashboard: jobs that succeed, fail and are stopped.

And all that one sees of one meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import RolloutRecord, StepRecord
from areal_ray.observability.run_status import RunStatus
from areal_ray.types import NOT_GENERATED
from tests.conftest import MarkedProcesses
from tests.vllm.jobs import JobCluster, job_cluster, of_a_run
from tests.vllm.training import EXAMPLES, step_records, wait_until_empty

QUICK = (
    "warmup.steps=0 goal=null evaluation.every=0 evaluation.prompts=8 generation.engines=1 "
    "trainer.groups_per_step=8"
)
METRICS_PORT = "import ray; ray.init(); print('PORT', ray.nodes()[0]['MetricsExportPort'])"
TASK_NAMES = """
import ray
ray.init()
print("NAMES", *sorted({e["cat"].removeprefix("task::") for e in ray.timeline()}), sep="\\n")
"""


@pytest.fixture(scope="module")
def marked() -> Iterator[MarkedProcesses]:
    marked = MarkedProcesses(f"jobs-{os.getpid()}")
    yield marked
    marked.kill()


@pytest.fixture(scope="module")
def cluster(
    marked: MarkedProcesses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobCluster]:
    with job_cluster(marked, tmp_path_factory.mktemp("cluster") / "head.log") as cluster:
        cluster.until_it_answers()
        yield cluster


@pytest.fixture(scope="module")
def submitted(cluster: JobCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was a job as the guide tells it: synchronous, on the engine's own
    devices, and with adapters."""
    runs = tmp_path_factory.mktemp("submitted")
    job = cluster.run(
        *("ray", "job", "submit", "--runtime-env", EXAMPLES / "job.yaml"),
        *("--working-dir", EXAMPLES, "--", "python", "two_tries.py", f"runs_dir={runs}"),
        *("steps=3", "warmup.steps=20", "goal=null", "evaluation.every=0", "evaluation.prompts=8"),
        *("generation.engines=1", "trainer.groups_per_step=8", "rollout.max_staleness=0"),
        *("generation.colocated=true", "weights.staging=host", "trainer.lora.rank=4"),
        timeout_s=300,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "areal-ray: all steps done after 3 steps" in job.stdout
    assert "succeeded" in job.stdout
    return runs / "two-tries"


def test_an_example_runs_as_a_submitted_job_synchronously_colocated_and_with_adapters(
    submitted: Path,
) -> None:
    assert (submitted / "model" / "model.safetensors").is_file()
    # Without staleness training is synchronous.
    records = read_metrics(submitted / "metrics.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.staleness_max for record in steps] == [0, 0, 0]
    assert [record.queue_groups for record in steps] == [0, 0, 0]
    # What the engine samples from is what the trainer computes: merged, with what adapters learnt,
    # and in both turns with all that the engine had read.
    assert all(record.kl_to_behaviour < 1e-3 for record in steps)
    # What one sees of it afterwards.
    assert "resting" in (submitted / "timeline.jsonl").read_text()
    assert b"GenerationActor" in (submitted / "trace.json").read_bytes()
    assert "<!doctype html>" in (submitted / "report.html").read_text()[:200].lower()
    assert not (submitted / "live.json").exists()


def test_its_episodes_had_two_turns(submitted: Path) -> None:
    samples = msgspec.json.Decoder(RolloutRecord).decode_lines(
        (submitted / "rollouts.jsonl").read_bytes()
    )
    assert len(samples) == 3 * 8 * 8
    twice = [sample for sample in samples if NOT_GENERATED in sample.versions]
    assert twice, "a model that has hardly learnt is wrong at first"
    for sample in twice:
        read = [
            token
            for token, version in zip(sample.tokens, sample.versions, strict=True)
            if version == NOT_GENERATED
        ]
        assert read == sample.prompt_tokens
        assert sample.reward in (0.0, 0.5)


def test_a_job_that_fails_is_failed_tells_the_cause_and_leaves_no_process(
    cluster: JobCluster, marked: MarkedProcesses, tmp_path: Path
) -> None:
    job = cluster.submit(
        f"python arithmetic.py runs_dir={tmp_path} {QUICK} checkpoint.every=0", EXAMPLES
    )
    cluster.until(lambda: len(step_records(tmp_path / "arithmetic")) >= 3, job)
    (trainer,) = marked.named("ray::TrainerActor")
    os.kill(trainer, signal.SIGKILL)  # with no checkpoint that it could go on from
    info = cluster.until_ended(job)
    assert (info["status"], info["driver_exit_code"]) == ("FAILED", 1)
    last = info["message"].rstrip().splitlines()[-1]
    assert re.match(r"areal_ray\.errors\.Trainer(Lost|Away): the trainer ", last), last
    assert wait_until_empty(lambda: of_a_run(marked)) == {}


@pytest.fixture(scope="module")
def running(
    cluster: JobCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A job in the midst of its training, by DAPO, and its run's directory. The last test stops
    it."""
    runs = tmp_path_factory.mktemp("stopped")
    job = cluster.submit(
        # With the imitator's first rights and wrongs, so that DAPO's filter lets groups through.
        f"areal-ray train dapo.yaml runs_dir={runs} name=watched steps=100000 {QUICK} "
        "warmup.steps=800",
        EXAMPLES,
        env_vars={"RAY_JOB_STOP_WAIT_TIME_S": "120"},
    )
    cluster.until(lambda: "step 3/" in cluster.logs(job), job)
    return job, runs / "watched"


def status_of(cluster: JobCluster, run: str | Path) -> RunStatus:
    asked = cluster.run("areal-ray", "status", run, "--json")
    assert asked.returncode == 0, asked.stderr
    return msgspec.json.decode(asked.stdout, type=RunStatus)


def test_the_job_carries_the_run_s_name(cluster: JobCluster, running: tuple[str, Path]) -> None:
    assert cluster.info(running[0])["metadata"]["areal_ray_run"] == "watched"


def test_it_is_looked_at_and_told_things_from_another_shell(
    cluster: JobCluster, running: tuple[str, Path], tmp_path: Path
) -> None:
    job, directory = running
    by_directory, by_name = status_of(cluster, directory), status_of(cluster, "watched")
    assert by_directory.name == by_name.name == "watched"
    told = {actor.report.who: actor.report.shown for actor in by_name.actors}
    assert told["engine-0"].startswith("GenerationActor[engine-0 v")
    assert told["trainer"].startswith("TrainerActor[trainer v")

    traced = cluster.run("areal-ray", "trace", directory, "--out", tmp_path / "trace.json")
    assert traced.returncode == 0, traced.stderr
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert spans >= {"generate", "reward", "queue wait", "train", "stage", "commit"}

    assert cluster.run("areal-ray", "pause", directory).returncode == 0
    paused = cluster.until(lambda: (s := status_of(cluster, directory)) and _ran_dry(s) and s, job)
    assert "paused" in next(a.report.shown for a in paused.actors if a.report.who == "controller")
    grown = cluster.run("areal-ray", "resize", "2", directory)
    assert grown.stdout == "areal-ray: 2 engines\n", grown.stderr
    assert cluster.run("areal-ray", "resize", "1", directory).returncode == 0
    refused = cluster.run("areal-ray", "resize", "0", directory)
    assert refused.returncode == 1
    assert "expected at least generation.min_engines" in refused.stderr
    assert cluster.run("areal-ray", "status", "nobody").returncode == 2

    resumed = cluster.run("areal-ray", "resume", directory)
    assert resumed.stdout == "areal-ray: resumed\n"
    cluster.until(lambda: step_records(directory)[-1]["step"] > paused.step.step, job)


def _ran_dry(status: RunStatus) -> bool:
    """Nothing is generated, and the trainer waits."""
    does = {actor.report.who: actor.shares for actor in status.actors}
    return does["engine-0"].get("busy") is None and "waiting for data" in does["trainer"]


def test_metrics_are_on_ray_s_own_endpoint(cluster: JobCluster, running: tuple[str, Path]) -> None:
    job, _ = running
    port = cluster.run("python", "-c", METRICS_PORT).stdout.partition("PORT")[2].strip()
    wanted = {
        'ray_areal_ray_reward{run="watched"}',
        'ray_areal_ray_generated_tokens_total{engine="engine-0",run="watched"}',
        'ray_areal_ray_queue_groups{run="watched"}',
        'ray_areal_ray_queue_bytes{run="watched"}',
        'ray_areal_ray_staleness_versions_count{run="watched"}',
        'ray_areal_ray_engine_version_lag{engine="engine-0",run="watched"}',
        'ray_areal_ray_weight_update_phase_seconds{phase="pause",run="watched"}',
        'ray_areal_ray_event_loop_lag_p99_ms{actor="trainer",run="watched"}',
        'ray_areal_ray_engine_state{engine="engine-0",run="watched",state="serving"}',
        'ray_areal_ray_gpu_idle_seconds_total{actor="trainer",cause="idle",run="watched"}',
    }

    def scraped() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return dict(map(_own_sample, answer.read().decode().splitlines()))

    # Ray gathers them every few seconds.
    found = cluster.until(lambda: (s := scraped()).keys() >= wanted and s, job, timeout_s=60)
    tokens = 'ray_areal_ray_generated_tokens_total{engine="engine-0",run="watched"}'
    assert found[tokens] > 100
    assert found['ray_areal_ray_engine_state{engine="engine-0",run="watched",state="serving"}'] == 1


def _own_sample(line: str) -> tuple[str, float]:
    """A line of Prometheus' format, with our own tags alone."""
    if not line.startswith("ray_areal_ray_"):
        return "", 0.0
    name, _, rest = line.partition("{")
    tags, _, value = rest.rpartition("} ")
    own = ("run=", "engine=", "actor=", "state=", "cause=", "phase=")
    kept = [tag for tag in tags.split('",') if tag.startswith(own)]
    shown = ",".join(sorted(f'{tag.rstrip(chr(34))}"' for tag in kept))
    return f"{name}{{{shown}}}", float(value)


def test_ray_s_timeline_names_the_phases(cluster: JobCluster, running: tuple[str, Path]) -> None:
    asked = cluster.run("python", "-c", TASK_NAMES)
    names = asked.stdout.partition("NAMES")[2].split("\n")
    for phase in (
        "TrainerActor: train step ",
        "TrainerActor: wait for batch ",
        "CheckpointEngineManager: weight update v",
        "GenerationActor: stage ",
        "GenerationActor: commit v",
    ):
        assert any(name.startswith(phase) for name in names), (phase, asked.stderr)


def test_the_dashboard_s_actor_page_tells_who_is_who(
    cluster: JobCluster, running: tuple[str, Path], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    browser.get(cluster.dashboard_url)
    browser.add_cookie({"name": "ray-authentication-token", "value": cluster.token})
    browser.get("about:blank")  # without the token it had asked for one
    browser.get(f"{cluster.dashboard_url}/#/actors")
    parts = ("engine-0", "trainer", "controller", "queue", "manager", "worker-0", "monitor")
    page = WebDriverWait(browser, 60).until(
        lambda b: (
            (text := b.find_element(By.TAG_NAME, "body").text)
            and all(f"watched/{part}" in text for part in parts)
            and text
        )
    )
    browser.save_screenshot(str(tmp_path / "actors.png"))
    assert "GenerationActor[engine-0]" in page
    assert "TrainerActor[trainer]" in page
    assert "RunMonitor[watched]" in page


def test_a_job_that_is_stopped_has_saved_its_model_and_leaves_no_process(
    cluster: JobCluster, running: tuple[str, Path], marked: MarkedProcesses
) -> None:
    job, directory = running
    assert cluster.run("ray", "job", "stop", job, timeout_s=180).returncode == 0
    assert cluster.until_ended(job)["status"] == "STOPPED"
    assert (directory / "model" / "model.safetensors").is_file()
    assert (directory / "report.html").is_file()
    assert "stopping: finishing the step, then saving" in cluster.logs(job)
    assert wait_until_empty(lambda: of_a_run(marked)) == {}
    assert cluster.run("areal-ray", "status", directory).returncode == 2
