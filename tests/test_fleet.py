from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from areal_ray.fleet import Fleet, MemberStatus, State


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fleet(clock: Clock, *, max_failed_starts: int = 3, may_restart: bool = True) -> Fleet:
    return Fleet(
        suspect_after_s=10.0,
        dead_after_s=30.0,
        max_failed_starts=max_failed_starts,
        may_restart=may_restart,
        clock=clock,
    )


def serving(clock: Clock, name: str = "a", **options: object) -> Fleet:
    members = fleet(clock, **options)
    members.add(name)
    serve(members, name)
    return members


def serve(members: Fleet, name: str = "a") -> None:
    """From starting to serving."""
    members.started(name)
    members.synced(name)


def brought_to(state: State, clock: Clock) -> Fleet:
    members = fleet(clock)
    members.add("a")
    if state in ("syncing", "serving", "suspect", "draining"):
        members.started("a")
    if state in ("serving", "suspect", "draining"):
        members.synced("a")
    if state == "suspect":
        clock.now_s += 11
        members.tick("a")
    if state == "draining":
        members.drain("a")
    if state == "dead":
        members.failed("a", "it fell over")
    assert members.state("a") == state
    return members


def later(seconds: float) -> Callable[[Fleet, Clock], object]:
    def pass_by(members: Fleet, clock: Clock) -> None:
        clock.now_s += seconds
        members.tick("a")

    return pass_by


MOVES: dict[str, Callable[[Fleet, Clock], object]] = {
    "started": lambda members, _: members.started("a"),
    "synced": lambda members, _: members.synced("a"),
    "answered": lambda members, _: members.answered("a"),
    "silent for 10 s": later(10.0),
    "silent for 11 s": later(11.0),
    "silent for 31 s": later(31.0),
    "failed": lambda members, _: members.failed("a", "an error"),
    "restart": lambda members, _: members.restart("a"),
    "drain": lambda members, _: members.drain("a"),
}
REFUSED = "refused"
# fmt: off
DIAGRAM: dict[State, dict[str, str]] = {
    "starting": {
        "started": "syncing", "synced": REFUSED, "answered": "starting",
        "silent for 10 s": "starting", "silent for 11 s": "starting", "silent for 31 s": "starting",
        "failed": "dead", "restart": REFUSED, "drain": REFUSED,
    },
    "syncing": {
        "started": REFUSED, "synced": "serving", "answered": "syncing",
        "silent for 10 s": "syncing", "silent for 11 s": "syncing", "silent for 31 s": "syncing",
        "failed": "dead", "restart": REFUSED, "drain": REFUSED,
    },
    "serving": {
        "started": REFUSED, "synced": REFUSED, "answered": "serving",
        "silent for 10 s": "serving", "silent for 11 s": "suspect", "silent for 31 s": "dead",
        "failed": "dead", "restart": REFUSED, "drain": "draining",
    },
    # It has been silent for 11 s already.
    "suspect": {
        "started": REFUSED, "synced": REFUSED, "answered": "serving",
        "silent for 10 s": "suspect", "silent for 11 s": "suspect", "silent for 31 s": "dead",
        "failed": "dead", "restart": REFUSED, "drain": "draining",
    },
    "draining": {
        "started": REFUSED, "synced": REFUSED, "answered": "draining",
        "silent for 10 s": "draining", "silent for 11 s": "draining", "silent for 31 s": "dead",
        "failed": "dead", "restart": REFUSED, "drain": REFUSED,
    },
    "dead": {
        "started": REFUSED, "synced": REFUSED, "answered": "dead",
        "silent for 10 s": "dead", "silent for 11 s": "dead", "silent for 31 s": "dead",
        "failed": "dead", "restart": "starting", "drain": REFUSED,
    },
}
# fmt: on


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("before", DIAGRAM)
def test_a_member_goes_where_the_diagram_leads_and_nowhere_else(
    before: State, move: str, clock: Clock
) -> None:
    members, after = brought_to(before, clock), DIAGRAM[before][move]
    if after == REFUSED:
        with pytest.raises(ValueError, match=f"a is {before}: it can't become"):
            MOVES[move](members, clock)
        after = before
    else:
        MOVES[move](members, clock)
    assert members.state("a") == after
    assert members.names(after) == ["a"]


