"""The arguments of `LLM.generate` and `LLM.chat`.

A prompt is a text or token ids, or a mapping that has one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

import msgspec

from ..core.messages import HIGHEST_PRIORITY, LOWEST_PRIORITY
from ..core.sampling import InvalidSamplingParams, SamplingParams, as_decoded
from ..text import RESERVED_VARIABLES, InvalidMessages, Tokenizer
from ..vllm_compat import UnsupportedArgument, refusals

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPT_FORMS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "prediction"}


class InvalidPrompt(ValueError):
    """A prompt, or a combination of prompts and parameters, that no engine could serve."""


@dataclass(frozen=True)
class ReadPrompt:
    text: str | None  # None: only token ids are known
    token_ids: list[int]
    cache_salt: str
    prediction: list[int] = field(default_factory=list)  # the expected answer


def as_list(prompts: Any) -> Sequence[Any]:
    """Return a list of prompts. A single prompt, which may be a list of integers, becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = _listed(prompts)
    if listed is None:
        raise InvalidPrompt(f"prompts is of type {type(prompts).__name__}: give {_PROMPT_FORMS}, or a list of them")
    return [listed] if len(listed) > 0 and isinstance(listed[0], Integral) else listed


def as_conversations(messages: Any) -> Sequence[Messages]:
    """Return a list of conversations. A single one becomes a list of one. Raises `InvalidMessages`."""
    single = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations = [messages] if single else messages
    for given in (conversations, *(conversations if isinstance(conversations, list | tuple) else ())):
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            kind = type(given).__name__
            raise InvalidMessages(f"messages hold a {kind}: give a list of messages, or a list of such lists")
    return cast(Sequence[Messages], conversations)


def predictions_for_each(prediction: Any, num_conversations: int) -> Sequence[str | None]:
    """Return the expected answer of each conversation. Raises `InvalidArgument` unless there is one for each."""
    if prediction is None:
        return [None] * num_conversations
    listed = [prediction] if isinstance(prediction, str) else prediction
    is_list = isinstance(listed, list | tuple) and all(each is None or isinstance(each, str) for each in listed)
    if not is_list or len(listed) != num_conversations:
        raise InvalidArgument(
            "prediction",
            f"must be the text of an answer, or a list with one for each of the {num_conversations} conversations",
        )
    return cast(Sequence[str | None], listed)


def priorities_for_each(priority: Any, num_prompts: int) -> Sequence[int]:
    """Return the priority of each prompt. Raises `InvalidArgument` unless there is one for each."""
    if priority is None:
        return [0] * num_prompts
    known = range(LOWEST_PRIORITY, HIGHEST_PRIORITY + 1)
    is_list = isinstance(priority, list | tuple) and all(type(each) is int and each in known for each in priority)
    if not is_list or len(priority) != num_prompts:
        raise InvalidArgument(
            "priority",
            f"must be a list with a whole number of 32 bits, lower is sooner, for each of the {num_prompts} prompts",
        )
    return cast(Sequence[int], priority)


