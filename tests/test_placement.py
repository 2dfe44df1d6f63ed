"""What a run asks of the cluster."""

from __future__ import annotations

import threading

import pytest

from areal_ray.config import Config
from areal_ray.config_file import from_mapping
from areal_ray.placement import Cluster, cluster, plan


def config(**generation: object) -> Config:
    return from_mapping({"name": "a", "model": {"path": "m"}, "generation": generation})


@pytest.mark.parametrize(
    ("device", "generation", "resources"),
    [
        ("cpu", {"engines": 2}, [{"CPU": 1}, {"CPU": 0.5}, {"CPU": 0.5}]),
        ("cpu", {"engines": 2, "colocated": True}, [{"CPU": 1.5}, {"CPU": 0.5}]),
        (
            "cuda",
            {"engines": 2, "tensor_parallel": 4},
            [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}],
        ),
        # The trainer uses a GPU of the first engine, and asks for none.
        (
            "cuda",
            {"engines": 2, "tensor_parallel": 4, "colocated": True},
            [{"CPU": 2, "GPU": 4}, {"CPU": 1, "GPU": 4}],
        ),
    ],
)
def test_what_each_bundle_asks_for(device, generation, resources) -> None:
    made = plan(config(**generation), device=device)
    assert [bundle.resources for bundle in made.bundles] == resources
    assert len(made.seats("engine")) == 2
    ((bundle, trainer),) = made.seats("trainer")
    assert bundle == 0
    assert trainer.gpus == (0 if device == "cpu" or "colocated" in generation else 1)


def test_a_ray_that_does_not_shut_down_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def hanging() -> None:
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr("ray.shutdown", hanging)
    monkeypatch.setattr(cluster, "LEAVE_TIMEOUT_S", 0.2)
    Cluster(started_here=True, device="cpu", dashboard_url="").leave()
    assert has_begun.is_set()
    may_end.set()


def test_a_cluster_that_was_there_before_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        pytest.fail("it was shut down")

    monkeypatch.setattr("ray.shutdown", never)
    Cluster(started_here=False, device="cpu", dashboard_url="").leave()
