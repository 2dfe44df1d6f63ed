"""A run's directory as a run would leave it, made up: for what reads one.

Ten minutes with a trainer and two engines that learn to add; engine-1 is lost on the way and comes
back, and one weight update needs a second attempt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_ray.config import Config, ModelConfig
from areal_ray.config_file import to_yaml
from areal_ray.observability.records import EvaluationRecord, Record, RolloutRecord, StepRecord
from areal_ray.observability.timeline import ActivityRecord, EventRecord, TimelineRecord

BEGAN = 1_790_000_000.0
STEP_S = 5.0
LOST_S, BACK_S = 287.0, 331.0
"""When engine-1 is lost, and when it serves again."""


def make_run(directory: Path, *, steps: int = 120, seed: int = 7) -> Path:
    """Everything that a report reads."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    config = Config(name=directory.name, steps=160, model=ModelConfig(path="Qwen/Qwen2.5-0.5B"))
    (directory / "config.yaml").write_text(to_yaml(config))
    append(directory / "metrics.jsonl", metrics(steps, chance))
    append(directory / "timeline.jsonl", timeline(steps * STEP_S, chance))
    append(directory / "rollouts.jsonl", rollouts(steps, chance))
    return directory


def append(path: Path, records: Sequence[msgspec.Struct] | Iterator[msgspec.Struct]) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.Encoder().encode_lines(list(records)))


def skill(step: int) -> float:
    """What part of the answers is right."""
    return 0.22 + 0.72 / (1 + math.exp(-(step - 45) / 13))


def metrics(steps: int, chance: random.Random) -> Iterator[Record]:
    for number in range(1, steps + 1):
        if (number - 1) % 15 == 0:
            yield EvaluationRecord(
                step=number - 1,
                version=number - 1,
                seconds=STEP_S * (number - 1) + 1.2,
                prompts=200,
                reward=round(skill(number - 1) + chance.uniform(-0.015, 0.02), 3),
                at=BEGAN + STEP_S * (number - 1) + 1.2,
            )
        yield step_record(number, chance)


def step_record(number: int, chance: random.Random) -> StepRecord:
    seconds = STEP_S * number
    is_short = LOST_S < seconds < BACK_S
    stale = [chance.randint(700, 1200), chance.randint(2600, 3300), chance.randint(300, 900)]
    stale += [chance.randint(100, 500)] if is_short else []
    tokens = sum(stale)
    return StepRecord(
        step=number,
        version=number,
        seconds=seconds,
        reward=min(1.0, skill(number) - 0.06 + chance.gauss(0, 0.035)),
        response_tokens=3.4 + chance.gauss(0, 0.1),
        tokens_per_s=(1900 if is_short else 3600) + chance.gauss(0, 160),
        staleness_mean=sum(age * count for age, count in enumerate(stale)) / tokens,
        staleness_max=len(stale) - 1,
        queue_groups=max(0, round(40 + 18 * math.sin(number / 6) + chance.gauss(0, 5))),
        groups_failed=0 if seconds < LOST_S else 1,
        groups_expired=0,
        groups_filtered=number // 4,
        engines=1 if is_short else 2,
        loop_lag_p99_ms={
            "controller": 2 + 2 * chance.random(),
            "queue": 1 + chance.random(),
            "trainer": 4 + 3 * chance.random(),
            "engine-0": 3 + 2 * chance.random(),
            "engine-1": (140 if is_short else 3) + 2 * chance.random(),
        },
        waited_s=(1.9 if is_short else 0.5) + 0.3 * chance.random(),
        train_s=2.7 + 0.4 * chance.random(),
        staged_s=0.31 + 0.12 * chance.random(),
        commit_s=0.085 + 0.03 * chance.random(),
        pause_s=0.038 + 0.02 * chance.random(),
        update_attempts=2 if number == 58 else 1,
        loss=-0.02 + chance.gauss(0, 0.012),
        grad_norm=0.6 + 0.5 * math.exp(-number / 40) + abs(chance.gauss(0, 0.09)),
        lr=1e-4 * min(1.0, number / 10),
        clipped=abs(chance.gauss(0.012, 0.004)),
        kl_to_behaviour=abs(chance.gauss(0.0021, 0.0006)),
        entropy=1.4 * math.exp(-number / 70) + chance.gauss(0, 0.02),
        at=BEGAN + seconds,
        staleness_tokens=stale,
    )


