from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from areal_ray.doctor import cluster, machine, software
from areal_ray.doctor.finding import Check, Finding, examine, ok
from areal_ray.doctor.software import Gpu, TorchFacts
from areal_ray.errors import ArealRayError
from areal_ray.placement.cluster_facts import ClusterFacts, ClusterUnreachable, NodeFacts, ask

GIB = 2**30
CPU_TORCH = TorchFacts(cuda=None, gpus=[], nccl=None)
H100 = Gpu("H100", 80 * GIB)


def the_one(findings: list[Finding], level: str, *, found: str = "", mend: str = "") -> None:
    (finding,) = findings
    assert finding.level == level, finding
    assert found in finding.found
    assert mend in finding.mend
    assert bool(finding.mend) == (level != "ok"), "just what is not ok says how"


def nothing_installed(package: str) -> str | None:
    return None


def test_a_python_that_is_too_old_is_a_problem() -> None:
    the_one(software.python_version("3.11.7", ">=3.11"), "ok")
    the_one(software.python_version("3.10.1", ">=3.11"), "problem", found="expected >=3.11")


def test_packages_are_compared_with_what_is_asked_for() -> None:
    wanted = ["ray[default]>=2.60", "numpy>=2.0", 'vllm>=0.32; extra == "gpu"']
    versions = {"ray": "2.61.0", "numpy": "1.26", "vllm": None}
    findings = software.packages(wanted, has_gpus=True, installed=versions.get)
    assert [(one.what, one.level) for one in findings] == [
        ("ray", "ok"),
        ("numpy", "problem"),
        ("vllm", "problem"),
    ]
    assert findings[1].found == "1.26, expected >=2.0"
    assert findings[2].mend == 'pip install "areal_ray[gpu]"'
    without_gpus = software.packages(wanted, has_gpus=False, installed=versions.get)
    assert [one.what for one in without_gpus] == ["ray", "numpy"]


@pytest.mark.parametrize(
    ("torch", "gpus_here", "level", "found"),
    [
        (CPU_TORCH, 0, "ok", "the CPU build"),
        (CPU_TORCH, 8, "problem", "on a machine with 8 GPUs"),
        (TorchFacts("12.8", [], None), 0, "warning", "without a GPU"),
        (TorchFacts("12.8", [H100], "2.27"), 2, "problem", "it can use 1 of 2 GPUs"),
        (TorchFacts("12.8", [H100], "2.27"), 1, "ok", "built for CUDA 12.8"),
    ],
)
def test_torchs_build_must_be_that_of_the_device(
    torch: TorchFacts, gpus_here: int, level: str, found: str
) -> None:
    the_one(software.torch_build(torch, gpus_here=gpus_here), level, found=found)


def test_packages_made_for_cuda_torch_break_the_cpu_build() -> None:
    the_one(software.cuda_made_packages(CPU_TORCH, nothing_installed), "ok")
    beside = {"torchvision": "0.28.0", "triton": "3.7.0", "torchaudio": "2.13.0+cpu"}
    the_one(
        software.cuda_made_packages(CPU_TORCH, beside.get),
        "problem",
        mend="pip uninstall torchvision triton",
    )
    assert software.cuda_made_packages(TorchFacts("12.8", [H100], "2"), beside.get) == []


def test_vllms_build_must_be_that_of_the_device() -> None:
    the_one(software.vllm_build("cpu", gpus_here=0), "ok")
    the_one(software.vllm_build("cpu", gpus_here=1), "problem", mend="areal_ray[gpu]")
    the_one(software.vllm_build("", gpus_here=0), "problem", found="for no device")


