"""The cluster a run uses: the one that is there, or a local one of its own.

Inside a submitted job, or with RAY_ADDRESS set, that cluster is joined and left as it was. Else
a local one is started, which listens on loopback only, keeps Ray's token authentication, and is
shut down again. In a notebook where `ray.init` was called already, that one is used.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._raylet import AuthenticationTokenLoader
from ray._raylet import Config as ray_config  # noqa: N813
from ray.job_config import JobConfig

from areal_ray import logs
from areal_ray.config import Config
from areal_ray.errors import PlacementError
from areal_ray.placement.job import RUN_KEY, label_job
from areal_ray.placement.plan import PlacementPlan, plan

LOOPBACK = "127.0.0.1"
LEAVE_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Cluster:
    started_here: bool
    device: Literal["cpu", "cuda"]
    dashboard_url: str

    def leave(self) -> None:
        """Shut down just what was started. Blocks, for a limited time: call it off the event loop.

        Ray joins threads of its own without a limit. The run is over by then: it must not hang for
        one that does not end. What Ray has started ends with this process, if not before.
        """
        if not self.started_here:
            return
        leaving = threading.Thread(target=ray.shutdown, name="leaving the cluster", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)
        if leaving.is_alive():
            logs.warning("Ray did not shut down within {:g} s: left to itself", LEAVE_TIMEOUT_S)
            atexit.unregister(ray.shutdown)  # which would wait for the same


def connect(config: Config) -> Cluster:
    """Join or start a cluster that can hold the run. Blocks: call it off the event loop."""
    started_here = False
    if not ray.is_initialized():
        started_here = _init(config)
    try:
        device = device_of(config)
        _refuse_if_too_small(plan(config, device=device))
    except PlacementError:
        if started_here:
            ray.shutdown()
        raise
    return Cluster(started_here=started_here, device=device, dashboard_url=_dashboard_url())


def join(address: str = "auto", *, metadata: dict[str, str] | None = None) -> None:
    """Join a running cluster: one at `address`, or the one at RAY_ADDRESS or else on this machine.
    `metadata`: of this process as a job there.

    Blocks, and raises what Ray does: a `ConnectionError`, or a `RuntimeError` if versions differ.
    """
    if address == "auto":
        address = services.get_ray_address_from_environment("auto", None)
    _send_token_if_there_is_one()
    # Or Ray looks for a cluster that listens on loopback at the host's outer address.
    is_local = address.rpartition(":")[0] in (LOOPBACK, "localhost")
    with _laptop_mode() if is_local else nullcontext():
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            job_config=JobConfig(metadata=metadata),
        )


def _send_token_if_there_is_one() -> None:
    """Ray itself does so for a cluster that it found, but not for one at an address: and one that
    was started on this machine asks for the token that it left here."""
    has_token = AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    if has_token and os.environ.get(AUTH_MODE_ENV_VAR) is None:
        os.environ[AUTH_MODE_ENV_VAR] = "token"
        ray_config.initialize("")


def _init(config: Config) -> bool:
    if os.environ.get("RAY_ADDRESS"):
        try:
            join(metadata={RUN_KEY: config.name})
            label_job(config.name)
        except ConnectionError as error:
            raise PlacementError(
                f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']}, but no cluster answers there: {error}"
            ) from error
        return False
    cores = os.cpu_count() or 1
    needed = plan(config, device="cpu").cpus if config.device != "cuda" else 0
    with _laptop_mode():
        ray.init(
            address="local",
            num_cpus=max(cores, math.ceil(needed)),
            log_to_driver=False,
            logging_level="ERROR",
            dashboard_host=LOOPBACK,
            job_config=JobConfig(metadata={RUN_KEY: config.name}),
        )
    if ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise PlacementError("this Ray can't be kept to the loopback interface; set RAY_ADDRESS")
    return True


@contextmanager
def _laptop_mode() -> Iterator[None]:
    """Make Ray listen on loopback only, as it does by itself on laptops.

    Elsewhere it replaces 127.0.0.1 by the host's outer address, even when asked for it. The
    variable is read when ray is imported, which may be long ago: so its outcome is set as well.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    outer = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if outer is not None:
            os.environ[name] = outer


def device_of(config: Config) -> Literal["cpu", "cuda"]:
    """What the run computes on, in the cluster that this process has joined."""
    if config.device != "auto":
        return config.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def _refuse_if_too_small(needed: PlacementPlan) -> None:
    there = ray.cluster_resources()
    for name, amount in (("CPU", needed.cpus), ("GPU", needed.gpus)):
        if there.get(name, 0) < amount:
            raise PlacementError(
                f"the run needs {amount:g} {name}s (trainer ranks: "
                f"{len(needed.seats('trainer'))}, engines: {len(needed.seats('engine'))}), "
                f"the cluster has {there.get(name, 0):g}"
            )


def _dashboard_url() -> str:
    url = ray._private.worker.get_dashboard_url()
    return f"http://{url}" if url else ""
