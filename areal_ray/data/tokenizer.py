"""From a prompt to token ids, and from generated ids to text. One way each.

The driver loads the tokenizer and sends it to the workers: to look up what class it is of imports
torch, which takes seconds and hundreds of megabytes, and to use it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from areal_ray.errors import DataError, ModelError
from areal_ray.types import Prompt, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTokenizer:
    def __init__(self, model_path: str, *, trust_remote_code: bool, max_tokens: int) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._max_tokens = max_tokens
        self._tokenizer = self._load()

    def _load(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self._model_path, trust_remote_code=self._trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: no tokenizer in {self._model_path}: {error}") from error

    def __getstate__(self) -> dict[str, object]:
        """One whose code came with the model, or that is written in Python, is loaded again where
        it is sent to."""
        kind = type(self._tokenizer)
        is_fast = getattr(self._tokenizer, "is_fast", False)  # which not every kind has
        can_be_sent = is_fast and kind.__module__.startswith("transformers.")
        return self.__dict__ | ({} if can_be_sent else {"_tokenizer": None})

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self._tokenizer is None:
            self._tokenizer = self._load()

    def encode(self, prompt: Prompt) -> TokenIds:
        if prompt.messages is not None:
            ids = self._tokenizer.apply_chat_template(
                [msgspec.structs.asdict(message) for message in prompt.messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        else:
            ids = self._tokenizer(prompt.text)["input_ids"]
        return self._checked(prompt, ids)

    def encode_demonstrations(self, prompts: Sequence[Prompt]) -> list[tuple[TokenIds, TokenIds]]:
        """Each prompt, and its answer as a model should give it: ended by the end of sequence."""
        answers = self._tokenizer([p.answer for p in prompts], add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        if all(prompt.text is not None for prompt in prompts):
            # All in one call: many times faster than one by one.
            texts = self._tokenizer([prompt.text for prompt in prompts])["input_ids"]
            questions = [self._checked(p, ids) for p, ids in zip(prompts, texts, strict=True)]
        else:
            questions = [self.encode(prompt) for prompt in prompts]
        return [
            (question, np.asarray([*answer, end], dtype=np.int32))
            for question, answer in zip(questions, answers["input_ids"], strict=True)
        ]

    def _checked(self, prompt: Prompt, ids: Sequence[int]) -> TokenIds:
        if not 0 < len(ids) <= self._max_tokens:
            raise DataError(
                f"a prompt of {len(ids)} tokens; expected 1 to {self._max_tokens} "
                f"(data.max_prompt_tokens): {str(prompt.text or prompt.messages)[:120]!r}"
            )
        return np.asarray(ids, dtype=np.int32)

    def decode(self, sequences: Sequence[TokenIds]) -> list[str]:
        """All in one call."""
        return self._tokenizer.batch_decode(
            [token_ids.tolist() for token_ids in sequences], skip_special_tokens=True
        )

    def pieces(self, token_ids: TokenIds) -> list[str]:
        """Each token's own text, special ones too: for people."""
        return self._tokenizer.batch_decode([[token] for token in token_ids.tolist()])

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)
