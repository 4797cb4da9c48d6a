"""Reasoning is separated from the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text import (
    ChatTemplate,
    ContentPart,
    OutputPart,
    ParserConfig,
    ReasoningPart,
    ReasoningStart,
    Tokenizer,
)

NONE, POSSIBLE, BEGUN = ReasoningStart


def read(text: str, thoughts: ReasoningStart, sizes: list[int] | None = None) -> tuple[str, str]:
    reader, rest = ParserConfig(reasoning=thoughts).new_parser(), text
    told: list[OutputPart] = []
    for size in sizes or []:
        told += reader.push(rest[:size])
        rest = rest[size:]
    told += reader.push(rest, finished=True)
    answer = "".join(part.text for part in told if isinstance(part, ContentPart))
    return "".join(part.text for part in told if isinstance(part, ReasoningPart)), answer


@pytest.mark.parametrize(
    ("thoughts", "text", "thought", "answer"),
    [
        (POSSIBLE, "<think>\nwell, \n so\n</think>\n\nYes. ", "well, \n so", "Yes. "),
        (POSSIBLE, " <think></think>Yes", "", "Yes"),
        (POSSIBLE, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (POSSIBLE, " \n<thi", "", " \n<thi"),
        (POSSIBLE, "<think>cut off </thi", "cut off </thi", ""),
        (BEGUN, "\nwell</think>Yes</think>", "well", "Yes</think>"),
        (BEGUN, "never an end \n", "never an end \n", ""),
        (NONE, "<think>well</think>Yes", "", "<think>well</think>Yes"),
        (POSSIBLE, "", "", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(thoughts: ReasoningStart, text: str, thought: str, answer: str) -> None:
    assert read(text, thoughts) == (thought, answer)


texts = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", " ", "\n", "a", "bc"]), max_size=10)


@given(texts.map("".join), st.lists(st.integers(0, 5), max_size=40), st.sampled_from(ReasoningStart))
def test_the_split_of_a_text_changes_nothing(text: str, sizes: list[int], thoughts: ReasoningStart) -> None:
    assert read(text, thoughts, sizes) == read(text, thoughts)


def test_text_is_streamed_as_it_arrives() -> None:
    reader = ParserConfig(reasoning=POSSIBLE).new_parser()
    assert reader.push("<thi") == []
    assert reader.push("nk>we") == [ReasoningPart("we")]
    assert reader.push("ll </t") == [ReasoningPart("ll")]
    assert reader.push("hink> \n") == []
    assert reader.push("Yes ") == [ContentPart("Yes ")]


@pytest.mark.parametrize(
    ("template", "prompt", "thoughts"),
    [
        ("{{ messages }}<think>", "hello <think>\n", BEGUN),
        ("{{ messages }}<think>", "hello <think>\n\n</think>\n\n", POSSIBLE),
        ("{{ messages }}<think>", "hello", POSSIBLE),
        ("{{ messages }}", "hello <think>", NONE),
    ],
)
def test_template_and_prompt_determine_if_a_model_reasons(
    byte_level: Tokenizer, template: str, prompt: str, thoughts: ReasoningStart
) -> None:
    tokenizer = Tokenizer(byte_level.backend, {}, ChatTemplate({"default": template}))
    assert tokenizer.reasoning_after(prompt) is thoughts
    assert byte_level.reasoning_after(prompt) is NONE, "without a template there is no reasoning"
