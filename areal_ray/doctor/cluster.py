"""A running cluster: whether it can be joined, its nodes and their clocks, its token."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from areal_ray.doctor.finding import Finding, ok, problem, warning

if TYPE_CHECKING:
    from areal_ray.placement.cluster_facts import ClusterFacts

CLOSE_CLOCKS_S = 1.0
TOKEN_FILE = Path(".ray", "auth_token")
"""In the home directory: where Ray looks, if nothing else is said."""


def unreachable(address: str, error: Exception) -> list[Finding]:
    told = str(error)
    if "ersion mismatch" in told:
        mend = "use the Python and the Ray of the cluster here, or start it with ours"
    elif "uthenticat" in told or "oken" in told:
        mend = "copy the cluster's token to ~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH"
    else:
        mend = "look whether it runs (`ray status` there), and whether a firewall is between"
    return [problem("cluster", f"{address}: {told}", mend)]


def reachable(facts: ClusterFacts) -> list[Finding]:
    """To have joined it means that Ray and Python are the same there."""
    return [ok("cluster", f"{facts.address} answers, with our versions of Ray and Python")]


def nodes(facts: ClusterFacts) -> list[Finding]:
    cpus = sum(node.cpus for node in facts.nodes)
    gpus = sum(node.gpus for node in facts.nodes)
    found = f"{len(facts.nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs"
    each = {(node.cpus, node.gpus) for node in facts.nodes}
    if len(each) == 1 and len(facts.nodes) > 1:
        found += f" ({facts.nodes[0].cpus:g} and {facts.nodes[0].gpus:g} each)"
    if not cpus:
        return [problem("nodes", found, "start a node with CPUs: ray start --address=...")]
    return [ok("nodes", found)]


def installed_there(facts: ClusterFacts, ours: str) -> list[Finding]:
    asked = [node for node in facts.nodes if node.clock_offset_s is not None]
    others = [node for node in asked if node.areal_ray_version != ours]
    if not others:
        return [ok("areal_ray on nodes", f"{ours} on all")]
    found = ", ".join(f"{node.address}: {node.areal_ray_version or 'none'}" for node in others)
    mend = f'pip install "areal_ray=={ours}" there, or send it along with the job\'s runtime_env'
    return [problem("areal_ray on nodes", f"{found}; here: {ours}", mend)]


def clocks(facts: ClusterFacts) -> list[Finding]:
    """Timelines and traces put what nodes tell side by side."""
    silent = [node.address for node in facts.nodes if node.clock_offset_s is None]
    if silent:
        mend = "look at the node: it starts no process within seconds"
        return [warning("clocks", f"no answer from {', '.join(silent)}", mend)]
    offsets = {node.address: node.clock_offset_s for node in facts.nodes}
    if not offsets:
        return []
    early, late = min(offsets, key=offsets.get), max(offsets, key=offsets.get)
    apart = offsets[late] - offsets[early]
    if apart <= CLOSE_CLOCKS_S:
        return [ok("clocks", f"within {apart * 1000:.0f} ms of each other")]
    found = f"{late} is {apart:.1f} s before {early}: timelines would not fit together"
    return [warning("clocks", found, "let NTP set them: timedatectl set-ntp true, or chrony")]


def token(environment: Mapping[str, str], home: Path, *, joins: bool) -> list[Finding]:
    """Whether Ray's token authentication is on, and has a token. Nobody reads it here.

    `joins`: a cluster is to be joined, not started.
    """
    if environment.get("RAY_AUTH_MODE", "token").lower() == "disabled":
        mend = "unset RAY_AUTH_MODE, unless the network lets nobody else in"
        found = "RAY_AUTH_MODE is disabled: whoever reaches a cluster can run code there"
        return [warning("token", found, mend)]
    if environment.get("RAY_AUTH_TOKEN"):
        return [ok("token", "in RAY_AUTH_TOKEN")]
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / TOKEN_FILE)
    if not path.is_file():
        if "RAY_AUTH_TOKEN_PATH" in environment:
            mend = "set it to the file with the cluster's token"
            return [problem("token", f"RAY_AUTH_TOKEN_PATH is {path}: no such file", mend)]
        if joins:
            mend = f"copy the cluster's token to {path}, or `ray get-auth-token --generate`"
            return [warning("token", f"none at {path}", mend)]
        return [ok("token", "none yet: Ray makes one when it starts a cluster")]
    if _others_can_read(path):
        found = f"{path} can be read by others, who could run code on the cluster"
        return [warning("token", found, f"chmod 600 {path}")]
    return [ok("token", f"at {path}")]


def _others_can_read(path: Path) -> bool:
    """By its own mode, and those of the directories on the way to it."""
    if not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return False
    on_the_way = path.absolute().parents
    return all(parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH) for parent in on_the_way)
