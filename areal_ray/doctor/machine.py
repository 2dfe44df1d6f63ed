"""The machine: devices, memory, disk, limits, ports."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from areal_ray.doctor.finding import Finding, ok, problem, warning
from areal_ray.doctor.software import Gpu
from areal_ray.weights.memory import readable_bytes

GIB = 2**30
OBJECT_STORE_PART = 0.3
"""Of memory: what Ray takes for its object store, as shared memory."""
LOW_DISK, LITTLE_DISK = 2 * GIB, 20 * GIB
FULL_DISK = 0.95
"""Beyond this, Ray spills no more objects."""
ENOUGH_FILES = 8192
LEAST_CORES, LEAST_MEMORY = 2, 6 * GIB
"""What the demo needs."""
PORTS = {8265: "Ray's dashboard", 52365: "Ray's dashboard agent"}
AGENT_PORT = 52365


def gpus_here(devices: Path = Path("/dev")) -> int:
    """As the machine counts them, without a driver's library."""
    with contextlib.suppress(OSError):
        return sum(
            re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in devices.iterdir()
        )
    return 0


def devices(gpus: Sequence[Gpu]) -> list[Finding]:
    if not gpus:
        return [ok("devices", "no GPU: engines and trainer run on the CPU")]
    by_kind: dict[str, int] = {}
    for gpu in gpus:
        kind = f"{gpu.name} ({readable_bytes(gpu.memory_bytes)})"
        by_kind[kind] = by_kind.get(kind, 0) + 1
    found = ", ".join(f"{count} × {kind}" for kind, count in by_kind.items())
    if len(by_kind) > 1:
        mend = "ranks and engines wait for the slowest: set CUDA_VISIBLE_DEVICES to GPUs alike"
        return [warning("devices", found, mend)]
    return [ok("devices", found)]


def nccl(version: str | None, gpus: int) -> list[Finding]:
    if not gpus:
        return []
    if version is None:
        mend = "install a torch built with NCCL: pip install torch --force-reinstall"
        return [problem("NCCL", "torch has none: weights can't go between GPUs", mend)]
    return [ok("NCCL", version)]


def cores_and_memory(cores: int, memory: int) -> list[Finding]:
    found = f"{cores} cores, {readable_bytes(memory)}"
    if cores < LEAST_CORES or memory < LEAST_MEMORY:
        mend = "expect slow starts and little room: the demo wants 2 cores and 6 GiB"
        return [warning("cores and memory", found, mend)]
    return [ok("cores and memory", found)]


def shared_memory(shm: int, memory: int) -> list[Finding]:
    """Ray puts its object store there, and falls back to files in its temporary directory."""
    wanted = int(memory * OBJECT_STORE_PART)
    found = f"/dev/shm has {readable_bytes(shm)}, Ray's object store wants {readable_bytes(wanted)}"
    if shm >= wanted:
        return [ok("shared memory", found)]
    size = f"{-(-wanted // GIB)}g"
    mend = (
        f"in Docker: --shm-size={size}; else: mount -o remount,size={size} /dev/shm; or start Ray "
        "with a smaller --object-store-memory"
    )
    return [warning("shared memory", f"{found}: it would use files, slowly", mend)]


def disk(what: str, path: Path, free: int, total: int) -> list[Finding]:
    found = f"{readable_bytes(free)} free of {readable_bytes(total)} at {path}"
    mend = "free some, or choose another place"
    if free < LOW_DISK:
        return [problem(what, found, mend)]
    if free / total < 1 - FULL_DISK:
        return [warning(what, f"{found}: beyond 95 % Ray spills no objects", mend)]
    if free < LITTLE_DISK:
        return [warning(what, f"{found}: checkpoints may not fit", mend)]
    return [ok(what, found)]


def file_descriptors(soft: int, hard: int) -> list[Finding]:
    """Each actor costs Ray several connections."""
    if soft == -1 or soft >= ENOUGH_FILES:
        return [ok("open files", f"{'no limit' if soft == -1 else soft}")]
    mend = f"ulimit -n {65536 if hard == -1 else min(hard, 65536)}, before Ray is started"
    if 0 < hard < ENOUGH_FILES:
        mend = "raise the hard limit in /etc/security/limits.conf (nofile 65536)"
    return [warning("open files", f"at most {soft}, expected {ENOUGH_FILES} or more", mend)]


def port(number: int, owner: str | None) -> list[Finding]:
    """`owner`: the process that listens there. None: nobody."""
    what = f"port {number}"
    if owner is None:
        return [ok(what, f"free, for {PORTS[number]}")]
    if "ray" in owner.lower():
        found = f"a running Ray has it ({owner})"
        if number == AGENT_PORT:
            found += "; a second `ray start` here needs --dashboard-agent-listen-port=0"
        return [ok(what, found)]
    option = "--dashboard-agent-listen-port" if number == AGENT_PORT else "--dashboard-port"
    mend = f"end it, or start Ray with another {option}"
    return [warning(what, f"taken by {owner}; {PORTS[number]} wants it", mend)]


def writable(directory: Path) -> list[Finding]:
    """Where the runs are to be written: it may have to be made first."""
    there = existing(directory)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".areal_ray_doctor_"):
            pass
    except OSError as error:
        mend = "chown it, or set `runs_dir` to a directory of your own"
        return [problem("runs_dir", f"{there} can't be written to: {error.strerror}", mend)]
    if there == directory.absolute():
        return [ok("runs_dir", f"{directory} can be written to")]
    return [ok("runs_dir", f"{directory} can be made")]


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def listener(number: int) -> str | None:
    """Who listens on this port of ours, if anybody does."""
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == number:
                return _name(connection.pid)
    return None


def _name(process: int | None) -> str:
    if process is None:
        return "a process of somebody else"
    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return f"process {process}"
    name = " ".join(os.path.basename(word) for word in words[:1]) or "?"
    is_ray = any("ray" in word for word in words)
    return f"{'ray, ' if is_ray and 'ray' not in name else ''}{name}, process {process}"


def disk_at(what: str, path: Path) -> list[Finding]:
    there = existing(path)
    usage = shutil.disk_usage(there)
    return disk(what, there, usage.free, usage.total)
