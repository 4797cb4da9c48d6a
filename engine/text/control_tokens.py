"""Control tokens, which only the model's template may write in a chat, not its clients.

A control token steers the model: it ends a turn, names the speaker, opens a tool call. If a client's text spells one,
it is encoded as ordinary text. Control tokens are all special tokens of a vocabulary, and those other added tokens that
the model's chat template writes, since many makers do not mark tokens like `<｜User｜>` and `<tool_call>` as special.
Further added tokens, such as runs of blanks or HTML tags, are ordinary text.

Most chats spell no control token; they are rendered once and encoded as they are. Any other chat is rendered a second
time with tagged values (`client_text`), which shows the control tokens that the template wrote.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .client_text import ClientText, Tags

_LEAST_CHARS = 3  # shorter added tokens that are not special are punctuation, not control tokens
_BRACKETED = re.compile(r"<[|｜].*[|｜]>")
_ROLE = re.compile(r"[\w-]+")
_WRITTEN_BY_MODELS = ("content", "reasoning_content")  # fields of an assistant's message
_EDGE = 3  # searches look for this many characters at the beginning or end of a control token
_NOTHING = "(?!)"  # a pattern that matches nothing
_BORDER = "\0"  # separates texts in a string that is searched at once


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat."""

    text: str
    tagged: str | None = None  # the text with the client's characters tagged; None if they spell no control token

    @property
    def of_template(self) -> str:
        """The text to search for the template's control tokens: only the template's own characters are untagged."""
        return self.text if self.tagged is None else self.tagged


class ControlTokens:
    """The control tokens of one model. Immutable once built; any number of threads may use it."""

    def __init__(self, backend: Backend, template_literals: Collection[str], answer_marks: Collection[str]) -> None:
        """Find the control tokens of a vocabulary.

        `template_literals` are the texts that the chat template itself writes. `answer_marks` are the texts that the
        model puts around parts of its answers. Messages of the assistant may contain those that are not special.
        """
        self._backend = backend
        known = "\n".join((*template_literals, *answer_marks))
        added = sorted(backend.get_added_tokens_decoder().items())
        self._tokens = {token_id: token for token_id, token in added if _is_control(token, known)}
        self._ids = {token.content: token_id for token_id, token in self._tokens.items()}
        self._unknown_ids = _unknown_ids(backend)
        self._tags = Tags(self._ids)
        self._reach = max(map(len, self._ids), default=0)
        self._normalizer = backend.normalizer if any(token.normalized for token in self._tokens.values()) else None
        self._edges = _Edges([*self._ids, *map(self._normalized, self._ids)], template_literals)
        self._written = _any_of([_pattern(token) for token in self._tokens.values()])
        kept = [token for token in self._tokens.values() if not token.special and token.content in answer_marks]
        self._kept = _any_of([re.escape(token.content) for token in kept])

    def may_be_spelled_by(self, messages: Iterable[Mapping[str, Any]], *others: Any) -> bool:
        """Return whether a client's values could become control tokens.

        False is certain for templates that do not rewrite texts.
        """
        if not self._ids:
            return False
        values = [
            value
            for message in messages
            for key, value in message.items()
            if key != "role" or not _has_plain_role(message)
        ]
        texts = list(_texts([values, others]))
        return self._edges.are_in(texts) or (
            self._normalizer is not None and self._edges.are_in([self._normalized(text) for text in texts])
        )

    def tag_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy with tagged values. A role that is a plain word stays untagged, since templates write it."""
        keeps = _WRITTEN_BY_MODELS if message["role"] == "assistant" else ()
        tagged = {key: self.tag(value, keeps_answer_marks=key in keeps) for key, value in message.items()}
        return {**tagged, "role": message["role"]} if _has_plain_role(message) else tagged

    def tag(self, value: Any, *, keeps_answer_marks: bool = False) -> Any:
        """Return a copy of a JSON value whose strings and keys are `ClientText`."""
        if isinstance(value, str):
            return ClientText(self._tag_text(value, keeps_answer_marks), self._tags)
        if isinstance(value, Mapping):
            return {self.tag(key): self.tag(each) for key, each in value.items()}
        return [self.tag(each) for each in value] if isinstance(value, list | tuple) else value

    def untag(self, text: str) -> str:
        """Return a text with its tags replaced by the characters that they stand for."""
        return self._tags.untag(text)

    def encode(self, prompt: ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt whose `tagged` is known.

        They are exactly those of its text, unless the text has control tokens that the template did not write.
        """
        tagged = prompt.tagged or ""
        ids = self._backend.encode_batch_fast([prompt.text], add_special_tokens=False)[0].ids
        written = [self._ids[match[0]] for match in self._written.finditer(tagged)]
        if self._control_ids(ids) == self._control_ids(written):
            if not add_special_tokens:
                return ids
            return self._backend.encode_batch_fast([prompt.text], add_special_tokens=True)[0].ids
        names = self._encoder.names
        named = self._written.sub(lambda match: names[self._ids[match[0]]], tagged)
        return self._encoder.encode(self._tags.untag(named), add_special_tokens)

    @cached_property
    def _encoder(self) -> GuardedEncoder:
        return GuardedEncoder(self._backend, self._tokens, self._unknown_ids)

    def _control_ids(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._tokens and token_id not in self._unknown_ids]

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(text)

    def _tag_text(self, text: str, keeps_answer_marks: bool) -> str:
        if not keeps_answer_marks:
            return self._tag_edges(text)
        end, pieces = 0, []
        for mark in self._kept.finditer(text):
            pieces += [self._tag_edges(text[end : mark.start()]), mark[0]]
            end = mark.end()
        return "".join([*pieces, self._tag_edges(text[end:])])

    def _tag_edges(self, text: str) -> str:
        """Tag only characters near an end of the text, or near a possible edge of a control token.

        Near means within the length of the longest control token. The rest of a long text cannot be part of one.
        """
        end, pieces = 0, []
        for start, stop in self._edges.near(text, self._reach):
            begin = max(start, end)
            pieces += [text[end:begin], self._tags.tag(text[begin:stop])]
            end = max(end, stop)
        return "".join([*pieces, text[end:]])


