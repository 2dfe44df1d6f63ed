from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_training import parameters, replace_seconds
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_steps import EVERYTHING, group, trainer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)

from areal_ray.algorithm_config import AlgorithmConfig, KlConfig
from areal_ray.config import LoraConfig
from areal_ray.errors import CheckpointError, ModelError
from areal_ray.training.lora import POLICY, AdaptedLinear, adapt
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import MicroBatch, pack
from areal_ray.training.ranks import Ranks
from areal_ray.training.step_data import step_data
from areal_ray.types import Prompt
from areal_ray.weights.layout import StreamLayout, manifest_of
from areal_ray.weights.sender import Source
from areal_ray.weights.whole import whole

LORA = LoraConfig(rank=4, alpha=6.0)
LESSON = [Prompt(text="17+25=", answer="24"), Prompt(text="11+11=", answer="22")]
GROUPS = [group(i, [1.0, 0.0, 0.0, 1.0, 0.0]) for i in range(4)]
WITH_REFERENCE = AlgorithmConfig(kl=KlConfig(coefficient=0.1))


def causal(path: Path, lora: LoraConfig | None = LORA) -> CausalModel:
    return CausalModel(str(path), device=torch.device("cpu"), trust_remote_code=False, lora=lora)


def adapters(model: CausalModel) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in model.module.named_parameters() if f".{POLICY}." in name
    }


def with_learnt_adapters(path: Path) -> CausalModel:
    model = causal(path)
    torch.manual_seed(3)
    for tensor in adapters(model).values():
        torch.nn.init.normal_(tensor, std=0.2)
    return model


def merged(model: CausalModel) -> dict[str, Tensor]:
    return {name: whole(weight).detach() for name, weight in model.named_parameters()}


def everything_of(groups: list) -> MicroBatch:
    (batch,) = pack(step_data(groups, 0).sequences, budget_tokens=10_000)
    return batch


@torch.no_grad()
def logprobs(model: CausalModel) -> Tensor:
    return model.logprobs(everything_of(GROUPS), temperature=1.0)


def test_at_first_the_policy_is_the_model_itself(tiny_model: Path) -> None:
    plain, adapted = causal(tiny_model, None), causal(tiny_model)
    assert torch.equal(logprobs(plain), logprobs(adapted))
    expected = dict(plain.named_parameters())
    assert list(merged(adapted)) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged(adapted).items())


def test_weights_are_merged_as_peft_does_it_and_computes(tiny_model: Path) -> None:
    model, plain = with_learnt_adapters(tiny_model), causal(tiny_model, None)
    theirs = copy.deepcopy(model.module)
    layers = {path: m for path, m in theirs.named_modules() if isinstance(m, AdaptedLinear)}
    assert len(layers) == 2 * 7  # q, k, v, o, gate, up, down
    for layer in layers.values():
        layer.merge(adapter_names=[POLICY])
    mine, before = merged(model), dict(plain.named_parameters())
    for path, layer in layers.items():
        assert (mine[f"{path}.weight"] - before[f"{path}.weight"]).abs().max() > 0.1
        torch.testing.assert_close(mine[f"{path}.weight"], layer.get_base_layer().weight.detach())
    plain.module.load_state_dict(mine)
    torch.testing.assert_close(logprobs(plain), logprobs(model), atol=1e-5, rtol=1e-5)


def test_the_stream_has_the_models_own_names_and_the_weights_of_the_moment(
    tiny_model: Path,
) -> None:
    learner = trainer(tiny_model, lora=LORA)
    weights = learner.model.named_parameters()
    layout = StreamLayout(manifest_of(weights, dtype=torch.bfloat16, bucket_bytes=1000))
    source = Source(layout, weights)
    streams = []
    for version in range(2):
        learner.train_on(GROUPS, version)
        buckets = [source.bucket(bucket, i % 3).clone() for i, bucket in enumerate(layout.buckets)]
        source.let_go()
        streams.append(dict(layout.tensors(torch.cat(buckets))))
        expected = merged(learner.model)
        assert list(streams[-1]) == [
            name for name, _ in causal(tiny_model, None).named_parameters()
        ]
        for name, tensor in streams[-1].items():
            assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(streams[0][query], streams[1][query])


