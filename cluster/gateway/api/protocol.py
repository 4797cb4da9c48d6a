"""Requests of OpenAI's completions and chat endpoints, with vLLM's extensions. Every supported field is here.

Other fields are refused (`parsing.py`). Types are strict: `"1"` and `true` are not numbers; 16.0 is an integer, as in
JSON. `SamplingParams` checks ranges.

These are accepted without effect, because no answer depends on them: `user`, `metadata`, `safety_identifier`,
`prompt_cache_key`, `service_tier` (`auto`, `default`), `store` (`false`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from baton.engine.core.messages import HIGHEST_PRIORITY, LOWEST_PRIORITY

from ..errors import excerpt
from .chat_messages import ChatMessage, TextContent, Tool, ToolChoice, Tools, check_tool_messages
from .reasoning import Effort
from .validators import FieldError, Integer, RequestModel, json_type_name

# Limits of one request, so that it delays neither the gateway nor the engine's steps for other requests.
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKENS = 2**19  # more than any vocabulary has
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


Tokens = list[int]
Prompt = str | list[str] | Tokens | list[Tokens]


def _check_prompt(value: Any) -> Any:
    """Check each item once.

    A union of list types would try every member on every token, and name none in its errors.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of those")
    if not value:
        raise ValueError("must not be empty")
    kinds = set(map(type, value))
    if kinds in ({int}, {str}):
        return value
    if kinds == {list} and all(tokens and set(map(type, tokens)) == {int} for tokens in value):
        return value
    raise ValueError("must be all strings, all integers, or all non-empty lists of integers")


FewStrings = Annotated[list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]], Field(fail_fast=True)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _object_or_text(value: Any) -> Any:
    """Accept an object or a string. The errors of a union would name its members."""
    if not isinstance(value, str | dict):
        raise ValueError(f"must be an object, or one as a string, not {json_type_name(value)}")
    return value


def _token_keys(value: Any) -> Any:
    """Convert the keys of `{"50256": -100}`, which JSON writes as strings, to token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} tokens")
    keys: dict[int, str] = {}  # by token
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"must have token ids as keys, not {excerpt(key)}")
        if (first := keys.setdefault(int(key), key)) != key:
            raise ValueError(f"must have each token once; {first!r} and {key!r} are both token {int(key)}")
    return {token: value[key] for token, key in keys.items()}


def _kept_tokens(value: int) -> int:
    if value < -1 or value == 0:
        raise ValueError(f"must be a number of tokens to keep, or -1 for as many as fit, not {value}")
    return value


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None  # padding against traffic analysis is TLS's task
    resumable: bool = False  # Baton's extension: see `resume.py`


class JsonSchemaFormat(RequestModel):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # no effect: answers always match the schema


class ResponseFormat(RequestModel):
    """OpenAI's field for JSON answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError(("json_schema",), "is required if the type is 'json_schema', and not allowed otherwise")
        return self


class StructuredOutputs(RequestModel):
    """vLLM's field for constrained answers. `StructuredOutputsParams` checks the combination of its parts."""

    json_: (
        Annotated[str | dict[str, Any], PlainValidator(_object_or_text, json_schema_input_type=str | dict[str, Any])]
        | None
    ) = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class EngineFields(RequestModel):
    """Fields that all generating endpoints share. `None` means that the client did not send the field."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS, fail_fast=True)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_keys)] = None
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]] | None = Field(None, max_length=MAX_BAD_WORDS)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    priority: Integer = Field(0, ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)  # lower is served sooner; see `KeyRights`
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    baton_timeline: bool = False  # Baton's extension: see `timeline.py`


class SamplingFields(EngineFields):
    """Fields that all generating endpoints of OpenAI's API share."""

    stop: Annotated[
        FewStrings | None, BeforeValidator(_one_or_many, json_schema_input_type=str | FewStrings | None)
    ] = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class GenerationRequest(SamplingFields):
    """Fields that completions and chat share."""

    n: Integer | None = None
    max_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, AfterValidator(_kept_tokens)] | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`"""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)]
    echo: bool | None = None
    logprobs: Integer | None = None
    add_special_tokens: bool = True


class ChatInput(RequestModel):
    """Fields that determine a chat's prompt."""

    messages: Annotated[list[ChatMessage], AfterValidator(check_tool_messages)] = Field(min_length=1, fail_fast=True)
    tools: Tools = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # because templates write special tokens themselves
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the prompt lists."""
        return self.tools or []


class Prediction(RequestModel):
    """The answer that the client expects. It can make the answer faster, and does not change it."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(ChatInput, GenerationRequest):
    """`POST /v1/chat/completions`"""

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else super().usable_tools


class TokenizeTextRequest(RequestModel):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatInput):
    """`POST /tokenize` of messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class TokenizeAnswer(msgspec.Struct):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None  # with `return_token_strs`


class DetokenizeAnswer(msgspec.Struct):
    """Answer of `POST /detokenize`."""

    prompt: str
