"""How long a killed engine is missed: seconds and tokens/s, with two real vLLM engines.

A real crew on the demo's tiny model (two engines, a trainer that trains, weight updates after
every step) with the default settings. `kill -9` strikes the vLLM process of one engine, later
the generation actor of the other. Three moments are told from the controller's status and the
worker's groups, asked every 20 ms:

- noticed: the engine does not count as serving any more;
- went on: none of the groups it worked on at the kill is still assigned to it: they are done, or
  go on at the other engine;
- serves: it is back, proved itself, and holds the current weights (looked up in the engine).

Tokens/s are those of finished groups: for some seconds before the kill, from the kill until the
engine serves again, and for some seconds after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from common import (
    Figure,
    Learning,
    local_cluster,
    pid_of,
    resolved,
    say,
    show,
    started_crew,
    tiny_model,
)
from ray.actor import ActorHandle

from areal_ray import Completion, Prompt
from areal_ray.actors.crew import Crew
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.fleet import MemberStatus
from areal_ray.staleness import LedgerCounts
from areal_ray.tasks import guarded

PROMPTS = [Prompt(text=f"{a}+{b}=") for a in range(10, 100) for b in range(10, 100)]
LOOK_EVERY_S = 0.02
RECOVERY_TIMEOUT_S = 240.0


def length(prompt: Prompt, completion: Completion) -> float:
    return float(len(completion.token_ids))


@dataclass(frozen=True)
class Look:
    at: float
    tokens: int
    engines: dict[str, MemberStatus]
    groups: dict[int, str]
    """The engine that each running group is assigned to."""
    ledger: LedgerCounts


@dataclass(frozen=True)
class Recovery:
    what: str
    noticed_s: float
    went_on_s: float
    serves_s: float
    groups_struck: int
    tokens_before: float
    tokens_during: float
    tokens_after: float
    longest_silence_s: float
    failed: int
    expired: int


class Observer:
    """Looks at a crew over and over, and keeps what it saw."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.looks: list[Look] = []

    async def for_ever(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def first(self, condition: Callable[[Look], bool], *, since: float) -> Look:
        """The first look since then that fulfils the condition; waits for it."""
        seen = 0
        while True:
            for look in self.looks[seen:]:
                if look.at >= since and condition(look):
                    return look
            seen = len(self.looks)
            await asyncio.sleep(LOOK_EVERY_S)

    def tokens_per_s(self, start: float, end: float) -> float:
        within_them = [look for look in self.looks if start <= look.at <= end]
        first, last = within_them[0], within_them[-1]
        return (last.tokens - first.tokens) / (last.at - first.at)

    def longest_silence_s(self, start: float, end: float) -> float:
        """The longest time in which no group was finished."""
        longest = 0.0
        since, tokens = start, -1
        for look in self.looks:
            if start <= look.at <= end:
                if look.tokens != tokens:
                    since, tokens = look.at, look.tokens
                longest = max(longest, look.at - since)
        return longest

    async def _look(self) -> None:
        status, groups = await asyncio.gather(
            self._crew.controller.status.remote(),
            self._crew._workers["worker-0"].running.remote(),
        )
        engines = {member.name: member for member in status.engines}
        self.looks.append(
            Look(time.perf_counter(), status.generated_tokens, engines, groups, status.ledger)
        )


async def strike(
    what: str,
    victim: str,
    kill: Callable[[ActorHandle], Awaitable[None]],
    crew: Crew,
    observer: Observer,
    learning: Learning,
    settle_s: float,
) -> Recovery:
    await asyncio.sleep(settle_s)
    before = observer.looks[-1]
    struck = {group_id for group_id, engine in before.groups.items() if engine == victim}
    await kill(crew.engines[victim])
    killed = time.perf_counter()
    incarnation = before.engines[victim].incarnation

    def is_noticed(look: Look) -> bool:
        member = look.engines[victim]
        return member.state != "serving" or member.incarnation > incarnation

    def has_gone_on(look: Look) -> bool:
        return all(look.groups.get(group_id) != victim for group_id in struck)

    def serves(look: Look) -> bool:
        member = look.engines[victim]
        return member.state == "serving" and member.incarnation > incarnation

    noticed = await observer.first(is_noticed, since=killed)
    went_on = await observer.first(has_gone_on, since=killed)
    back = await observer.first(serves, since=killed)
    held = await crew.engines[victim].__ray_call__.remote(lambda actor: actor._engine._version)
    if held < learning.version - 1:
        raise AssertionError(f"{victim} serves version {held}, not {learning.version}")
    say(f"{what}: {victim} serves again after {back.at - killed:.1f} s, version {held}")
    await asyncio.sleep(settle_s)
    after = observer.looks[-1]
    return Recovery(
        what=what,
        noticed_s=noticed.at - killed,
        went_on_s=went_on.at - killed,
        serves_s=back.at - killed,
        groups_struck=len(struck),
        tokens_before=observer.tokens_per_s(killed - settle_s, killed),
        tokens_during=observer.tokens_per_s(killed, back.at),
        tokens_after=observer.tokens_per_s(back.at, after.at),
        longest_silence_s=observer.longest_silence_s(killed, back.at),
        failed=after.ledger.failed - before.ledger.failed,
        expired=after.ledger.expired - before.ledger.expired,
    )


async def kill_vllm(actor: ActorHandle) -> None:
    parent = await pid_of(actor)
    os.kill(await asyncio.to_thread(_engine_core_of, parent), signal.SIGKILL)


async def kill_actor(actor: ActorHandle) -> None:
    os.kill(await pid_of(actor), signal.SIGKILL)


def _engine_core_of(parent: int) -> int:
    for child in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, child.read_text().split()):
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise ProcessLookupError(f"process {parent} has no vLLM engine")


