from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_ray.checkpoints import CheckpointStore, Draws
from areal_ray.cli import main
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
