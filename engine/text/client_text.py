"""Tagged strings, which tell a client's text from the text that a chat template writes.

The characters of a client's text are *tagged*: each is replaced by a surrogate, which no encodable text contains. A
template may join, slice, trim, repeat and write tagged text: each character keeps its tag. So in the finished prompt, a
control token without any tagged character was written by the template; any other was spelled by the client.

    "a<|end|>"  ── tag ──>  ClientText, which holds "a" and seven surrogates, and equals "a<|end|>"
    template: "<|user|>" + text + "<|end|>"  ──>  only the last "<|end|>" is found in the tagged prompt
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

_FIRST_TAG, _NUM_TAGS = 0xD800, 2048  # all surrogates
_TAGGED = re.compile("[\ud800-\udfff]+")


class Tags:
    """A tag for each character that occurs in some texts. If there are too few tags, the most frequent get them.

    Whitespace has no tags, so that templates find it, and neither have the two characters that JSON escapes.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(character for text in texts for character in text)
        taggable = [character for character, _ in counts.most_common() if not character.isspace()]
        taggable = [character for character in taggable if character not in '"\\'][:_NUM_TAGS]
        self._tags = {ord(character): _FIRST_TAG + i for i, character in enumerate(taggable)}
        self._characters = {tag: character for character, tag in self._tags.items()}

    def tag(self, text: str) -> str:
        return text.translate(self._tags)

    def untag(self, text: str) -> str:
        return _TAGGED.sub(lambda tagged: tagged[0].translate(self._characters), text)


class ClientText(str):
    """A string of tagged characters that behaves like the untagged text.

    It compares, hashes, searches and splits as that text, and substrings and concatenations keep their tags. Operations
    that are not defined here give a plain string, which keeps the tags as well.
    """

    __slots__ = ("_plain", "_tags")

    _tags: Tags
    _plain: str | None

    def __new__(cls, tagged: str, tags: Tags) -> ClientText:
        text = super().__new__(cls, tagged)
        text._tags = tags
        text._plain = None
        return text

    @property
    def _untagged(self) -> str:
        """The untagged text. Templates must not get it, and cannot: they cannot read private names."""
        if self._plain is None:
            self._plain = self._tags.untag(with_tags(self))
        return self._plain

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._new(repr(self._untagged))  # used when a template prints a list

    def __hash__(self) -> int:
        return hash(self._untagged)

    def __eq__(self, other: object) -> bool:
        return self._untagged == plain(other)

    def __ne__(self, other: object) -> bool:
        return self._untagged != plain(other)

    def __lt__(self, other: str) -> bool:
        return self._untagged < plain(other)

    def __le__(self, other: str) -> bool:
        return self._untagged <= plain(other)

    def __gt__(self, other: str) -> bool:
        return self._untagged > plain(other)

    def __ge__(self, other: str) -> bool:
        return self._untagged >= plain(other)

    def __contains__(self, part: object) -> bool:
        return plain(part) in self._untagged

    def __int__(self) -> int:
        return int(self._untagged)

    def __float__(self) -> float:
        return float(self._untagged)

    def __add__(self, other: str) -> str:
        return self._with("".join((self, other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return self._with("".join((other, self))) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return self._with(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return map(self._with, with_tags(self))

    def join(self, texts: Iterable[str]) -> str:
        return self._with(str.join(self, texts))

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(self._untagged.lstrip(plain(chars))) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(self._untagged.rstrip(plain(chars)))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, _ = self._untagged.partition(plain(sep))
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(before) + len(found) :]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, _ = self._untagged.rpartition(plain(sep))
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(before) + len(found) :]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self._untagged.split(plain(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self._untagged.rsplit(plain(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(self._untagged.splitlines(keepends=True), "")
        if keepends:
            return lines
        return [line[: len(bare)] for line, bare in zip(lines, self._untagged.splitlines(), strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return self._new(self._untagged.replace("", plain(new), count))
        return self._with(str.join(new, self.split(old, count)))

    def _located(self, parts: Iterable[str], sep: str | None) -> list[str]:
        """Return the tagged text of `parts`, consecutive parts of the plain text, between `sep` (None: whitespace)."""
        cut, end = [], 0
        for part in parts:
            start = self._untagged.index(part, end)
            cut.append(self[start : start + len(part)])
            end = start + len(part) + len(sep or "")
        return cut

    def _with(self, tagged: str) -> ClientText:
        return ClientText(tagged, self._tags)

    def _new(self, text: str) -> ClientText:
        """Tag a text that was derived from this one, although some of its characters may not be the client's."""
        return ClientText(self._tags.tag(text), self._tags)


def plain(value: Any) -> Any:
    """Return the untagged text of a `ClientText`, also within a tuple; return any other value as it is."""
    if isinstance(value, ClientText):
        return value._untagged
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def with_tags(text: str) -> str:
    """Return a text as an ordinary string, in which tagged characters stay tagged."""
    return "".join((text,))


def concatenated(texts: Iterable[str]) -> str:
    """Join texts; the result is a `ClientText` if one of them is."""
    listed = list(texts)
    joined = "".join(listed)
    first = next((text for text in listed if isinstance(text, ClientText)), None)
    return joined if first is None else first._with(joined)


def _of_plain(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def ask(self: ClientText, *args: Any) -> Any:
        return method(self._untagged, *map(plain, args))

    return ask


def _new_of_plain(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def convert(self: ClientText) -> str:
        return self._new(method(self._untagged))

    return convert


for _name in (
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "encode",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "istitle",
    "isupper",
):
    setattr(ClientText, _name, _of_plain(_name))
for _name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
    setattr(ClientText, _name, _new_of_plain(_name))