def test_the_example_of_the_docstring(clock: Clock) -> None:
    members = serving(clock)
    clock.now_s = 100.0
    members.answered("a")
    clock.now_s = 110.0
    assert members.tick("a") == "serving"
    clock.now_s = 111.0
    assert members.tick("a") == "suspect"
    clock.now_s = 130.0
    assert members.tick("a") == "suspect"
    clock.now_s = 131.0
    assert members.tick("a") == "dead"
    assert members.restart("a") == 2
    assert members.statuses() == [
        MemberStatus("a", "starting", 2, given_up=False, cause="no answer for 31.0 s")
    ]


def test_an_answer_makes_a_suspect_serve_again_and_its_silence_begins_anew(clock: Clock) -> None:
    members = serving(clock)
    for _ in range(3):
        clock.now_s += 29
        assert members.tick("a") == "suspect"
        members.answered("a")
        assert members.state("a") == "serving"
        clock.now_s += 10
        assert members.tick("a") == "serving"
        members.answered("a")
    assert members.incarnation("a") == 1


def test_how_long_a_start_took_does_not_count_as_silence(clock: Clock) -> None:
    members = fleet(clock)
    members.add("a")
    for incarnation in (1, 2):
        assert members.incarnation("a") == incarnation
        clock.now_s += 1000
        members.started("a")
        clock.now_s += 1000
        members.synced("a")
        clock.now_s += 10
        assert members.tick("a") == "serving"
        members.failed("a", "an error")
        members.restart("a")


def test_late_news_of_a_dead_member_do_not_bring_it_back(clock: Clock) -> None:
    members = serving(clock)
    members.failed("a", "the first cause")
    members.answered("a")
    members.failed("a", "a later one")
    assert members.tick("a") == "dead"
    assert members.statuses() == [
        MemberStatus("a", "dead", 1, given_up=False, cause="the first cause")
    ]


@pytest.mark.parametrize("serves_in_between", [False, True])
def test_a_member_that_fails_to_serve_too_often_in_a_row_is_given_up(
    clock: Clock, serves_in_between: bool
) -> None:
    members = fleet(clock, max_failed_starts=3)
    members.add("a")
    members.failed("a", "could not start")
    assert members.restart("a") == 2
    members.started("a")
    members.failed("a", "could not sync")
    assert members.restart("a") == 3
    if serves_in_between:
        # That ends the row, and dying while it serves is no failed start.
        serve(members)
        members.failed("a", "an error")
        assert not members.is_given_up("a")
        members.restart("a")
        members.failed("a", "could not start")
        members.restart("a")
        members.failed("a", "could not start")
        members.restart("a")
    members.failed("a", "could not start")
    assert members.is_given_up("a")
    assert members.hopeful() == []
    with pytest.raises(ValueError, match="a is given up"):
        members.restart("a")
    assert members.state("a") == "dead"


@pytest.mark.parametrize("move", ["failed", "silent for 31 s"])
def test_without_restarts_each_loss_is_for_good(clock: Clock, move: str) -> None:
    members = serving(clock, may_restart=False)
    MOVES[move](members, clock)
    assert members.is_given_up("a")
    with pytest.raises(ValueError, match="a is given up"):
        members.restart("a")


def test_a_loss_can_be_known_to_be_for_good(clock: Clock) -> None:
    members = serving(clock, "a")
    members.add("b")
    members.failed("a", "its node is gone", for_good=True)
    members.failed("b", "its process is gone")
    assert (members.is_given_up("a"), members.is_given_up("b")) == (True, False)
    # It may become known after it is known to be dead; and is not forgotten.
    members.failed("b", "its node is gone too", for_good=True)
    members.failed("b", "it does not answer")
    assert members.is_given_up("b")