async def measure(config: Config, model: Path, settle_s: float, rounds: int) -> list[Recovery]:
    async with started_crew(config, model, prompts=PROMPTS, reward=length) as crew:
        observer, learning = Observer(crew), Learning(crew)

        async def strikes() -> list[Recovery]:
            recoveries = []
            for _ in range(rounds):
                for what, victim, kill in (
                    ("vLLM process", "engine-0", kill_vllm),
                    ("generation actor", "engine-1", kill_actor),
                ):
                    struck = strike(what, victim, kill, crew, observer, learning, settle_s)
                    recoveries.append(
                        await within(RECOVERY_TIMEOUT_S, struck, who=victim, doing="recovering")
                    )
            return recoveries

        return await guarded(strikes(), learning.for_ever(), observer.for_ever(), crew.watch())


def report(recoveries: list[Recovery]) -> None:
    rows = [
        [
            one.what,
            f"{one.noticed_s:.2f}",
            f"{one.went_on_s:.2f}",
            f"{one.serves_s:.1f}",
            f"{one.groups_struck}",
            *(f"{r:,.0f}" for r in (one.tokens_before, one.tokens_during, one.tokens_after)),
            f"{one.longest_silence_s:.2f}",
            f"{one.failed}",
            f"{one.expired}",
        ]
        for one in recoveries
    ]
    figures = dict[str, Figure]()
    for what in dict.fromkeys(one.what for one in recoveries):
        mine = [one for one in recoveries if one.what == what]
        key = what.replace(" ", "_").lower()
        for name in ("noticed_s", "went_on_s", "serves_s", "tokens_before", "tokens_during"):
            figures[f"{key}_{name}"] = [round(getattr(one, name), 3) for one in mine]
        figures[f"{key}_tokens_after"] = [round(one.tokens_after, 3) for one in mine]
    moments = ["noticed s", "went on s", "serves s", "groups struck"]
    rates = ["tokens/s before", "during", "after"]
    show(["killed", *moments, *rates, "longest silence s", "failed", "expired"], rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of both kills")
    parser.add_argument("--settle-s", type=float, default=8.0, help="before and after each kill")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    with tiny_model() as model:
        config = resolved(
            {
                "model": {"path": str(model)},
                "data": {"max_prompt_tokens": 8},
                "generation": {"engines": 2, "max_new_tokens": options.new_tokens},
                "rollout": {"samples": 8, "max_staleness": 2},
                "trainer": {"groups_per_step": 32},
            }
        )
        with local_cluster(config):
            recoveries = asyncio.run(measure(config, model, options.settle_s, options.rounds))
    report(recoveries)


if __name__ == "__main__":
    main()
