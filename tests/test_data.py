from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.data import PromptSource, SourceState, load_prompts
from areal_ray.data.source import as_prompts, refuse_without_answers
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.errors import DataError, PluginError
from areal_ray.plugins import load_function, pack, unpack
from areal_ray.types import Message, Prompt

PROMPTS = [Prompt(text=str(index)) for index in range(10)]


def draw(source: PromptSource, count: int) -> list[str]:
    return [source[source.draw()].text for _ in range(count)]


def test_each_epoch_deals_every_prompt_once_in_an_order_of_its_own() -> None:
    source = PromptSource(PROMPTS, seed=3, shuffle=True)
    first, second = draw(source, 10), draw(source, 10)
    assert sorted(first) == sorted(second) == [str(index) for index in range(10)]
    assert first != second
    assert first != [str(index) for index in range(10)]
    assert draw(PromptSource(PROMPTS, seed=3, shuffle=True), 20) == first + second
    assert draw(PromptSource(PROMPTS, seed=4, shuffle=True), 10) != first


def test_without_shuffling_the_order_is_the_given_one() -> None:
    source = PromptSource(PROMPTS, seed=3, shuffle=False)
    assert draw(source, 12) == [*"0123456789", "0", "1"]


def test_prompts_that_are_put_back_are_drawn_again_first() -> None:
    source = PromptSource(PROMPTS, seed=0, shuffle=False)
    drawn = [source.draw() for _ in range(3)]
    # What is put back last is drawn first: so whoever goes backwards keeps the order.
    for index in reversed(drawn):
        source.put_back(index)
    assert draw(source, 4) == ["0", "1", "2", "3"]


def test_a_prompt_that_is_put_back_at_the_end_of_an_epoch_comes_before_the_next() -> None:
    source = PromptSource(PROMPTS[:2], seed=0, shuffle=False)
    draw(source, 1)
    source.failed(0)
    source.put_back(source.draw())
    assert draw(source, 4) == ["1", "0", "0", "1"]


def test_a_prompt_that_fails_is_tried_again_at_the_end_of_the_epoch_and_then_given_up() -> None:
    source = PromptSource(PROMPTS[:3], seed=0, shuffle=False)
    assert source.failed(source.draw())
    # 0 has failed once: the epoch goes on with 1 and 2, then 0 again.
    assert draw(source, 2) == ["1", "2"]
    assert source.failed(source.draw())
    again = source.draw()
    assert source[again].text == "0"
    assert not source.failed(again)
    assert draw(source, 4) == ["1", "2", "1", "2"]


def test_prompts_that_fail_come_last_in_the_order_in_which_they_failed() -> None:
    source = PromptSource(PROMPTS[:4], seed=0, shuffle=False)
    draw(source, 3)
    source.failed(2)
    source.failed(0)
    assert draw(source, 4) == ["3", "2", "0", "0"]


def test_a_prompt_is_given_up_even_if_it_was_put_back() -> None:
    source = PromptSource(PROMPTS[:2], seed=0, shuffle=False)
    index = source.draw()
    source.put_back(index)
    # It was drawn more than once at a time: small sets of prompts come around quickly.
    assert [source.failed(index) for _ in range(3)] == [True, True, False]
    assert draw(source, 3) == ["1", "1", "1"]


def test_a_source_whose_prompts_all_fail_goes_on_dealing() -> None:
    source = PromptSource(PROMPTS[:2], seed=0, shuffle=False)
    tried_again = [source.failed(source.draw()) for _ in range(12)]
    # 0 1, again 0 1, again 0 1, and both are given up: then all begins anew.
    assert tried_again == [True, True, True, True, False, False] * 2
    assert source[source.draw()].text in ("0", "1")


STEPS = st.lists(
    st.sampled_from(["draw", "draw", "draw", "put back", "fail"]), min_size=8, max_size=40
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompts=st.integers(1, 6),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    before=STEPS,
    after=STEPS,
)
def test_from_its_state_another_source_goes_on_just_there(
    prompts: int, seed: int, shuffle: bool, before: list[str], after: list[str]
) -> None:
    def new_source() -> PromptSource:
        return PromptSource(PROMPTS[:prompts], seed=seed, shuffle=shuffle)

    def play(source: PromptSource, steps: list[str], in_hand: list[int]) -> list[object]:
        seen: list[object] = []
        for step in steps:
            if step == "draw" or not in_hand:
                in_hand.append(source.draw())
                seen.append(in_hand[-1])
            elif step == "put back":
                source.put_back(in_hand.pop(0))
            else:
                seen.append(source.failed(in_hand.pop(0)))
        return [*seen, source.state]

    source, in_hand = new_source(), []
    play(source, before, in_hand)
    written = msgspec.json.encode(source.state)
    again = new_source()
    # It may have been used before: nothing of that is left.
    play(again, after, [])
    again.restore(msgspec.json.decode(written, type=SourceState))
    assert again.state == source.state
    assert play(again, after, list(in_hand)) == play(source, after, list(in_hand))


