"""The life of each member of a pool, engine or worker. A pure state machine; its clock is injected.

    starting -> syncing -> serving <-> suspect
        ^           |          |          |
        |           v          v          v
        `--------- dead <-----------------'        serving -> draining -> (gone)

Only a serving member gets new work. One that has not answered for `suspect_after_s` is suspect:
it keeps what it has and gets nothing new; an answer makes it serve again, and after `dead_after_s`
of silence it is dead. A health flag stays green on a wedged process, so an answer must be proof
of work. A dead member comes back only by way of syncing: it never serves weights of another
version than the rest. Each start is an incarnation with a number, so that late news of the one
before does no harm. One that fails to serve `max_failed_starts` times in a row is given up, and
so is one that dies while it is leaving.

Example: suspect_after_s 10, dead_after_s 30. Last answer at 100 s; at 111 s it is suspect, at
131 s dead; `restart` makes incarnation 2 of it, which is starting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

State = Literal["starting", "syncing", "serving", "suspect", "draining", "dead"]


class MemberStatus(msgspec.Struct, frozen=True):
    name: str
    state: State
    incarnation: int
    given_up: bool
    cause: str
    """Why it died last, if it ever did."""


@dataclass
class _Member:
    state: State
    last_answer: float
    incarnation: int = 1
    failed_starts: int = 0
    has_served: bool = False
    given_up: bool = False
    cause: str = ""


class Fleet:
    def __init__(
        self,
        *,
        suspect_after_s: float,
        dead_after_s: float,
        max_failed_starts: int,
        may_restart: bool,
        clock: Callable[[], float],
    ) -> None:
        self._suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._max_failed_starts = max_failed_starts
        self._may_restart = may_restart
        self._clock = clock
        self._members: dict[str, _Member] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def state(self, name: str) -> State:
        return self._members[name].state

    def is_given_up(self, name: str) -> bool:
        return self._members[name].given_up

    def incarnation(self, name: str) -> int:
        return self._members[name].incarnation

    def names(self, *states: State) -> list[str]:
        return [name for name, member in self._members.items() if member.state in states]

    def hopeful(self) -> list[str]:
        """Those that serve or may yet serve."""
        return [
            name
            for name, member in self._members.items()
            if not member.given_up and member.state != "draining"
        ]

    def has_ever_served(self) -> bool:
        return any(member.has_served for member in self._members.values())

    def statuses(self) -> list[MemberStatus]:
        return [
            MemberStatus(name, m.state, m.incarnation, m.given_up, m.cause)
            for name, m in self._members.items()
        ]

    def add(self, name: str, *, has_served: bool = False) -> None:
        """`has_served`: it did so before this fleet knew of it."""
        if name in self._members:
            raise ValueError(f"{name} is in the fleet already")
        self._members[name] = _Member("starting", self._clock(), has_served=has_served)

    def started(self, name: str) -> None:
        self._move(name, ("starting",), "syncing")

    def synced(self, name: str) -> None:
        member = self._move(name, ("syncing",), "serving")
        member.has_served = True
        member.failed_starts = 0
        member.last_answer = self._clock()

    def answered(self, name: str) -> None:
        """Proof of work: a suspect serves again."""
        member = self._members[name]
        member.last_answer = self._clock()
        if member.state == "suspect":
            member.state = "serving"

    def tick(self, name: str) -> State:
        """Let the time pass for one of them; returns its state by now."""
        member = self._members[name]
        silent_s = self._clock() - member.last_answer
        if member.state in ("serving", "suspect", "draining") and silent_s > self._dead_after_s:
            self._die(member, f"no answer for {silent_s:.1f} s")
        elif member.state == "serving" and silent_s > self._suspect_after_s:
            member.state = "suspect"
        return member.state

    def failed(self, name: str, cause: str, *, for_good: bool = False) -> None:
        """It is known to be gone, or could not be started or synced."""
        member = self._members[name]
        if member.state != "dead":
            self._die(member, cause)
        member.given_up = member.given_up or for_good

    def restart(self, name: str) -> int:
        """Begin the next incarnation of a dead member; returns its number."""
        member = self._members[name]
        if member.given_up:
            raise ValueError(f"{name} is given up")
        self._move(name, ("dead",), "starting")
        member.incarnation += 1
        member.last_answer = self._clock()
        return member.incarnation

    def drain(self, name: str) -> None:
        """No new work; it leaves when it has none."""
        self._move(name, ("serving", "suspect"), "draining")

    def remove(self, name: str) -> None:
        del self._members[name]

    def _die(self, member: _Member, cause: str) -> None:
        if member.state in ("starting", "syncing"):
            member.failed_starts += 1
        member.cause = cause
        member.given_up = (
            member.state == "draining"
            or not self._may_restart
            or member.failed_starts >= self._max_failed_starts
        )
        member.state = "dead"

    def _move(self, name: str, allowed: tuple[State, ...], to: State) -> _Member:
        member = self._members[name]
        if member.state not in allowed:
            raise ValueError(f"{name} is {member.state}: it can't become {to}")
        member.state = to
        return member
