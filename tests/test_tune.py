"""Sweeps: what Tune may search, what each trial is, and Tune's own schedulers over runs that are
played (tests/vllm/test_tune.py has real ones)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import played_runs
import pytest
import ray
from played_runs import FATAL_SEED, ORIGIN, PlayedRun
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_ray import tune as sweep
from areal_ray.checkpoints import CHECKPOINTS, CheckpointStore, draws_of
from areal_ray.config import Config
from areal_ray.config_file import from_mapping
from areal_ray.errors import ConfigError
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.run_files import take_over
from areal_ray.placement import PlacementPlan, adopt, plan

ray.cloudpickle.register_pickle_by_value(played_runs)  # other processes can't import it
ONCE = tune.TuneConfig(metric="reward", mode="max")


def config(directory: Path | str = "runs", **changes: object) -> Config:
    base = {
        "name": "a",
        "runs_dir": str(directory),
        "device": "cpu",
        "steps": 4,
        "model": {"path": "m"},
        "checkpoint": {"every": 2},
    }
    return from_mapping(base | changes)


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({"trainer.lrr": 1e-4}, "trainer.lrr: unknown key; did you mean `lr`?"),
        ({"trainer.lr": "high"}, 'trainer.lr: expected a number > 0, got the text "high"'),
        ({"trainer.lr": tune.choice([1e-4, 0.0])}, "trainer.lr: expected a number > 0, got 0.0"),
        ({"steps": tune.grid_search([1, 2.5])}, "steps: expected an integer >= 1, got 2.5"),
        ({"steps": tune.uniform(1, 5)}, "steps: expected an integer >= 1"),
        ({"trainer.lrr": tune.sample_from(lambda _: 1.0)}, "trainer.lrr: unknown key"),
        ({"trainer": {"lr": tune.choice([1])}}, "trainer.lr: expected a number"),
        ({"name": "b"}, "name: can't be searched: each trial has its own"),
        ({"checkpoint.every": 0}, "checkpoint.every: expected at least 1 in a sweep"),
    ],
)
def test_a_space_that_can_t_work_is_refused_before_anything_starts(space, problem) -> None:
    with pytest.raises(ConfigError) as refused:
        sweep.tuner(config(), space, tune_config=ONCE)
    assert problem in str(refused.value)


def test_all_problems_of_a_space_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="trainer.lrr.*\n.*steps"):
        sweep.tuner(config(), {"trainer.lrr": 1.0, "steps": 0}, tune_config=ONCE)


def test_what_the_user_brings_is_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="data.train: missing"):
        sweep.tuner(config(), {"trainer.lr": tune.loguniform(1e-5, 1e-3)}, tune_config=ONCE)


def test_each_trial_has_a_run_of_its_own_with_what_was_drawn() -> None:
    drawn = {"trainer.lr": np.float64(3e-4), "rollout.max_staleness": np.int64(1)}
    made = sweep.trial_config(config(), drawn, "3f2a1_00002")
    assert made.name == "a-3f2a1_00002"
    assert (made.trainer.lr, made.rollout.max_staleness) == (3e-4, 1)
    with pytest.raises(ConfigError, match="trainer.lr: expected a number > 0, got -1"):
        sweep.trial_config(config(), {"trainer.lr": -1.0}, "3f2a1_00002")


@pytest.mark.parametrize(("engines", "bundles"), [(1, 2), (3, 4)])
def test_a_trial_asks_for_what_its_own_run_needs(engines: int, bundles: int) -> None:
    asked = sweep.resources(config(), {"generation.engines": engines})
    assert asked.head_bundle_is_empty, "the trial's own process needs nothing"
    assert asked.bundles == [{"CPU": 1}, *[{"CPU": 0.5}] * engines]
    assert len(asked.bundles) == bundles


def test_a_trial_that_will_be_refused_does_not_end_the_sweep() -> None:
    assert sweep.resources(config(), {"generation.engines": -1}).bundles[0] == {"CPU": 1}


@ray.remote(num_cpus=0)
class Inside:
    """Somebody who was started in a reserved place."""

    def seats(self, needed: PlacementPlan) -> int | None:
        adopted = adopt(needed)
        if adopted is None:
            return None
        adopted.release()
        return len(adopted.slots("engine"))


def test_a_run_takes_the_places_that_it_was_started_in_and_leaves_them(ray_cluster) -> None:
    needed = plan(config(generation={"engines": 2}), device="cpu")
    group = placement_group([bundle.resources for bundle in needed.bundles])
    where = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    inside = Inside.options(scheduling_strategy=where).remote()
    assert ray.get(inside.seats.remote(needed)) == 2
    # It is still there; and a run that needs others does not take these.
    assert ray.get(inside.seats.remote(plan(config(), device="cpu"))) is None
    remove_placement_group(group)


def played(base: Config) -> type[tune.Trainable]:
    known = tune.with_parameters(sweep.SweepTrial, base=base, make_run=PlayedRun)
    return tune.with_resources(known, partial(sweep.resources, base))


def test_asha_stops_the_weak_trials_by_what_they_report(ray_cluster, tmp_path: Path) -> None:
    results = tune.Tuner(
        played(config(tmp_path)),
        param_space={"trainer.lr": tune.grid_search([0.9, 0.1])},
        tune_config=tune.TuneConfig(
            metric="reward",
            mode="max",
            max_concurrent_trials=1,
            scheduler=ASHAScheduler(max_t=4, grace_period=2, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path)),
    ).fit()
    strong, weak = results
    assert (strong.metrics["step"], strong.metrics["training_iteration"]) == (4, 4)
    assert (weak.metrics["step"], weak.metrics["done"]) == (2, True)
    assert weak.metrics["loop_lag_p99_ms/queue"] == 0.5
    assert list(strong.metrics_dataframe["step"]) == [1, 2, 3, 4]
    # What the runs saved by themselves is Tune's too.
    assert len(strong.best_checkpoints) == 2
    assert results.get_best_result().config == {"trainer.lr": 0.9}
    assert Path(strong.metrics["run_dir"]).parent == tmp_path


def test_a_weak_trial_goes_on_from_a_strong_one_s_checkpoint(ray_cluster, tmp_path: Path) -> None:
    """At its second step, which no run saves by itself."""
    results = tune.Tuner(
        played(config(tmp_path, checkpoint={"every": 3, "keep": 9})),
        param_space={"trainer.lr": tune.grid_search([0.1, 0.9])},
        tune_config=tune.TuneConfig(
            metric="reward",
            mode="max",
            scheduler=PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=2,
                quantile_fraction=0.5,
                hyperparam_mutations={"trainer.lr": [0.5]},
                synch=True,
            ),
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path)),
    ).fit()
    assert results.errors == []
    weak, strong = (Path(result.metrics["run_dir"]) for result in results)
    assert [record.reward for record in read_metrics(strong / "metrics.jsonl")] == [0.9] * 4
    # Still in the directory of its own, though it is another's model now.
    assert [record.reward for record in read_metrics(weak / "metrics.jsonl")] == [
        0.1,
        0.1,
        0.5,
        0.5,
    ]
    origin = weak / CHECKPOINTS / "step-00000002" / ORIGIN
    assert origin.read_text() == strong.name


def test_a_trial_that_failed_tells_why_and_goes_on_from_its_checkpoint(
    ray_cluster, tmp_path: Path
) -> None:
    trainable = played(config(tmp_path))
    results = tune.Tuner(
        trainable,
        param_space={"seed": tune.grid_search([FATAL_SEED, 1])},
        tune_config=ONCE,
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path)),
    ).fit()
    (error,) = results.errors
    assert "the third step was fatal" in str(error)
    assert results.num_terminated == 1, "the other one is not touched by it"

    restored = tune.Tuner.restore(str(tmp_path / "sweep"), trainable, resume_errored=True)
    failed, other = restored.fit()
    assert failed.error is None
    for result in (failed, other):
        records = read_metrics(Path(result.metrics["run_dir"]) / "metrics.jsonl")
        assert [record.step for record in records] == [1, 2, 3, 4]
    assert failed.metrics["training_iteration"] == 4


def test_a_checkpoint_is_taken_over_in_the_place_of_one_s_own(tmp_path: Path) -> None:
    mine, theirs = config(tmp_path, name="mine"), config(tmp_path, name="theirs")
    for one in (mine, theirs):
        store = CheckpointStore(one.run_dir / CHECKPOINTS, keep=2)
        (store.begin(3) / ORIGIN).write_text(one.name)
        store.commit(3, 3, draws_of(one))
    taken = take_over(theirs.run_dir / CHECKPOINTS / "step-00000003", mine)
    assert taken.directory == (mine.run_dir / CHECKPOINTS / "step-00000003").resolve()
    assert (taken.directory / ORIGIN).read_text() == "theirs"
