from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.text import IncrementalDetokenizer, Tokenizer

EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "e\u0301", "�", "▁", "Ġ", "\x00", "  ", "\n", "<s>", "<0x41>", "</s>"]
texts = st.lists(st.one_of(st.text(max_size=6), st.sampled_from(EMOJI), st.sampled_from(["hello", "world"]))).map(
    "".join
)
concatenating = pytest.mark.parametrize("kind", ["byte level", "sentence piece", "metaspace", "unusual"])
every = pytest.mark.parametrize("kind", ["byte level", "sentence piece", "metaspace", "word piece", "unusual"])


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([token]) for token in token_ids), detokenizer.flush()]


@pytest.mark.slow
@every
@settings(deadline=None, max_examples=150)
@given(text=texts, skip=st.booleans())
def test_the_deltas_add_up_to_decoding_all_tokens_at_once(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text)
    assert "".join(stream(tokenizer, tokens, skip=skip)) == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(0, 430), max_size=30), skip=st.booleans())
def test_byte_level_deltas_add_up_also_for_tokens_that_are_no_text(
    byte_level: Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert "".join(stream(byte_level, tokens, skip=skip)) == byte_level.decode(tokens, skip_special_tokens=skip)


@pytest.mark.slow
@concatenating
@settings(deadline=None, max_examples=100)
@given(prompt=texts.filter(lambda text: text.strip()), text=texts)
def test_an_output_continues_its_prompt(tokenizers: dict[str, Tokenizer], kind: str, prompt: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    before, after = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(before + after)
    assert tokenizer.decode(before) + "".join(stream(tokenizer, after, before)) == whole


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(text=texts, data=st.data())
def test_a_character_that_the_prompt_began_is_completed(byte_level: Tokenizer, text: str, data: st.DataObject) -> None:
    tokens = byte_level.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    utf8 = codecs.getincrementaldecoder("utf-8")()
    complete = utf8.decode(b"".join(map(byte_level.token_bytes, tokens[:cut])))
    assert complete + "".join(stream(byte_level, tokens[cut:], tokens[:cut], skip=False)) == text


@pytest.mark.parametrize("kind", ["byte level", "sentence piece", "unusual"])
def test_no_partial_character_is_ever_emitted(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "🤖 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👩‍👧‍👦 ѯ"
    tokens = tokenizer.encode(text)
    deltas = stream(tokenizer, tokens)
    assert len(tokens) > len(text), "these characters must not be in the vocabulary"
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
    assert "".join(deltas) == text


def test_flush_shows_bytes_that_never_became_a_character(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("𝔘", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(tokens) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def test_the_space_of_a_first_word_is_kept_only_after_a_prompt(sentence_piece: Tokenizer) -> None:
    word = sentence_piece.encode("hello", add_special_tokens=False)
    bos = sentence_piece.encode("")
    assert bos == [sentence_piece.bos_token_id]
    assert "".join(stream(sentence_piece, word)) == "hello"
    assert "".join(stream(sentence_piece, word, bos)) == "hello"
    assert "".join(stream(sentence_piece, word, sentence_piece.encode("Say"))) == " hello"


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("<|im_start|>hello<|im_end|>")
    assert "".join(stream(byte_level, tokens)) == "hello"
    assert "".join(stream(byte_level, tokens, skip=False)) == "<|im_start|>hello<|im_end|>"


def test_ids_beyond_the_vocabulary_give_no_text(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [byte_level.vocab_size + 5]) == ["", ""]


def test_a_token_without_text_is_not_the_first_word(sentence_piece: Tokenizer) -> None:
    word = sentence_piece.encode("hello", add_special_tokens=False)
    assert "".join(stream(sentence_piece, [sentence_piece.vocab_size + 5, *word])) == "hello"


def offsets_of(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    detokenizer, offsets = IncrementalDetokenizer(tokenizer, skip_special_tokens=False), []
    for token in tokens:
        offsets.append(detokenizer.offset_of(token))
        detokenizer.push([token])
    return offsets


@pytest.mark.parametrize("kind", ["byte level", "sentence piece", "unusual"])
def test_tokens_of_one_character_begin_where_it_begins(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode("𝔘𝔫x", add_special_tokens=False)
    assert offsets_of(tokenizer, tokens)[-9:] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", ["byte level", "sentence piece", "unusual"])
def test_a_token_behind_a_character_that_stays_incomplete_begins_behind_its_replacement(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    *_, begin, _, _, _ = tokenizer.encode("𝔘", add_special_tokens=False)
    word = tokenizer.encode("hello", add_special_tokens=False)
    tokens = [*word, begin, word[-1], word[-1]]
    text = "".join(stream(tokenizer, tokens, skip=False))
    place = text.index("\N{REPLACEMENT CHARACTER}")
    assert offsets_of(tokenizer, tokens)[-3:-1] == [place, place + 1]


@settings(deadline=None, max_examples=200)
@given(tokens=st.lists(st.integers(0, 419), max_size=30))
def test_offsets_are_those_of_the_characters_that_the_tokens_first_bytes_belong_to(
    byte_level: Tokenizer, tokens: list[int]
) -> None:
    expected, before = [], b""
    for token in tokens:
        piece = byte_level.token_bytes(token)
        expected.append(len((before + piece[:1]).decode(errors="replace")) - 1)
        before += piece
    assert offsets_of(byte_level, tokens) == expected
