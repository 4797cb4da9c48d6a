"""Requests of Anthropic's Messages API, `POST /v1/messages` and `/v1/messages/count_tokens`.

    system, messages: text | thinking | tool_use | tool_result blocks ──> `anthropic_input.py` ──> a chat

Marks of prompt caching (`cache_control`) have no effect: all prefixes are cached while there is room. Unknown types of
blocks and tools, and fields of the API that Baton does not support (`REFUSED`), are refused with an error that names
them and an alternative.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from ..errors import excerpt
from .chat_messages import MAX_TOOLS, Function, FunctionName, Tool, check_unique_names
from .parsing import ApiFields
from .protocol import EngineFields, FewStrings
from .reasoning import opened_thoughts
from .validators import (
    TEXT_ALONE,
    FieldError,
    Integer,
    ReplayedModel,
    RequestModel,
    json_type_name,
    kind,
    object_of_type,
    tag,
    without_nulls,
)

CLIENTS_ALONE = "This server runs no tools: clients run them"

# Field -> values that have no effect and are accepted, and advice for other values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((None,), f"{CLIENTS_ALONE}, so leave it out."),
    "context_management": ((None,), "Nothing is cut from 'messages': leave it out."),
    "diagnostics": ((None,), "Leave it out."),
    "inference_geo": ((None,), "Leave it out."),
    "mcp_servers": ((None, []), f"{CLIENTS_ALONE}. List their tools in 'tools'."),
    "speed": ((None, "standard"), "Leave it out."),
    "user_profile_id": ((None,), "Send 'metadata.user_id'."),
}

# Names of fields: of a chat request, or obsolete ones of this API -> this API's.
RENAMED = {
    "functions": "tools",
    "max_completion_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "output_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}

# Names of fields: of a chat request -> this API's.
NAMES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}

FIELDS = ApiFields(REFUSED, RENAMED, NAMES, {"parameters": "input_schema"})

BLOCKS = {  # types of blocks that a message may have, by its role
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}

CallId = Annotated[str, Field(min_length=1, max_length=128)]
CacheControl = dict[str, Any] | None


def _text_block(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of content blocks, not {json_type_name(value)}")
    return value


def _check_signature(value: str) -> str:
    try:
        opened_thoughts(value)
    except ValueError:
        raise ValueError("is damaged: send thoughts back as they came") from None
    return value


class TextBlockParam(ReplayedModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] = Field([], max_length=0)
    parsed_output: Any = None  # added by the official client when it parses `text`


class ThinkingBlockParam(ReplayedModel):
    """Thoughts before an earlier answer: in plain text, or in the signature if this server omitted the text."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, AfterValidator(_check_signature)] = ""

    @property
    def text(self) -> str:
        """The thoughts: those in the signature, if it holds any, or else `thinking`."""
        found = opened_thoughts(self.signature)
        return self.thinking if found is None else found


class RedactedThinkingBlockParam(ReplayedModel):
    """Thoughts that another server has encrypted. They are not shown to the model."""

    type: Literal["redacted_thinking"]
    data: str


class _Caller(RequestModel):
    type: Literal["direct"]


class ToolUseBlockParam(ReplayedModel):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: _Caller | None = None


OnlyText = Annotated[TextBlockParam, object_of_type(("text",), TEXT_ALONE)]
Texts = Annotated[
    list[OnlyText], Field(fail_fast=True), BeforeValidator(_text_block, json_schema_input_type=str | list[OnlyText])
]


