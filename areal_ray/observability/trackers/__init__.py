"""Trackers: where a run's metrics go besides `metrics.jsonl`, which always has all of them.

    observability:
      trackers: [tensorboard, wandb, mlflow]
      project: sums

| `trackers` | install | where to look |
|---|---|---|
| `tensorboard` | `areal_ray[tensorboard]` | `tensorboard --logdir runs`; event files in the run's directory |
| `wandb` | `areal_ray[wandb]` | the project `observability.project`; files in `<run>/wandb`, which `wandb sync` sends if WANDB_MODE is `offline` |
| `mlflow` | `areal_ray[mlflow]` | the experiment `observability.project` at MLFLOW_TRACKING_URI; without one `mlflow.db` in the working directory |
| `file.py:name` | | whatever your own does |

Each has every number of a step by its name in `metrics.jsonl` (`reward`, `loop_lag_p99_ms/queue`,
`staleness_tokens/2`), those of an evaluation under `evaluation/`, the optimizer step as the axis,
the time when it was written down, and the resolved config as hyper-parameters (`trainer.lr`). The
run has the name of its directory. It ends as finished, failed (with the cause) or killed (Ctrl-C,
`ray job stop`). A run that is resumed goes on in the same W&B and MLflow run, by the id in its
directory; steps that are done again are there twice, while TensorBoard takes the old ones back.

A tracker of your own is an object with three methods; they are called one at a time, in order,
from a thread that is the tracker's own, so they may block:

    from areal_ray.observability.tracking import TrackedRun, scalars

    class Printer:
        def open(self, run: TrackedRun) -> None:
            print(run.name, run.config.trainer.lr)

        def log(self, record: StepRecord | EvaluationRecord) -> None:
            print(record.step, scalars(record))

        def close(self, error: BaseException | None) -> None:
            print("done" if error is None else error)

Name it in the config (`trackers: [printer.py:Printer]`: a class or function that gives one without
arguments), or hand it over: `train(config, trackers=[Printer()])`.

What is asked for and not installed is refused before anything starts. During the run no tracker can
hold it up: one that raises is told of once and left out; one that is stuck is waited for at the
end, for 20 s, and it is told how many records it did not get.
"""  # noqa: E501 - a table

from areal_ray.observability.trackers.loading import load_trackers
from areal_ray.observability.trackers.threads import TrackerThread, tell_all_unwritten

__all__ = ["TrackerThread", "load_trackers", "tell_all_unwritten"]
