from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_ray.checkpoints import CheckpointStore, Draws
from areal_ray.cli import main
from areal_ray.cli.completion import commands_of
from areal_ray.cli.main import make_parser
from areal_ray.config import LoraConfig


def config(tmp_path: Path, **sections: str) -> str:
    lines = {
        "name": "test",
        "model": "{factory: mine.py:model}",
        "data": "{train: mine.py:prompts}",
        "reward": "{function: mine.py:reward}",
    } | sections
    (tmp_path / "mine.py").write_text(
        "from areal_ray import Prompt\n"
        "def model(directory): pass\n"
        "def prompts(): return [Prompt(text='a')]\n"
        "def nothing(): return []\n"
        "def reward(prompt, completion): return 1.0\n"
        "def one_argument(prompt): return 1.0\n"
        "def plain_workflow(prompt, context): return []\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return str(path)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"steps": "0"}, "steps: expected an integer >= 1, got 0"),
        ({"data": "{}"}, "data.train: missing; expected a .jsonl file or file.py:function"),
        ({"data": "{train: mine.py:nothing}"}, "mine.py:nothing: holds no prompts"),
        ({"data": "{train: mine.py:nobody}"}, "mine.py has no `nobody`"),
        ({"reward": "{}"}, "reward.function: missing; expected file.py:function"),
        (
            {"reward": "{function: mine.py:one_argument}"},
            "reward.function: one_argument must take a prompt and a completion: "
            "too many positional arguments",
        ),
        (
            {"rollout": "{workflow: two_turn}"},
            "rollout.workflow: expected one of single_turn, or file.py:function, got two_turn",
        ),
        (
            {"rollout": "{workflow: mine.py:plain_workflow}"},
            "must be an async function",
        ),
        (
            {"algorithm": "{loss: ppp}"},
            'got "ppp"; did you mean `ppo`?',
        ),
        ({"warmup": "{steps: 3}"}, "warmup.data: item 0 has no answer to teach: a"),
        ({"model": "{path: /}"}, "model.path: / holds no config.json"),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, str], message: str
) -> None:
    arguments = ["train", config(tmp_path, **sections), f"runs_dir={tmp_path / 'runs'}"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("areal-ray: ")
    assert message in said
    assert not (tmp_path / "runs").exists()


def test_a_config_made_in_python_is_checked_as_strictly() -> None:
    from areal_ray import Config, train
    from areal_ray.config import ModelConfig, TrainerConfig
    from areal_ray.errors import ConfigError

    config = Config(
        name="../elsewhere", model=ModelConfig(path="m"), trainer=TrainerConfig(lr="fast")
    )
    with pytest.raises(ConfigError) as refused:
        train(config, prompts=[], reward=lambda prompt, completion: 0.0)
    assert "name: expected text that matches" in str(refused.value)
    assert 'trainer.lr: expected a number > 0, got the text "fast"' in str(refused.value)


def test_help_needs_neither_torch_nor_ray() -> None:
    script = (
        "import sys\nfrom areal_ray.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_there_must_be_something_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", config(tmp_path), "--resume", f"runs_dir={tmp_path / 'runs'}"]
    assert main(arguments) == 2
    assert "beside it, holds a whole checkpoint" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    arguments = ["train", config(tmp_path), "--resume-from", str(tmp_path / "empty")]
    assert main(arguments) == 2
    assert "empty is no checkpoint: it has no manifest.json" in capsys.readouterr().err


def test_an_option_that_does_not_exist_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["train", config(tmp_path), "--resume", "steps=3", "--restart"])
    assert refused.value.code == 2


def test_a_checkpoint_of_other_batches_or_another_seed_is_not_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.begin(5)
    directory = store.commit(5, 5, Draws(groups_per_step=4, seed=1, shuffle=True)).directory
    assert main(["train", config(tmp_path), "--resume-from", str(directory)]) == 2
    assert (
        "is of a run with trainer.groups_per_step 4, seed 1 and data.shuffle true; expected the "
        "same, got trainer.groups_per_step 32, seed 0 and data.shuffle true"
    ) in capsys.readouterr().err


def test_a_checkpoint_of_other_adapters_is_not_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.begin(5)
    draws = Draws(groups_per_step=32, seed=0, shuffle=True, lora=LoraConfig(rank=4))
    directory = store.commit(5, 5, draws).directory
    changed = ["trainer.lora.rank=4", "trainer.lora.alpha=8"]
    assert main(["train", config(tmp_path), *changed, "--resume-from", str(directory)]) == 2
    assert (
        'data.shuffle true, with trainer.lora {"rank":4,"alpha":32.0,"targets":"all-linear"}; '
        "expected the same, got trainer.groups_per_step 32, seed 0 and data.shuffle true, with "
        'trainer.lora {"rank":4,"alpha":8.0,"targets":"all-linear"}'
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"steps": "0"}, "steps: expected an integer >= 1, got 0"),
        ({"data": "{train: mine.py:nothing}"}, "mine.py:nothing: holds no prompts"),
        ({"trainer": "{ranks: 2}", "generation": "{colocated: true}"}, "generation.colocated"),
        ({"model": "{path: /}"}, "model.path: / holds no config.json"),
    ],
)
def test_plan_refuses_what_train_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, str], message: str
) -> None:
    assert main(["plan", config(tmp_path, **sections)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_for_programs_holds_what_a_person_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", config(tmp_path), "trainer.ranks=2", "--gpus", "4", "--nodes", "2"]
    assert main([*arguments, "--json", "generation.engines=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["name"] == "test"
    assert plan["placement"]["gpus"] == 4
    assert [node["gpus_used"] for node in plan["placement"]["nodes"]] == [2, 2]
    shown = main(arguments)
    told = capsys.readouterr().out
    assert shown == 0
    for chapter in plan["chapters"]:
        assert chapter["title"] in told


def test_a_plan_that_does_not_fit_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", config(tmp_path, device="cuda"), "generation.tensor_parallel=2"]
    assert main([*arguments, "--nodes", "3", "--gpus-per-node", "1"]) == 1
    told = capsys.readouterr().out
    assert "3 GPUs and 2 CPUs in all: it does not fit" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "3", "--nodes", "2"], "--gpus: 3 can't be shared out evenly on 2 nodes"),
        (["--gpus", "3", "--nodes", "1", "--gpus-per-node", "2"], "1 nodes × 2 GPUs = 2, got 3"),
        (["--nodes", "0"], "--nodes: expected a number >= 1, got 0"),
    ],
)
def test_nodes_that_can_not_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["plan", config(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_every_command_tells_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(make_parser()):
        with pytest.raises(SystemExit) as ended:
            main([command.name, "--help"])
        assert ended.value.code == 0
        told = capsys.readouterr().out
        assert f"  areal-ray {command.name}" in told, "an example"
        assert "exit codes:" in told
        assert max(map(len, told.splitlines())) <= 100


def test_what_only_some_commands_take_is_refused_by_the_others() -> None:
    with pytest.raises(SystemExit) as refused:
        main(["doctor", "steps=3"])
    assert refused.value.code == 2


def test_doctors_exit_code_tells_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from areal_ray.cli import doctor
    from areal_ray.doctor.finding import Check, ok, problem, warning

    found = [ok("Python", "3.11"), warning("disk", "little", "free some")]
    monkeypatch.setattr(doctor, "_checks", lambda *_: [Check("all", lambda: found)])
    assert main(["doctor"]) == 0
    assert "→ free some" in capsys.readouterr().out
    found.append(problem("torch", "broken", "install it anew"))
    assert main(["doctor"]) == 1
    assert "1 problem, 1 warning" in capsys.readouterr().out
