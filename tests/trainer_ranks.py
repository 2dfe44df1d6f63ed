"""What a trainer does on one rank or on several, to be compared.

`main` is one rank of several, in a process of its own: it does it all, goes on from what a trainer
of one rank has written to OUT/alone, and tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from training_steps import EVERYTHING, group, trainer

from areal_ray.algorithm_config import AlgorithmConfig, KlConfig
from areal_ray.config import LoraConfig
from areal_ray.training.ranks import Ranks, join
from areal_ray.training.spec import RankPlace, StepMetrics
from areal_ray.training.trainer import PolicyTrainer
from areal_ray.types import Prompt

ALGORITHMS = {
    "plain": AlgorithmConfig(),
    "everything": EVERYTHING,
    "lora": AlgorithmConfig(kl=KlConfig(coefficient=0.1)),
}
# More rank shares than samples in some parts, and parts that can't be shared out evenly.
GROUPS = [group(i, [1.0, 0.0, 0.0, 1.0, 0.0][: 2 + i % 4]) for i in range(5)]
DEMONSTRATIONS = [Prompt(text="17+25=", answer="24"), Prompt(text="1+1=", answer="2")]


@dataclass
class Done:
    """All that there is to compare. Gradients are of the first update, whole and clipped."""

    warmup_loss: float
    metrics: list[StepMetrics]
    gradients: list[torch.Tensor]
    share: int
    """Tokens of the largest step that this rank passed through the model."""


def new_trainer(model: Path, name: str, ranks: Ranks | None) -> PolicyTrainer:
    return trainer(
        model,
        algorithm=ALGORITHMS[name],
        ranks=ranks,
        mini_batches=3,
        epochs=2,
        lr=1e-4,
        micro_batch_tokens=24,
        gradient_checkpointing=name == "everything",
        lora=LoraConfig(rank=4 if name == "lora" else 0),
    )


def run(model: Path, name: str, ranks: Ranks | None, directory: Path) -> Done:
    """A supervised phase, a step, a checkpoint, another step, and an export."""
    learner = new_trainer(model, name, ranks)
    loss = learner.warm_up(DEMONSTRATIONS, steps=2, batch=3, lr=1e-3)
    gradients: list[torch.Tensor] = []
    note_gradients(learner, gradients)
    metrics = [learner.train_on(GROUPS, 0)]
    learner.write(learner.snapshot(), directory / name / "checkpoint")
    metrics.append(learner.train_on(GROUPS, 1))
    learner.export(directory / name / "model")
    sequences = [t for one in GROUPS for t in one.trajectories]
    share = learner.ranks.share(sequences, lambda t: len(t.prompt_ids) + len(t.response_ids))
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in share)
    return Done(loss, metrics, gradients, tokens)


def go_on(model: Path, name: str, ranks: Ranks | None, directory: Path) -> StepMetrics:
    """The second step, from that checkpoint."""
    learner = new_trainer(model, name, ranks)
    learner.restore(directory / name / "checkpoint")
    return learner.train_on(GROUPS, 1)


def note_gradients(learner: PolicyTrainer, into: list[torch.Tensor]) -> None:
    step = learner._policy.optimizer.step

    def noted(step: object = step) -> None:
        if not into:
            for parameter in learner._policy.optimizer.param_groups[0]["params"]:
                grad = parameter.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                into.append(whole.clone())
        step()

    learner._policy.optimizer.step = noted


def main(encoded_place: str, shards: str, model: str, out: str) -> None:
    torch.set_num_threads(1)
    place = msgspec.json.decode(encoded_place, type=RankPlace)
    ranks = join(place, torch.device("cpu"), address=place.host, shards=shards == "yes")
    directory = Path(out) / ("sharded" if ranks.shards else "replicated")
    for name in ALGORITHMS:
        done = run(Path(model), name, ranks, directory)
        resumed = go_on(Path(model), name, ranks, Path(out) / "alone")
        torch.save((done, resumed), directory / name / f"rank-{ranks.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
