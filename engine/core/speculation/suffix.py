"""Suffix decoding: guesses from the request's own text and from recent answers of the engine, the longest match first.

    own text          prediction, prompt, answer so far
    recent answers    of requests with the same salt, in batches: the newest batch grows, the oldest is dropped, of a
                      salt that has more than its share first

The request's last tokens are searched for in each of these texts. The longest match wins; of equal ones, that in the
own text, then that in the newest answers. The number of guesses grows with the match: a match of L tokens allows
`max_spec_factor` * L guesses, and one of `max_tree_depth` tokens allows as many as are asked for. If the match occurs
several times and the continuations differ, the most frequent token is taken, as long as the share of places that agree
is at least `min_token_prob`.

The idea and the names of its settings are those of SuffixDecoding (https://arxiv.org/abs/2411.04975) in vLLM. Instead
of trees with counts there are texts with linked places (`token_index`), whose memory is bounded by their length.

Memory: 28 bytes for each token of a request's own text, and 32 kB, until it ends. Recent answers are limited to
`RECENT_TOKENS` tokens of all salts together, and `ANSWER_TOKENS` of one answer: 14 MB, and 1 kB for each of their
salts.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set

from .drafter import DraftedRequest
from .ngram import OwnText
from .token_index import SEPARATOR, Match, TokenIndex

RECENT_TOKENS = 2**19
BATCH_TOKENS = RECENT_TOKENS // 4  # of one salt, before its next batch begins
_FIRST_BATCH_TOKENS, _FIRST_HASHES = 2**14, 64  # of a salt's first batch: most salts have few answers
_HASHES = BATCH_TOKENS // 4  # enough that a batch never needs to be linked anew
ANSWER_TOKENS = 2**13  # of a longer answer, only the last ANSWER_TOKENS are kept
_ANCHORS = (6, 2)  # a match has at least 2 tokens
_VOTES = 8  # places of the longest match whose continuations are compared
_ENOUGH = 4  # places at which a search may stop, once all tokens searched for match


class SuffixDrafter:
    """Guesses from the request's own text and from recent answers. Implements `Drafter`."""

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self._longest = max_tree_depth
        self._factor = max_spec_factor
        self._min_prob = min_token_prob
        self.recent = RecentAnswers(max_cached_requests)
        self._texts: dict[str, OwnText] = {}
        self._salts: dict[str, str] = {}

    def start(self, request: DraftedRequest) -> None:
        self._texts[request.request_id] = OwnText(request, _ANCHORS, self._longest)
        self._salts[request.request_id] = request.cache_salt

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        if (text := self._texts.get(request_id)) is not None:
            text.extend(token_ids)

    def propose(self, request_id: str, most: int) -> list[int]:
        own = self._texts.get(request_id)
        if own is None:
            return []
        tail = own.tail()
        source: OwnText | TokenIndex = own
        match = own.search(tail, _ENOUGH)
        for index in self.recent.of(self._salts[request_id]):
            if match is not None and match.length == len(tail):
                break
            other = index.search(tail, _ENOUGH, 0 if match is None else match.length)
            if other is not None:
                match, source = other, index
        return [] if match is None else self._guess(source, match, most)

    def _guess(self, source: OwnText | TokenIndex, match: Match, most: int) -> list[int]:
        if match.length < self._longest:
            most = min(most, int(self._factor * match.length))
        if most <= 0:
            return []
        return most_frequent([source.following(place, most) for place in match.places[:_VOTES]], self._min_prob)

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        self.recent.add(cache_salt, array("i", answer[-ANSWER_TOKENS:]))

    def end(self, request_id: str) -> None:
        if (text := self._texts.pop(request_id, None)) is not None:
            self.recent.add(self._salts.pop(request_id), text.answer(ANSWER_TOKENS))


