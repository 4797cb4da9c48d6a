"""Look-ahead: masks after draft tokens equal those of an output with these tokens, and the state stays unchanged."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.engine import StructuredOutputsParams
from baton.engine.core.grammar import LookAhead
from baton.engine.structured import GrammarVocabulary, XGrammarBackend, output_grammar
from baton.engine.text import Tokenizer

from ...helpers.structured_cases import CASES, SCHEMA, WITH_TEXT
from ...helpers.structured_fixtures import VOCAB_SIZE

EOS = 0
ASKED = {
    **{name: case.asked for name, case in CASES.items()},
    **WITH_TEXT,
    "any whitespace": StructuredOutputsParams(json=SCHEMA),
}


@pytest.fixture(scope="module", autouse=True)
def quick(monkeypatch_module: pytest.MonkeyPatch) -> None:
    """Make no mask count as slow, however busy the machine is."""
    monkeypatch_module.setattr(output_grammar, "QUICK_MASK_S", 60.0)


@pytest.fixture(scope="module")
def monkeypatch_module() -> object:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def tokenizer(vocabulary: GrammarVocabulary) -> Tokenizer:
    return Tokenizer.from_folder(vocabulary.tokenizer)


def tokens_of(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=VOCAB_SIZE, bitorder="little")
    return bits.nonzero()[0].tolist()


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_masks_after_guesses_equal_those_of_an_output_with_the_guesses(
    grammars: XGrammarBackend, asked: StructuredOutputsParams
) -> None:
    draw, most = random.Random(1), 6
    for _ in range(12):
        output: list[int] = []
        grammar = grammars.open(asked)
        mask = grammar.advance([])
        while len(output) < 60:
            guesses = guesses_behind(draw, grammars, asked, output, most)
            ahead = grammar.look_ahead(guesses, most)
            assert len(ahead.guesses) == len(ahead.masks) <= most
            assert EOS not in ahead.guesses
            check_guesses(ahead, guesses, mask)
            twin = grammars.open(asked)
            twin.advance(output)
            assert [twin.advance([guess]) for guess in ahead.guesses] == ahead.masks
            kept = ahead.guesses[: draw.randint(0, len(ahead.guesses))]
            behind = ahead.masks[len(kept) - 1] if kept else mask
            drawn = [*kept, draw.choice(tokens_of(behind))]
            if drawn[-1] == EOS:
                break
            output += drawn
            mask = grammar.advance(drawn)
            twin = grammars.open(asked)
            assert twin.advance(output) == mask


def guesses_behind(
    draw: random.Random, grammars: XGrammarBackend, asked: StructuredOutputsParams, output: list[int], most: int
) -> list[int]:
    """Return allowed tokens, some of which are replaced by others or by the end token."""
    grammar = grammars.open(asked)
    mask, guesses = grammar.advance(output), []
    for _ in range(draw.randint(0, most + 2)):
        guesses.append(draw.choice(tokens_of(mask)))
        if guesses[-1] == EOS:
            break
        mask = grammar.advance(guesses[-1:])
    return [draw.randrange(VOCAB_SIZE) if draw.random() < 0.1 else guess for guess in guesses]


def check_guesses(ahead: LookAhead, guesses: list[int], mask: bytes) -> None:
    """Check that guesses are kept up to the first that is not allowed or ends the output."""
    for number, guess in enumerate(guesses[:6]):
        allowed = tokens_of(mask)
        if guess not in allowed or guess == EOS:
            return
        assert ahead.guesses[number] == guess
        mask = ahead.masks[number]


def test_the_end_token_is_never_guessed(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    grammar = grammars.open(StructuredOutputsParams(regex="ab?"))
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    grammar.advance([])
    ahead = grammar.look_ahead([a, EOS, b], 5)
    assert ahead.guesses == [a]
    assert tokens_of(ahead.masks[0]) == [EOS, b]
    assert tokens_of(grammar.advance([a, b])) == [EOS]
    assert grammar.look_ahead([EOS], 5) == LookAhead([], [])
    assert grammar.look_ahead([], 5) == LookAhead([], [])


def test_tokens_outside_the_mask_are_not_guessed(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    grammar = grammars.open(StructuredOutputsParams(json={"type": "string", "maxLength": 9}))
    quote, tab, letter = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ('"', "\t", "x"))
    assert tab not in tokens_of(grammar.advance([quote]))
    assert grammar.look_ahead([letter, tab, letter], 5).guesses == [letter]


def test_the_only_allowed_text_is_guessed(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    text = '{"name": "a", "age": '
    tokens = tokenizer.encode(text, add_special_tokens=False)
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    asked = StructuredOutputsParams(choice=['{"name": "a"}', '{"name": "b", "age": 12}'])
    grammar = grammars.open(asked)
    grammar.advance([])
    ahead = grammar.look_ahead([], 20)
    guessed = b"".join(map(tokenizer.token_bytes, ahead.guesses))
    assert guessed
    assert b'{"name": "'.startswith(guessed)
    assert grammar.look_ahead([], 1).guesses == ahead.guesses[:1]
    wrong = grammar.look_ahead([quote, *tokens], 20)
    assert wrong == ahead, "the forced text must replace a guess that is not allowed"


def test_a_text_that_begins_within_a_character_is_not_guessed(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("😀", add_special_tokens=False)
    assert rest
    grammar = grammars.open(StructuredOutputsParams(choice=["😀"]))
    grammar.advance([first])
    assert grammar.look_ahead([], 4) == LookAhead([], [])
    assert grammar.look_ahead(rest, 4).guesses == rest


def test_a_grammar_does_not_look_ahead_after_a_slow_mask(
    grammars: XGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.open(StructuredOutputsParams(choice=["yes it is"]))
    grammar.advance([])
    assert grammar.look_ahead([], 4).guesses
    monkeypatch.setattr(output_grammar, "QUICK_MASK_S", 0.0)
    assert grammar.look_ahead([], 4) == LookAhead([], [])
