"""What a second trainer rank gives: tokens/s of the same step on one rank and on two.

Forward, backward and AdamW on the model and the unequal lengths of `trainer_step.py`; each rank is
a process with one thread, on CPUs over gloo. All kinds of trainer are up at the same time and step
turn by turn, so that what else the machine does meets them alike. Loss and gradient must agree
before anything is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from common import median, random_model, say, show, spread
from trainer_step import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Packed,
    StepOutcome,
    make_groups,
    refuse_unless_equal,
)

from areal_ray.training.spec import RankPlace
from areal_ray.weights.transport import Rendezvous

HOST = "127.0.0.1"
TIMEOUT_S = 600.0
WAYS = {"one rank": (1, False), "two, copies": (2, False), "two, shards": (2, True)}


@dataclass(frozen=True)
class Size:
    groups: int
    samples: int


def serve(
    orders: Connection, model: Path, size: Size, place: RankPlace | None, shards: bool
) -> None:
    """One rank, in a process of its own: a step for each order."""
    import torch

    from areal_ray.training.ranks import join

    torch.set_num_threads(1)
    ranks = None
    if place is not None:
        ranks = join(place, torch.device("cpu"), address=HOST, shards=shards)
    trainer = Packed(model, make_groups(size.groups, size.samples), ranks)
    orders.send(None)
    while orders.recv() == "step":
        orders.send(trainer.step())


class Trainer:
    """Some ranks together."""

    def __init__(self, model: Path, size: Size, count: int, shards: bool) -> None:
        self._meeting = Rendezvous(HOST, timeout_s=TIMEOUT_S)
        spawning = multiprocessing.get_context("spawn")
        self._orders: list[Connection] = []
        for rank in range(count):
            mine, theirs = spawning.Pipe()
            place = RankPlace(rank, count, HOST, self._meeting.port, TIMEOUT_S)
            arguments = (theirs, model, size, place if count > 1 else None, shards)
            spawning.Process(target=serve, args=arguments, daemon=True).start()
            self._orders.append(mine)
        self._answers()

    def step(self) -> StepOutcome:
        for orders in self._orders:
            orders.send("step")
        return self._answers()[0]

    def close(self) -> None:
        for orders in self._orders:
            orders.send("end")

    def _answers(self) -> Sequence[StepOutcome]:
        return [orders.recv() for orders in self._orders]


def compare(model: Path, size: Size, rounds: int) -> None:
    groups = make_groups(size.groups, size.samples)
    tokens = sum(
        len(t.prompt_ids) + len(t.response_ids) for group in groups for t in group.trajectories
    )
    trainers = {}
    for name, (count, shards) in WAYS.items():
        say(f"starting {name}")
        trainers[name] = Trainer(model, size, count, shards)
    refuse_unless_equal({name: trainer.step() for name, trainer in trainers.items()})
    speeds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.step()
            speeds[name].append(tokens / (time.perf_counter() - began))
        say(f"round {number + 1} of {rounds}")
    for trainer in trainers.values():
        trainer.close()
    alone = speeds["one rank"]
    ratios = {
        name: [own / one for own, one in zip(ours, alone, strict=True)]
        for name, ours in speeds.items()
    }
    show(
        ("trainer", "tokens/s", "of one rank's", "rounds"),
        [
            (name, f"{median(ours):,.0f}", f"{median(ratios[name]):.2f}", spread(ratios[name]))
            for name, ours in speeds.items()
        ],
        {f"{name} / one rank": median(ratios[name]) for name in WAYS if name != "one rank"}
        | {"tokens": tokens},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    with random_model(hidden=HIDDEN, layers=LAYERS, vocabulary=VOCABULARY) as model:
        compare(model, Size(options.groups, options.samples), options.rounds)


if __name__ == "__main__":
    main()