def test_those_are_hopeful_that_serve_or_may_yet_serve(clock: Clock) -> None:
    members = fleet(clock)
    names = ["starting", "syncing", "serving", "suspect", "dead", "draining", "given up"]
    for name in names:
        members.add(name)
    assert members.names("starting") == names
    members.started("syncing")
    for name in ("suspect", "draining", "dead", "given up"):
        serve(members, name)
    clock.now_s += 11
    members.tick("suspect")
    serve(members, "serving")
    members.drain("draining")
    members.failed("dead", "an error")
    members.failed("given up", "an error", for_good=True)
    assert members.hopeful() == ["starting", "syncing", "serving", "suspect", "dead"]
    assert members.names("serving", "suspect") == ["serving", "suspect"]
    assert members.names("dead") == ["dead", "given up"]


def test_whether_any_has_ever_served_is_remembered(clock: Clock) -> None:
    members = fleet(clock)
    members.add("a")
    members.add("b")
    members.started("a")
    assert not members.has_ever_served()
    members.synced("a")
    assert members.has_ever_served()
    members.failed("a", "an error")
    assert members.has_ever_served()


def test_a_draining_member_leaves(clock: Clock) -> None:
    members = serving(clock)
    members.drain("a")
    assert members.names("serving") == []
    assert "a" in members
    members.remove("a")
    assert "a" not in members
    # Its name is free again, and begins as anybody.
    members.add("a")
    assert (members.state("a"), members.incarnation("a")) == ("starting", 1)
    with pytest.raises(ValueError, match="a is in the fleet already"):
        members.add("a")


def test_a_draining_member_that_dies_does_not_come_back(clock: Clock) -> None:
    members = serving(clock)
    members.drain("a")
    clock.now_s += 31
    assert members.tick("a") == "dead"
    assert members.hopeful() == []
    with pytest.raises(ValueError, match="a is given up"):
        members.restart("a")


EDGES: set[tuple[State, State]] = {
    ("starting", "syncing"),
    ("syncing", "serving"),
    ("serving", "suspect"),
    ("suspect", "serving"),
    ("serving", "draining"),
    ("suspect", "draining"),
    ("dead", "starting"),
    *((state, "dead") for state in DIAGRAM if state != "dead"),
}
NAMES = st.sampled_from(["a", "b", "c"])


