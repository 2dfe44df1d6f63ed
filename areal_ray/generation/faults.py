"""What can go wrong with a simulated engine, and when.

A fault strikes at once, or at the one trigger that it names: `after_s` seconds, when
`after_requests` more requests have come (0: with the next one), or with `probability` at each
request. A fault of an engine's spec counts from the call of `start`, an injected one from its
injection. `Die`, `Wedge` and `Slow` act when they strike; each of the others waits for the next
call of its kind and spoils just that one. A fault that strikes with a request hits that request.

Chance is seeded: the same requests in the same order meet the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec


class _Triggered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    after_s: float | None = None
    after_requests: int | None = None
    probability: float | None = None

    def __post_init__(self) -> None:
        triggers = (self.after_s, self.after_requests, self.probability)
        if sum(trigger is not None for trigger in triggers) > 1:
            raise ValueError(
                "a fault has one trigger at most: after_s, after_requests or probability"
            )


class Die(_Triggered, frozen=True):
    """The engine is lost. Running requests end with what they had made; later calls raise."""


class Wedge(_Triggered, frozen=True):
    """No token is made any more and no call answers, while the engine looks alive."""


class Slow(_Triggered, frozen=True, kw_only=True):
    """Tokens come at `factor` times the rate (at 0, none), for good if no duration is given."""

    factor: float
    duration_s: float | None = None


class FailRequest(_Triggered, frozen=True):
    """One `generate` raises."""


class SpoilResult(_Triggered, frozen=True, kw_only=True):
    """One `generate` gives a result that is wrong."""

    how: Literal["missing_completion", "nan_logprob"]


class FailStart(_Triggered, frozen=True):
    """`start` raises when it should be done."""


Step = Literal["receive", "pause", "release_kv", "swap", "stamp", "drop", "restore_kv", "resume"]
"""Of a change of weights, as in `weight_switch.SwitchSteps`."""

RestStep = Literal["sleep", "wake"]
"""Of a rest, likewise."""


class FailStep(_Triggered, frozen=True, kw_only=True):
    """One step of a change of weights, or of a rest, fails: before it has any effect, or with all
    of it."""

    step: Step | RestStep
    how: Literal["raise", "hang", "die"]
    when: Literal["before", "after"]


Fault = Die | Wedge | Slow | FailRequest | SpoilResult | FailStart | FailStep
AnyFault = TypeVar("AnyFault", bound=_Triggered)


class FaultPlan:
    """The faults that strike with a request, and those that wait for a call of their kind."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._requests = 0
        self._counted: list[tuple[int, Fault]] = []
        self._by_chance: list[tuple[float, Fault]] = []
        self._waiting: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """A fault whose trigger is `after_requests` or `probability`."""
        if fault.after_requests is not None:
            self._counted.append((self._requests + fault.after_requests, fault))
        elif fault.probability is not None:
            self._by_chance.append((fault.probability, fault))

    def at_request(self) -> list[Fault]:
        """A request has come: the faults that strike with it."""
        strikes = [fault for number, fault in self._counted if number == self._requests]
        strikes += [fault for chance, fault in self._by_chance if self._random.random() < chance]
        self._requests += 1
        return strikes

    def hold(self, fault: Fault) -> None:
        """Keep it for the next call of its kind."""
        self._waiting.append(fault)

    def take(
        self, kind: type[AnyFault], of: Callable[[AnyFault], bool] = lambda _: True
    ) -> AnyFault | None:
        """The first fault of this kind that waits and is meant, once."""
        for fault in self._waiting:
            if isinstance(fault, kind) and of(fault):
                self._waiting.remove(fault)
                return fault
        return None
