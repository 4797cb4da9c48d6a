"""Log probabilities in the three formats of the API: legacy completions, chat, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine.core.messages import TokenLogprobs
from baton.engine.text import IncrementalDetokenizer, Tokenizer

from .detokenize import LocatedToken

LOWEST = -9999.0  # JSON has no minus infinity; this is what other servers write


class CompletionLogprobs(msgspec.Struct):
    """Four lists with an entry for each token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, tokenizer: Tokenizer, tokens: Sequence[LocatedToken], offset: int) -> None:
        """Add generated tokens. `offset` is the length of an echoed prompt, in characters."""
        for token in tokens:
            self._add(tokenizer, token.logprobs, offset + token.offset)

    def add_prompt(
        self, tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
    ) -> None:
        """Add the tokens of a prompt that is echoed as `text`. The first has none: nothing precedes it."""
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        for token_id, entry in zip(prompt, logprobs, strict=True):
            offset = detokenizer.length
            if entry is None:
                self.tokens.append(token_name(tokenizer, token_id))
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
                self.text_offset.append(offset)
            else:
                self._add(tokenizer, entry, offset)
            is_framing = token_id in tokenizer.special_token_ids  # the tokenizer adds it around the text
            if not is_framing or text.startswith(tokenizer.token_text(token_id), offset):
                detokenizer.push([token_id])

    def _add(self, tokenizer: Tokenizer, entry: TokenLogprobs, offset: int) -> None:
        names = [token_name(tokenizer, token_id) for token_id in entry.token_ids]
        values = [max(logprob, LOWEST) for logprob in entry.logprobs]
        self.tokens.append(names[0])
        self.token_logprobs.append(values[0])
        self.top_logprobs.append(dict(zip(names, values, strict=True)))
        self.text_offset.append(offset)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[LocatedToken]) -> ChatLogprobs:
    content = []
    for token in tokens:
        first, *top = (
            TopLogprob(tokenizer.token_text(token_id), max(logprob, LOWEST), list(tokenizer.token_bytes(token_id)))
            for token_id, logprob in zip(token.logprobs.token_ids, token.logprobs.logprobs, strict=True)
        )
        content.append(ChatTokenLogprob(first.token, first.logprob, first.bytes, top))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's format: for each prompt token but the first, its own and the likeliest ones by token id."""
    result: list[dict[str, PromptLogprob] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        by_token: dict[str, PromptLogprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            value = PromptLogprob(max(logprob, LOWEST), rank, tokenizer.token_text(token_id))
            by_token.setdefault(str(token_id), value)
        result.append(by_token)
    return result


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a distinct key for each token: incomplete characters are written as OpenAI does, `bytes:\\xe2\\x80`."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
