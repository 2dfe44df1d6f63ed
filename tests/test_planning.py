from __future__ import annotations

from pathlib import Path

import pytest

from areal_ray.config import Config, resolve
from areal_ray.config_file import from_mapping
from areal_ray.placement.fit import Node, fit
from areal_ray.placement.overview import overview
from areal_ray.placement.plan import plan
from areal_ray.planning.figures import Chapter, Figure
from areal_ray.planning.flow import flow, milestones
from areal_ray.planning.memory import MemoryPlan
from areal_ray.planning.model_size import ModelSize, UnknownSize, model_size

PARAMETERS = 84_416
"""Of the tiny model: 2 x 14 x 64 embeddings and head, 41,248 in each of 2 layers, a norm of 64."""
GIB = 2**30


def made(device: str, **sections: object) -> Config:
    raw = {"name": "planned", "model": {"path": "some/model"}} | sections
    return resolve(from_mapping(raw), device=device)


def named(chapters: list[Chapter], title: str) -> dict[str, Figure]:
    (chapter,) = (chapter for chapter in chapters if chapter.title.startswith(title))
    return {figure.name: figure for figure in chapter.figures}


def memory(config: Config) -> list[Chapter]:
    return MemoryPlan(config, model_size(config)).chapters


def on(tiny_model: Path, device: str, **sections: object) -> list[Chapter]:
    return memory(made(device, model={"path": str(tiny_model)}, **sections))


def test_a_models_size_is_read_from_its_files(tiny_model: Path) -> None:
    size = model_size(made("cpu", model={"path": str(tiny_model)}))
    assert isinstance(size, ModelSize)
    assert size.parameters == PARAMETERS
    assert size.kv_token_bytes == 2 * 2 * 2 * 32 * 4  # K and V, 2 layers, 2 heads of 32, float32
    # Without the head of 14 x 64, with one number for each of 64, and a bias.
    assert size.critic_parameters == PARAMETERS - 14 * 64 + 64 + 1


def test_what_is_not_here_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unknown = model_size(made("cpu", model={"path": "nobody/has-this-model"}))
    assert isinstance(unknown, UnknownSize)
    assert "not in the local Hugging Face cache" in unknown.why
    factory = made("cpu", model={"factory": "mine.py:model"}, runs_dir=str(tmp_path))
    assert model_size(factory) == UnknownSize("not known before model.factory has made it")


def test_a_model_that_an_earlier_run_has_made_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "base_model").symlink_to(tiny_model)
    size = model_size(made("cpu", model={"factory": "mine.py:model"}, runs_dir=str(tmp_path)))
    assert size.parameters == PARAMETERS
    assert "an earlier run of this name" in size.source


def test_a_trainer_holds_weights_gradients_and_two_moments_in_float32(tiny_model: Path) -> None:
    figures = named(on(tiny_model, "cpu"), "Memory of each trainer rank")
    assert figures["weights"].value == figures["gradients"].value == PARAMETERS * 4
    assert figures["Adam"].value == PARAMETERS * 8
    assert figures["in all"].value == PARAMETERS * 16
    assert "84.42 K parameters × 4 bytes (float32)" in figures["weights"].how


def test_sharded_ranks_hold_a_part_each_with_critic_and_reference(tiny_model: Path) -> None:
    algorithm = {
        "advantage": "gae",
        "critic": {"enabled": True},
        "kl": {"coefficient": 0.1},
    }
    chapters = on(tiny_model, "cuda", trainer={"ranks": 4}, algorithm=algorithm)
    figures = named(chapters, "Memory of each trainer rank's GPU")
    assert figures["weights"].value == figures["reference"].value == PARAMETERS
    assert figures["critic"].value == (PARAMETERS - 14 * 64 + 65) * 16 // 4
    assert figures["buckets"].value == 3 * PARAMETERS * 2  # the whole model, in bfloat16, thrice
    assert named(chapters, "Host memory")["reading the model"].value == 4 * PARAMETERS * 4


def test_of_adapters_two_sets_are_held_and_one_is_trained(tiny_model: Path) -> None:
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    chapters = on(tiny_model, "cpu", trainer={"lora": lora})
    figures = named(chapters, "Memory of each trainer rank")
    adapters = 2 * 4 * ((64 + 64) + (128 + 64))  # 2 layers, rank 4, in and out of each
    assert figures["adapters"].value == adapters * (2 * 4 + 4 + 8)
    assert "gradients" not in figures
    # A checkpoint has the policy's adapters with their moments, and none of the model's weights.
    assert named(chapters, "Disk")["checkpoints"].value == 3 * adapters * 12


def test_ranks_with_copies_need_room_to_sum_gradients(tiny_model: Path) -> None:
    figures = named(on(tiny_model, "cpu", trainer={"ranks": 2}), "Memory of each trainer rank")
    assert figures["gradient sums"].value == PARAMETERS * 4  # less than one buffer


