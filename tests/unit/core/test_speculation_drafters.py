"""Drafters, compared with an exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.engine.core.speculation import ngram
from baton.engine.core.speculation.config import SpeculativeConfig, make_drafter
from baton.engine.core.speculation.drafter import DraftedRequest, Drafter
from baton.engine.core.speculation.ngram import NgramDrafter
from baton.engine.core.speculation.suffix import ANSWER_TOKENS, RECENT_TOKENS, SuffixDrafter, most_frequent
from baton.engine.core.speculation.token_index import MOST_PLACES, SEPARATOR, TokenIndex

FEW_TOKENS = st.integers(0, 3)
TEXTS = st.lists(FEW_TOKENS, max_size=MOST_PLACES)


def suffix(depth: int = 24, cached: int = 100, factor: float = 100.0, min_prob: float = 0.0) -> SuffixDrafter:
    return SuffixDrafter(
        max_tree_depth=depth, max_cached_requests=cached, max_spec_factor=factor, min_token_prob=min_prob
    )


def runs(text: Sequence[int], tail: Sequence[int], most: int) -> dict[int, int]:
    """Return how many tokens before each place of the text equal the end of the tail, `most` at most."""
    lengths = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(most, place, len(tail)) and text[place - 1 - length] == tail[len(tail) - 1 - length]:
            length += 1
        lengths[place] = length
    return lengths


def continued(text: Sequence[int], place: int, most: int) -> list[int]:
    """Return the tokens after a place; beyond the end, the text repeats from the place on."""
    longer = list(text)
    while len(longer) < place + most:
        longer.append(longer[len(longer) - len(text) + place])
    return longer[place : place + most]


def looked_up(text: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    lengths = runs(text, text, longest)
    best = max(lengths.values(), default=0)
    if best < shortest:
        return []
    return continued(text, max(place for place, length in lengths.items() if length == best), most)


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 8), st.integers(0, MOST_PLACES))
@example([1, 2, 3, 0, 2, 0, 1, 2], 1, 2, 2, 8)  # the longest run is not the newest
def test_ngram_finds_the_longest_run_and_of_these_the_newest(
    text: list[int], shortest: int, more: int, most: int, num_prompt: int
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    drafter.start(DraftedRequest("a", text[:num_prompt]))
    drafter.extend("a", text[num_prompt:])
    assert drafter.propose("a", most) == looked_up(text, shortest, shortest + more, most)


@given(TEXTS, st.integers(1, 8), st.lists(st.integers(1, 5), max_size=20))
@example([7, 1, 2, 5, *[1, 2, 6] * 5, 7, 1, 2], 2, [])  # many newer runs are shorter
def test_suffix_finds_the_longest_run_too_and_texts_may_grow_in_any_steps(
    text: list[int], most: int, sizes: list[int]
) -> None:
    drafter = suffix()
    drafter.start(DraftedRequest("a", []))
    rest = text
    for size in [*sizes, len(text)]:
        drafter.extend("a", rest[:size])
        rest = rest[size:]
    lengths = runs(text, text, 24)
    best = max(lengths.values(), default=0)
    guess = drafter.propose("a", most)
    if best < 2:
        assert guess == []
    else:
        places = [place for place, length in sorted(lengths.items(), reverse=True) if length == best]
        assert guess == most_frequent([continued(text, place, most) for place in places[:8]], 0.0)


@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 8))
def test_the_longest_match_of_own_text_and_recent_answers_decides(
    text: list[int], answers: list[list[int]], most: int
) -> None:
    drafter = suffix()
    for number, answer in enumerate(answers):
        drafter.start(DraftedRequest(str(number), [9, 9, 9], answer))
        drafter.end(str(number))
    drafter.start(DraftedRequest("a", text))
    shared = [token for answer in answers if answer for token in (*answer, SEPARATOR)]
    own = max(runs(text, text, 24).values(), default=0)
    other = max(runs(shared, text, 24).values(), default=0)
    guess = drafter.propose("a", most)
    if max(own, other) < 2:
        assert guess == []
    elif own < other and len(shared) <= MOST_PLACES:
        options = [place for place, length in runs(shared, text, 24).items() if length == other]
        assert any(guess[:1] == ([] if shared[place] == SEPARATOR else [shared[place]]) for place in options)
    assert SEPARATOR not in guess


def test_of_equal_matches_that_in_the_own_text_decides_then_that_in_the_newest_answers() -> None:
    drafter = suffix()
    drafter.learn([1, 2, 3, 8, 9], "")
    drafter.start(DraftedRequest("a", [1, 2, 3, 5, 6, 1, 2, 3]))
    assert drafter.propose("a", 2) == [5, 6]
    drafter.start(DraftedRequest("b", [0, 1, 2, 3]))
    drafter.learn([1, 2, 3, 7, 7], "")
    assert drafter.propose("b", 2) == [7, 7]


def test_of_a_long_answer_the_end_is_learnt() -> None:
    drafter, answer = suffix(), list(range(ANSWER_TOKENS + 100))
    drafter.learn(answer, "")
    for start, guess in (0, []), (ANSWER_TOKENS, answer[ANSWER_TOKENS + 8 : ANSWER_TOKENS + 10]):
        drafter.start(DraftedRequest("a", answer[start : start + 8]))
        assert drafter.propose("a", 2) == guess
        drafter.end("a")


def test_salts_without_answers_are_forgotten() -> None:
    drafter = suffix(cached=4)
    for number in range(20):
        drafter.learn([1, 2, 3], f"salt {number}")
    assert len(drafter.recent.salts) <= 4


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_calls_for_unknown_requests_do_nothing(method: str) -> None:
    drafter = make(method)
    drafter.extend("a", [1])
    drafter.end("a")
    assert drafter.propose("a", 3) == []
    drafter.start(DraftedRequest("a", [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]))
    assert drafter.propose("a", 3) == [1, 2, 3]
    drafter.end("a")
    assert drafter.propose("a", 3) == []


def make(method: str) -> Drafter:
    return make_drafter(SpeculativeConfig(method=method, num_speculative_tokens=8))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_predicted_answer_is_guessed_from_its_first_token_on(method: str) -> None:
    prompt, prediction = list(range(100, 140)), list(range(200, 230))
    drafter = make(method)
    drafter.start(DraftedRequest("a", prompt, prediction_token_ids=prediction))
    drafter.start(DraftedRequest("b", prompt))
    assert drafter.propose("a", 40) == prediction
    assert drafter.propose("b", 40) == []
    drafter.extend("a", [*prediction[:3], 7, *prediction[10:16]])
    assert drafter.propose("a", 4) == prediction[16:20]
    drafter.end("a")
    drafter.start(DraftedRequest("c", [1, 2, *prediction[20:26]]))
    assert drafter.propose("c", 4) == [], "a prediction is no answer"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("num_other", [2, 8])
@pytest.mark.parametrize("num_answered", [0, 4])
def test_of_long_texts_the_last_tokens_are_searched(
    method: str, num_other: int, num_answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "MOST_INDEXED", 12)
    run, others = [1, 2, 3, 4, 5], list(range(10, 10 + num_other))
    text = [*range(100, 120), *run, *others, *run]
    drafter = make(method)
    drafter.start(DraftedRequest("a", text[: len(text) - num_answered], text[len(text) - num_answered :]))
    assert drafter.propose("a", 2) == (others if num_other == 2 else [])
    drafter.extend("a", run)
    assert drafter.propose("a", 2) == [1, 2], "what comes later is added"
    drafter.start(DraftedRequest("b", range(50, 70), prediction_token_ids=range(300, 320)))
    assert drafter.propose("b", 20) == list(range(300, 312))


def test_answers_serve_only_requests_of_their_salt() -> None:
    drafter, answer = suffix(), [5, 6, 7, 8, 9]
    drafter.start(DraftedRequest("a", [1], cache_salt="tenant"))
    drafter.extend("a", answer)
    drafter.end("a")
    for request_id, salt, guess in (("b", "tenant", [7, 8, 9]), ("c", "other", []), ("d", "", [])):
        drafter.start(DraftedRequest(request_id, [5, 6], cache_salt=salt))
        assert drafter.propose(request_id, 5) == guess, salt


def test_prompts_serve_only_their_own_request() -> None:
    drafter = suffix()
    drafter.start(DraftedRequest("a", [5, 6, 7, 8, 9], [1]))
    drafter.end("a")
    drafter.start(DraftedRequest("b", [5, 6]))
    assert drafter.propose("b", 5) == []


def test_a_longer_match_allows_more_guesses() -> None:
    text = list(range(100))
    for length in (2, 5, 10, 24, 40):
        drafter = suffix(factor=1.0)
        drafter.start(DraftedRequest("a", [*text, *text[:length]]))
        assert len(drafter.propose("a", 30)) == (length if length < 24 else 30)
    assert suffix(factor=0.0).propose("a", 5) == []


def test_the_more_frequent_continuation_is_guessed_until_too_few_agree() -> None:
    assert most_frequent([[1, 2, 3], [4, 5, 6], [4, 5, 7]], 0.0) == [4, 5, 6]
    assert most_frequent([[1, 2, 3], [4, 5, 6], [4, 5, 7]], 0.5) == [4, 5]
    assert most_frequent([[1, 2, 3], [4, 5, 6], [4, 5, 7]], 0.9) == []
    assert most_frequent([[1], [1, 2]], 0.0) == [1, 2]
    assert most_frequent([[], []], 0.0) == []


@pytest.mark.slow
def test_recent_answers_are_bounded_in_number_and_tokens() -> None:
    drafter, draw = suffix(cached=8), random.Random(0)
    answers = [[draw.randrange(10_000) for _ in range(50)] for _ in range(100)]
    for number, answer in enumerate(answers):
        drafter.start(DraftedRequest(str(number), [1], answer, cache_salt=f"salt {number % 3}"))
        drafter.end(str(number))
        assert drafter.recent.num_answers <= 8
    assert len(drafter.recent.salts) <= 3
    known = 0
    for number, answer in enumerate(answers):
        drafter.start(DraftedRequest("probe", answer[:10], cache_salt=f"salt {number % 3}"))
        known += drafter.propose("probe", 5) == answer[10:15]
    assert 3 <= known <= 8

    drafter = suffix(cached=10_000)
    for _ in range(80):
        drafter.start(DraftedRequest("a", [1], [draw.randrange(100_000) for _ in range(10_000)]))
        drafter.end("a")
        assert drafter.recent.num_tokens <= RECENT_TOKENS
    assert drafter.recent.num_answers < 80


@pytest.mark.parametrize("num_quiet", [1, 3])
def test_a_busy_salt_takes_no_others_place_once_it_has_its_share(num_quiet: int) -> None:
    drafter, draw = suffix(cached=16), random.Random(0)
    quiet = [[draw.randrange(10_000) for _ in range(50)] for _ in range(num_quiet)]
    for number, answer in enumerate(quiet):
        drafter.learn(answer, f"quiet {number}")
    for _ in range(100):
        drafter.learn([draw.randrange(10_000) for _ in range(50)], "busy")
        assert drafter.recent.num_answers <= 16
    for number, answer in enumerate(quiet):
        drafter.start(DraftedRequest(str(number), answer[:10], cache_salt=f"quiet {number}"))
        assert drafter.propose(str(number), 5) == answer[10:15]


def test_a_salt_with_long_answers_takes_no_others_place_either() -> None:
    drafter, draw = suffix(cached=10_000), random.Random(0)
    drafter.learn(quiet := [draw.randrange(10_000) for _ in range(50)], "quiet")
    for number in range(2 * RECENT_TOKENS // ANSWER_TOKENS):
        drafter.learn(range(number, number + ANSWER_TOKENS), "busy")
        assert drafter.recent.num_tokens <= RECENT_TOKENS
    drafter.start(DraftedRequest("a", quiet[:10], cache_salt="quiet"))
    assert drafter.propose("a", 5) == quiet[10:15]


def test_the_newest_answer_is_kept_even_if_there_is_room_for_one_alone() -> None:
    drafter = suffix(cached=1)
    for salt in ("first", "second"):
        drafter.learn([5, 6, 7, 8], salt)
    drafter.start(DraftedRequest("a", [5, 6], cache_salt="second"))
    assert drafter.propose("a", 2) == [7, 8]


def test_no_answers_are_kept_where_none_are_asked_for() -> None:
    drafter = suffix(cached=0)
    drafter.start(DraftedRequest("a", [1], [5, 6, 7]))
    drafter.end("a")
    drafter.start(DraftedRequest("b", [5, 6]))
    assert drafter.propose("b", 3) == []


def de_bruijn(num_tokens: int, length: int) -> list[int]:
    """Return a text that has every run of `length` tokens once."""
    counts, text = [0] * num_tokens**length, [0] * length
    for _ in range(num_tokens**length):
        state = 0
        for token in text[-length + 1 :]:
            state = state * num_tokens + token
        counts[state] += 1
        text.append(num_tokens - counts[state])
    return text


@pytest.mark.parametrize("text", [[7] * 100_000, de_bruijn(46, 3), [1, 2] * 50_000], ids=["one", "de_bruijn", "two"])
def test_a_search_looks_at_few_places_in_any_text(text: list[int]) -> None:
    index = TokenIndex((6, 2), text, num_hashes=64)
    match = index.search(index.part(len(text) - 24))
    assert match is None or len(match.places) <= MOST_PLACES
    assert index.num_bytes <= 28 * len(text)
    drafter = suffix()
    drafter.start(DraftedRequest("a", text))
    assert len(drafter.propose("a", 32)) <= 32


def test_links_survive_the_growth_of_the_index() -> None:
    draw = random.Random(1)
    text = [draw.randrange(50_000) for _ in range(5_000)]
    index = TokenIndex((6, 2), num_hashes=64)
    for token in text:
        index.extend([token])
    assert index.num_bytes <= 28 * len(text)
    for place in (10, 63, 64, 65, 255, 256, 257, 1024, 4000):
        match = index.search(index.part(place - 8, place))
        assert match is not None
        assert (match.length, match.places) == (8, [place])