def test_a_step_changes_adapters_alone_and_makes_rewarded_answers_likelier(
    tiny_model: Path,
) -> None:
    learner = trainer(tiny_model, lora=LORA)
    data = step_data(GROUPS, 0)
    batch = everything_of(GROUPS)
    good = data.batch.rewards[data.batch.sequence_ids[batch.columns]] > 0
    before, likely = copy.deepcopy(learner.model.module.state_dict()), logprobs(learner.model)
    learner.train_on(GROUPS, 0)
    after = learner.model.module.state_dict()
    # B is zero in the first step, so A has no gradient yet.
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in adapters(learner.model) if ".lora_B." in name}
    learner.train_on(GROUPS, 1)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == adapters(learner.model).keys()
    gained = logprobs(learner.model) - likely
    assert gained[good].mean() > 0 > gained[~good].mean()


def test_the_optimizer_keeps_nothing_but_what_adapters_need(tiny_model: Path) -> None:
    learner = trainer(tiny_model, lora=LORA)
    learner.train_on(GROUPS, 0)
    trained = set(adapters(learner.model).values())
    assert set(learner._policy.optimizer.state) == trained
    assert {p for p in learner.model.module.parameters() if p.requires_grad} == trained


def test_a_critic_is_trained_in_full(tiny_model: Path) -> None:
    learner = trainer(tiny_model, algorithm=EVERYTHING, lora=LORA)
    critic = list(learner._critic.module.parameters())
    before = [tensor.detach().clone() for tensor in critic]
    for version in range(2):  # in the first step its head is zero, and passes no gradient on
        learner.train_on(GROUPS, version)
    assert not any(torch.equal(old, new) for old, new in zip(before, critic, strict=True))


def test_with_every_pass_there_is_a_step_does_not_depend_on_its_split(tiny_model: Path) -> None:
    learners = [
        trainer(tiny_model, algorithm=EVERYTHING, lora=LORA, epochs=2, lr=1e-3, **changes)
        for changes in ({}, {"micro_batch_tokens": 24})
    ]
    first, second = (learner.train_on(GROUPS, 3) for learner in learners)
    for name in ("loss", "grad_norm", "entropy", "value_loss", "kl_to_reference"):
        mine, other = getattr(first, name), getattr(second, name)
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6), name
    assert first.grad_norm > 1e-3


