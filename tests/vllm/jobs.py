"""Ray's Jobs API from a user's shell: a cluster with a dashboard, and jobs submitted to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import MarkedProcesses
from tests.vllm.training import wait_until_empty

BIN = Path(sys.executable).parent
SUBMIT = """
import json, sys
from ray.job_submission import JobSubmissionClient

print("JOB", JobSubmissionClient().submit_job(**json.loads(sys.argv[1])))
"""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def of_a_run(marked: MarkedProcesses) -> dict[int, str]:
    """Processes that a run starts, and a cluster does not."""
    kinds = ("GenerationActor", "Trainer", "Rollout", "RunMonitor")
    starts = ("VLLM::", *(f"ray::{kind}" for kind in kinds))
    return {pid: name for pid, name in marked.alive().items() if name.startswith(starts)}


class JobCluster:
    """A cluster that somebody started with `ray start`, and a shell beside it."""

    def __init__(self, environment: dict[str, str], dashboard_url: str, token: str) -> None:
        self._environment = environment
        self.dashboard_url = dashboard_url
        self.token = token

    def run(self, *command: str | Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess:
        """A command in that shell."""
        return subprocess.run(
            [BIN / command[0], *command[1:]],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def until_it_answers(self) -> None:
        while True:  # the test's own time limit ends it otherwise
            with contextlib.suppress(OSError):
                self._ask("")
                return
            time.sleep(0.2)

    def submit(self, entrypoint: str, working_dir: Path, **runtime_env: object) -> str:
        """Returns the submission's id."""
        job = {
            "entrypoint": entrypoint,
            "runtime_env": {"working_dir": str(working_dir), **runtime_env},
        }
        asked = self.run("python", "-c", SUBMIT, json.dumps(job))
        assert "JOB" in asked.stdout, asked.stdout + asked.stderr
        return asked.stdout.partition("JOB")[2].strip()

    def info(self, job: str) -> dict:
        return self._ask(job)

    def logs(self, job: str) -> str:
        return self._ask(f"{job}/logs")["logs"]

    def _ask(self, what: str) -> object:
        """Of Ray's Jobs API, as it is on the wire: a process for each question would keep a core
        busy that the job needs."""
        asked = urllib.request.Request(
            f"{self.dashboard_url}/api/jobs/{what}",
            headers={"Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def until_ended(self, job: str, timeout_s: float = 240.0) -> dict:
        return self.until(lambda: (i := self.info(job))["status"] in ENDED and i, job, timeout_s)

    def until(self, condition: Callable[[], object], job: str, timeout_s: float = 240.0) -> object:
        """What the condition gives, once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, self.logs(job)
            time.sleep(0.5)
        return found


@contextmanager
def job_cluster(marked: MarkedProcesses, log: Path) -> Iterator[JobCluster]:
    token = secrets.token_hex(32)
    environment = {
        **marked.environment,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
        # Said to all: by themselves the cluster asks for a token once there is one, and Ray's CLI
        # sends it only if told to.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    dashboard, port = free_port(), free_port()
    with log.open("wb") as said:
        head = subprocess.Popen(
            [
                *(BIN / "ray", "start", "--head", "--block", f"--port={port}"),
                *("--include-dashboard=true", f"--dashboard-port={dashboard}"),
                *(f"--dashboard-agent-listen-port={free_port()}", "--num-cpus=2"),
            ],
            env=environment,
            stdout=said,
            stderr=said,
        )
        url = f"http://127.0.0.1:{dashboard}"
        shell = environment | {
            "RAY_API_SERVER_ADDRESS": url,
            "RAY_ADDRESS": f"127.0.0.1:{port}",
        }
        try:
            yield JobCluster(shell, url, token)
        finally:
            head.terminate()
            head.wait(timeout=60)
    assert wait_until_empty(marked.alive) == {}
