from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def clean_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv outside the checkout, with the wheel in it.

    The dependencies, gigabytes of them, are borrowed from this environment by a path file;
    path files there, such as the editable install's, are not read through it.
    """
    room = tmp_path_factory.mktemp("packaging")
    # Without --wheel it is built from the source distribution, never from a stale build/.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(room)]
    subprocess.run([*build, str(REPO)], check=True, capture_output=True)
    (wheel,) = room.glob("*.whl")
    venv.create(room / "venv", with_pip=True)
    python = room / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site_packages,) = (room / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return room / "venv"


def run_outside(clean_venv: Path, *command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [clean_venv / "bin" / command[0], *command[1:]],
        cwd=clean_venv,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_wheel_imports_outside_the_checkout(clean_venv: Path) -> None:
    script = (
        "import areal_ray, areal_ray.actors.trainer, areal_ray.placement, areal_ray.run\n"
        "print(areal_ray.__file__, areal_ray.actors.__file__, areal_ray.placement.__file__)"
    )
    for path in run_outside(clean_venv, "python", "-c", script).split():
        assert Path(path).is_relative_to(clean_venv)


def test_the_wheel_brings_the_command(clean_venv: Path) -> None:
    help_text = run_outside(clean_venv, "areal-ray", "--help")
    assert re.search(r"train +train a model as a config says", help_text)
    assert "key=value" in run_outside(clean_venv, "areal-ray", "train", "--help")


def test_the_wheel_takes_no_common_name(clean_venv: Path) -> None:
    (site_packages,) = (clean_venv / "lib").glob("python*/site-packages")
    assert not (site_packages / "actors").exists()
    assert not (site_packages / "placement").exists()


def test_the_wheel_holds_every_package_of_the_checkout(clean_venv: Path) -> None:
    (site_packages,) = (clean_venv / "lib").glob("python*/site-packages")
    installed = site_packages / "areal_ray"
    homes = {"areal_ray": installed, "actors": installed / "actors"}
    homes["placement"] = installed / "placement"
    for room, home in homes.items():
        for path in (REPO / room).rglob("*"):
            if path.suffix in (".py", ".html", ".css", ".js"):
                assert (home / path.relative_to(REPO / room)).is_file(), path
