"""`ClientText` behaves in templates like the plain text that it stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text.chat import to_json
from baton.engine.text.client_text import ClientText, Tags, concatenated, plain

TAGS = Tags(["<|end|>", "</think>", "<｜User｜>"])
TEXT = st.text(st.sampled_from('<|end>/thik｜User \n\t"\\aé'), max_size=12)
SEPARATORS = ["</think>", "<|end|>", " ", "\n", "e", "|", "nd"]


def tagged(text: str) -> ClientText:
    return ClientText(TAGS.tag(text), TAGS)


def untagged(value: Any) -> Any:
    """Return the value as plain text, after checking that all of its strings are tagged."""
    if isinstance(value, str):
        assert isinstance(value, ClientText)
        return TAGS.untag("".join((value,)))
    return [untagged(each) for each in value] if isinstance(value, list | tuple) else value


def test_every_character_of_a_control_token_is_tagged_and_no_whitespace() -> None:
    raw = "".join((tagged("a <|end|>\n"),))
    assert raw[0] == "a"
    assert raw[1] == " "
    assert raw[-1] == "\n"
    assert all("\ud800" <= character <= "\udfff" for character in raw[2:-1])
    assert TAGS.untag(raw) == "a <|end|>\n"


@given(text=TEXT, sep=st.sampled_from(SEPARATORS), count=st.integers(-1, 2))
def test_parts_are_those_of_the_plain_text(text: str, sep: str, count: int) -> None:
    ours = tagged(text)
    for name in ("split", "rsplit"):
        assert untagged(getattr(ours, name)(sep, count)) == getattr(text, name)(sep, count)
        assert untagged(getattr(ours, name)(None, count)) == getattr(text, name)(None, count)
    for keepends in (True, False):
        assert untagged(ours.splitlines(keepends)) == text.splitlines(keepends)
    for name in ("partition", "rpartition"):
        assert untagged(getattr(ours, name)(sep)) == list(getattr(text, name)(sep))
    for name in ("strip", "lstrip", "rstrip"):
        assert untagged(getattr(ours, name)()) == getattr(text, name)()
    for name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
        assert untagged(getattr(ours, name)(sep)) == getattr(text, name)(sep)
        assert untagged(getattr(ours, name)(tagged(sep))) == getattr(text, name)(sep)
    assert plain(ours.replace(sep, "<|", count)) == text.replace(sep, "<|", count)
    assert plain(ours.replace("", "-")) == text.replace("", "-")
    assert untagged(ours[1:4]) == text[1:4]
    assert untagged(list(ours)) == list(text)


@given(text=TEXT, other=TEXT)
def test_comparisons_and_searches_are_those_of_the_plain_text(text: str, other: str) -> None:
    ours = tagged(text)
    for theirs in (other, tagged(other)):
        assert (ours == theirs) is (text == other)
        assert (theirs == ours) is (text == other)
        assert (ours != theirs) is (text != other)
        assert (ours < theirs) is (text < other)
        assert (theirs <= ours) is (other <= text)
        assert (theirs in ours) is (other in text)
        assert ours.find(theirs) == text.find(other)
        assert ours.startswith(theirs) is text.startswith(other)
        assert ours.endswith((theirs, "x")) is text.endswith((other, "x"))
        assert (ours in {theirs: 1}) is (text == other)
        assert (ours in [theirs]) is (text == other)
    assert hash(ours) == hash(text)
    assert len(ours) == len(text)
    assert ours.isalnum() is text.isalnum()
    assert ours.encode() == text.encode()
    assert untagged(ours.upper()) == text.upper()
    assert TAGS.untag(repr([ours])) == repr([text])
    assert not any(token in repr({ours: ours}) for token in ("<|end|>", "</think>", "<｜User｜>"))


@given(text=TEXT)
def test_text_that_is_joined_to_a_clients_text_gets_no_tags(text: str) -> None:
    for joined in (
        "<|end|>" + tagged(text) + "|end",
        concatenated(["<|end|>", tagged(text), "|end"]),
        "<|end|>" + tagged("").join([tagged(text), "|end"]),
    ):
        assert isinstance(joined, ClientText)
        raw = "".join((joined,))
        assert raw == "<|end|>" + TAGS.tag(text) + "|end"
        assert joined == f"<|end|>{text}|end"
    assert concatenated(["a", "b"]) == "ab"


@pytest.mark.parametrize("options", [{}, {"ensure_ascii": True}, {"indent": 2}, {"sort_keys": True}])
@given(text=TEXT)
def test_json_is_that_of_the_plain_text(options: dict[str, Any], text: str) -> None:
    value = {text: [text, 1], "b<|": {"a": text}}
    shown = to_json({tagged(key): each for key, each in value.items()} | {"b<|": {"a": tagged(text)}}, **options)
    assert json.loads(TAGS.untag(shown)) == value
    plain_json = json.dumps(value, **{"ensure_ascii": False, **options})
    assert to_json(value, **options) == plain_json
    assert list(json.loads(TAGS.untag(shown))) == list(json.loads(plain_json))


def test_a_tagged_text_can_be_parsed_as_a_number() -> None:
    tags = Tags(["<|extra_1|>"])
    one = ClientText(tags.tag("1"), tags)
    assert "".join((one,)) != "1"
    assert (int(one), float(one)) == (1, 1.0)
