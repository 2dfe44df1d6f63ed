"""Whether each algorithm learns: the arithmetic example to its goal, one run after the other.

All begin with the same model, which has imitated the careless teacher; so what differs is what
reinforcement learning makes of it. Real runs: vLLM engines, a trainer, weight updates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import EXAMPLE, say, show

from areal_ray.algorithms import Algorithm
from areal_ray.config import Config, resolve
from areal_ray.config_file import load
from areal_ray.data import load_prompts
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.plugins import load_function, pack

ARITHMETIC = EXAMPLE.with_suffix(".yaml")
CRITIC = ("algorithm.critic.enabled=true", "algorithm.critic.lr=1e-3")
ALGORITHMS = {
    "grpo": (),
    "rloo": ("algorithm.advantage=rloo",),
    "gspo": ("algorithm.loss=gspo", "algorithm.reduction=sequence_mean"),
    "cispo": ("algorithm.loss=cispo", "algorithm.clip_low=1"),
    "dapo": (
        "rollout.filter=unequal_rewards",
        "algorithm.overlong.buffer_tokens=2",
        "algorithm.overlong.penalty=0.5",
    ),
    "ppo with a critic": ("algorithm.advantage=gae", "algorithm.whiten=batch", *CRITIC),
    "decoupled ppo, staleness 4": (
        "algorithm.loss=decoupled_ppo",
        "algorithm.proximal=recompute",
        "rollout.max_staleness=4",
    ),
}


@dataclass(frozen=True)
class Outcome:
    before: float
    after: float
    steps: int
    seconds: float
    staleness: float
    has_reached_goal: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goal", type=float, default=0.95, help="held-out accuracy to reach")
    parser.add_argument("--steps", type=int, default=120, help="at most so many")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "imitator"
        imitate(model, load(str(ARITHMETIC), []))
        outcomes = {
            name: learn(Path(directory), model, name, options.goal, options.steps)
            for name in options.only
        }
    show(
        ("algorithm", "before", "after", "steps", "seconds", "staleness", "goal"),
        [
            (
                name,
                f"{one.before:.1%}",
                f"{one.after:.1%}",
                str(one.steps),
                f"{one.seconds:.0f}",
                f"{one.staleness:.1f}",
                "reached" if one.has_reached_goal else "missed",
            )
            for name, one in outcomes.items()
        ],
        {f"{name}: steps to {options.goal:.0%}": one.steps for name, one in outcomes.items()}
        | {"all reached": all(one.has_reached_goal for one in outcomes.values())},
    )


def imitate(directory: Path, config: Config) -> None:
    """The supervised phase alone, and its model."""
    from areal_ray.training.spec import TrainerSpec
    from areal_ray.training.trainer import PolicyTrainer

    say("imitating the careless teacher")
    random_model = directory.with_name("random")
    random_model.mkdir()
    load_function(config.model.factory)(random_model)
    resolved = resolve(config, device="cpu")
    trainer = PolicyTrainer(
        TrainerSpec(
            model_path=str(random_model),
            trust_remote_code=False,
            device="cpu",
            dtype="float32",
            max_prompt_tokens=config.data.max_prompt_tokens,
            temperature=1.0,
            seed=config.seed,
            trainer=config.trainer,
            steps=config.steps,
            packed_algorithm=pack(Algorithm.of(resolved.algorithm)),
        )
    )
    warmup = config.warmup
    lessons = load_prompts(warmup.data)
    trainer.warm_up(lessons, steps=warmup.steps, batch=warmup.batch, lr=warmup.lr)
    trainer.export(directory)


def learn(runs: Path, model: Path, name: str, goal: float, steps: int) -> Outcome:
    say(f"learning by {name}")
    run_name = name.replace(" ", "-").replace(",", "")
    said = subprocess.run(
        [
            *(sys.executable, "-m", "areal_ray.cli", "train", str(ARITHMETIC)),
            *(f"name={run_name}", f"runs_dir={runs}", f"goal={goal}", f"steps={steps}"),
            *("model.factory=null", f"model.path={model}", "warmup.steps=0"),
            *ALGORITHMS[name],
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        raise SystemExit(f"{name} failed:\n{said.stdout}\n{said.stderr}")
    records = read_metrics(runs / run_name / "metrics.jsonl")
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    taken = [record for record in records if isinstance(record, StepRecord)]
    return Outcome(
        before=evaluations[0].reward,
        after=evaluations[-1].reward,
        steps=len(taken),
        seconds=taken[-1].seconds,
        staleness=sum(record.staleness_mean for record in taken) / len(taken),
        has_reached_goal=any(evaluation.reward >= goal for evaluation in evaluations),
    )


if __name__ == "__main__":
    main()
