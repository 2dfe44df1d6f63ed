from __future__ import annotations

from pathlib import Path

import pytest

from areal_ray.algorithms import Algorithm
from areal_ray.config import check, resolve
from areal_ray.config_file import from_mapping, load, to_yaml
from areal_ray.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"

GOOD = """\
name: test
model: {path: some/model}
data: {train: prompts.jsonl}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("trainer: {lrr: 1}", "trainer.lrr: unknown key; did you mean `lr`?"),
        ("stepz: 3", "stepz: unknown key; did you mean `steps`?"),
        (
            "reward: {x: 1}",
            "reward.x: unknown key; valid here: function, processes, timeout_s",
        ),
        ("steps: many", 'steps: expected an integer >= 1, got the text "many"'),
        ("steps: 0", "steps: expected an integer >= 1, got 0"),
        ("steps: 1.5", "steps: expected an integer >= 1, got 1.5"),
        ("steps:", "steps: expected an integer >= 1, got nothing"),
        ("trainer: {lr: -1}", "trainer.lr: expected a number > 0, got -1"),
        ("trainer: 3", "trainer: expected a section of keys and values, got 3"),
        (
            "device: cudaa",
            'device: expected one of auto, cpu, cuda, got the text "cudaa"; did you mean `cuda`?',
        ),
        (
            "generation: {gpu_memory: 2}",
            "generation.gpu_memory: expected a number > 0 and <= 1, got 2",
        ),
        (
            "data: {shuffle: maybe}",
            'data.shuffle: expected true or false, got the text "maybe"',
        ),
        (
            "generation: {kv_cache_gib: big}",
            'generation.kv_cache_gib: expected a number > 0 or null, got the text "big"',
        ),
        ("seed: -1", "seed: expected an integer >= 0, got -1"),
        ("trainer: {beta1: 1}", "trainer.beta1: expected a number >= 0 and < 1, got 1"),
        ("trainer: {lr: .inf}", "trainer.lr: expected a number > 0, got inf"),
        ("goal: [1]", "goal: expected a number or null, got a list"),
        (
            "generation: {min_engines: 0}",
            "generation.min_engines: expected an integer >= 1, got 0",
        ),
        (
            "generation: {restart_engines: sometimes}",
            'generation.restart_engines: expected true or false, got the text "sometimes"',
        ),
        (
            "generation: {progress_every_s: 0}",
            "generation.progress_every_s: expected a number > 0, got 0",
        ),
        (
            "generation: {suspect_after_s: -1, dead_after_s: 0}",
            "generation.suspect_after_s: expected a number > 0, got -1\n"
            "generation.dead_after_s: expected a number > 0, got 0",
        ),
        (
            "rollout: {max_failure_rate: -0.1}",
            "rollout.max_failure_rate: expected a number >= 0, got -0.1",
        ),
        ("rollout: {filter: 3}", "rollout.filter: expected text, got 3"),
        (
            "rollout: {max_filtered_in_a_row: 0}",
            "rollout.max_filtered_in_a_row: expected an integer >= 1, got 0",
        ),
        (
            "rollout: {order: stric}",
            "rollout.order: expected one of completion, strict, window, got the text "
            '"stric"; did you mean `strict`?',
        ),
        (
            "rollout: {window: 0}",
            "rollout.window: expected an integer >= 1 or null, got 0",
        ),
        (
            "rollout: {max_queue_gib: 0}",
            "rollout.max_queue_gib: expected a number > 0, got 0",
        ),
        ("trainer: {lora: {rank: -1}}", "trainer.lora.rank: expected an integer >= 0, got -1"),
        (
            "trainer: {lora: {rank: 4, targets: q_proj}}",
            "trainer.lora.targets: expected one of all-linear or a list, each item text, got the "
            'text "q_proj"',
        ),
        (
            "steps: 0\ntrainer: {lrr: 1}",
            "steps: expected an integer >= 1, got 0\ntrainer.lrr: unknown key; did you mean `lr`?",
        ),
    ],
)
def test_a_bad_value_is_refused_with_its_path_and_what_was_expected(
    tmp_path: Path, extra: str, message: str
) -> None:
    base = "".join(
        line + "\n" for line in GOOD.splitlines() if not extra.startswith(line.split(":")[0] + ":")
    )
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, base + extra))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "model: expected exactly one of `path` and `factory`"),
        (
            {"model": {"path": "a", "factory": "b.py:c"}},
            "model: expected exactly one of `path` and `factory`",
        ),
        (
            {"evaluation": {"every": 5}},
            "evaluation.every: needs `data.held_out`, the prompts to evaluate on",
        ),
        (
            {"data": {"held_out": "a.jsonl"}, "goal": 0.5},
            "goal: needs `evaluation.every`, how often to look whether it is reached",
        ),
        (
            {"rollout": {"samples": 1}},
            "rollout.samples: expected an integer >= 2, got 1: `grpo` compares the samples of a "
            "prompt with each other, and one alone has an advantage of zero",
        ),
        (
            {"generation": {"temperature": 0}},
            "generation.temperature: expected a number > 0, got 0: greedy samples of a prompt are "
            "all alike, and there is nothing to learn from them",
        ),
        (
            {"device": "cpu", "generation": {"tensor_parallel": 2}},
            "generation.tensor_parallel: expected 1 with `device: cpu`, got 2",
        ),
        (
            {"generation": {"engines": 2, "min_engines": 3}},
            "generation.min_engines: expected at most generation.engines (2), got 3",
        ),
        (
            {"generation": {"suspect_after_s": 120}},
            "generation.suspect_after_s: expected less than generation.dead_after_s (120), got 120",
        ),
        (
            {"generation": {"suspect_after_s": 0.75, "dead_after_s": 0.5}},
            "generation.suspect_after_s: expected less than generation.dead_after_s (0.5), "
            "got 0.75",
        ),
        (
            {"rollout": {"window": 8}},
            "rollout.window: only read with `rollout.order: window`, not `completion`",
        ),
        (
            {"trainer": {"lora": {"alpha": 8}}},
            "trainer.lora: only read with `trainer.lora.rank`; at 0 all weights are trained",
        ),
        (
            {"trainer": {"lora": {"rank": 4, "targets": []}}},
            "trainer.lora.targets: expected `all-linear` or at least one name, got an empty list",
        ),
        (
            {"rollout": {"window": 8, "order": "strict"}},
            "rollout.window: only read with `rollout.order: window`, not `strict`",
        ),
        (
            {"generation": {"min_engines": 2}, "rollout": {"window": 8}},
            "generation.min_engines: expected at most generation.engines (1), got 2\n"
            "rollout.window: only read with `rollout.order: window`, not `completion`",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused(raw: dict, message: str) -> None:
    model = {} if not raw or "model" in raw else {"model": {"path": "some/model"}}
    with pytest.raises(ConfigError) as refused:
        check(from_mapping({"name": "test"} | model | raw))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"generation": {"engines": 3, "min_engines": 3}},
        {"generation": {"suspect_after_s": 119.9}},
        {"trainer": {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]}}},
        {"rollout": {"order": "window"}},
        {"rollout": {"order": "window", "window": 8}},
        {"rollout": {"order": "strict"}},
        {"rollout": {"max_failed_groups": 0, "max_failure_rate": 0}},
    ],
)
def test_a_combination_that_can_work_is_accepted(raw: dict) -> None:
    check(from_mapping({"name": "test", "model": {"path": "some/model"}} | raw))


def test_a_name_is_required_and_may_not_leave_the_runs_directory(tmp_path: Path) -> None:
    pattern = "text that matches ^[A-Za-z0-9][A-Za-z0-9_.-]*$"
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, "steps: 3"))
    assert str(refused.value) == f"name: missing; expected {pattern}"
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, "name: ../elsewhere"))
    assert str(refused.value) == f'name: expected {pattern}, got the text "../elsewhere"'


def test_overrides_change_nested_keys_and_are_checked_alike(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = load(path, ["trainer.lr=1e-4", "steps=7", "data.shuffle=false"])
    assert (config.trainer.lr, config.steps, config.data.shuffle) == (1e-4, 7, False)
    with pytest.raises(ConfigError, match=r"^trainer\.lrr: unknown key; did you mean `lr`\?$"):
        load(path, ["trainer.lrr=1"])
    with pytest.raises(ConfigError, match="^steps: expected an override of the form key=value$"):
        load(path, ["steps"])
    with pytest.raises(ConfigError, match="`name` holds a value, not a section"):
        load(path, ["name.first=x"])


def test_a_number_in_short_scientific_form_is_a_number(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD + "trainer: {lr: 3e-4}")).trainer.lr == 3e-4


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "steps: 1\nsteps: 2\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value) == f"{path}:5: `steps` is given twice"


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError) as refused:
        load(missing)
    assert str(refused.value) == f"{missing}: can't be read: No such file or directory"
    with pytest.raises(ConfigError, match="expected a mapping of keys to values, got a list"):
        load(write(tmp_path, "- a\n- b\n"))
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(write(tmp_path, "a: [1\n"))


def test_files_named_in_a_config_are_found_beside_it(tmp_path: Path) -> None:
    text = GOOD + "reward: {function: rewards.py:mine}\n"
    text += "rollout: {workflow: package.flows:mine, filter: rules.py:mine}"
    config = load(write(tmp_path, text))
    assert config.data.train == str(tmp_path / "prompts.jsonl")
    assert config.reward.function == f"{tmp_path / 'rewards.py'}:mine"
    assert config.rollout.workflow == "package.flows:mine"
    assert config.rollout.filter == f"{tmp_path / 'rules.py'}:mine"
    assert config.model.path == "some/model"


@pytest.mark.parametrize(
    ("rollout", "window"),
    [
        ({"order": "window"}, 16),
        ({"order": "window", "window": 3}, 3),
        ({"order": "strict"}, None),
        ({"order": "completion"}, None),
        ({}, None),
    ],
)
def test_the_window_is_a_batch_unless_it_is_given(rollout: dict, window: int | None) -> None:
    config = from_mapping({"name": "test", "trainer": {"groups_per_step": 16}, "rollout": rollout})
    resolved = resolve(config, device="cpu")
    assert resolved.rollout.window == window
    # And a resolved config is resolved.
    assert resolve(resolved, device="cpu") == resolved


def test_what_is_left_open_is_derived_from_the_rest() -> None:
    config = from_mapping({"name": "test", "model": {"path": "m"}})
    on_cpu, on_cuda = resolve(config, device="cpu"), resolve(config, device="cuda")
    assert (on_cpu.model.dtype, on_cuda.model.dtype) == ("float32", "bfloat16")
    # (max_staleness 2 + 1) batches of 32 groups may be on their way.
    assert on_cpu.rollout.max_concurrent_groups == 96


def test_a_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = resolve(load(EXAMPLES / "arithmetic.yaml"), device="cpu")
    assert load(write(tmp_path, to_yaml(config))) == config


def test_the_demo_is_configured_in_25_lines() -> None:
    assert len((EXAMPLES / "arithmetic.yaml").read_text().splitlines()) <= 25


@pytest.mark.parametrize(
    "path",
    sorted(path for path in EXAMPLES.glob("*.yaml") if path.name != "job.yaml"),  # Ray's own kind
    ids=lambda path: path.name,
)
def test_every_example_is_whole(path: Path) -> None:
    config = load(str(path), [])
    check(config)
    Algorithm.of(resolve(config, device="cpu").algorithm)