def timeline(length_s: float, chance: random.Random) -> Iterator[TimelineRecord]:
    yield _event(0.0, "run", "info", "starting 2 engines and the trainer")
    for second in range(1, int(length_s) + 1):
        at = BEGAN + second
        yield _trainer(at, second, chance)
        yield _engine("engine-0", at, second, chance)
        if second < LOST_S or second >= BACK_S - 14:
            yield _engine("engine-1", at, second, chance)
        yield from _happened(second)


def _happened(second: int) -> Iterator[EventRecord]:
    if second == 22:
        yield _event(second, "run", "info", "training")
    elif second == LOST_S:
        yield _event(second, "engine-1", "error", "lost: ActorDiedError: killed by signal 9")
        yield _event(second + 0.4, "engine-1", "warning", "11 requests go on at engine-0")
    elif second == LOST_S + 3:
        yield _event(second, "manager", "warning", "version 58 is sent again, without engine-1")
    elif second == BACK_S:
        yield _event(second, "engine-1", "info", "serves version 66 again after 44 s")
    elif second % 150 == 0:
        yield _event(second, "trainer", "info", f"checkpoint of step {second // 5} written")


def _event(second: float, who: str, level: str, text: str) -> EventRecord:
    return EventRecord(at=BEGAN + second, who=who, level=level, text=text)


def _trainer(at: float, second: int, chance: random.Random) -> ActivityRecord:
    if second <= 20:
        return _cell("trainer", at, {"restarting": 1.0})
    phase = second % 5
    if phase == 4 and second % 150 > 145:
        return _cell("trainer", at, {"saving": 0.6, "waiting for weights": 0.3, "idle": 0.1})
    if phase == 4:
        return _cell("trainer", at, {"waiting for weights": 0.42, "idle": 0.08, "busy": 0.5})
    if phase == 0:
        is_short = LOST_S < second < BACK_S
        waited = min(1.0, (0.95 if is_short else 0.5) + 0.05 * chance.random())
        return _cell("trainer", at, {"waiting for data": waited, "busy": 1 - waited}, tokens=4600)
    if phase == 1 and LOST_S < second < BACK_S:
        return _cell("trainer", at, {"waiting for data": 0.8, "busy": 0.2})
    return _cell("trainer", at, {"busy": 1.0})


def _engine(who: str, at: float, second: int, chance: random.Random) -> ActivityRecord:
    is_back = who == "engine-1" and BACK_S - 14 <= second < BACK_S
    if second <= 16 or (is_back and second < BACK_S - 3):
        return _cell(who, at, {"restarting": 1.0})
    if second <= 21 or is_back:
        return _cell(who, at, {"waiting for weights": 1.0})
    paused = 0.05 if second % 5 == 4 else 0.0
    starved = max(0.0, chance.gauss(0.04, 0.05)) + (0.25 if second % 45 > 41 else 0.0)
    busy = 1.0 - paused - starved
    tokens = int(1900 * busy)
    return _cell(
        who, at, {"busy": busy, "waiting for data": starved, "paused": paused}, tokens=tokens
    )


def _cell(who: str, at: float, seconds: dict[str, float], tokens: int = 0) -> ActivityRecord:
    there = {activity: amount for activity, amount in seconds.items() if amount}
    return ActivityRecord(who=who, at=at, seconds=there, tokens=tokens, requests=24, version=1)


def rollouts(steps: int, chance: random.Random) -> Iterator[RolloutRecord]:
    for step in range(1, steps + 1):
        for group in range(6):
            first, second = chance.randint(10, 99), chance.randint(10, 99)
            answer = f"{first + second:03}"
            for _ in range(4):
                is_right = chance.random() < skill(step)
                text = answer if is_right else f"{chance.randint(20, 198):03}"
                yield RolloutRecord(
                    step=step,
                    group=step * 6 + group,
                    prompt=f"{first}+{second}=",
                    answer=answer,
                    text=text,
                    reward=float(text == answer),
                    finish_reason="stop",
                    prompt_tokens=[1, 2, 3, 4, 5, 6],
                    tokens=[1, 2, 3, 4],
                    versions=[max(0, step - 2), max(0, step - 2), step - 1, step - 1],
                )