def test_gpus_are_counted_without_a_driver(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert machine.gpus_here(tmp_path) == 2
    assert machine.gpus_here(tmp_path / "nowhere") == 0


def test_devices_are_told_with_their_memory() -> None:
    the_one(machine.devices([]), "ok", found="no GPU")
    the_one(machine.devices([H100, H100]), "ok", found="2 × H100 (80 GiB)")
    the_one(machine.devices([H100, Gpu("L4", 24 * GIB)]), "warning", mend="CUDA_VISIBLE_DEVICES")


def test_gpus_need_nccl() -> None:
    assert machine.nccl(None, 0) == []
    the_one(machine.nccl(None, 2), "problem")
    the_one(machine.nccl("2.27.5", 2), "ok", found="2.27.5")


def test_shared_memory_must_hold_rays_object_store() -> None:
    the_one(machine.shared_memory(8 * GIB, 16 * GIB), "ok")
    # Docker gives 64 MiB; 30 % of 100 GiB are 30.
    the_one(machine.shared_memory(GIB // 16, 100 * GIB), "warning", mend="--shm-size=30g")


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [(1, 500, "problem"), (19, 500, "warning"), (21, 500, "warning"), (26, 500, "ok")],
)
def test_a_disk_must_have_room(free: int, total: int, level: str) -> None:
    the_one(machine.disk("disk", Path("/runs"), free * GIB, total * GIB), level)


def test_open_files_and_cores_are_compared_with_what_is_needed() -> None:
    the_one(machine.file_descriptors(65536, 65536), "ok")
    the_one(machine.file_descriptors(-1, -1), "ok")
    the_one(machine.file_descriptors(1024, 1048576), "warning", mend="ulimit -n 65536")
    the_one(machine.file_descriptors(1024, 4096), "warning", mend="limits.conf")
    the_one(machine.cores_and_memory(8, 64 * GIB), "ok")
    the_one(machine.cores_and_memory(1, 64 * GIB), "warning")


def test_who_has_a_port_is_told() -> None:
    the_one(machine.port(8265, None), "ok")
    the_one(machine.port(8265, "ray, python, process 7"), "ok")
    the_one(machine.port(8265, "nginx, process 7"), "warning", mend="--dashboard-port")
    the_one(machine.port(52365, "ray, python, process 7"), "ok", found="a second `ray start`")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"process {os.getpid()}" in machine.listener(server.getsockname()[1])


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    the_one(machine.writable(tmp_path), "ok", found="can be written to")
    the_one(machine.writable(tmp_path / "a" / "b"), "ok", found="can be made")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    the_one(machine.writable(tmp_path / "file"), "problem", mend="runs_dir")


def node(address: str, offset: float | None = 0.0, version: str | None = "1.0") -> NodeFacts:
    return NodeFacts(address, 8, 2, GIB, offset, version)


def facts(*nodes: NodeFacts) -> ClusterFacts:
    return ClusterFacts("10.0.0.1:6379", "/tmp/ray/session", "", list(nodes))


def test_a_clusters_nodes_are_told() -> None:
    two = facts(node("10.0.0.1"), node("10.0.0.2"))
    the_one(cluster.nodes(two), "ok", found="2 nodes, 16 CPUs, 4 GPUs (8 and 2 each)")
    the_one(cluster.nodes(facts()), "problem")


def test_clocks_must_be_within_a_second() -> None:
    the_one(cluster.clocks(facts(node("a", -0.3), node("b", 0.6))), "ok", found="900 ms")
    apart = facts(node("a", -0.3), node("b", 0.8))
    the_one(cluster.clocks(apart), "warning", found="b is 1.1 s before a", mend="NTP")
    the_one(cluster.clocks(facts(node("a"), node("b", None))), "warning", found="answer from b")


def test_areal_ray_must_be_the_same_on_all_nodes() -> None:
    the_one(cluster.installed_there(facts(node("a")), "1.0"), "ok")
    others = facts(node("a"), node("b", version=None), node("c", version="0.9"))
    the_one(cluster.installed_there(others, "1.0"), "problem", found="b: none, c: 0.9; here: 1.0")


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        ("Version mismatch: the cluster has Ray 2.50", "the Ray of the cluster"),
        ("AuthenticationError: Token is wrong", "token"),
        ("ConnectionError: refused", "firewall"),
    ],
)
def test_why_a_cluster_cannot_be_joined_decides_how_to_mend_it(error: str, mend: str) -> None:
    the_one(cluster.unreachable("a:1", ClusterUnreachable(error)), "problem", mend=mend)


def test_a_token_must_be_there_and_private(tmp_path: Path) -> None:
    def look(joins: bool = True, **environment: str) -> list[Finding]:
        return cluster.token(environment, tmp_path, joins=joins)

    the_one(look(), "warning", found="none at")
    the_one(look(joins=False), "ok", found="Ray makes one")
    the_one(look(RAY_AUTH_MODE="disabled"), "warning", mend="unset RAY_AUTH_MODE")
    the_one(look(RAY_AUTH_TOKEN="x"), "ok")
    the_one(look(RAY_AUTH_TOKEN_PATH=str(tmp_path / "gone")), "problem")
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch(mode=0o600)
    the_one(look(), "ok")


def test_a_token_that_others_can_read_is_told() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        home = Path(directory)
        home.chmod(0o755)
        token = home / ".ray" / "auth_token"
        token.parent.mkdir()
        token.touch()
        token.chmod(0o644)
        the_one(cluster.token({}, home, joins=True), "warning", mend="chmod 600")
        home.chmod(stat.S_IRWXU)  # nobody gets as far as the file
        the_one(cluster.token({}, home, joins=True), "ok")


def test_a_check_that_raises_or_hangs_holds_up_no_other() -> None:
    released = threading.Event()

    def hang() -> list[Finding]:
        released.wait(30)
        return []

    def break_down() -> list[Finding]:
        raise OSError("no such device")

    checks = [
        Check("hangs", hang),
        Check("breaks", break_down),
        Check("works", lambda: [ok("works", "it does")]),
    ]
    hung, broken, fine = examine(checks, timeout_s=0.2)
    released.set()
    assert (hung.what, hung.level) == ("hangs", "problem")
    assert "no answer within 0.2 s" in hung.found
    assert (broken.level, "no such device" in broken.found) == ("warning", True)
    assert fine == ok("works", "it does")


def test_what_does_not_import_is_told_by_its_last_line() -> None:
    with pytest.raises(software.Broken, match="ModuleNotFoundError: No module named 'nowhere'"):
        software._last_line([sys.executable, "-c", "import nowhere"], 20)
    with pytest.raises(software.Broken, match="no answer within"):
        software._last_line([sys.executable, "-c", "input()"], 0.01)


def test_asking_a_cluster_that_is_not_there_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ArealRayError, match=address):
            ask(address, timeout_s=0.5)


def test_where_nobody_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterUnreachable, match=f"nobody listens at 127.0.0.1:{port}"):
        ask(f"127.0.0.1:{port}")


def test_asking_tells_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], 1, b"", b"a warning\nVersion mismatch: Ray 2.50\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ClusterUnreachable, match="^Version mismatch: Ray 2.50$"):
        ask("auto")
