"""`areal-ray doctor`: checks the machine and the cluster, and says how to mend what is wrong."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from areal_ray import __version__
from areal_ray.cli.command import command

if TYPE_CHECKING:
    from rich.console import Console

    from areal_ray.doctor.finding import Check, Finding

PROBE_TIMEOUT_S = 90.0
"""vLLM alone takes ten seconds and more to import, on a cold disk a minute."""
TIMEOUT_S = PROBE_TIMEOUT_S + 10


def add(commands: argparse._SubParsersAction) -> None:
    doctor = command(
        commands,
        "doctor",
        _run,
        summary="check the machine and the cluster, and say how to mend each",
        description=(
            "Check versions and builds, devices, memory, disk, limits and ports of this machine; "
            "with an address, also the cluster there: whether it can be joined, its nodes, their "
            "clocks. Each finding that is not ok says how to mend it. Takes half a minute, most "
            "of it vLLM's import."
        ),
        examples=["areal-ray doctor", "areal-ray doctor --address 10.0.0.1:6379"],
        exit_codes={
            0: "no problem (there may be warnings)",
            1: "there is a problem",
            2: "refused: a bad command line",
        },
    )
    doctor.add_argument(
        "--address", metavar="ADDR", help="of a cluster to check (default: RAY_ADDRESS, if set)"
    )
    doctor.add_argument(
        "--runs-dir", metavar="DIR", type=Path, default=Path("runs"),
        help="where runs are to be written (default: runs)",
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from areal_ray.doctor.finding import examine

    console = Console(highlight=False)
    address = options.address or os.environ.get("RAY_ADDRESS")
    with console.status("looking …"):
        findings = examine(_checks(address, options.runs_dir), timeout_s=TIMEOUT_S)
    _show(findings, console)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _checks(address: str | None, runs_dir: Path) -> list[Check]:
    import resource

    import psutil

    from areal_ray.doctor import cluster, machine, software
    from areal_ray.doctor.finding import Check, problem

    gpus = machine.gpus_here()
    memory = psutil.virtual_memory().total

    def torch_and_devices() -> Sequence[Finding]:
        try:
            torch = software.ask_torch(PROBE_TIMEOUT_S)
        except software.Broken as error:
            mend = "pip install torch --force-reinstall; on CPUs: make setup"
            return [problem("torch build", f"it does not import: {error}", mend)]
        return [
            *software.torch_build(torch, gpus_here=gpus),
            *software.cuda_made_packages(torch),
            *machine.devices(torch.gpus),
            *machine.nccl(torch.nccl, len(torch.gpus)),
        ]

    def vllm() -> Sequence[Finding]:
        try:
            return software.vllm_build(software.ask_vllm(PROBE_TIMEOUT_S), gpus_here=gpus)
        except software.Broken as error:
            mend = f'pip install --force-reinstall "areal_ray[{"gpu" if gpus else "cpu"}]"'
            return [problem("vLLM build", f"it does not import: {error}", mend)]

    def cluster_there() -> Sequence[Finding]:
        return _cluster(address)

    about = metadata.metadata("areal_ray")
    return [
        Check(
            "Python",
            lambda: software.python_version(platform.python_version(), about["Requires-Python"]),
        ),
        Check(
            "packages",
            lambda: software.packages(metadata.requires("areal_ray") or (), has_gpus=gpus > 0),
        ),
        Check("torch build", torch_and_devices),
        Check("vLLM build", vllm),
        Check("cores and memory", lambda: machine.cores_and_memory(os.cpu_count() or 1, memory)),
        Check(
            "shared memory",
            lambda: machine.shared_memory(psutil.disk_usage("/dev/shm").total, memory),
        ),
        Check("disk for runs", lambda: machine.disk_at("disk for runs", runs_dir)),
        Check("disk for Ray", lambda: machine.disk_at("disk for Ray", _ray_dir())),
        Check("runs_dir", lambda: machine.writable(runs_dir)),
        Check(
            "open files",
            lambda: machine.file_descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        ),
        *(Check(f"port {number}", partial(_port, number)) for number in machine.PORTS),
        Check("token", lambda: cluster.token(os.environ, Path.home(), joins=address is not None)),
        Check("cluster", cluster_there),
    ]


def _port(number: int) -> Sequence[Finding]:
    from areal_ray.doctor import machine

    return machine.port(number, machine.listener(number))


def _ray_dir() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")


def _cluster(address: str | None) -> Sequence[Finding]:
    from areal_ray.doctor import cluster
    from areal_ray.doctor.finding import ok
    from areal_ray.errors import ArealRayError
    from areal_ray.placement.cluster_facts import ask

    if address is None:
        return [ok("cluster", "none given, RAY_ADDRESS is not set: `train` starts a local one")]
    try:
        facts = ask(address)
    except ArealRayError as error:
        return cluster.unreachable(address, error)
    return [
        *cluster.reachable(facts),
        *cluster.nodes(facts),
        *cluster.installed_there(facts, __version__),
        *cluster.clocks(facts),
    ]


def _show(findings: Sequence[Finding], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = marks[finding.level]
        found = Text(finding.found, "" if finding.level != "ok" else "dim")
        if finding.mend:
            found.append(f"\n→ {finding.mend}", style)
        table.add_row(Text(mark, style), finding.what, found)
    console.print(table)
    console.print()
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not problems and not warnings:
        console.print(Text("All is well.", "green"))
        return
    counted = (
        f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    )
    console.print(Text(counted, "bold red" if problems else "yellow"))
