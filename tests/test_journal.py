from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_ray import journal
from areal_ray.data import PromptSource
from areal_ray.errors import JournalError
from areal_ray.journal import Journal
from areal_ray.rollout_book import Event, RolloutBook
from areal_ray.types import Prompt


def book() -> RolloutBook:
    prompts = PromptSource([Prompt(text=str(i)) for i in range(10)], seed=0, shuffle=True)
    return RolloutBook(prompts, batch=4, max_staleness=1, max_concurrent=100)


def eventful() -> tuple[RolloutBook, list[Event]]:
    """A book to which everything has happened that can."""
    kept = book()
    for _ in range(7):
        kept.draw()
    for group_id in (0, 1, 2):
        kept.end(group_id, "accepted")
    kept.end(3, "filtered", tokens=7)
    kept.end(4, "failed")
    kept.end(5, "timed out")
    kept.expire(2)
    kept.trained([0, 1])
    kept.commit(1)
    kept.pause(True)
    return kept, kept.take_events()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollout.journal"


def test_there_is_none_at_first(path: Path) -> None:
    assert Journal(path).read() is None


def test_what_is_written_is_read_back(path: Path) -> None:
    kept, events = eventful()
    written = Journal(path)
    written.begin(book().state)
    written.append(events[:3])
    written.append([])
    written.append(events[3:])
    assert Journal(path).read() == (book().state, events)
    # And the same of a book in the middle of its life.
    written.begin(kept.state)
    kept.draw()
    written.append(later := kept.take_events())
    state, since = Journal(path).read()
    assert (state.counts.version, since) == (1, later)
    again = RolloutBook(
        PromptSource([Prompt(text=str(i)) for i in range(10)], seed=0, shuffle=True),
        batch=4,
        max_staleness=1,
        max_concurrent=100,
        state=state,
    )
    again.replay(since)
    assert again.state == kept.state


def test_a_last_line_that_is_cut_anywhere_is_ignored(path: Path) -> None:
    _, events = eventful()
    written = Journal(path)
    written.begin(book().state)
    snapshot_bytes = path.stat().st_size
    written.append(events)
    whole = path.read_bytes()
    assert whole.endswith(b"\n")
    for cut in range(snapshot_bytes, len(whole) + 1):
        path.write_bytes(whole[:cut])
        # One line is the snapshot; of the others those count that have their end.
        is_there = whole[:cut].count(b"\n") - 1
        assert Journal(path).read() == (book().state, events[:is_there])
    assert is_there == len(events) == 17


def test_a_journal_that_was_cut_goes_on_after_it_is_begun_anew(path: Path) -> None:
    _, events = eventful()
    cut = Journal(path)
    cut.begin(book().state)
    cut.append(events)
    path.write_bytes(path.read_bytes()[:-3])
    again = Journal(path)
    _, known = again.read()
    restored = book()
    restored.replay(known)
    again.begin(restored.state)
    again.append(events[-1:])
    assert Journal(path).read() == (restored.state, events[-1:])


def test_a_leftover_of_a_begin_that_was_killed_does_not_matter(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b'{"next_group": 3, "cou')
    assert Journal(path).read() is None
    Journal(path).begin(book().state)
    path.with_suffix(".new").write_bytes(b"x" * 10_000)
    assert Journal(path).read() == (book().state, [])
    kept, _ = eventful()
    Journal(path).begin(kept.state)
    assert Journal(path).read() == (kept.state, [])
    assert not path.with_suffix(".new").exists()


def test_at_every_moment_of_a_begin_one_whole_journal_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, events = eventful()
    written = Journal(path)
    written.begin(book().state)
    written.append(events)
    seen = []

    class Killed(BaseException):
        pass

    def killed_before_it_is_renamed(new: Path, old: Path) -> None:
        seen.append((Journal(old).read(), Journal(new).read()))
        raise Killed

    monkeypatch.setattr(os, "replace", killed_before_it_is_renamed)
    with pytest.raises(Killed):
        written.begin(kept.state)
    # The old one is untouched, and the new one was whole before it takes the old one's place.
    assert seen == [((book().state, events), (kept.state, []))]
    assert Journal(path).read() == (book().state, events)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [lines[0], b'["drawn",0', *lines[1:]], "Input data was truncated"),
        (lambda lines: [lines[0], b"\0\0\0\0", *lines[1:]], "JSON is malformed"),
        (lambda lines: [lines[0], b'["eaten",0]', *lines[1:]], "Invalid value"),
        (lambda lines: [lines[0], b"", *lines[1:]], "Input data was truncated"),
        (lambda lines: lines[1:], "Expected `object`, got `array`"),
        (lambda lines: [], "list index out of range"),
    ],
    ids=["cut", "zeros", "unknown event", "empty line", "no snapshot", "empty"],
)
def test_anything_else_that_is_wrong_in_it_is_refused(path: Path, spoil, message: str) -> None:
    _, events = eventful()
    written = Journal(path)
    written.begin(book().state)
    written.append(events)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in spoil(lines)))
    with pytest.raises(
        JournalError, match=f"rollout.journal is no journal of this version: {message}"
    ):
        Journal(path).read()


def test_after_many_events_it_wants_to_be_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "EVENTS_PER_SNAPSHOT", 5)
    kept, events = eventful()
    written = Journal(path)
    written.begin(book().state)
    assert not written.wants_snapshot
    written.append(events[:4])
    assert not written.wants_snapshot
    written.append(events[4:5])
    assert written.wants_snapshot
    written.append(events[5:])
    assert written.wants_snapshot
    written.begin(kept.state)
    assert not written.wants_snapshot
    assert path.read_bytes().count(b"\n") == 1