class PromptReader:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidPrompt` if there is none."""
        if self._tokenizer is None:
            raise InvalidPrompt("text needs a tokenizer: leave out skip_tokenizer_init, or give prompt_token_ids")
        return self._tokenizer

    def read(self, index: int, prompt: Any) -> ReadPrompt:
        """Return the prompt as text and token ids. `index`, its place in the call, is for errors: `InvalidPrompt`."""
        where = f"prompts[{index}]"
        if isinstance(prompt, str):
            return ReadPrompt(prompt, self._encode(where, prompt), "")
        if isinstance(prompt, Mapping):
            return self._read_mapping(where, prompt)
        if _listed(prompt) is None:
            raise InvalidPrompt(f"{where} is of type {type(prompt).__name__}: give {_PROMPT_FORMS}")
        return ReadPrompt(None, _token_ids(where, prompt), "")

    def _read_mapping(self, where: str, prompt: Mapping[str, Any]) -> ReadPrompt:
        given = {key: value for key, value in prompt.items() if value is not None}
        if given.keys() - _PROMPT_KEYS or not given.keys() & {"prompt", "prompt_token_ids"}:
            raise InvalidPrompt(
                f"{where} has the keys {', '.join(sorted(map(str, given))) or 'of nothing'}: give prompt or "
                "prompt_token_ids, and cache_salt or prediction if wanted"
            )
        for key in ("prompt", "cache_salt"):
            if not isinstance(given.get(key, ""), str):
                raise InvalidPrompt(f"{where}[{key!r}] is of type {type(given[key]).__name__}: it must be text")
        require_text(f"{where}['cache_salt']", given.get("cache_salt", ""))
        text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
        at = f"{where}['prompt_token_ids']"
        ids = self._encode(where, cast(str, text)) if token_ids is None else _token_ids(at, token_ids)
        return ReadPrompt(text, ids, given.get("cache_salt", ""), self._prediction(where, given.get("prediction")))

    def _prediction(self, where: str, prediction: Any) -> list[int]:
        at = f"{where}['prediction']"
        if isinstance(prediction, str):
            return self._encode(at, prediction, add_special_tokens=False)
        return [] if prediction is None else _token_ids(at, prediction)

    def _encode(self, where: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        require_text(where, text)
        return self.tokenizer().encode(text, add_special_tokens)


def require_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPrompt(f"{where} is not valid text: half a surrogate pair at character {error.start}") from None


def _listed(given: Any) -> Sequence[Any] | None:
    """Return a list, tuple or similar as it is, an array or tensor as a list, and None for anything else."""
    value = given.tolist() if hasattr(given, "__array__") else given
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    return value if is_list else None


def _token_ids(where: str, given: Any) -> list[int]:
    listed = _listed(given)
    if listed is None:
        raise InvalidPrompt(f"{where} is of type {type(given).__name__}: it must be a list of token ids")
    try:
        return msgspec.convert(listed, list[int])  # the fast way, for Python's integers
    except msgspec.ValidationError:
        return [_token_id(f"{where}[{i}]", token) for i, token in enumerate(listed)]


def _token_id(where: str, token: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise InvalidPrompt(f"{where} is {token!r}: a token id is an integer")
    return int(token)


class InvalidArgument(TypeError):
    """Argument `name` has an unsupported type or value."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name


def refuse_unsupported(call: str, given: Mapping[str, Any], known: Mapping[str, UnsupportedArgument]) -> None:
    """Check the arguments for which `call` has no parameter: each must be one of vLLM's, without effect.

    Raises `InvalidArgument`.
    """
    for name in given:
        if name not in known:
            raise InvalidArgument(name, f"is not an argument of {call}")
    for name, message in refusals(given, known).items():
        raise InvalidArgument(name, message)


def require_flag(name: str, value: Any, hint: str = "") -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, f"is {value!r}: give True or False{hint}")


def require_tools(tools: Any) -> None:
    listed = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not listed:
        raise InvalidArgument("tools", f"are {tools!r}: give a list of dicts, each of which describes a function")


def require_template_for_tools(tools: Any, tokenizer: Tokenizer) -> None:
    """Raise `InvalidArgument` for tools of which the chat template would tell the model nothing."""
    if tools and tokenizer.chat_template_source is not None and not tokenizer.lists_tools:
        advice = "leave them out, or put a chat_template.jinja that lists them into the model's folder"
        raise InvalidArgument("tools", f"are of no use: this model's chat template does not list them; {advice}")


def template_variables(given: Any) -> Mapping[str, Any]:
    """Return the template variables in `chat_template_kwargs`. Raises `InvalidArgument`."""
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidArgument(name, f"is {given!r}: give a dict of names and values")
    if reserved := sorted(RESERVED_VARIABLES & given.keys()):
        raise InvalidArgument(name, f"holds {reserved[0]!r}, which cannot be set there")
    return given


def one_for_each(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Return a `SamplingParams` for each prompt, validated as those in a message are.

    Raises `InvalidSamplingParams`, and `InvalidPrompt` if their number is not that of the prompts.
    """
    if isinstance(given, SamplingParams):
        return [as_decoded(given)] * num_prompts
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    for at, params in enumerate(given) if listed else [(None, given)]:
        if not isinstance(params, SamplingParams):
            where = "sampling_params" if at is None else f"sampling_params[{at}]"
            kind = type(params).__name__
            raise InvalidSamplingParams(where, f"give SamplingParams, or a list with one for each prompt, not {kind}")
    if len(given) != num_prompts:
        raise InvalidPrompt(f"{num_prompts} prompts but {len(given)} sampling_params: give one for each")
    return [as_decoded(params) for params in given]
