"""Arguments of `LLM`: other libraries' numbers and vLLM's arguments are taken, what makes no sense is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import (
    LLM,
    InvalidArgument,
    InvalidPrompt,
    InvalidSamplingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from baton.engine.core.sampling import as_decoded
from baton.engine.text import InvalidMessages

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
IDS = [10, 20, 30, 40]
ONE_LETTER = StructuredOutputsParams(choice="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is of type NoneType: give text, a list of token ids"),
        (5, "prompts is of type int"),
        (b"abc", "prompts is of type bytes"),
        ([1.5], r"prompts\[0\] is of type float"),
        ([None], r"prompts\[0\] is of type NoneType"),
        ([{1, 2}], r"prompts\[0\] is of type set"),
        (np.array([[[5]]]), r"prompts\[0\]\[0\] is \[5\]"),
        ([IDS, b"abc"], r"prompts\[1\] is of type bytes"),
        ([[1, 2.5]], r"prompts\[0\]\[1\] is 2.5: a token id is an integer"),
        ([[1, True]], r"prompts\[0\]\[1\] is True"),
        ({"prompt_token_ids": "abc"}, r"prompts\[0\]\['prompt_token_ids'\] is of type str"),
        ({"prompt_token_ids": 5}, r"prompts\[0\]\['prompt_token_ids'\] is of type int"),
        ({"prompt": 5}, r"prompts\[0\]\['prompt'\] is of type int"),
        ({"prompt": None}, "keys of nothing: give prompt or"),
        ({"prompt_token_ids": IDS, "cache_salt": 5}, r"\['cache_salt'\] is of type int"),
        (
            {"prompt_token_ids": IDS, "prediction": 5},
            r"\['prediction'\] is of type int: it must be a list of token ids",
        ),
        (
            {"prompt_token_ids": IDS, "prediction": [99_999]},
            "token id 99999 in the prediction is not in the vocabulary",
        ),
        ({1: 2}, "has the keys 1: give prompt"),
        ("half \ud800 a character", "is not valid text: half a surrogate pair at character 5"),
        ({"prompt": "a", "cache_salt": "\ud800"}, r"prompts\[0\]\['cache_salt'\] is not valid text: half a surrogate"),
    ],
)
def test_what_is_no_prompt_is_refused_by_what_it_is_and_where(text_llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        text_llm.generate(prompts, GREEDY, use_tqdm=False)


def test_a_prompt_that_the_engine_refuses_is_named_by_its_place_in_the_call(llm: LLM) -> None:
    for _ in range(2):
        with pytest.raises(InvalidPrompt, match=r"^prompts\[1\]: token id 99999 "):
            llm.generate([IDS, [99_999]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("token", [-1, 2**40, 2**70])
def test_a_token_that_no_tokenizer_knows_is_refused_where_text_is_written_too(text_llm: LLM, token: int) -> None:
    with pytest.raises(InvalidPrompt, match=rf"^prompts\[0\]: token id {token} "):
        text_llm.generate([[5, token]], GREEDY, use_tqdm=False)


def test_token_ids_may_be_those_of_other_libraries(llm: LLM) -> None:
    expected = llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    array = np.array(IDS)
    forms: list[Any] = [array, [array], np.array([IDS]), list(array), torch.tensor(IDS), {"prompt_token_ids": array}]
    for form in forms:
        (result,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert (result.outputs[0].token_ids, result.prompt_token_ids) == (expected, IDS)
        assert {type(token) for token in result.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 5}, "sampling_params: give SamplingParams, or a list .* not dict"),
        ("greedy", "sampling_params: .* not str"),
        ([GREEDY, {"max_tokens": 5}], r"sampling_params\[1\]: .* not dict"),
        (SamplingParams(n=1.5), "n: Expected `int`, got `float`"),  # type: ignore[arg-type]
        (SamplingParams(detokenize="no"), "detokenize: Expected `bool`, got `str`"),  # type: ignore[arg-type]
        (SamplingParams(stop_token_ids=[1, "2"]), r"stop_token_ids\[1\]: Expected `int`"),  # type: ignore[list-item]
        (SamplingParams(bad_words=["a", "\ud800"]), "bad_words: is not valid text"),
        (SamplingParams(stop=["\ud800"]), "stop: is not valid text"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(choice=["\ud800"])),
            "structured_outputs.choice: is not valid text",
        ),
        (SamplingParams(structured_outputs={"regex": 5}), r"structured_outputs.regex: Expected"),  # type: ignore[arg-type]
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(choice="yes")),
            r"structured_outputs.choice: Expected",
        ),  # type: ignore[arg-type]
    ],
)
def test_sampling_parameters_of_another_type_are_refused_by_name(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=message):
        llm.generate([IDS, IDS], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": "2"}, "n"),
        ({"temperature": None}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
    ],
)
def test_a_value_that_no_check_can_read_is_refused_by_name_at_once(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSamplingParams, match="Expected") as caught:
        SamplingParams(**values)
    assert caught.value.field == field


PLAIN: dict[str, Any] = {
    "temperature": 0.5,
    "seed": 3,
    "max_tokens": 6,
    "stop_token_ids": [7],
    "logit_bias": {5: 1.0},
    "bad_words_token_ids": [[1, 2]],
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    "others",
    [
        {"temperature": np.float32(0.5), "seed": np.int64(3), "max_tokens": np.int32(6), "ignore_eos": np.True_},
        {"stop_token_ids": (7,), "bad_words_token_ids": ((1, 2),)},
        {"stop_token_ids": [np.int64(7)], "logit_bias": {np.int64(5): np.float32(1.0)}},
        {"stop_token_ids": np.array([7])},
        {"stop_token_ids": torch.tensor([7])},
    ],
    ids=["numbers", "tuples", "numbers within", "array", "tensor"],
)
def test_parameters_may_be_those_of_other_libraries(others: dict[str, Any]) -> None:
    assert as_decoded(SamplingParams(**{**PLAIN, **others})) == SamplingParams(**PLAIN)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"use_tqdm": "no"}, "use_tqdm"),
        ({"use_tqdm": print}, "use_tqdm"),
        ({"lora_request": object()}, "lora_request"),
        ({"prompt_token_ids": [IDS]}, "prompt_token_ids"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_arguments_that_ask_for_something_else_are_refused_by_name(
    llm: LLM, arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is") as caught:
        llm.generate([IDS], GREEDY, **arguments)
    assert caught.value.name == name


@pytest.mark.parametrize("priority", [1, [1, 2], [], "1", [1.0], [True], [2**31], [None]])
def test_priorities_are_whole_numbers_one_for_each_prompt(llm: LLM, priority: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^priority must be a list with a whole number .* each of the 1 prompts"):
        llm.generate([IDS], GREEDY, use_tqdm=False, priority=priority)


def test_vllms_arguments_of_a_call_are_taken_where_they_ask_for_nothing(text_llm: LLM) -> None:
    nothing: dict[str, Any] = {"use_tqdm": False, "lora_request": None, "priority": None, "tokenization_kwargs": {}}
    assert text_llm.generate("Hi", GREEDY, **nothing)[0].finished
    chat: dict[str, Any] = {**nothing, "chat_template": None, "chat_template_content_format": "auto"}
    assert text_llm.chat([{"role": "user", "content": "Hi"}], GREEDY, **chat)[0].finished


@pytest.mark.parametrize("messages", [None, "hi", 5, ["hi"], [[{"role": "user", "content": "Hi"}], None]])
def test_what_is_no_conversation_is_refused_by_what_it_is(text_llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidMessages, match=r"messages hold a (NoneType|str|int): give a list of messages"):
        text_llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_message_that_is_no_text_is_refused(text_llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "half \ud800 a character")]
    with pytest.raises(InvalidPrompt, match="conversation 1 is not valid text: half a surrogate pair"):
        text_llm.chat(conversations, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": "look"}, "tools are 'look': give a list of dicts"),
        ({"tools": ["look"]}, "tools are"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "chat template does not list them"),
        ({"chat_template_kwargs": "mood"}, "chat_template_kwargs is 'mood'"),
        ({"prediction": 5}, "prediction must be the text"),
        ({"prediction": ["one", "two"]}, "one for each of the 1 conversations"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs holds 'tools'"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt is 'no'"),
    ],
)
def test_arguments_of_a_chat_are_refused_by_name(text_llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        text_llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False, **arguments)