class _Edges:
    """Patterns for beginnings and ends of control tokens."""

    def __init__(self, spellings: Iterable[str], template_literals: Iterable[str]) -> None:
        tokens = [spelling for spelling in spellings if spelling.strip()]
        starts = {token[:size] for token in tokens for size in range(1, _EDGE)}
        ends = {token[-size:] for token in tokens for size in range(1, _EDGE)}
        self._edge = _edge_of(tokens)
        self._begun = re.compile(rf"(?:{_any_of(map(re.escape, starts)).pattern})\s*{_BORDER}")
        self._ended = re.compile(rf"{_BORDER}\s*(?:{_any_of(map(re.escape, ends)).pattern})")
        self._outer = {character for token in tokens for character in (token[0], token[-1])}
        whole = _any_of(map(re.escape, tokens))
        pieces = [piece for literal in template_literals for piece in whole.split(literal)]
        opens = any(piece.endswith(tuple(starts)) for piece in pieces)
        self._insides = "\n".join(tokens) if opens and any(piece.startswith(tuple(ends)) for piece in pieces) else ""

    def are_in(self, texts: Collection[str]) -> bool:
        """Return whether a text contains a control token, or a part that other text next to it could complete."""
        if self._insides and any(text.strip() in self._insides for text in texts if text.strip()):
            return True  # the template itself writes a control token's beginning and end around a client's text
        together = _BORDER + _BORDER.join(texts) + _BORDER
        if not any(character in together for character in self._outer):
            return False
        return any(pattern.search(together) for pattern in (self._edge, self._begun, self._ended))

    def near(self, text: str, reach: int) -> Iterator[tuple[int, int]]:
        """Yield spans of the text that may hold parts of control tokens, in order of their starts."""
        yield 0, min(reach, len(text))
        for match in self._edge.finditer(text):
            yield max(0, match.start() - reach), min(match.end() + reach, len(text))
        yield max(0, len(text) - reach), len(text)


