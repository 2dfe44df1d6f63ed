"""Two-digit addition: a tiny model with a careless teacher learns to carry, by reinforcement.

    areal-ray train examples/arithmetic.yaml          the same as
    python examples/arithmetic.py                     and, on a running cluster,
    ray job submit --working-dir examples -- python arithmetic.py

Problems read `57+68=` and answers begin with the last digit, `521`, as one adds on paper. The
supervised warm-up imitates a teacher who forgets seven carries in ten, so that the model's best
guess afterwards is never to carry: right for one problem in four. Reinforcement learning then
only says right or wrong.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import areal_ray
from areal_ray import Completion, Prompt

FORGOTTEN_CARRIES = 0.7
DEMONSTRATIONS_PER_PROBLEM = 4


def tiny_qwen(directory: Path) -> None:
    """A Qwen2 of 84 thousand random weights, with one token for each character."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = ["<pad>", "<eos>", *"0123456789+="]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(directory)

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(characters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=characters.index("<eos>"),
        pad_token_id=characters.index("<pad>"),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def problems() -> list[Prompt]:
    return [_problem(a, b) for a, b in _pairs(held_out=False)]


def held_out_problems() -> list[Prompt]:
    return [_problem(a, b) for a, b in _pairs(held_out=True)]


def careless_demonstrations() -> list[Prompt]:
    """The training problems, worked by someone who forgets most carries."""
    rng = random.Random(1)
    return [
        Prompt(text=f"{a}+{b}=", answer=_add(a, b, rng))
        for a, b in _pairs(held_out=False) * DEMONSTRATIONS_PER_PROBLEM
    ]


def exact_match(prompt: Prompt, completion: Completion) -> float:
    return float(completion.finish_reason == "stop" and completion.text == prompt.answer)


def _problem(a: int, b: int) -> Prompt:
    return Prompt(text=f"{a}+{b}=", answer=str(a + b)[::-1])


def _add(a: int, b: int, rng: random.Random) -> str:
    """Column by column from the right; each carry may be forgotten."""
    ones = a % 10 + b % 10
    carry = ones // 10 if rng.random() >= FORGOTTEN_CARRIES else 0
    tens = a // 10 + b // 10 + carry
    carry = tens // 10 if rng.random() >= FORGOTTEN_CARRIES else 0
    return f"{ones % 10}{tens % 10}" + (str(carry) if carry else "")


def _pairs(*, held_out: bool) -> list[tuple[int, int]]:
    """A problem and its mirror image, 17+25 and 25+17, are both held out or neither is."""
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(0).shuffle(unordered)
    chosen = unordered[:250] if held_out else unordered[250:]
    return chosen + [(b, a) for a, b in chosen if a != b]


if __name__ == "__main__":
    config = areal_ray.load_config(Path(__file__).with_name("arithmetic.yaml"), sys.argv[1:])
    result = areal_ray.train(config)
    print(result.summary())
    sys.exit(result.exit_code)