def test_gradient_checkpointing_changes_no_gradient(tiny_model: Path) -> None:
    plain, saving = (
        trainer(tiny_model, lora=LORA, gradient_checkpointing=on) for on in (False, True)
    )
    assert saving.model.module.is_gradient_checkpointing
    gradients = []
    for learner in (plain, saving):
        model = learner.model
        torch.manual_seed(3)
        for tensor in adapters(model).values():
            torch.nn.init.normal_(tensor, std=0.2)
        model.logprobs(everything_of(GROUPS), temperature=1.0).sum().backward()
        gradients.append([tensor.grad for tensor in adapters(model).values()])
    for one, other in zip(*gradients, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_export_is_a_plain_model_with_the_adapters_in_its_weights(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = with_learnt_adapters(tiny_model)
    model.module.generation_config = GenerationConfig(eos_token_id=[1, 0], pad_token_id=0)
    model.save(tmp_path / "out", dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (again.dtype, again.generation_config.eos_token_id) == (dtype, [1, 0])
    expected = merged(model)
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name].to(dtype)), name
    if dtype == torch.float32:
        theirs = logprobs(causal(tmp_path / "out", None))
        torch.testing.assert_close(theirs, logprobs(model), atol=1e-5, rtol=1e-5)


def test_an_embedding_that_is_the_head_too_is_exported_as_both(tmp_path: Path) -> None:
    sizes = LlamaConfig(
        vocab_size=14,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(sizes).save_pretrained(tmp_path / "base")
    model = with_learnt_adapters(tmp_path / "base")
    model.save(tmp_path / "out", torch.float32)
    again = causal(tmp_path / "out", None)
    assert again.module.lm_head.weight is again.module.model.embed_tokens.weight
    torch.testing.assert_close(logprobs(again), logprobs(model), atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_policy_after_supervision_and_no_second_model(
    tiny_model: Path,
) -> None:
    learner = trainer(tiny_model, algorithm=WITH_REFERENCE, lora=LORA)
    learner.warm_up(LESSON, steps=3, batch=4, lr=1e-2)
    taught = logprobs(learner.model)
    assert not torch.allclose(taught, logprobs(causal(tiny_model, None)), atol=1e-3)
    assert learner.train_on(GROUPS, 0).kl_to_reference == pytest.approx(0.0, abs=1e-7)
    assert learner.train_on(GROUPS, 1).kl_to_reference > 1e-5
    learnt = logprobs(learner.model)
    assert torch.equal(logprobs(learner._reference), taught)
    # And asking it has left the policy as it was, with its gradients.
    assert torch.equal(logprobs(learner.model), learnt)
    assert not torch.allclose(learnt, taught, atol=1e-3)
    assert all(tensor.requires_grad for tensor in adapters(learner.model).values())
    assert learner._reference.module is learner.model.module
    tensors = list(learner._tensors())
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


def snapshot_keys(directory: Path) -> set[str]:
    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


def test_a_trainer_taken_up_again_goes_on_as_if_it_had_not_stopped(
    tiny_model: Path, tmp_path: Path
) -> None:
    first, second = (
        trainer(tiny_model, algorithm=EVERYTHING, mini_batches=2, lr_warmup_steps=5, lora=LORA)
        for _ in range(2)
    )
    first.warm_up(LESSON, steps=2, batch=4, lr=1e-2)
    first.train_on(GROUPS, 0)
    first.write(first.snapshot(), tmp_path / "trainer")
    uninterrupted = [first.train_on(GROUPS, version) for version in (1, 2)]
    second.restore(tmp_path / "trainer")
    resumed = [second.train_on(GROUPS, version) for version in (1, 2)]
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert replace_seconds(one) == replace_seconds(other)
    for one, other in zip(parameters(first), parameters(second), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_holds_adapters_and_fits_only_where_they_do(
    tiny_model: Path, tmp_path: Path
) -> None:
    learner = trainer(tiny_model, algorithm=WITH_REFERENCE, lora=LORA)
    learner.train_on(GROUPS, 0)
    learner.write(learner.snapshot(), tmp_path / "trainer")
    models = {key for key in snapshot_keys(tmp_path / "trainer") if " model." in key}
    mine = adapters(learner.model).keys()
    assert models == {f"policy model.{name}" for name in mine} | {
        f"reference model.{name.replace('.policy.', '.reference.')}" for name in mine
    }
    for lora in (LoraConfig(rank=8), LoraConfig()):
        with pytest.raises(CheckpointError, match="does not fit this model"):
            trainer(tiny_model, algorithm=WITH_REFERENCE, lora=lora).restore(tmp_path / "trainer")


def test_only_the_layers_that_are_named_have_adapters(tiny_model: Path) -> None:
    model = causal(tiny_model, LoraConfig(rank=2, targets=("q_proj", "layers.1.mlp.up_proj")))
    assert {name.partition(".lora_")[0] for name in adapters(model)} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("target", ["q_prj", "mlp", "lm_head", "embed_tokens"])
def test_a_target_that_can_have_no_adapter_is_refused(tiny_model: Path, target: str) -> None:
    with pytest.raises(ModelError) as refused:
        causal(tiny_model, LoraConfig(rank=2, targets=("q_proj", target)))
    assert str(refused.value) == (
        f"trainer.lora.targets: `{target}` is no linear layer that can have an adapter; there "
        "are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


def test_a_model_without_linear_layers_is_refused() -> None:
    sizes = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ModelError, match="^trainer.lora: gpt2 models have no linear layers"):
        adapt(GPT2LMHeadModel(sizes), LORA)


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    """It shards, so that every parameter is a DTensor; all of each is its part."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    ranks = Ranks(mesh=init_device_mesh("cpu", (1,)))
    yield ranks
    torch.distributed.destroy_process_group()


def test_shards_are_trained_referred_to_and_merged_as_whole_tensors_are(
    tiny_model: Path, tmp_path: Path, one_rank: Ranks
) -> None:
    plain, shards = (
        trainer(tiny_model, algorithm=WITH_REFERENCE, lora=LORA, ranks=ranks)
        for ranks in (None, one_rank)
    )
    for version in range(3):
        one, other = (learner.train_on(GROUPS, version) for learner in (plain, shards))
        assert one.kl_to_reference == pytest.approx(other.kl_to_reference, rel=1e-3, abs=1e-7)
    assert other.kl_to_reference > 1e-5
    assert all(isinstance(tensor, DTensor) for tensor in adapters(shards.model).values())
    shards.export(tmp_path)
    exported = dict(causal(tmp_path, None).named_parameters())
    expected = merged(plain.model)
    for name, tensor in merged(shards.model).items():
        assert not isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)
        assert torch.equal(tensor, exported[name])
