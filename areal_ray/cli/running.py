"""The runs that are on their way: which there are, and how to ask one.

A run is named by its directory, whose `live.json` tells where it is, or by its name in the cluster
at RAY_ADDRESS (or on this machine).
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from areal_ray.deadlines import within
from areal_ray.errors import NoRun
from areal_ray.run_address import published

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
WHAT_RUN = (
    "a run's directory (runs/NAME), or its name in the cluster at RAY_ADDRESS; may be left out if "
    "there is only one"
)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=WHAT_RUN)


@contextmanager
def the_monitor_of(run: str | None) -> Iterator[ActorHandle]:
    """The monitor of the run that is meant, in its cluster, which is left again."""
    import ray

    address = None if run is None else published(Path(run))
    if run is not None and address is None and Path(run).is_dir():
        raise NoRun(f"{run}: no run is on its way there (it has no live.json)")
    _join("auto" if address is None else address.ray_address)
    try:
        if address is not None:
            yield _get(address.monitor, address.namespace, run)
        else:
            yield _get(*find_monitor(run), run)
    finally:
        ray.shutdown()


def asked(call: Callable[[], Awaitable[T]], *, timeout_s: float = ANSWER_TIMEOUT_S) -> T:
    """What the monitor answers."""

    async def ask() -> T:
        return await within(timeout_s, call(), who="the run's monitor", doing="answering")

    return asyncio.run(ask())


def _join(address: str) -> None:
    from areal_ray.placement import join

    try:
        _refuse_if_silent(address)
        join(address)
    except (OSError, RuntimeError) as error:
        raise NoRun(f"no Ray cluster answers at {address}: {error}") from error


def _refuse_if_silent(address: str) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _get(name: str, namespace: str, run: str | None) -> ActorHandle:
    import ray

    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        raise NoRun(f"{run or name}: it is not on its way any more") from None


def find_monitor(run: str | None) -> tuple[str, str]:
    """The name and the namespace of its monitor, in the cluster that was joined."""
    import ray

    from areal_ray.actors.crew_members import MONITOR, NAMESPACE

    there = [
        (actor["name"], actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"].startswith(NAMESPACE) and actor["name"].endswith(f"/{MONITOR}")
    ]
    meant = [one for one in there if run in (None, one[0].removesuffix(f"/{MONITOR}"))]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(sorted(name.removesuffix(f"/{MONITOR}") for name, _ in there)) or "none"
    if not meant:
        which = "" if run is None else f"named {run} "
        raise NoRun(f"no run {which}is on its way; there: {names}")
    raise NoRun(f"more than one run is meant: name its directory. There: {names}")
