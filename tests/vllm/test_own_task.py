"""The README's example of one's own model, data and reward, with a model that is here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def test_the_readme_shows_the_example_as_it_is() -> None:
    source = (REPO / "examples" / "own_task.py").read_text()
    shown = source.partition('"""\n\n')[2].strip()
    assert shown in (REPO / "README.md").read_text()
    assert len(shown.splitlines()) < 20


def test_one_s_own_model_data_and_reward_train(
    ray_cluster: None,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    script = (REPO / "examples" / "own_task.py").read_text()
    script = script.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model))
    script = script.replace('name="own-task",', 'name="own-task", steps=2,')
    script = script.replace("max_new_tokens=64", "max_new_tokens=16")
    script = script.replace('f"{a} times {b} is"', 'f"{a}{b}="')
    (tmp_path / "own_task.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("own_task.py", run_name="__main__")
    assert "areal-ray: all steps done after 2 steps" in capsys.readouterr().out
    assert (tmp_path / "runs" / "own-task" / "model" / "config.json").is_file()
