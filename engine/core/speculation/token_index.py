"""A text of tokens in which the places where its last tokens occurred before are found quickly.

The search is that of zlib's deflate. An *anchor* is a run of a fixed number of tokens. All places behind equal anchors
are linked, the newest first:

    tokens    a  b  c  d  a  b  e  a  b              anchors of 2 tokens; the text ends with (a, b)
    place     0  1  2  3  4  5  6  7  8
    newest    hash(a, b) -> 6                        the newest place behind such an anchor, by its hash
    previous  6 -> 2 -> none                         the one before it

A search takes the last tokens as an anchor, follows the links through no more than `MOST_PLACES` places, and compares
backwards from each how many tokens are equal. So it costs the same in every text, also where one token is repeated a
hundred thousand times. Anchors with equal hashes share a list; comparing tells them apart.

Memory is arrays of 32-bit numbers: for two lengths of anchors 14 to 28 bytes a token, whatever the tokens are, and 8
for each hash that is told apart at first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_PLACES = 24  # looked at by one search for each length of anchors
SEPARATOR = -1  # between texts that do not continue each other; no token has this id
_NONE = -1
_LOAD = 4  # places for each hash that is told apart, before there are more hashes
_GROWTH = 4


class Match(NamedTuple):
    """The longest run of tokens that a search has found."""

    length: int  # tokens that are equal, at least an anchor's
    places: list[int]  # what follows the run begins here: the newest first, one at least


class TokenIndex:
    """A growing text. `anchors` are the lengths of runs that are looked up, the longest first.

    A text that grows beyond `_LOAD` times `num_hashes` is linked anew, which takes some 0.4 ms for 1000 tokens.
    """

    def __init__(self, anchors: Iterable[int], tokens: Iterable[int] = (), *, num_hashes: int) -> None:
        """`num_hashes`: a power of 2; more where the tokens are more."""
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
        """Return the memory that the text and its links take."""
        arrays = [self._tokens, *(each for links in self._links for each in links.arrays)]
        return sum(each.itemsize * len(each) for each in arrays)

    def part(self, start: int, end: int | None = None) -> array[int]:
        return self._tokens[start:end]

    def _index(self) -> None:
        for links in self._links:
            links.extend(self._tokens)

    def search(self, tail: array[int], enough: int = MOST_PLACES, longer_than: int = 0) -> Match | None:
        """Return the longest run of this text that equals the end of `tail`; None where there is none.

        Runs of `longer_than` tokens and fewer are left out. Where all of `tail` was found `enough` times, older places
        are not looked for.
        """
        for links in self._links:
            if (match := self._walk(links, tail, enough, max(links.length, longer_than + 1))) is not None:
                return match
            if longer_than >= links.length:
                break
        return None

    def _walk(self, links: _Links, tail: array[int], enough: int, best: int) -> Match | None:
        """Compare the places behind one anchor; a run has `best` tokens at least."""
        tokens, previous, length = self._tokens, links.previous, len(tail)
        place = links.find(tail)
        places: list[int] = []
        if place == _NONE or best > length:
            return None
        end = tail[length - best :]  # the tokens that a place must follow to be as good as the best one
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
        """Return how many tokens before the place equal the last ones of `tail`, of which `known` are known to."""
        tokens, length = self._tokens, len(tail)
        if place >= length and tokens[place - length : place] == tail:
            return length
        most = min(length, place)
        while known < most and tokens[place - 1 - known] == tail[length - 1 - known]:
            known += 1
        return known

    def following(self, place: int, most: int, *, repeats: bool = False) -> list[int]:
        """Return up to `most` tokens from a place on, which end at a separator.

        With `repeats`, the text is thought to go on behind its end as it does from the place on.
        """
        tokens = self._tokens[place : place + most].tolist()
        if repeats and len(tokens) < most:
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class _Links:
    """The places behind the anchors of one length. The end of the text is no place yet: nothing follows."""

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
        """Return the newest place behind an anchor with the hash of the last tokens of `tail`, or `_NONE`."""
        if len(tail) < self.length:
            return _NONE
        return self._newest[hash(tuple(tail[-self.length :])) & self._mask]

    def extend(self, tokens: array[int]) -> None:
        """Add the places that are new in the text, before its end."""
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
    """Return lengths of anchors for matches of these lengths, for `TokenIndex`."""
    return (shortest,) if shortest == longest else (longest, shortest)
