"""What a running cluster says of itself, asked by a process of its own.

Connecting to a cluster that does not answer, or is of another Ray, can take minutes or end the
process: so `ask` starts one for it, `python -m areal_ray.placement.cluster_facts ADDRESS`, and ends
that at the limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from importlib import metadata

import msgspec

from areal_ray.errors import ArealRayError, DeadlineExceeded

ASK_TIMEOUT_S = 30.0
KNOCK_TIMEOUT_S = 5.0
NODE_TIMEOUT_S = 12.0
"""For a process on each node to start and tell its clock."""


class ClusterUnreachable(ArealRayError):
    """No cluster can be joined at this address."""


class NodeFacts(msgspec.Struct, frozen=True):
    address: str
    cpus: float
    gpus: float
    object_store_bytes: float
    clock_offset_s: float | None
    """How far its clock is before ours. None: it did not answer in time."""
    areal_ray_version: str | None
    """None: not installed there, or it did not answer."""


class ClusterFacts(msgspec.Struct, frozen=True):
    address: str
    session_dir: str
    dashboard_url: str
    nodes: list[NodeFacts]


def ask(address: str, *, timeout_s: float = ASK_TIMEOUT_S) -> ClusterFacts:
    """`auto`: RAY_ADDRESS, or a cluster on this machine. Raises `ClusterUnreachable`, or
    `DeadlineExceeded`."""
    _knock(address)
    environment = {**os.environ, "RAY_LOG_TO_STDERR": "0", "PYTHONWARNINGS": "ignore"}
    if address != "auto":  # which would win over what is asked for
        environment.pop("RAY_ADDRESS", None)
    arguments = [sys.executable, "-m", "areal_ray.placement.cluster_facts", address]
    try:
        asked = subprocess.run(
            arguments, env=environment, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise DeadlineExceeded(f"the cluster at {address}", "answering", timeout_s) from late
    if asked.returncode != 0:
        lines = asked.stderr.decode(errors="replace").strip().splitlines()
        raise ClusterUnreachable(lines[-1] if lines else f"no cluster answers at {address}")
    return msgspec.json.decode(asked.stdout.strip().splitlines()[-1], type=ClusterFacts)


def _knock(address: str) -> None:
    """Where nobody listens, Ray would try on for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterUnreachable(f"nobody listens at {address}: {error}") from error


def main(address: str) -> None:
    """Print the facts as JSON, on the last line."""
    from areal_ray.placement.cluster import join

    try:
        with contextlib.redirect_stdout(sys.stderr):
            join(address)
            facts = _gather(address)
    except (ConnectionError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))
    print(msgspec.json.encode(facts).decode())


def _gather(address: str) -> ClusterFacts:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    clocks = _clocks([node["NodeID"] for node in nodes])
    worker = ray._private.worker
    return ClusterFacts(
        address=ray.get_runtime_context().gcs_address or address,
        session_dir=worker._global_node.get_session_dir_path(),
        dashboard_url=f"http://{worker.get_dashboard_url()}" if worker.get_dashboard_url() else "",
        nodes=[
            NodeFacts(
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0),
                gpus=node["Resources"].get("GPU", 0),
                object_store_bytes=node["Resources"].get("object_store_memory", 0),
                clock_offset_s=clock[0],
                areal_ray_version=clock[1],
            )
            for node, clock in zip(nodes, clocks, strict=True)
        ],
    )


def _clocks(node_ids: list[str]) -> list[tuple[float | None, str | None]]:
    """A process on each node is asked twice: the first time it may have to start."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Clock:
        def tell(self) -> tuple[float, str | None]:
            try:
                return time.time(), metadata.version("areal_ray")
            except metadata.PackageNotFoundError:
                return time.time(), None

    clocks = [
        Clock.options(scheduling_strategy=NodeAffinitySchedulingStrategy(one, soft=False)).remote()
        for one in node_ids
    ]
    first = [clock.tell.remote() for clock in clocks]
    ready, _ = ray.wait(first, num_returns=len(first), timeout=NODE_TIMEOUT_S)
    told: list[tuple[float | None, str | None]] = []
    for clock, answer in zip(clocks, first, strict=True):
        if answer not in ready:
            told.append((None, None))
            continue
        asked = time.time()
        there, version = ray.get(clock.tell.remote(), timeout=NODE_TIMEOUT_S)
        told.append((there - (asked + time.time()) / 2, version))
    return told


if __name__ == "__main__":
    main(sys.argv[1])
