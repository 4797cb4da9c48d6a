from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.sampling import SamplingParams
from baton.engine.text import TextDelta, TextStream, Tokenizer


@settings(deadline=None, max_examples=150)
@given(
    text=st.text(st.sampled_from("ab 👍🏽ü"), max_size=20),
    sizes=st.lists(st.integers(1, 4)),
    stop=st.text("ab ", min_size=1),
)
def test_with_any_grouping_of_tokens_the_text_ends_before_the_stop_string(
    byte_level: Tokenizer, text: str, sizes: list[int], stop: str
) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=[stop]))
    tokens = byte_level.encode(text)
    given_out, found, rest = "", None, list(tokens)
    for size in [*sizes, len(tokens) + 1]:
        delta = stream.push(rest[:size], finished=size >= len(rest))
        rest = rest[size:]
        given_out += delta.text
        found = found or delta.stop
        if found or not rest:
            break
    assert given_out == text.split(stop)[0]
    assert (found == stop) == (stop in text)


def test_tokens_after_a_stop_string_are_not_counted(byte_level: Tokenizer) -> None:
    head, tail = byte_level.encode("hello w"), byte_level.encode("orld")
    delta = TextStream(byte_level, SamplingParams(stop=["w"])).push(head + tail)
    assert (delta.text, delta.stop, delta.num_tokens) == ("hello ", "w", len(head))


@given(text=st.text(st.sampled_from("ab 👍🏽ü"), min_size=1, max_size=20), finished=st.booleans())
def test_tokens_that_come_together_add_what_each_would_add_alone(
    byte_level: Tokenizer, text: str, finished: bool
) -> None:
    tokens, params = byte_level.encode(text), SamplingParams(stop=["ab b"])
    together = TextStream(byte_level, params).push(tokens, finished=finished)
    cuts = [0, *together.ends, len(together.text)]
    alone = TextStream(byte_level, params)
    for number, (begin, end) in enumerate(pairwise(cuts)):
        is_last = number == len(tokens) - 1
        assert alone.push(tokens[number : number + 1], finished=finished and is_last).text == together.text[begin:end]
    assert len(cuts) - 1 == together.num_tokens


def test_the_stop_token_is_not_part_of_the_text_unless_asked_for(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("hello!")
    for include, expected in ((False, "hello"), (True, "hello!")):
        stream = TextStream(byte_level, SamplingParams(include_stop_str_in_output=include))
        assert stream.push(tokens, finished=True, stop_token_id=tokens[-1]).text == expected


def test_the_end_emits_the_text_that_was_held_back(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=["o world"]))
    assert stream.push(byte_level.encode("hello")).text == "hell"
    assert stream.push([], finished=True) == TextDelta("o")


def test_an_incomplete_character_at_the_end_is_shown_as_such(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams())
    assert stream.push(byte_level.encode("a𝔘")[:-1], finished=True).text == "a\N{REPLACEMENT CHARACTER}"


def test_stop_strings_do_not_count_before_min_tokens(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("b b b")
    assert len(tokens) == 5, "the third token completes a stop string, but is still within min_tokens"
    stream = TextStream(byte_level, SamplingParams(stop=["b"], min_tokens=3, max_tokens=64))
    delta = stream.push(tokens)
    assert (delta.text, delta.stop) == ("b b ", "b")
