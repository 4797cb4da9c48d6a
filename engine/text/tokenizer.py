"""A model's tokenizer: text to token ids and back, and chats to prompts.

`tokenizer.json` is read with the `tokenizers` library alone, which is imported in milliseconds. For folders without
that file, `transformers` converts older formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import NFC

from ..absent import FETCH_AGAIN, absent_file
from .byte_decoder import ByteDecoder, byte_decoder_of
from .chat import Chat, ChatTemplate
from .client_text import with_tags
from .control_tokens import ChatPrompt, ControlTokens
from .errors import ChatTemplateError, InvalidMessages, TokenizerError
from .parsers import reasoning
from .parsers.reasoning import ReasoningStart
from .parsers.tool_call_format import ToolCallFormat

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
COMPOSED = 4  # Unicode composition merges at most this many characters into one


class _Packed(msgspec.Struct, frozen=True):
    backend: str
    special_tokens: dict[str, str]
    chat_templates: dict[str, str] | None


class Tokenizer:
    """A model's tokenizer and chat template.

    Immutable once loaded; any number of threads may use it. Encoding releases the GIL.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` maps names like `eos_token` to tokens of the vocabulary; chat templates can read them."""
        self._backend = backend
        self._chat_template = chat_template
        self._pieces: dict[int, bytes] = {}
        self.special_tokens = dict(special_tokens or {})
        self.byte_decoder: ByteDecoder | None = byte_decoder_of(backend)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        literals = () if chat_template is None else chat_template.literals
        self.control_tokens = ControlTokens(backend, literals, self.marks)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face model folder.

        Raises `TokenizerError` if no tokenizer can be read, `ChatTemplateError` if the template is broken.
        """
        folder = Path(path)
        if not folder.is_dir():
            advice = "give one of a model, with a tokenizer.json, or a name on the Hub, such as Qwen/Qwen3-0.6B"
            raise TokenizerError(f"{folder} is not a folder; {advice}")
        # Older multimodal folders have the template of their processor in a file of its own, and may have no other.
        config = _read_json(folder / "chat_template.json") | _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        backend = _load_backend(folder)
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, special_tokens.values())
        return cls(backend, special_tokens, ChatTemplate.from_folder(folder, config))

    def to_bytes(self) -> bytes:
        """Return the tokenizer as bytes, for `from_bytes` in another process."""
        template = self._chat_template
        sources = None if template is None else template.sources
        return msgspec.msgpack.encode(_Packed(self._backend.to_str(), self.special_tokens, sources))

    @classmethod
    def from_bytes(cls, packed: bytes) -> Tokenizer:
        """Return the tokenizer that `to_bytes` packed."""
        found = msgspec.msgpack.decode(packed, type=_Packed)
        template = None if found.chat_templates is None else ChatTemplate(found.chat_templates)
        return cls(Backend.from_str(found.backend), found.special_tokens, template)

    @property
    def backend(self) -> Backend:
        """The underlying `tokenizers` object, to make a tokenizer with the same vocabulary and another template."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest token id, added tokens included. A model's output layer may be wider."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """The model's tool-call format; None if its chat template teaches none that Baton can parse."""
        return None if self._chat_template is None else self._chat_template.tool_call_format

    @property
    def chat_template_source(self) -> str | None:
        """The chat template for chats without tools."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def lists_tools(self) -> bool:
        """True if the template lists a chat's `tools` in the prompt."""
        return self._chat_template is not None and self._chat_template.lists_tools

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads in addition to those that it is always given."""
        return frozenset() if self._chat_template is None else self._chat_template.variables

    def reasoning_after(self, prompt: str) -> ReasoningStart:
        """Return whether the answer to this chat prompt may begin with reasoning, or continues it."""
        if self._chat_template is None or not self._chat_template.has_reasoning:
            return ReasoningStart.NONE
        return ReasoningStart.BEGUN if prompt.rstrip().endswith(reasoning.BEGIN) else ReasoningStart.POSSIBLE

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the model puts around parts of its answers, according to its template."""
        template = self._chat_template
        calls = () if template is None or template.tool_call_format is None else template.tool_call_format.marks
        return (*calls, reasoning.BEGIN, reasoning.END) if template is not None and template.has_reasoning else calls

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        return self.special_token_ids & {self._backend.token_to_id(text) for text in texts}

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, without encoding it: from the longest token's length.

        It is 0 if tokens have no maximal length, for example if one token stands for unknown text of any length.
        """
        return len(text) // self._most_characters if self._most_characters else 0

    @cached_property
    def _most_characters(self) -> int:
        """The maximal number of a text's characters that one token may stand for; 0 if there is no limit."""
        if self.byte_decoder is None or not self.byte_decoder.byte_level:
            return 0
        if not isinstance(self._backend.normalizer, NFC | None):
            return 0
        if any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values()):
            return 0  # such a token absorbs all spaces next to it
        composed = 1 if self._backend.normalizer is None else COMPOSED
        return composed * max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; `add_special_tokens` adds BOS and the like. For chats, use `encode_chat`."""
        # Encoding a batch releases the GIL: a long text, which takes seconds, does not block other threads.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, decoded together. Ids beyond the vocabulary (padding of the output layer)
        have no text.
        """
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, such as `Ġthe`; None if it has none."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character; empty for ids beyond the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        r"""Return one token's text for display. Bytes of an incomplete character are escaped: `\xf0\x9f`."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def render_chat(self, chat: Chat) -> str:
        """Return the text of a chat's prompt. See `ChatTemplate.render`, and `guard_chat` for its tokens."""
        return self._template().render(chat, special_tokens=self.special_tokens)

    def guard_chat(self, text: str, chat: Chat) -> ChatPrompt:
        """Return the prompt for `encode_chat`. `text` is the result of `render_chat` for the same chat.

        Text in messages, tools and variables never becomes control tokens.
        """
        template, control = self._template(), self.control_tokens
        if not template.rewrites_texts and not control.may_be_spelled_by(chat.messages, chat.tools, chat.variables):
            return ChatPrompt(text)
        try:
            tagged = template.render(chat, special_tokens=self.special_tokens, control=control)
        except InvalidMessages as error:
            raise InvalidMessages(control.untag(str(error)), control.untag(error.detail)) from error
        return ChatPrompt(text, with_tags(tagged))

    def encode_chat(self, prompt: ChatPrompt, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a chat's prompt. Usually its template has already written BOS and the like."""
        if prompt.tagged is None:
            return self.encode(prompt.text, add_special_tokens)
        return self.control_tokens.encode(prompt, add_special_tokens)

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template; use text completions, or add chat_template.jinja")
        return self._chat_template

    def _read_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.byte_decoder is not None:
            return self.byte_decoder.to_bytes(token)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise TokenizerError(f"{file} is not a tokenizer that can be read: {error}") from error
    if file.is_symlink():
        raise TokenizerError(f"{folder} has no {absent_file(file)}: {FETCH_AGAIN}")
    # Imported here: it takes seconds, and only folders in older formats need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library's errors have no common base class
        reason = f"holds no tokenizer.json, and nothing to convert to one: {error}"
        raise TokenizerError(f"{folder} {reason}; {FETCH_AGAIN}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerError(
            f"{type(converted).__name__} of {folder} has no fast form; add a tokenizer.json to the folder"
        )
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """Return an optional file's object; empty if there is no file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.is_symlink():
            raise TokenizerError(f"{file.parent} has no {absent_file(file)}: {FETCH_AGAIN}") from None
        return {}
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold an object, not {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens, each written as a string or as an object with its `content`."""
    found: dict[str, str] = {}
    for name in _NAMED_SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
        elif content is not None:
            raise TokenizerError(f"tokenizer_config.json: {name} must be a string, not {content!r}")
    return found


def _add_missing(backend: Backend, tokens: Iterable[str]) -> None:
    """Make all named special tokens special, even if the vocabulary does not mark them."""
    added = backend.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    missing = [
        token for token in dict.fromkeys(tokens) if token not in known and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return token sequences for `SamplingParams.bad_words_token_ids`: each word at a text's start and after a space.

    A sequence that ends with a shorter one is left out, since the shorter one already bans it.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}") if bare else (word,):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokens and not any(tokens[-len(known) :] == known for known in sequences):
                sequences.append(tokens)
    return sequences
