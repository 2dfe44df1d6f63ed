"""However many ranks a trainer has, and however they hold the model, it learns the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import trainer_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trainer_ranks import ALGORITHMS, Done

from areal_ray.training.ranks import Ranks
from areal_ray.training.spec import RankPlace, StepMetrics
from areal_ray.weights.transport import Rendezvous

RANKS = 2
TIMEOUT_S = 120.0
WAYS = {"replicated": "no", "sharded": "yes"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(tiny_model: Path, directory: Path) -> dict[str, Done]:
    return {
        name: trainer_ranks.run(tiny_model, name, None, directory / "alone") for name in ALGORITHMS
    }


@pytest.fixture(scope="module", params=WAYS)
def together(
    request: pytest.FixtureRequest, tiny_model: Path, directory: Path, alone: dict[str, Done]
) -> Path:
    """The directory in which each of two ranks has told what it did."""
    meeting = Rendezvous("127.0.0.1", timeout_s=TIMEOUT_S)
    script = Path(trainer_ranks.__file__)
    processes = []
    for rank in range(RANKS):
        place = RankPlace(rank, RANKS, meeting.host, meeting.port, TIMEOUT_S)
        encoded = msgspec.json.encode(place).decode()
        arguments = (encoded, WAYS[request.param], str(tiny_model), str(directory))
        do = f"import trainer_ranks; trainer_ranks.main(*{arguments!r})"
        processes.append(subprocess.Popen([sys.executable, "-c", do], cwd=script.parent))
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return directory / request.param


def told(together: Path, name: str, rank: int = 0) -> tuple[Done, StepMetrics]:
    return torch.load(together / name / f"rank-{rank}.pt", weights_only=False)


def assert_alike(one: StepMetrics, other: StepMetrics) -> None:
    assert one.tokens == other.tokens
    for name in ("loss", "grad_norm", "entropy", "value_loss", "kl_to_reference", "clipped"):
        mine, theirs = getattr(one, name), getattr(other, name)
        same = mine is theirs is None or mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)
        assert same, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_change_no_loss_and_no_gradient(
    alone: dict[str, Done], together: Path, name: str
) -> None:
    (done, _), by_one = told(together, name), alone[name]
    assert done.warmup_loss == pytest.approx(by_one.warmup_loss, rel=1e-4)
    for one, other in zip(done.metrics, by_one.metrics, strict=True):
        assert_alike(one, other)
    assert len(done.gradients) == len(by_one.gradients) > 0
    for one, other in zip(done.gradients, by_one.gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_tells_the_same_and_has_its_share(together: Path, name: str) -> None:
    (first, _), (second, _) = told(together, name, 0), told(together, name, 1)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        assert msgspec.structs.replace(one, seconds=0) == msgspec.structs.replace(other, seconds=0)
    whole = sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories())
    assert first.share + second.share == whole
    assert abs(first.share - second.share) <= max(
        len(t.prompt_ids) + len(t.response_ids) for t in trajectories()
    )


def trajectories() -> list:
    return [t for group in trainer_ranks.GROUPS for t in group.trajectories]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_checkpoint_can_be_taken_up_by_another_number_of_ranks(
    alone: dict[str, Done], together: Path, tiny_model: Path, name: str
) -> None:
    _, two_from_one = told(together, name)
    assert_alike(two_from_one, alone[name].metrics[1])
    one_from_two = trainer_ranks.go_on(tiny_model, name, None, together)
    assert_alike(one_from_two, alone[name].metrics[1])


def test_both_ranks_write_their_part_of_a_checkpoint(together: Path) -> None:
    parts = {path.name.split("_")[2] for path in together.glob("plain/checkpoint/*.distcp")}
    assert parts == {"0", "1"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_exported_model_is_whole(together: Path, directory: Path, name: str) -> None:
    mine = load_file(together / name / "model" / "model.safetensors")
    theirs = load_file(directory / "alone" / name / "model" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        # A gradient near zero may have either sign, and Adam steps by the sign: two epochs, three
        # parts and two steps of the learning rate 1e-4 are the most that can be between them.
        torch.testing.assert_close(tensor, theirs[key], atol=2.4e-3, rtol=0)
        assert (tensor - theirs[key]).abs().mean() < 2e-5, key


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 5))
def test_every_item_is_in_one_share_and_no_share_is_much_larger(
    sizes: list[int], count: int
) -> None:
    items = list(enumerate(sizes))
    shares = [Ranks(rank, count).share(items, lambda item: item[1]) for rank in range(count)]
    assert sorted(item for share in shares for item in share) == items
    loads = [sum(size for _, size in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