def test_a_state_does_not_change_with_its_source() -> None:
    source = PromptSource(PROMPTS, seed=0, shuffle=False)
    source.put_back(source.draw())
    source.failed(5)
    state = source.state
    written = msgspec.json.encode(state)
    other = PromptSource(PROMPTS, seed=0, shuffle=False)
    other.restore(state)
    for one in (source, other):
        one.draw()
        one.failed(5)
        one.put_back(3)
    assert msgspec.json.encode(state) == written


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"text": "2+2=", "answer": "4"}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}], "metadata": {"level": 3}}\n'
    )
    assert load_prompts(str(path)) == [
        Prompt(text="2+2=", answer="4"),
        Prompt(messages=(Message(role="user", content="hi"),), metadata={"level": 3}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"}', "Object contains unknown field `prompt`"),
        ('{"answer": "x"}', "a Prompt has either text or messages"),
        ('{"text": 3}', r"Expected `str \| null`, got `int`"),
        ("not json", "JSON is malformed"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=f"prompts.jsonl:2: .*{message}"):
        load_prompts(str(path))


def test_a_source_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="data.train: item 1 is a str, expected a Prompt"):
        as_prompts([Prompt(text="a"), "b"], where="data.train")
    with pytest.raises(DataError, match="data.train: holds no prompts"):
        as_prompts([], where="data.train")
    with pytest.raises(DataError, match="warmup.data: item 0 has no answer to teach: a"):
        refuse_without_answers([Prompt(text="a")])


def test_a_function_is_found_in_a_file_and_travels_without_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("BONUS = 2\ndef reward(prompt, completion):\n    return BONUS\n")
    packed = pack(load_function(f"{path}:reward"))
    path.unlink()
    assert unpack(packed)(None, None) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py", "expected file.py:function or package.module:function"),
        ("missing.py:f", "no such file"),
        ("no_such_package.x:f", "can't be imported"),
        ("math:no_such", "math has no `no_such`"),
        ("math:pi", "`pi` is a float, not a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(spec: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_function(spec)


def test_a_file_that_fails_to_load_is_refused_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(PluginError, match="failed while it was loaded: ZeroDivisionError"):
        load_function(f"{path}:f")


def test_a_prompt_goes_to_ids_and_an_answer_comes_back_as_text(tiny_model: Path) -> None:
    tokenizer = PromptTokenizer(str(tiny_model), trust_remote_code=False, max_tokens=8)
    prompt = Prompt(text="17+25=", answer="24")
    # <pad> <eos> 0 1 2 ... 9 + =: the digit d is token d + 2, plus is 12, equals is 13.
    assert tokenizer.encode(prompt).tolist() == [3, 9, 12, 4, 7, 13]
    ((question, answer),) = tokenizer.encode_demonstrations([prompt])
    assert question.tolist() == [3, 9, 12, 4, 7, 13]
    assert answer.tolist() == [4, 6, 1]
    assert tokenizer.decode([answer, question]) == ["24", "17+25="]
    with pytest.raises(DataError, match=r"a prompt of 9 tokens; expected 1 to 8"):
        tokenizer.encode(Prompt(text="123456789"))


WHERE_IT_ARRIVES = """
import pickle, sys
from areal_ray import Prompt

tokenizer = pickle.load(sys.stdin.buffer)
ids = tokenizer.encode(Prompt(text="17+25="))
print(type(tokenizer._tokenizer).__name__, ids.tolist(), tokenizer.decode([ids]))
print("torch is here" if "torch" in sys.modules else "no torch")
"""


def sent_elsewhere(tokenizer: PromptTokenizer) -> list[str]:
    """What another process says that was given it."""
    asked = [sys.executable, "-c", WHERE_IT_ARRIVES]
    done = subprocess.run(asked, input=pickle.dumps(tokenizer), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_tokenizer_that_was_sent_needs_no_torch(tiny_model: Path) -> None:
    tokenizer = PromptTokenizer(str(tiny_model), trust_remote_code=False, max_tokens=8)
    assert sent_elsewhere(tokenizer) == [
        "Qwen2Tokenizer [3, 9, 12, 4, 7, 13] ['17+25=']",
        "no torch",
    ]


def test_a_tokenizer_whose_code_came_with_the_model_arrives_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    pass\n"
    )
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "OwnTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = PromptTokenizer(str(model), trust_remote_code=True, max_tokens=8)
    assert sent_elsewhere(tokenizer)[0] == "OwnTokenizer [3, 9, 12, 4, 7, 13] ['17+25=']"


def test_the_held_out_problems_and_their_mirror_images_are_not_trained_on(arithmetic) -> None:
    def pairs(prompts) -> set[frozenset[str]]:
        return {frozenset(prompt.text.rstrip("=").split("+")) for prompt in prompts}

    held_out = arithmetic.held_out_problems()
    assert len(held_out) >= 400
    assert not pairs(held_out) & pairs(arithmetic.problems())
    assert not pairs(held_out) & pairs(arithmetic.careless_demonstrations())
