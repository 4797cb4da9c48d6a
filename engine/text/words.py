"""Bad words as token sequences."""

from __future__ import annotations

from collections.abc import Iterable

from .tokenizer import Tokenizer


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Token sequences for `SamplingParams.bad_words_token_ids`: each word at a text's start and after a space.

    A sequence that ends with another one is left out: the shorter bans it already.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}") if bare else (word,):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokens and not any(tokens[-len(known) :] == known for known in sequences):
                sequences.append(tokens)
    return sequences