class ToolResultBlockParam(ReplayedModel):
    """The client's result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts = []
    is_error: bool = False
    cache_control: CacheControl = None


Block = Annotated[
    Annotated[TextBlockParam, tag("text")]
    | Annotated[ThinkingBlockParam, tag("thinking")]
    | Annotated[RedactedThinkingBlockParam, tag("redacted_thinking")]
    | Annotated[ToolUseBlockParam, tag("tool_use")]
    | Annotated[ToolResultBlockParam, tag("tool_result")],
    Discriminator(lambda value: f"<{kind(value)}>"),
    object_of_type(("text", "thinking", "redacted_thinking", "tool_use", "tool_result"), TEXT_ALONE),
]


class Message(ReplayedModel):
    """A message. Messages of this server can be sent back unchanged, also as the official client stores them."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_text_block, json_schema_input_type=str | list[Block]),
    ]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        for index, block in enumerate(self.content):
            if block.type not in BLOCKS[self.role]:
                reason = f"is {block.type!r}, which no message of the role {self.role!r} has"
                raise FieldError(("content", index, "type"), reason)
        return self


def _check_results(messages: list[Message]) -> list[Message]:
    """Check that each result has an earlier call, and that the last message has no call: its result would follow."""
    made: set[str] = set()
    for index, message in enumerate(messages):
        for at, block in enumerate(message.content):
            if isinstance(block, ToolResultBlockParam) and block.tool_use_id not in made:
                reason = f"is {excerpt(block.tool_use_id)}, which is the id of no 'tool_use' before it"
                raise FieldError((index, "content", at, "tool_use_id"), reason)
            if isinstance(block, ToolUseBlockParam):
                if index == len(messages) - 1:
                    reason = "is 'tool_use' in the last message: send the call's 'tool_result' in a message behind it"
                    raise FieldError((index, "content", at, "type"), reason)
                made.add(block.id)
    return messages


class ClientTool(RequestModel):
    """A tool that the client executes."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = []
    eager_input_streaming: bool | None = None  # no effect: inputs are always streamed as they are generated
    input_examples: list[Any] = Field([], max_length=0)

    def for_chat(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


def _tool_kind(value: Any) -> Any:
    return value.get("type", "custom")


def _named_once(tools: list[ClientTool]) -> list[ClientTool]:
    check_unique_names([tool.for_chat() for tool in tools])
    return tools


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_a_name_if_it_names_one(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise FieldError(("name",), "is required if the type is 'tool', and not allowed otherwise")
        return self


class Thinking(RequestModel):
    """Switches thoughts before the answer. A budget has no effect: `max_tokens` limits thoughts and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None  # None and `summarized` show the thoughts in full

    @model_validator(mode="after")
    def _has_a_budget_if_it_is_enabled(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise FieldError(("budget_tokens",), "is required if the type is 'enabled', and not allowed otherwise")
        if self.type == "disabled" and self.display is not None:
            raise FieldError(("display",), "is not allowed if the type is 'disabled'")
        return self


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(RequestModel):
    user_id: str | None = None


class MessageStreamOptions(RequestModel):
    resumable: bool = False  # Baton's extension: see `resume.py`


class MessagesInput(RequestModel):
    """The fields that both routes have."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), AfterValidator(_check_results)]
    system: Texts = []
    tools: Annotated[
        list[Annotated[ClientTool, object_of_type(("custom",), f". {CLIENTS_ALONE}", _tool_kind)]],
        Field(max_length=MAX_TOOLS),
        AfterValidator(_named_once),
    ] = []
    tool_choice: Annotated[ToolChoice, object_of_type(("auto", "any", "tool", "none"))] | None = None
    thinking: Annotated[Thinking, object_of_type(("enabled", "disabled", "adaptive"))] | None = None
    output_config: Annotated[OutputConfig, BeforeValidator(without_nulls)] = OutputConfig()
    cache_control: CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = None  # Baton's extension, as in other chats


class MessagesRequest(MessagesInput, EngineFields):
    """`POST /v1/messages`"""

    max_tokens: Integer
    temperature: float | None = Field(None, ge=0, le=1)
    stop_sequences: FewStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stream_options: MessageStreamOptions | None = None


class CountTokensRequest(MessagesInput):
    """`POST /v1/messages/count_tokens`"""

    model: str
