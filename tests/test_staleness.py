from __future__ import annotations

import pytest

from areal_ray.staleness import StalenessLedger


def ledger(*, batch: int = 4, max_staleness: int = 1, max_concurrent: int = 100) -> StalenessLedger:
    return StalenessLedger(batch=batch, max_staleness=max_staleness, max_concurrent=max_concurrent)


def test_capacity_is_the_batches_that_staleness_allows() -> None:
    counted = ledger()
    # (1 + 0 + 1) * 4 = 8 groups may be on their way at version 0.
    for _ in range(8):
        counted.submit()
    assert counted.capacity == 0
    for _ in range(8):
        counted.accept()
    assert counted.capacity == 0
    counted.commit(1)
    # (1 + 1 + 1) * 4 - 8 accepted = 4.
    assert counted.capacity == 4


def test_without_staleness_one_batch_is_on_its_way_at_a_time() -> None:
    counted = ledger(max_staleness=0)
    for version in range(1, 4):
        assert counted.capacity == 4
        for _ in range(4):
            counted.submit()
            counted.accept()
        assert counted.capacity == 0
        counted.commit(version)


def test_the_concurrency_limit_binds_when_it_is_the_smaller() -> None:
    counted = ledger(max_concurrent=3)
    for _ in range(3):
        counted.submit()
    assert counted.capacity == 0
    counted.accept()
    assert counted.capacity == 1


@pytest.mark.parametrize("end", ["filter", "fail"])
def test_a_group_that_is_not_accepted_gives_its_place_back(end: str) -> None:
    counted = ledger()
    counted.submit()
    assert counted.capacity == 7
    getattr(counted, end)()
    assert counted.capacity == 8


def test_an_expired_group_gives_its_place_back() -> None:
    counted = ledger()
    counted.submit()
    counted.accept()
    assert counted.capacity == 7
    counted.expire()
    assert counted.capacity == 8
    counts = counted.counts
    assert counts.submitted == 1
    assert counts.expired == 1


def test_what_cannot_happen_is_refused() -> None:
    counted = ledger(batch=1, max_staleness=0)
    with pytest.raises(ValueError, match="not running"):
        counted.accept()
    with pytest.raises(ValueError, match="never accepted"):
        counted.expire()
    counted.submit()
    with pytest.raises(ValueError, match="beyond the ledger's capacity"):
        counted.submit()
    counted.commit(2)
    with pytest.raises(ValueError, match="version 1 committed after version 2"):
        counted.commit(1)
