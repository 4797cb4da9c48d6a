"""Each token of an answer is attributed to reasoning, content or neither, however the answer is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.gateway.api.answer_reader import AnswerReader, TokenAttribution, TokenRun, token_runs
from baton.cluster.gateway.api.detokenize import ChoiceDelta, LocatedToken
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.text import ContentPart, ParserConfig, ReasoningStart, ToolCallStart

THOUGHT, ANSWER = "<think>\nis it < or the fox?\n</think>\n\n", "the dog < the fox, 1 <think"
TEXT = THOUGHT + ANSWER


def pieces_of(cuts: set[int]) -> list[str]:
    ends = [0, *sorted(cuts), len(TEXT)]
    return [TEXT[begin:end] for begin, end in pairwise(ends)]


def located(offset: int, token_id: int) -> LocatedToken:
    return LocatedToken(offset, Logprobs.pack([TokenLogprobs([token_id], [-1.0], 1)]))


def shares_of(pieces: list[str], *, known: bool) -> tuple[int, str]:
    """Return the number of reasoning tokens, and the tokens of the content. Each piece is a delta, each character a
    token.
    """
    reader = AnswerReader(ParserConfig(reasoning=ReasoningStart.POSSIBLE).new_parser(), has_logprobs=known)
    words: list[LocatedToken] = []
    at = 0
    for piece in pieces:
        tokens = [located(at + i, ord(char)) for i, char in enumerate(piece)]
        at += len(piece)
        delta = ChoiceDelta(
            piece,
            tokens if known else [],
            finish_reason="stop" if at == len(TEXT) else None,
            num_tokens=len(piece),
            token_ends=[] if known else range(1, len(piece)),
        )
        for _, own in reader.push(delta):
            words += own
    return reader.num_reasoning_tokens, "".join(chr(token.logprobs[0].token_ids[0]) for token in words)


@given(st.sets(st.integers(1, len(TEXT) - 1)))
def test_the_attribution_does_not_depend_on_how_an_answer_is_split(cuts: set[int]) -> None:
    assert shares_of(pieces_of(cuts), known=True) == (len(THOUGHT), ANSWER)
    assert shares_of(pieces_of(cuts), known=False) == (len(THOUGHT), "")


def test_tokens_without_a_text_of_their_own_belong_to_the_next_text() -> None:
    """The tokens that are parts of one character have no text of their own, for example."""
    attribution = TokenAttribution()
    parts = [located(0, number) for number in range(3)]
    for run in token_runs(ChoiceDelta("é", parts, num_tokens=3), 0, known=True):
        attribution.push(run)
    assert attribution.take([ContentPart("é")]) == [parts]


def test_the_rest_of_a_token_does_not_count_again() -> None:
    first, second = (located(at, at) for at in (0, 4))
    attribution = TokenAttribution()
    for delta, at in ((ChoiceDelta("ab", [first], 1), 0), (ChoiceDelta("cdef", [second], 1), 2)):
        for run in token_runs(delta, at, known=True):
            attribution.push(run)
    assert attribution.take([ContentPart("abc"), ContentPart("def")]) == [[first], [second]]


def test_a_text_may_come_without_a_token() -> None:
    assert (
        list(token_runs(ChoiceDelta("ab"), 0, known=False))
        == list(token_runs(ChoiceDelta("ab"), 0, known=True))
        == [TokenRun("ab", 0)]
    )


def test_text_behind_a_call_has_its_own_tokens() -> None:
    attribution = TokenAttribution()
    for text in ("f(", ")", "so"):
        attribution.push(TokenRun(text, 1, located(0, len(text))))
    (_, own) = attribution.take([ToolCallStart(0, "f"), ContentPart("so")])
    assert [token.logprobs[0].token_ids for token in own] == [(2,)]
    assert attribution.num_reasoning_tokens == 0