def _edge_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for a token's first characters, or for its last characters after the rest of the token.

    The search is fast, since tokens begin and end with few different characters, which are rare in texts.
    """
    begins, ends = defaultdict(set), defaultdict(set)
    for token in tokens:
        begins[token[0]].add(re.escape(token[1:_EDGE]))
        if len(token) >= _EDGE:
            ends[token[-1]].add(re.escape(token[-_EDGE:]))
    patterns = [f"{re.escape(first)}(?:{'|'.join(sorted(rest))})" for first, rest in sorted(begins.items())]
    patterns += [f"{re.escape(last)}(?<={'|'.join(sorted(edge))})" for last, edge in sorted(ends.items())]
    return re.compile("|".join(patterns) or _NOTHING)


def _is_control(token: AddedToken, known: str) -> bool:
    """Return whether an added token is a control token. `known` has the texts of the template and the answer marks."""
    content = token.content
    if not content.strip():
        return False
    if token.special:
        return True
    is_word = content.replace("_", "").isalnum() or len(content) < _LEAST_CHARS
    return not is_word and (content in known or _BRACKETED.fullmatch(content) is not None)


def _has_plain_role(message: Mapping[str, Any]) -> bool:
    return _ROLE.fullmatch(message["role"]) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, its keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of the patterns, the longest first, or nothing if there are none."""
    return re.compile("|".join(sorted(set(patterns), key=lambda pattern: (-len(pattern), pattern))) or _NOTHING)


def _pattern(token: AddedToken) -> str:
    """Return a pattern for the token in a tagged text, as a tokenizer would find it."""
    content = re.escape(token.content)
    return rf"(?<![\w\ud800-\udfff]){content}(?![\w\ud800-\udfff])" if token.single_word else content


def _unknown_ids(backend: Backend) -> frozenset[int]:
    """Return the token ids of unknown text: those of a Unicode noncharacter, which no vocabulary contains."""
    try:
        return frozenset(backend.encode("\U0010ffff", add_special_tokens=False).ids)
    except Exception:  # the library raises bare Exception if a vocabulary has no token for unknown text
        return frozenset()


_PRIVATE_USE = 0xF0000  # plane 15: 65 534 private-use characters
_NUM_PRIVATE = 65_534
_SECRET_CHARS = 8  # 128 bits


class GuardedEncoder:
    """A second tokenizer with the same vocabulary, in which control tokens have secret names.

    The names begin with random characters, so that no client can spell one. Everything else about the tokens is
    unchanged: where they split a text, and which blanks around them they absorb.
    """

    def __init__(self, backend: Backend, control: Mapping[int, AddedToken], unknown_ids: frozenset[int]) -> None:
        """`control` maps ids to control tokens. `unknown_ids` are the tokens of text that the vocabulary lacks."""
        self._framing = backend
        self._backend = renamed = Backend(backend.model)  # shares the vocabulary, which may be large
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(renamed, part, getattr(backend, part))
        secret = "".join(chr(_PRIVATE_USE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_SECRET_CHARS))
        self.names = {token_id: secret + chr(_PRIVATE_USE + i) for i, token_id in enumerate(control)}
        added = sorted(backend.get_added_tokens_decoder().items())
        renamed.add_tokens([_renamed(token, self.names.get(token_id, token.content)) for token_id, token in added])
        self._original_ids = {
            renamed.token_to_id(self.names.get(token_id, token.content)): token_id for token_id, token in added
        }
        self._never = (control.keys() - unknown_ids) - self._original_ids.keys()
        self._spelled = {token_id: self._spell(control[token_id].content) for token_id in self._never}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text in which control tokens have their secret names."""
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        original = self._original_ids
        if self._never.isdisjoint(encoded):
            ids = [original.get(token_id, token_id) for token_id in encoded]
        else:
            ids = [i for token_id in encoded for i in self._spelled.get(token_id, [original.get(token_id, token_id)])]
        return self._framed(ids) if add_special_tokens else ids

    def _spell(self, content: str) -> list[int]:
        """Return token ids of single characters, for a text that merging would turn into a control token."""
        tokens = [token for character in content for token in self._backend.model.tokenize(character)]
        return [token.id for token in tokens if token.id not in self._never]

    def _framed(self, ids: list[int]) -> list[int]:
        """Add the special tokens that the tokenizer puts around every text."""
        frame = self._framing.encode("a", add_special_tokens=True)
        text = [i for i, is_frame in enumerate(frame.special_tokens_mask) if not is_frame]
        return [*frame.ids[: text[0]], *ids, *frame.ids[text[-1] + 1 :]]


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word and name == token.content,  # the caller has checked for word boundaries
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
