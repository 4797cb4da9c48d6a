"""The recall task: a list of key-value pairs, then questions for single keys.

     qk dt mp rd          a key, then its value: two syllables out of 256 each
     bs kc gs fd          (a syllable is one token, so a pair is five tokens)
    ? bs kc gs fd

An answer is a copy of two tokens from an exact place in the context. A KV block that is lost, stale or in the wrong
place therefore shows as a wrong answer.
"""

from __future__ import annotations

import random

CONSONANTS = "bcdfghjklmnpqrst"
SYLLABLES = [f" {first}{second}" for first in CONSONANTS for second in CONSONANTS]
TOKENS_PER_PAIR = 5  # two of the key, two of the value, newline
TOKENS_PER_QUESTION = 3  # "?", two of the key
TOKENS_PER_ANSWER = 2


def make_pair(rng: random.Random) -> tuple[str, str]:
    """A key and a value, as they stand in the text (with the leading space)."""
    return (rng.choice(SYLLABLES) + rng.choice(SYLLABLES), rng.choice(SYLLABLES) + rng.choice(SYLLABLES))


def make_question(rng: random.Random, num_tokens: int) -> tuple[str, str]:
    """A prompt of about `num_tokens` tokens (at least one pair and the question) and the right answer."""
    pairs: dict[str, str] = {}
    wanted = max(1, (num_tokens - TOKENS_PER_QUESTION) // TOKENS_PER_PAIR)
    while len(pairs) < wanted:
        key, value = make_pair(rng)
        pairs[key] = value
    asked = rng.choice(list(pairs))
    lines = "".join(f"{key}{value}\n" for key, value in pairs.items())
    return f"{lines}?{asked}", pairs[asked]
