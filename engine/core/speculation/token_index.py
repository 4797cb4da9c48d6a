"""A text of tokens with an index of the earlier places of its last tokens.

The search is that of zlib's deflate. An *anchor* is a run of a fixed number of tokens. The *place* of an anchor is the
index of the token after it. Places of equal anchors are linked, newest first:

    tokens    a  b  c  d  a  b  e  a  b              anchors of 2 tokens; the text ends with (a, b)
    index     0  1  2  3  4  5  6  7  8
    newest    hash(a, b) -> 6                        the newest place of the anchor, by its hash
    previous  6 -> 2 -> none                         the place before it

A search takes the last tokens as an anchor, follows the links through at most `MOST_PLACES` places, and compares
backwards from each of them. So it costs the same in every text, even if one token is repeated a hundred thousand times.
Anchors with equal hashes share a list; the comparison tells them apart.

Memory is arrays of 32-bit numbers: with two lengths of anchors 14 to 28 bytes for each token, whatever the tokens are,
and 8 for each of the initial hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_PLACES = 24  # to look at in one search, for each length of anchors
SEPARATOR = -1  # between texts that do not continue each other; no token has this id
_NONE = -1
_LOAD = 4  # places for each hash, before the number of hashes grows
_GROWTH = 4


class Match(NamedTuple):
    """The longest run of tokens that a search found."""

    length: int  # tokens that are equal: at least as many as an anchor has
    places: list[int]  # indices of the tokens after the run: at least one, newest first


class TokenIndex:
    """A growing text. `anchors` are the lengths of the anchors to index, longest first.

    When the text has more than `_LOAD` tokens for each hash, it is linked anew, in about 0.4 ms for 1000 tokens.
    """

    def __init__(self, anchors: Iterable[int], tokens: Iterable[int] = (), *, num_hashes: int) -> None:
        """Create a text with `num_hashes` hashes, a power of 2, or with more if it already needs them."""
        self._tokens = array("i", tokens)
        num_hashes = max(num_hashes, _power_of_2(len(self._tokens)))
        self._links = [_Links(length, num_hashes) for length in anchors]
        self._index()

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self._tokens.extend(tokens)
        self._index()

    @property
    def num_bytes(self) -> int:
        """The memory of the text and its links, in bytes."""
        arrays = [self._tokens, *(each for links in self._links for each in links.arrays)]
        return sum(each.itemsize * len(each) for each in arrays)

    def part(self, start: int, end: int | None = None) -> array[int]:
        return self._tokens[start:end]

    def _index(self) -> None:
        for links in self._links:
            links.extend(self._tokens)

    def search(self, tail: array[int], enough: int = MOST_PLACES, longer_than: int = 0) -> Match | None:
        """Return the longest run of this text that equals the end of `tail`; None if there is none.

        Only runs of more than `longer_than` tokens count. Once all of `tail` was found `enough` times, the search
        ends.
        """
        for links in self._links:
            if (match := self._walk(links, tail, enough, max(links.length, longer_than + 1))) is not None:
                return match
            if longer_than >= links.length:
                break
        return None

    def _walk(self, links: _Links, tail: array[int], enough: int, best: int) -> Match | None:
        """Compare the places of one anchor. Only runs of at least `best` tokens count."""
        tokens, previous, length = self._tokens, links.previous, len(tail)
        place = links.find(tail)
        places: list[int] = []
        if place == _NONE or best > length:
            return None
        end = tail[length - best :]  # the tokens before a place that is as good as the best one
        for _ in range(MOST_PLACES):
            if place >= best and tokens[place - best : place] == end:
                if best < length and (equal := self._num_equal(place, tail, best)) > best:
                    best, places, end = equal, [], tail[length - equal :]
                places.append(place)
                if best == length and len(places) >= enough:
                    break
            place = previous[place]
            if place == _NONE:
                break
        return Match(best, places) if places else None

    def _num_equal(self, place: int, tail: array[int], known: int) -> int:
        """Return how many tokens before the place equal the last ones of `tail`; at least `known` do."""
        tokens, length = self._tokens, len(tail)
        if place >= length and tokens[place - length : place] == tail:
            return length
        most = min(length, place)
        while known < most and tokens[place - 1 - known] == tail[length - 1 - known]:
            known += 1
        return known

    def following(self, place: int, most: int, *, repeats: bool = False) -> list[int]:
        """Return up to `most` tokens from a place on, up to a separator.

        With `repeats`, a text that is too short is continued by repeating its tokens from the place on.
        """
        tokens = self._tokens[place : place + most].tolist()
        if repeats and len(tokens) < most:
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class _Links:
    """The places of the anchors of one length. The end of the text is no place yet, since no token follows."""

    __slots__ = ("_mask", "_newest", "length", "previous")

    def __init__(self, length: int, num_hashes: int) -> None:
        self.length = length
        self.previous = array("i", [_NONE]) * length  # by place
        self._mask = num_hashes - 1
        self._newest = array("i", [_NONE]) * num_hashes  # by hash

    @property
    def arrays(self) -> tuple[array[int], array[int]]:
        return self.previous, self._newest

    def find(self, tail: array[int]) -> int:
        """Return the newest place of anchors with the same hash as the last tokens of `tail`, or `_NONE`."""
        if len(tail) < self.length:
            return _NONE
        return self._newest[hash(tuple(tail[-self.length :])) & self._mask]

    def extend(self, tokens: array[int]) -> None:
        """Add the places of new tokens, except the end of the text."""
        first, end = len(self.previous), len(tokens)
        if end > len(self._newest) * _LOAD:
            self._mask = max(len(self._newest) * _GROWTH, _power_of_2(end)) - 1
            self._newest = array("i", [_NONE]) * (self._mask + 1)
            first = self.length
            del self.previous[first:]
        if first + 1 == end:
            self._add(first, [hash(tuple(tokens[first - self.length : first]))])
        elif first < end:
            new = tokens[first - self.length : end - 1].tolist()
            self._add(first, map(hash, zip(*(new[offset:] for offset in range(self.length)), strict=False)))

    def _add(self, first: int, hashes: Iterable[int]) -> None:
        newest, mask, append = self._newest, self._mask, self.previous.append
        for place, key in enumerate(hashes, first):
            key &= mask
            append(newest[key])
            newest[key] = place


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def anchors_of(shortest: int, longest: int) -> Sequence[int]:
    """Return the lengths of anchors with which a `TokenIndex` finds matches from `shortest` to `longest` tokens."""
    return (shortest,) if shortest == longest else (longest, shortest)