def most_frequent(texts: list[list[int]], min_prob: float) -> list[int]:
    """Return the most frequent beginning of `texts`, chosen token by token; among equally frequent tokens the first.

    It ends before a token whose share of all texts is below `min_prob`.
    """
    guess: list[int] = []
    num_texts = len(texts)
    while texts:
        first = texts[0]
        if texts.count(first) == len(texts):
            return guess + first[len(guess) :]
        position = next(_differing(texts), min(map(len, texts)))  # equal up to here
        guess = first[:position]
        votes = Counter(text[position] for text in texts if len(text) > position)
        if not votes:
            break
        token, count = votes.most_common(1)[0]
        if count < min_prob * num_texts:
            break
        texts = [text for text in texts if len(text) > position and text[position] == token]
    return guess


def _differing(texts: list[list[int]]) -> Iterator[int]:
    """Yield the positions at which not all texts have the same token."""
    return (position for position, tokens in enumerate(zip(*texts, strict=False)) if len(set(tokens)) > 1)


class RecentAnswers:
    """Answers of ended requests, by salt: the texts of one salt have no answers of another."""

    def __init__(self, max_answers: int) -> None:
        """Keep at most `max_answers`, of all salts together; 0: none."""
        self._max_answers = max_answers
        self._by_salt: dict[str, deque[_AnswerBatch]] = {}
        self._by_age: deque[_AnswerBatch] = deque()  # the oldest first
        self.num_tokens = 0
        self.num_answers = 0

    @property
    def salts(self) -> Set[str]:
        return self._by_salt.keys()

    def of(self, salt: str) -> Iterator[TokenIndex]:
        """Yield the texts of a salt, newest first."""
        return (batch.index for batch in self._by_salt.get(salt, ()))

    def add(self, salt: str, answer: array[int]) -> None:
        if not answer or not self._max_answers:
            return
        batch = self._newest(salt, len(answer) + 1)
        before = len(batch.index)
        batch.index.extend([*answer, SEPARATOR])
        batch.num_answers += 1
        self.num_answers += 1
        self.num_tokens += len(batch.index) - before
        while self.num_tokens > RECENT_TOKENS or self.num_answers > self._max_answers:
            self._drop(self._to_drop(salt))

    def _newest(self, salt: str, num_tokens: int) -> _AnswerBatch:
        """Return the batch for the next answer, which has `num_tokens` tokens."""
        batches = self._by_salt.setdefault(salt, deque())
        most_answers = max(1, self._max_answers // 4)
        if batches:
            newest = batches[0]
            if len(newest.index) + num_tokens <= newest.most_tokens and newest.num_answers < most_answers:
                return newest
        batches.appendleft(batch := _AnswerBatch(salt, is_first=not batches))
        self._by_age.append(batch)
        return batch

    def _to_drop(self, salt: str) -> _AnswerBatch:
        """Return the oldest batch of the salt whose answers come, if it has more than its share; else that of all."""
        batches, num_salts = self._by_salt[salt], len(self._by_salt)
        num_tokens = sum(len(batch.index) for batch in batches)
        num_answers = sum(batch.num_answers for batch in batches)
        is_over = num_tokens * num_salts > RECENT_TOKENS or num_answers * num_salts > self._max_answers
        return batches[-1] if is_over and len(batches) > 1 else self._by_age[0]

    def _drop(self, batch: _AnswerBatch) -> None:
        """Drop the oldest batch of a salt, with its answers."""
        self._by_age.remove(batch)
        batches = self._by_salt[batch.salt]
        batches.pop()
        if not batches:
            del self._by_salt[batch.salt]
        self.num_tokens -= len(batch.index)
        self.num_answers -= batch.num_answers


class _AnswerBatch:
    """Answers that are dropped together."""

    __slots__ = ("index", "most_tokens", "num_answers", "salt")

    def __init__(self, salt: str, *, is_first: bool) -> None:
        self.salt = salt
        self.most_tokens = _FIRST_BATCH_TOKENS if is_first else BATCH_TOKENS
        self.index = TokenIndex(_ANCHORS, num_hashes=_FIRST_HASHES if is_first else _HASHES)
        self.num_answers = 0
