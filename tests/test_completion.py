from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from areal_ray.cli.completion import SHELLS, commands_of, values_by_key
from areal_ray.cli.completion_scripts import SCRIPTS
from areal_ray.cli.main import make_parser
from areal_ray.config_file import from_mapping

CASES = [
    ("areal-ray pl", ["plan"]),
    ("areal-ray train con", ["config.yaml", "configs/"]),
    ("areal-ray train configs/", ["configs/mine.yml"]),
    ("areal-ray train config.yaml tr", ["trainer."]),
    ("areal-ray train config.yaml trainer.lo", ["trainer.lora."]),
    ("areal-ray train config.yaml trainer.lr_", [
        "trainer.lr_floor=", "trainer.lr_schedule=", "trainer.lr_warmup_steps=",
    ]),
    ("areal-ray train config.yaml --resume trainer.lora.r", ["trainer.lora.rank="]),
    ("areal-ray train config.yaml trainer.lr_schedule=co", ["constant", "cosine"]),
    ("areal-ray train config.yaml data.shuffle=", ["false", "true"]),
    ("areal-ray plan config.yaml --gpus 8 algorithm.loss=ge", ["geo_mean"]),
    ("areal-ray train config.yaml --resume-from con", ["configs/"]),
    ("areal-ray plan config.yaml --gpus ", []),
    ("areal-ray train config.yaml --res", ["--resume", "--resume-from"]),
    ("areal-ray completion ", ["bash", "fish", "zsh"]),
]  # fmt: skip

BASH = """source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
COMP_WORDBREAKS=$' \\t\\n"><=;|&(:'
_areal_ray
printf '%s\\n' "${COMPREPLY[@]}"
"""
# In zsh only its line editor completes: so there is one, at a terminal of its own, and a command
# that tells what it was called with.
ZSH = """
zmodload zsh/zpty
zpty editor zsh -f -i
zpty -w editor "autoload -U compinit; compinit -u -D; source $1"
zpty -w editor 'areal-ray() { print -r -- "called:$*:" }'
shift
for line expected in "$@"; do
    zpty -w editor "$line"$'\\t'
    zpty -r editor said "*called:${(b)expected}:*"
done
print all of them
"""
FISH = 'source $argv[1]; complete -C $argv[2] | string replace -r "\\t.*" ""'


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    commands, values = commands_of(make_parser()), values_by_key()
    directory = tmp_path_factory.mktemp("scripts")
    paths = {shell: directory / shell for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(SCRIPTS[shell](commands, values))
    return paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "conftest.py").touch()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yml").touch()
    (tmp_path / "configs" / "notes.txt").touch()
    return tmp_path


def offered(shell: str, program: str, script: Path, words: list[str], folder: Path) -> list[str]:
    """What the program says in that shell, given the script and some words."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    clean = {
        "bash": ["--norc", "-c", program, "bash"],
        "zsh": ["-f", "-c", program, "zsh"],
        "fish": ["--no-config", "-c", program],
    }
    done = subprocess.run(
        [shell, *clean[shell], str(script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    return sorted({word.strip() for word in done.stdout.splitlines() if word.strip()})


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes(
    scripts: dict[str, Path], folder: Path, line: str, expected: list[str]
) -> None:
    assert offered("bash", BASH, scripts["bash"], [line], folder) == expected


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_completes(
    scripts: dict[str, Path], folder: Path, line: str, expected: list[str]
) -> None:
    # fish completes the whole word.
    key, equals, _ = line.rpartition(" ")[2].partition("=")
    whole = [f"{key}={word}" if equals else word for word in expected]
    assert offered("fish", FISH, scripts["fish"], [line], folder) == whole


def test_zsh_completes(scripts: dict[str, Path], folder: Path) -> None:
    """Each of these has one way to go on, which then stands in the line."""
    lines = {
        "areal-ray pl": "plan",
        "areal-ray train configs/m": "train configs/mine.yml",
        "areal-ray train a.yaml trainer.lo": "train a.yaml trainer.lora.",
        "areal-ray train a.yaml trainer.lr_s": "train a.yaml trainer.lr_schedule=",
        "areal-ray train a.yaml trainer.lr_schedule=cos": "train a.yaml trainer.lr_schedule=cosine",
        "areal-ray train a.yaml --resume-from con": "train a.yaml --resume-from configs",
        "areal-ray completion f": "completion fish",
    }
    words = [word for pair in lines.items() for word in pair]
    assert offered("zsh", ZSH, scripts["zsh"], words, folder) == ["all of them"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_takes_its_script(scripts: dict[str, Path], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", scripts[shell]], check=True, timeout=20)


def test_every_key_that_is_offered_is_one_and_every_value_is_taken() -> None:
    values = values_by_key()
    assert "trainer.lora.rank" in values
    assert values["algorithm.advantage"][0] == "grpo"
    for key, known in values.items():
        for value in known:
            raw: dict = {"name": "completed"}
            *sections, leaf = key.split(".")
            inner = raw
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[leaf] = {"true": True, "false": False}.get(value, value)
            from_mapping(raw)  # which refuses an unknown key and a wrong value


def test_every_command_and_option_is_known_to_every_script(scripts: dict[str, Path]) -> None:
    for command in commands_of(make_parser()):
        for shell, path in scripts.items():
            text = path.read_text()
            assert command.name in text
            for option in command.options:
                for flag in option.flags:
                    spelled = flag.lstrip("-") if shell == "fish" else flag
                    assert spelled in text, (shell, command.name, flag)
