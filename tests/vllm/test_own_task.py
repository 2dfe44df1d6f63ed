"""The README's example of one's own model, data and reward, with a model that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_readme_shows_the_example_as_it_is() -> None:
    source = (REPO / "examples" / "own_task.py").read_text()
    shown = source.partition('"""\n\n')[2].strip()
    assert shown in (REPO / "README.md").read_text()
    assert len(shown.splitlines()) < 20


def test_one_s_own_model_data_and_reward_train(tiny_model: Path, tmp_path: Path) -> None:
    script = (REPO / "examples" / "own_task.py").read_text()
    script = script.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model))
    script = script.replace('name="own-task",', 'name="own-task", steps=2,')
    script = script.replace("max_new_tokens=64", "max_new_tokens=16")
    script = script.replace('f"{a} times {b} is"', 'f"{a}{b}="')
    (tmp_path / "own_task.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "own_task.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "areal-ray: all steps done after 2 steps" in done.stdout
    assert (tmp_path / "runs" / "own-task" / "model" / "config.json").is_file()
