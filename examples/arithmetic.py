"""Two-digit addition: a tiny model, made on the spot, learns it by reinforcement.

areal-ray train examples/arithmetic.yaml          the same as
python examples/arithmetic.py                     and, on a running cluster,
ray job submit --working-dir examples -- python arithmetic.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import areal_ray
from areal_ray import Completion, Prompt

HELD_OUT = 500


def tiny_qwen(directory: Path) -> None:
    """A Qwen2 of 0.8 million random weights, with one token for each character."""
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
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=characters.index("<eos>"),
        pad_token_id=characters.index("<pad>"),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def problems() -> list[Prompt]:
    return _all_problems()[HELD_OUT:]


def held_out_problems() -> list[Prompt]:
    return _all_problems()[:HELD_OUT]


def exact_match(prompt: Prompt, completion: Completion) -> float:
    return float(completion.text == prompt.answer)


def _all_problems() -> list[Prompt]:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    return [Prompt(text=f"{a:02}+{b:02}=", answer=str(a + b)[::-1]) for a, b in pairs]


if __name__ == "__main__":
    config = areal_ray.load_config(Path(__file__).with_name("arithmetic.yaml"), sys.argv[1:])
    result = areal_ray.train(config)
    print(result)
    sys.exit(result.exit_code)
