"""Which learning rate, and how much staleness? A sweep with Ray Tune that stops poor trials early.

    python examples/tune_sweep.py                                   or, on a running cluster,
    ray job submit --working-dir examples -- python tune_sweep.py   and, after a Ctrl-C,
    python examples/tune_sweep.py --resume runs/arithmetic-sweep

The task is that of arithmetic.py, shortened: each trial imitates the careless teacher for a while,
then takes a few steps of reinforcement learning. As many trials run at once as the cluster holds;
on two cores it is one after the other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator
from rich.console import Console
from rich.table import Table

import areal_ray
import areal_ray.tune

SHORTENED = ("steps=12", "goal=null", "warmup.steps=1000", "trainer.lr_warmup_steps=1")
CHEAP = ("generation.engines=1", "evaluation.every=4", "checkpoint.every=4")
SPACE = {
    "trainer.lr": tune.loguniform(1e-5, 1e-1),
    "rollout.max_staleness": tune.choice([0, 1, 2]),
}


def main() -> int:
    options = _options()
    example = Path(__file__).with_name("arithmetic.yaml")
    config = areal_ray.load_config(example, [*SHORTENED, *CHEAP, *options.overrides])
    if options.resume:
        tuner = areal_ray.tune.restore(options.resume, config, SPACE)
    else:
        tuner = areal_ray.tune.tuner(
            config,
            SPACE,
            tune_config=tune.TuneConfig(
                metric="reward",
                mode="max",
                num_samples=options.trials,
                scheduler=ASHAScheduler(max_t=config.steps, grace_period=4, reduction_factor=2),
                search_alg=BasicVariantGenerator(random_state=2),  # the same draws each time
            ),
        )
    results = tuner.fit()
    return report(results, config.steps)


def report(results: tune.ResultGrid, steps: int) -> int:
    """Print how each trial did and what was best; returns the exit code."""
    table = Table(title="the sweep")
    for column in ("learning rate", "max_staleness", "steps", "reward", "held-out", "ended"):
        table.add_column(column)
    for result in results:
        if _steps(result):
            table.add_row(
                f"{result.config['trainer.lr']:.1e}",
                str(result.config["rollout.max_staleness"]),
                str(_steps(result)),
                f"{result.metrics['reward']:.3f}",
                f"{result.metrics['held_out_reward']:.3f}",
                _ending(result, steps),
            )
    Console(width=100).print(table)
    if results.num_errors + sum(_has_ended(result) for result in results) < len(results):
        print(f"interrupted; to go on: --resume {results.experiment_path}")
        return 130
    if results.num_errors < len(results):
        best = results.get_best_result()
        print("best:", *(f"{key}={value:g}" for key, value in best.config.items()))
        print(f"  its run is in {best.metrics['run_dir']}")
    return 1 if results.num_errors else 0


def _steps(result: tune.Result) -> int:
    return (result.metrics or {}).get("step", 0)


def _has_ended(result: tune.Result) -> bool:
    return bool(_steps(result) and result.metrics["done"] and not result.error)


def _ending(result: tune.Result, steps: int) -> str:
    if result.error:
        return f"failed: {result.error}"
    if not _has_ended(result):
        return "unfinished"
    return "all steps done" if _steps(result) == steps else "stopped early"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search a learning rate and a staleness.")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="of every trial")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--resume", metavar="DIR", help="go on with the sweep in this directory")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