class AnyFleet(RuleBasedStateMachine):
    """Members to which anything is told at any time, most of it out of place."""

    @initialize(
        max_failed_starts=st.integers(1, 3), may_restart=st.sampled_from([True, True, True, False])
    )
    def begin(self, max_failed_starts: int, may_restart: bool) -> None:
        self.clock = Clock()
        self.max_failed_starts, self.may_restart = max_failed_starts, may_restart
        self.fleet = fleet(self.clock, max_failed_starts=max_failed_starts, may_restart=may_restart)
        self.was: dict[str, MemberStatus] = {}
        self.is_synced: dict[str, bool] = {}
        self.is_lost_for_good: dict[str, bool] = {}
        self.failed_in_a_row: dict[str, int] = {}
        self.last_answer_s: dict[str, float] = {}
        for name in ("a", "b", "c"):
            self.add(name)
        for name in ("a", "b"):
            self.come_up(name)
            self.note()

    def add(self, name: str) -> None:
        self.fleet.add(name)
        self.was[name] = self.status(name)
        self.is_synced[name] = self.is_lost_for_good[name] = False
        self.failed_in_a_row[name] = 0
        self.last_answer_s[name] = self.clock.now_s

    @rule(name=NAMES)
    def started(self, name: str) -> None:
        self.tell(self.fleet.started, name)

    @rule(name=NAMES)
    def synced(self, name: str) -> None:
        if self.tell(self.fleet.synced, name):
            self.is_synced[name] = True
            self.last_answer_s[name] = self.clock.now_s

    @rule(name=NAMES)
    def come_up(self, name: str) -> None:
        """All that it takes at once, so that many members come to serve."""
        self.tell(self.fleet.restart, name)
        self.note(restarted=name)
        self.started(name)
        self.note()
        self.synced(name)

    @rule(name=NAMES)
    def answered(self, name: str) -> None:
        self.fleet.answered(name)
        self.last_answer_s[name] = self.clock.now_s

    @rule(seconds=st.sampled_from([1, 9, 12, 29, 32]))
    def time_passes(self, seconds: int) -> None:
        self.clock.now_s += seconds
        for name, before in self.was.items():
            state = self.fleet.tick(name)
            assert state == self.fleet.state(name)
            silent_s = self.clock.now_s - self.last_answer_s[name]
            if before.state in ("serving", "suspect", "draining") and silent_s > 30:
                assert state == "dead"
            elif before.state in ("serving", "suspect"):
                assert state == ("suspect" if silent_s > 10 else "serving")
            else:
                assert state == before.state

    @rule(name=NAMES, for_good=st.sampled_from([False, False, False, True]))
    def failed(self, name: str, for_good: bool) -> None:
        self.fleet.failed(name, "an error", for_good=for_good)
        self.is_lost_for_good[name] |= for_good

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        may = self.was[name].state == "dead" and not self.was[name].given_up
        assert self.tell(self.fleet.restart, name) == may
        self.note(restarted=name if may else "")

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        self.tell(self.fleet.drain, name)

    @rule(name=NAMES)
    def leave_and_come_anew(self, name: str) -> None:
        if self.was[name].given_up or self.was[name].state == "draining":
            self.fleet.remove(name)
            assert name not in self.fleet
            self.add(name)

    def tell(self, what: Callable[[str], object], name: str) -> bool:
        try:
            what(name)
        except ValueError:
            assert self.status(name) == self.was[name], "what is refused changes nothing"
            return False
        return True

    def status(self, name: str) -> MemberStatus:
        return next(status for status in self.fleet.statuses() if status.name == name)

    def note(self, restarted: str = "") -> None:
        """Look what has become of each, and whether it may have become that."""
        for status in self.fleet.statuses():
            name, before = status.name, self.was[status.name]
            assert before.state == status.state or (before.state, status.state) in EDGES
            if (before.state, status.state) == ("dead", "starting"):
                assert name == restarted
                assert status.incarnation == before.incarnation + 1
                assert not before.given_up
                self.last_answer_s[name] = self.clock.now_s
            else:
                assert status.incarnation == before.incarnation
            if status.state == "dead":
                if before.state in ("starting", "syncing"):
                    self.failed_in_a_row[name] += 1
                self.is_lost_for_good[name] |= before.state == "draining"
                self.is_synced[name] = False
            elif status.state == "serving":
                assert self.is_synced[name], "nobody serves who was not synced since it died"
                self.failed_in_a_row[name] = 0
            self.was[name] = status

    @invariant()
    def each_goes_its_way_by_the_diagram(self) -> None:
        self.note()

    @invariant()
    def those_are_given_up_that_should_be(self) -> None:
        for status in self.fleet.statuses():
            assert status.given_up == (
                status.state == "dead"
                and (
                    not self.may_restart
                    or self.is_lost_for_good[status.name]
                    or self.failed_in_a_row[status.name] >= self.max_failed_starts
                )
            )
        assert self.fleet.hopeful() == [
            status.name
            for status in self.fleet.statuses()
            if not status.given_up and status.state != "draining"
        ]


def test_whatever_is_told_nobody_serves_who_was_not_synced_since_it_died() -> None:
    run_state_machine_as_test(
        AnyFleet,
        settings=settings(
            max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )
