"""Drafts that were taken from a prediction are counted as such."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from baton.engine.core.requests.drafting import PredictedText
from baton.engine.core.speculation.stats import NO_DRAFTS, DraftCounts

tokens = st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=12)


@given(tokens, tokens.filter(bool))
@example([0, 256], [1])  # its bytes are there, within two tokens
@example([0xD83D, 0xDE00], [0x1F600])  # so are the two halves of a character
@example([1, 1], [1, 1])
def test_a_run_is_found_where_it_stands_token_by_token(text: list[int], run: list[int]) -> None:
    places = range(len(text) - len(run) + 1)
    assert PredictedText(text).contains(run) == any(text[at : at + len(run)] == run for at in places)


@given(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.integers(1, 6))
def test_tokens_of_a_step_share_its_counts(num_drafts: int, accepted: int, are_predicted: bool, kept: int) -> None:
    accepted = min(num_drafts, accepted)
    step = DraftCounts.of_step(num_drafts, accepted, are_predicted=are_predicted)
    kept = min(kept, accepted + 1)
    shares = [step.of_token(index).within(1) for index in range(kept)]
    assert sum(shares, NO_DRAFTS) == step.within(kept)
