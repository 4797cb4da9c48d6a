from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.text import StopResult, StopStrings

# A small alphabet makes stop strings overlap with the text, with each other and with themselves.
letters = st.sampled_from("ab")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=4), max_size=3)
pieces_of_text = st.lists(st.text(letters, max_size=4), max_size=8)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the end of the shortest prefix of the text that ends with a stop string, and the longest such string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@settings(deadline=None, max_examples=500)
@given(stops=stop_lists, pieces=pieces_of_text, include=st.booleans())
def test_text_comes_out_up_to_the_first_stop_string(stops: list[str], pieces: list[str], include: bool) -> None:
    finder = StopStrings(stops, include)
    results = [finder.push(piece) for piece in pieces]
    given_out, stopped = "".join(result.text for result in results), [r.stop for r in results if r.stop]
    text = "".join(pieces)
    expected = first_stop(text, stops)
    if expected is None:
        assert stopped == []
        assert given_out + finder.flush() == text
    else:
        end, stop = expected
        assert stopped == [stop]
        assert given_out == (text[:end] if include else text[: end - len(stop)])
        assert finder.flush() == ""


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(stops=stop_lists, pieces=pieces_of_text)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    finder = StopStrings(stops)
    text = given_out = ""
    for piece in pieces:
        text += piece
        result = finder.push(piece)
        given_out += result.text
        if result.stop:
            return
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert given_out == text[: len(text) - held]


def test_a_stop_string_may_span_many_tokens() -> None:
    finder = StopStrings(["END OF TEXT"])
    assert [finder.push(piece).text for piece in ("one E", "ND", " OF", " TEXTURE?")] == ["one ", "", "", ""]
    assert finder.push("more") == StopResult("")


def test_text_that_only_began_like_a_stop_string_is_emitted() -> None:
    finder = StopStrings(["END OF TEXT"])
    assert [finder.push(piece).text for piece in ("an E", "ND", " OF", " DAY")] == ["an ", "", "", "END OF DAY"]


def test_text_that_passes_by_cannot_stop() -> None:
    finder = StopStrings(["stop"])
    assert finder.push("st").text == ""
    assert finder.pass_unchecked("op and st") == "stop and st"
    assert finder.push("op") == StopResult("op")
    assert finder.push(" stop").stop == "stop"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings([""])


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    """Comparing a stop string of a megabyte that almost matches anew for each piece would take minutes."""
    finder = StopStrings(["a" * 1_000_000 + "b"])
    for _ in range(100):
        assert finder.push("a" * 1_000).text == ""
    assert len(finder.push("c").text) == 100_001
