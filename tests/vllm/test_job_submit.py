"""`ray job submit` of the example to a running cluster."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import StepRecord
from tests.vllm.training import EXAMPLES, wait_until_empty

RAY = Path(sys.executable).with_name("ray")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def cluster(marked_processes, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a shell beside a cluster that somebody started with `ray start`."""
    environment = {
        **marked_processes.environment,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
        # Said to all: by themselves the cluster asks for a token once there is one, and Ray's CLI
        # sends it only if told to.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
    }
    dashboard = free_port()
    log = (tmp_path / "head.log").open("wb")
    head = subprocess.Popen(
        [
            *(RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={free_port()}"),
            *("--include-dashboard=true", f"--dashboard-port={dashboard}"),
            f"--dashboard-agent-listen-port={free_port()}",
        ],
        env=environment,
        stdout=log,
        stderr=log,
    )
    yield environment | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    head.terminate()
    head.wait(timeout=60)
    log.close()
    assert wait_until_empty(marked_processes.alive) == {}


def test_the_example_runs_as_a_submitted_job_synchronously_colocated_and_with_adapters(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    listing = [RAY, "job", "list"]
    while subprocess.run(listing, env=cluster, capture_output=True, check=False).returncode:
        pass  # until the dashboard answers; the test's own time limit ends it otherwise
    submitted = subprocess.run(
        [
            *(RAY, "job", "submit", "--working-dir", EXAMPLES, "--"),
            *("python", "arithmetic.py", f"runs_dir={tmp_path / 'runs'}", "steps=3"),
            *("warmup.steps=20", "goal=null", "evaluation.every=0", "evaluation.prompts=8"),
            *("generation.engines=1", "trainer.groups_per_step=8", "rollout.max_staleness=0"),
            *("generation.colocated=true", "weights.staging=host", "trainer.lora.rank=4"),
        ],
        env=cluster,
        capture_output=True,
        text=True,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "areal-ray: all steps done after 3 steps" in submitted.stdout
    assert "succeeded" in submitted.stdout
    assert (tmp_path / "runs" / "arithmetic" / "model" / "model.safetensors").is_file()
    # Without staleness training is synchronous.
    steps = [
        record
        for record in read_metrics(tmp_path / "runs" / "arithmetic" / "metrics.jsonl")
        if isinstance(record, StepRecord)
    ]
    assert [record.staleness_max for record in steps] == [0, 0, 0]
    assert [record.queue_groups for record in steps] == [0, 0, 0]
    # What the engine samples from is what the trainer computes: merged, with what adapters learnt.
    assert all(record.kl_to_behaviour < 1e-3 for record in steps)
    # The job joined the cluster and left it as it was.
    assert subprocess.run(listing, env=cluster, capture_output=True, check=False).returncode == 0