def test_an_engines_parts_are_told_for_each_gpu(tiny_model: Path) -> None:
    generation = {"tensor_parallel": 2, "kv_cache_gib": 3}
    figures = named(on(tiny_model, "cuda", generation=generation), "Memory of each GPU")
    assert figures["weights"].value == figures["staging copy"].value == PARAMETERS * 2 // 2
    assert figures["buckets"].value == 2 * PARAMETERS * 2
    assert figures["KV cache"].value == 3 * GIB
    assert figures["in all"].value == sum(
        figure.value for name, figure in figures.items() if name != "in all"
    )


def test_host_staging_is_counted_where_it_is(tiny_model: Path) -> None:
    chapters = on(tiny_model, "cuda", weights={"staging": "host"}, generation={"engines": 3})
    assert "staging copy" not in named(chapters, "Memory of each GPU")
    assert named(chapters, "Host memory")["staging copies"].value == 3 * PARAMETERS * 2


def test_the_kv_cache_is_what_samples_in_flight_need_within_limits(tiny_model: Path) -> None:
    sections = {"rollout": {"samples": 16}, "generation": {"engines": 2}}
    figures = named(on(tiny_model, "cpu", **sections), "Memory of each engine")
    # (2 + 1) x 32 groups x 16 samples over 2 engines: 768, of at most 64 tokens x 1 KiB: 48 MiB,
    # below the least.
    assert figures["KV cache"].value == GIB // 16
    assert figures["KV cache"].how.startswith("768 samples × 64 tokens × 1 KiB")


def test_of_an_unknown_model_memory_is_told_for_each_parameter() -> None:
    chapters = memory(made("cuda", trainer={"ranks": 2}))
    assert named(chapters, "Memory of each trainer")["in all"].text == "768 MiB + 8 B/parameter"
    engine = named(chapters, "Memory of each GPU")["in all"]
    assert engine.text == "4 B/parameter"
    assert engine.how == "the sum of the above, without KV cache"


def test_staleness_bounds_what_is_on_its_way() -> None:
    config = made(
        "cpu",
        trainer={"groups_per_step": 4},
        rollout={"samples": 8, "max_staleness": 1},
        generation={"engines": 3, "max_new_tokens": 10},
    )
    chapters = flow(config, prompts=50, held_out=0)
    figures = named(chapters, "Staleness")
    assert figures["groups ahead"].value == 8  # as in the ledger's own example
    assert figures["in an engine"].value == 22  # 64 samples over 3 engines
    assert figures["queue"].value == 12
    step = named(chapters, "A step")
    assert step["learned tokens"].value == 4 * 8 * 10
    assert step["of the run"].how.endswith("each of the 50 prompts 8 times")


def test_synchronous_training_is_called_so() -> None:
    chapters = flow(made("cpu", rollout={"max_staleness": 0}), prompts=1, held_out=0)
    assert "synchronous" in named(chapters, "Staleness")["oldest token"].how


@pytest.mark.parametrize(
    ("steps", "every", "points"),
    [(7, 3, [0, 3, 6, 7]), (6, 3, [0, 3, 6]), (5, 0, [0, 5]), (2, 50, [0, 2])],
)
def test_milestones_are_the_start_the_end_and_between(
    steps: int, every: int, points: list[int]
) -> None:
    assert milestones(steps, every) == points


def test_bundles_stay_whole_on_a_node() -> None:
    config = made("cuda", generation={"engines": 3, "tensor_parallel": 2}, trainer={"ranks": 2})
    needed = plan(config, device="cuda")
    # 8 GPUs are enough in number, but no node has two left for the third engine.
    short = fit(needed, [Node(gpus=3), Node(gpus=3), Node(gpus=1), Node(gpus=1)])
    assert not short.is_whole
    assert len(short.on(None)) == 1
    assert fit(needed, [Node(gpus=4), Node(gpus=4)]).is_whole
    assert not fit(needed, [Node(gpus=8, cpus=4)]).is_whole


def test_the_overview_names_every_actor_and_what_has_no_room() -> None:
    told = overview(made("cuda", trainer={"ranks": 3}), [Node(gpus=3)])
    assert {one.actor: one.count for one in told.actors}["TrainerRank"] == 2
    assert not told.fits
    left = told.nodes[-1]
    assert left.node is None
    assert left.seats == {"engine": 1}


def test_a_colocated_trainer_takes_no_gpu_of_its_own() -> None:
    config = made("cuda", generation={"colocated": True}, weights={"staging": "host"})
    told = overview(config, [Node(gpus=1)])
    assert told.fits
    assert told.gpus == 1
    assert told.nodes[0].seats == {"engine": 1, "trainer": 1}
